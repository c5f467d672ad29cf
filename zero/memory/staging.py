"""Scratch buffers on the device of the weights, borrowed and given back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerators import Accelerator
from accelerators.streams import Stream
from zero.memory.offload import Crossing


class Staging:
    """Keeps what is given back for the next borrower of the same size, until it is told to let go.

    [Note: staging lifetimes]
    A buffer given back may still be read by work on the stream that was current then, or by a copy to the host. A
    borrower on the same stream comes after the work anyway; one on another stream makes it wait for the first, and
    both make theirs wait for the copy. No event is recorded at the return: on a device without streams recording one
    waits for all its work, and so for other ranks, in the middle of backward.
    """

    def __init__(self, accelerator: Accelerator, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._accelerator = accelerator
        self._allocate = allocate
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, Stream | None, Crossing | None]]] = {}
        self.borrowed = 0
        self.most_borrowed = 0

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory with anything in it: the borrower writes what it will send."""
        self.borrowed += 1
        self.most_borrowed = max(self.most_borrowed, self.borrowed)
        free = self._free.get((numel, dtype))
        if not free:
            return self._allocate(numel, dtype)
        buffer, returned_on, crossing = free.pop()
        if crossing is not None:
            crossing.wait()
        current = self._stream()
        if returned_on is not None and current is not None and returned_on != current:
            current.wait_stream(returned_on)
        return buffer

    def give_back(self, buffer: torch.Tensor, crossing: Crossing | None = None) -> None:
        """`crossing`: a copy to the host that may still read it."""
        self.borrowed -= 1
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append((buffer, self._stream(), crossing))

    def release(self) -> None:
        """Lets the buffers that nobody has borrowed go."""
        self._free.clear()

    def _stream(self) -> Stream | None:
        return None if self._accelerator.is_synchronous else self._accelerator.current_stream()
