"""Scratch buffers on the device of the weights, borrowed and given back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from accelerators import Accelerator
from accelerators.streams import Event, InOrderStream, Stream
from zero.memory.addresses import address_of
from zero.memory.homes.home import Transfer


class Staging:
    """A borrower's work on a buffer always comes after all that still reads it, whether by ranks, streams or copies.

    Buffers that are given back are kept for the next borrower until `release`. Buffers of one dtype have one size, the largest
    that was borrowed so far: so any serves the next borrower, and as many exist as were lent at one time. A buffer that is
    larger than usual, as for buckets of whole tensors, has a size of its own.

    [Note: staging lifetimes] A buffer given back may still be read by work on the stream that was current then, or by a copy to
    the host. A borrower on the same stream comes after the work anyway; one on another stream makes it wait for the first, and
    both make theirs wait for the copy. No event is recorded at the return: on a device without streams recording one waits for
    all its work, and so for other ranks, in the middle of backward.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
        is_reusable: Callable[[torch.Tensor], bool] = lambda _: True,
        room: Callable[[], float] = lambda: math.inf,
        usual_numel: float = math.inf,
        of_parts: Sequence[Source] = (),
    ) -> None:
        self._accelerator = accelerator
        self.runs_behind = not accelerator.is_synchronous  # the host goes on while the device works on a buffer
        self._sources = (Source(allocate, is_reusable), *of_parts)  # by family: a group sends memory of its own without a copy
        self.room = room  # returns the bytes for buffers beyond those that a rank in pace needs
        self._usual_numel = usual_numel
        self._free: dict[_Kind, list[_Returned]] = {}  # the buffer that was given back last comes last
        self._whole: dict[int, _FullBuffer] = {}  # by address of a lent buffer: the same memory in full size
        self._sizes: dict[_Kind, int] = {}
        self.borrowed = 0
        self.most_borrowed = 0

    def borrow(self, numel: int, dtype: torch.dtype, family: int = 0, purpose: int | None = None) -> torch.Tensor:
        """Lends memory with undefined contents: the borrower writes what it will send. If buffers come and go in one order,
        each is lent for the same purpose again, and has the views that were made of it; see `views_of`."""
        self.borrowed += 1
        self.most_borrowed = max(self.most_borrowed, self.borrowed)
        kind = dtype, numel > self._usual_numel, family
        if numel > self._sizes.get(kind, 0):
            self._sizes[kind] = numel
            self._free.pop(kind, None)  # all of these are too small from now on
        memory = self._reuse(kind, purpose)
        if memory is None:
            memory = _FullBuffer(self._sources[family].allocate(self._sizes[kind], dtype), kind)
        if purpose is None or memory.purpose != purpose:
            memory.purpose, memory.views = purpose, {}
        self._whole[address_of(memory.buffer)] = memory
        return memory.buffer[:numel]

    def views_of(self, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns the views that were made of a lent buffer. They go when it is freed, or lent for another purpose."""
        return self._whole[address_of(buffer)].views

    def _reuse(self, kind: _Kind, purpose: int | None) -> _FullBuffer | None:
        free, is_reusable = self._free.get(kind, []), self._sources[kind[-1]].is_reusable
        if not free or not is_reusable(free[0].memory.buffer):  # those that were given back after it are not reusable either
            return None
        index = 0
        if purpose is None or free[0].memory.purpose != purpose:
            index = next(index for index in reversed(range(len(free))) if is_reusable(free[index].memory.buffer))
        memory, returned_on, transfer = free.pop(index)
        if transfer is not None:
            transfer.wait()
        current = self._stream(memory.buffer)
        if returned_on is not None and current is not None and returned_on != current:
            current.wait_stream(returned_on)
        return memory

    def give_back(self, buffer: torch.Tensor, transfer: Transfer | None = None) -> None:
        """Takes a buffer back. `transfer` is a copy that may still read it."""
        self.borrowed -= 1
        memory = self._whole.pop(address_of(buffer))
        if memory.buffer.numel() == self._sizes[memory.kind]:
            self._free.setdefault(memory.kind, []).append(_Returned(memory, self._stream(memory.buffer), transfer))

    def discard(self, buffer: torch.Tensor) -> None:
        """Forgets a buffer that will not be given back, as something may write to it at any time."""
        self.borrowed -= 1
        del self._whole[address_of(buffer)]

    def num_bytes(self, most_free: int | None = None) -> int:
        """Returns the bytes of lent buffers, and of at most `most_free` others of each dtype and size."""
        free = (returned.memory for kept in self._free.values() for returned in kept[:most_free])
        return sum(memory.buffer.nbytes for memory in (*self._whole.values(), *free))

    def release(self, keep: int = 0) -> None:
        """Frees the buffers that are not lent, except so many of each dtype and size."""
        for free in self._free.values():
            del free[keep:]

    def mark(self, buffer: torch.Tensor) -> Event | None:
        """Records an event that comes when the device of a buffer has done what it was given so far. Returns None if that is
        done, or if the device has no streams: to wait would be to wait for other ranks."""
        stream = self._stream(buffer)
        return None if stream is None or isinstance(stream, InOrderStream) else stream.record_event()

    def _stream(self, buffer: torch.Tensor) -> Stream | None:
        return self._accelerator.current_stream(buffer.device.index) if self.runs_behind else None


_Kind = tuple[torch.dtype, bool, int]  # the dtype, whether it is larger than usual, and the family


class Source(NamedTuple):
    """A source of buffers."""

    allocate: Callable[[int, torch.dtype], torch.Tensor]
    is_reusable: Callable[[torch.Tensor], bool]  # returns whether no other rank reads it any more


class _FullBuffer:
    """A buffer in full size."""

    __slots__ = ("buffer", "kind", "purpose", "views")

    def __init__(self, buffer: torch.Tensor, kind: _Kind) -> None:
        self.buffer = buffer
        self.kind = kind
        self.purpose: int | None = None  # the purpose that it was last lent for
        self.views: dict[int, torch.Tensor] = {}  # the views of its borrower


class _Returned(NamedTuple):
    """A buffer that was given back, and what may still read it."""

    memory: _FullBuffer
    on: Stream | None
    transfer: Transfer | None
