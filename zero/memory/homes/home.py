"""The protocol of a place where state lives, the simplest one, the device that computes, and memory that homes lend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from accelerators.streams import Event


class Transfer(Protocol):
    """A copy into a home or out of it, on its way."""

    def done(self) -> bool: ...

    def finish(self) -> None:
        """Waits on the host until the copy has arrived."""

    def wait(self) -> None:
        """Makes the current stream wait: what is issued to it from now on comes after the copy. The host goes on."""

    def release_source(self) -> None:
        """Drops the source: work that gets its memory next on the current stream comes after the copy."""


class Done:
    """A `Transfer` that has arrived."""

    def done(self) -> bool:
        return True

    def finish(self) -> None: ...

    def wait(self) -> None: ...

    def release_source(self) -> None: ...


DONE = Done()


class Stored(Protocol):
    """The entry of values that live in a home. The code that stored them keeps the entry, and reads and writes by it."""

    values: torch.Tensor  # memory of the home, or the placeholder of values on a disk

    def lend(self, device: torch.device) -> torch.Tensor | None:
        """Lends memory on this device which the values are read to and written from without a copy, until they were written or
        it is taken back. Returns None if the home has no such memory."""

    def take_back(self) -> None:
        """Takes back what was lent, if anything is."""

    def reclaim(self) -> None:
        """Takes back what was lent to a caller that broke off, after any transfer that still uses it."""

    def write(self, source: torch.Tensor) -> Transfer: ...

    def read(self, target: torch.Tensor) -> Transfer: ...

    def is_spoilt(self) -> bool:
        """Returns whether anything was written to `values` since the last call, if they only stand for values elsewhere."""

    def free(self) -> None:
        """Frees its place."""


@dataclass
class Link:
    """Counts what crossed between the device and the host beside it so far."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    waited_s: float = 0.0  # the seconds that the host waited for copies


class Home(Protocol):
    """A place where state lives: shares of gradients, masters, moments, and weights at times."""

    device: torch.device  # the device on which its values are computed: the home itself, or one beside it

    @property
    def memory(self) -> MemoryHome:
        """The home that its values are computed in: this one, or the one that they are read to."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory on `device` with undefined contents, which is freed with its last reference."""

    def store(self, numel: int, dtype: torch.dtype) -> Stored:
        """Makes an entry with undefined values."""


class MemoryHome(Home, Protocol):
    """A home that is memory, whose values are computed with where they live. `write` brings tensors here from the device that
    computes the model, and `read` takes them there. Both are asynchronous, as is `add`."""

    pinned: bool | None  # whether the home's memory is pinned; None if it is pinned only where that is possible
    link: Link | None  # the link to the device that computes; None if that is the same place

    @property
    def num_lent_bytes(self) -> int:
        """Bytes of memory for mirrors, lent or not."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is memory of the kind that `allocate` makes."""

    def write(self, source: torch.Tensor, stored: torch.Tensor, after: Event | None = None) -> Transfer:
        """Copies from the device that computes into memory of this home: after all that the current stream has been given, or
        after an event, if nothing has written to the source since."""

    def read(self, stored: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Copies from memory of this home to the device that computes."""

    def finish_reads(self) -> None:
        """Waits until the device has read what was passed to `read`, so that it may be written here."""

    def add(self, values: torch.Tensor, factor: float, stored: torch.Tensor, fresh: bool) -> Transfer:
        """Adds `factor * values` to what is stored, or writes it there if that is `fresh`. `values` are on the device that
        computes and may be changed; the transfer still reads them. What is stored has the sum after `catch_up`."""

    def catch_up(self) -> None:
        """Waits until everything that was passed to `add` is added."""

    def has_added(self, stored: torch.Tensor) -> bool:
        """Returns whether everything that was passed to `add` for this memory is added. Waits for nothing."""

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lends memory here for the values of a tensor on the device that computes; the tensor itself if both are the same
        place. It is returned by `give_back`."""

    def give_back(self, mirror: torch.Tensor) -> None:
        """Returns a mirror. The host has waited for all transfers that use it."""

    def release(self) -> None:
        """Frees memory for mirrors that are not lent."""


class StoredInMemory:
    """The `Stored` of values that live in memory of a home."""

    def __init__(self, home: MemoryHome, values: torch.Tensor) -> None:
        self.values = values
        self._home = home

    def lend(self, device: torch.device) -> torch.Tensor | None:
        return None

    def take_back(self) -> None: ...

    def reclaim(self) -> None: ...

    def write(self, source: torch.Tensor) -> Transfer:
        return self._home.write(source, self.values.view(source.shape))

    def read(self, target: torch.Tensor) -> Transfer:
        return self._home.read(self.values.view(target.shape), target)

    def is_spoilt(self) -> bool:
        return False

    def free(self) -> None: ...


class DeviceHome:
    """The `MemoryHome` that is the device which computes the model: what lives here needs no transfer."""

    pinned: bool | None = None
    link: Link | None = None
    num_lent_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def memory(self) -> MemoryHome:
        return self

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def store(self, numel: int, dtype: torch.dtype) -> Stored:
        return StoredInMemory(self, self.allocate(numel, dtype))

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def write(self, source: torch.Tensor, stored: torch.Tensor, after: Event | None = None) -> Transfer:
        if source is not stored:
            stored.copy_(source)
        return DONE

    def read(self, stored: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self.write(stored, target)

    def add(self, values: torch.Tensor, factor: float, stored: torch.Tensor, fresh: bool) -> Transfer:
        if fresh:
            torch.mul(values, factor, out=stored)  # written in place of zeros to add to
        else:
            stored.add_(values, alpha=factor)
        return DONE

    def finish_reads(self) -> None: ...

    def catch_up(self) -> None: ...

    def has_added(self, stored: torch.Tensor) -> bool:
        return True

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def give_back(self, mirror: torch.Tensor) -> None: ...

    def release(self) -> None: ...


class Pool:
    """A pool of memory that is lent and taken back. All pieces have the most bytes that were expected so far, so that any of
    them serves the next borrower, who finds what the last one left in it."""

    def __init__(self) -> None:
        self._largest = 0
        self._free: list[torch.Tensor] = []
        self.num_bytes = 0  # the bytes of all memory, lent or not

    def expect(self, num_bytes: int) -> None:
        """Prepares for borrowers of so many bytes."""
        if num_bytes > self._largest:
            self._largest = num_bytes
            self.release()  # all of it is too small from now on

    def borrow(self, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Lends memory that was given back, or else what `allocate` makes, for the most bytes that were expected."""
        if self._free:
            return self._free.pop()
        memory = allocate(self._largest)
        self.num_bytes += memory.nbytes
        return memory

    def give_back(self, memory: torch.Tensor) -> None:
        """Takes memory back. The host has waited for everything that uses it."""
        if memory.nbytes >= self._largest:
            self._free.append(memory)
        else:
            self.num_bytes -= memory.nbytes

    def release(self) -> None:
        """Frees the memory that is not lent."""
        self.num_bytes -= sum(memory.nbytes for memory in self._free)
        self._free.clear()
