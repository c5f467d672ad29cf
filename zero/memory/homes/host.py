"""Host memory beside a device, and copies that cross between the two while both go on.

[Note: crossings]
Each direction has a stream of its own, so that neither waits for the other nor for what is computed. A copy starts
when everything that was issued before it on the current stream is done: who wrote its source, who reads its target.
It is on its way until somebody waits for it, the host (`finish`) or the current stream (`wait`), and until then it
keeps both ends alive: memory that was let go could be somebody else's before the copy has read it. A device without
streams copies at once, since there waiting for one copy is waiting for all work.
"""

from __future__ import annotations

import torch

from accelerators import Accelerator
from accelerators.streams import Event, InOrderStream, Stream


class HostCopy:
    """A copy on its way."""

    def __init__(self, accelerator: Accelerator, event: Event | None, *ends: torch.Tensor) -> None:
        self._accelerator = accelerator
        self._event = event
        self._ends = ends

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def finish(self) -> None:
        """The host waits."""
        if self._event is not None:
            self._event.synchronize()
        self._event, self._ends = None, ()

    def wait(self) -> None:
        """What is issued to the current stream from now on comes after the copy; the host goes on."""
        if self._event is not None:
            self._accelerator.current_stream().wait_event(self._event)

    def release_source(self) -> None:
        """Lets go of the source: whoever gets its memory next on the current stream comes after the copy."""
        self.wait()
        self._ends = self._ends[1:]


class HostPool:
    """Host memory for one device: made, lent for a while, and reached."""

    def __init__(self, accelerator: Accelerator, pinned: bool | None = None) -> None:
        self.pinned = pinned  # None: where that works
        self.num_lent_bytes = 0  # that exist for lending, lent or not
        self._accelerator = accelerator
        self._largest = 0  # bytes that anybody borrowed so far: all that is lent has as many, so that any serves the next
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # what was lent a part of, by its address
        self._streams: dict[str, Stream] = {}  # by direction, made when first used

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(numel, dtype=dtype, device="cpu")
        if self.pinned is False:
            return memory
        memory = self._accelerator.pin(memory)
        if self.pinned and numel and not memory.is_pinned():
            raise MemoryError(
                f"Pinned host memory was asked for, but {memory.nbytes} bytes of it could not be had. Leave pinned out, and "
                "pageable memory serves."
            )
        return memory

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that nobody is using: what is given back was waited for."""
        if numel * dtype.itemsize > self._largest:
            self._largest = numel * dtype.itemsize
            self.release()  # too small from now on
        if self._free:
            memory = self._free.pop()
        else:
            memory = self.empty(self._largest, torch.uint8)
            self.num_lent_bytes += memory.nbytes
        self._lent[memory.data_ptr()] = memory
        return memory[: numel * dtype.itemsize].view(dtype)

    def give_back(self, part: torch.Tensor) -> None:
        """The host has waited for every copy that uses it."""
        memory = self._lent.pop(part.data_ptr())
        if memory.nbytes == self._largest:
            self._free.append(memory)
        else:
            self.num_lent_bytes -= memory.nbytes

    def release(self) -> None:
        """Lets the memory go that nobody has borrowed."""
        self.num_lent_bytes -= sum(memory.nbytes for memory in self._free)
        self._free.clear()

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> HostCopy:
        """From the device to the host."""
        return self._copy("down", source, target)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> HostCopy:
        """From the host to the device."""
        return self._copy("up", source, target)

    def _copy(self, direction: str, source: torch.Tensor, target: torch.Tensor) -> HostCopy:
        current = self._accelerator.current_stream()
        if isinstance(current, InOrderStream):
            target.copy_(source)
            return HostCopy(self._accelerator, None)
        if direction not in self._streams:
            self._streams[direction] = self._accelerator.new_stream()
        stream = self._streams[direction]
        stream.wait_stream(current)  # for who wrote the source, and for who reads the target
        with self._accelerator.in_stream(stream):
            target.copy_(source, non_blocking=True)
        return HostCopy(self._accelerator, stream.record_event(), source, target)
