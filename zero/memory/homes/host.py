"""Host memory beside a device, and copies between the two while both go on computing.

[Note: crossings] Each direction has a stream of its own, so that neither waits for the other nor for what is computed. A copy
starts when everything that was issued before it on the current stream is done: what wrote its source, and what reads its
target. The host (`finish`) or the current stream (`wait`) waits for its end, and until then it keeps both ends alive: freed
memory could be in use again before the copy has read it. A device without streams copies at once, since there waiting for one
copy is waiting for all work.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import NamedTuple

import torch

from accelerators import Accelerator
from accelerators.streams import Event, InOrderStream, Stream
from zero.memory.addresses import address_of
from zero.memory.homes.home import DONE, Link, MemoryHome, Pool, Stored, StoredInMemory, Transfer

_MOST_ON_THE_WAY = 2  # sums that travel to the host at once; each keeps its memory on the device meanwhile


class HostCopy:
    """A `Transfer` between the device and the host."""

    def __init__(self, accelerator: Accelerator, index: int | None, event: Event, link: Link, *ends: torch.Tensor) -> None:
        self._accelerator = accelerator
        self._index = index  # the device, which need not be the current one of the thread that waits
        self._event: Event | None = event
        self._link = link
        self._ends = ends

    def done(self) -> bool:
        event = self._event  # read once, as another thread may finish this copy meanwhile
        return event is None or event.query()

    def finish(self) -> None:
        event = self._event
        if event is not None:
            began = time.perf_counter()
            event.synchronize()
            self._link.waited_s += time.perf_counter() - began
        self._event, self._ends = None, ()

    def wait(self) -> None:
        event = self._event
        if event is not None:
            self._accelerator.current_stream(self._index).wait_event(event)

    def release_source(self) -> None:
        self.wait()
        self._ends = self._ends[1:]


class HostHome:
    """The `MemoryHome` that is the host beside a device."""

    def __init__(self, accelerator: Accelerator, pinned: bool | None = None) -> None:
        self.device = torch.device("cpu")
        self.pinned = pinned
        self.link: Link | None = Link()
        self._accelerator = accelerator
        self._mirrors = Pool()
        self._lent: dict[int, torch.Tensor] = {}  # by address of a lent mirror: the memory that it is a part of
        self._streams: dict[str, Stream] = {}  # by kind of copy; made when first used
        self._arriving: deque[_Addend] = deque()  # in the order in which they were sent

    @property
    def num_lent_bytes(self) -> int:
        return self._mirrors.num_bytes

    @property
    def memory(self) -> MemoryHome:
        return self

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(numel, dtype=dtype, device="cpu")
        if self.pinned is False:
            return memory
        memory = self._accelerator.pin(memory)
        if self.pinned and numel and not memory.is_pinned():
            raise MemoryError(
                f"Cannot offload with pinned=True: {memory.nbytes} bytes of host memory could not be pinned. Leave pinned out "
                "to use pageable memory where pinned memory ends."
            )
        return memory

    def store(self, numel: int, dtype: torch.dtype) -> Stored:
        return StoredInMemory(self, self.allocate(numel, dtype))

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and self.pinned is False

    def write(self, source: torch.Tensor, stored: torch.Tensor, after: Event | None = None) -> Transfer:
        # A copy after an event has a stream of its own. In that of other copies it would wait for what writes their sources.
        return self._copy("write" if after is None else "write after", source, stored, after)

    def read(self, stored: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self._copy("read", stored, target)

    def finish_reads(self) -> None:
        if "read" in self._streams:
            self._streams["read"].synchronize()

    def _copy(self, kind: str, source: torch.Tensor, target: torch.Tensor, after: Event | None = None) -> Transfer:
        index = (source if target.is_cpu else target).device.index
        current, link = self._accelerator.current_stream(index), self._crossed(source, target)
        if link is None or isinstance(current, InOrderStream):
            target.copy_(source)
            return DONE
        if kind not in self._streams:
            self._streams[kind] = self._accelerator.new_stream(index)
        stream = self._streams[kind]
        if after is None:
            stream.wait_stream(current)  # waits for the work that wrote the source, and for the work that reads the target
        else:
            stream.wait_event(after)
        with self._accelerator.in_stream(stream):
            target.copy_(source, non_blocking=True)
        return HostCopy(self._accelerator, index, stream.record_event(), link, source, target)

    def _crossed(self, source: torch.Tensor, target: torch.Tensor) -> Link | None:
        """Counts a copy and returns the link that it crosses; None if both ends are in one place."""
        if source.device == target.device:
            return None
        assert self.link is not None
        if target.is_cpu:
            self.link.to_host_bytes += target.nbytes
        else:
            self.link.to_device_bytes += target.nbytes
        return self.link

    def add(self, values: torch.Tensor, factor: float, stored: torch.Tensor, fresh: bool) -> Transfer:
        self._add_arrived(most=_MOST_ON_THE_WAY - 1)  # a host that is ahead waits here for a copy, and never for another rank
        if fresh:
            addend = _Addend(self.write(values if factor == 1.0 else values.mul_(factor), stored), stored)
        else:
            landing = self.mirror(values)
            addend = _Addend(self.write(values, landing), stored, landing, factor)
        self._arriving.append(addend)
        return addend.transfer

    def catch_up(self) -> None:
        self._add_arrived()

    def has_added(self, stored: torch.Tensor) -> bool:
        self._add_arrived(most=len(self._arriving))
        return all(addend.stored is not stored for addend in self._arriving)

    def _add_arrived(self, most: int = 0) -> None:
        """Adds what has arrived, in the order in which it was sent, until no more than so many are on their way."""
        while self._arriving and (len(self._arriving) > most or self._arriving[0].transfer.done()):
            addend = self._arriving.popleft()
            addend.transfer.finish()
            if addend.landing is not None:
                addend.stored.add_(addend.landing, alpha=addend.factor)
                self.give_back(addend.landing)

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lends memory that nothing uses: the code that gave it back had waited for its last use."""
        self._mirrors.expect(tensor.nbytes)
        memory = self._mirrors.borrow(partial(self.allocate, dtype=torch.uint8))
        self._lent[address_of(memory)] = memory
        return memory[: tensor.nbytes].view(tensor.dtype)

    def give_back(self, mirror: torch.Tensor) -> None:
        self._mirrors.give_back(self._lent.pop(address_of(mirror)))

    def release(self) -> None:
        self._mirrors.release()


class _Addend(NamedTuple):
    """Values that are being added to a sum: the first go into the sum itself, others into memory beside it."""

    transfer: Transfer
    stored: torch.Tensor
    landing: torch.Tensor | None = None
    factor: float = 1.0
