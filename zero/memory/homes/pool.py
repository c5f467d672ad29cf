"""Memory that is lent again and again."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Pool:
    """Memory that is lent and taken back. All of it has the size of the largest that was asked for so far, so that any of it
    serves the next borrower, who finds anything in it."""

    def __init__(self) -> None:
        self._largest = 0
        self._free: list[torch.Tensor] = []
        self.num_bytes = 0  # bytes of all memory, lent or not

    def expect(self, num_bytes: int) -> None:
        """Prepares for borrowers of so many bytes."""
        if num_bytes > self._largest:
            self._largest = num_bytes
            self.release()  # too small from now on

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
