"""Scratch buffers, borrowed and given back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerators import Accelerator


class Staging:
    """Keeps what is given back for the next borrower of the same size, until it is told to let go.

    [Note: staging lifetimes]
    A buffer given back may still be read by work on the stream that was current then. The next borrower may
    write on another stream, so that stream waits for an event recorded at the return. On a device whose work
    is in order both are no-ops.
    """

    def __init__(self, accelerator: Accelerator, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._accelerator = accelerator
        self._allocate = allocate
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, object]]] = {}
        self.borrowed = 0
        self.most_borrowed = 0

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory with anything in it: the borrower writes what it will send."""
        self.borrowed += 1
        self.most_borrowed = max(self.most_borrowed, self.borrowed)
        free = self._free.get((numel, dtype))
        if not free:
            return self._allocate(numel, dtype)
        buffer, returned = free.pop()
        if returned is not None:
            self._accelerator.current_stream().wait_event(returned)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        self.borrowed -= 1
        returned = None
        if not self._accelerator.is_synchronous:
            returned = self._accelerator.current_stream().record_event()
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append((buffer, returned))

    def release(self) -> None:
        """Lets the buffers that nobody has borrowed go."""
        self._free.clear()
