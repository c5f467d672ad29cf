"""Which memory parameters have. No other file looks at their addresses.

Everywhere else a parameter is its number in the table. Code that exchanges memory through `.data`, or by `model.half()`,
reports it nowhere, and no version counter counts it: only the address shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.runtime.params.absent import Absent


class KnownMemory:
    """The memory that each parameter had when it was noted."""

    def __init__(self) -> None:
        self._addresses: dict[int, int] = {}  # by parameter; 0 for memory that is not looked at

    def __contains__(self, index: int) -> bool:
        return index in self._addresses

    def note(self, index: int, memory: torch.Tensor | None) -> None:
        """Takes this for the memory of a parameter; None: whatever it has is right."""
        self._addresses[index] = 0 if memory is None else _address(memory)

    def has_changed(self, index: int, tensor: torch.Tensor) -> bool:
        return _address(tensor) != self._addresses[index]

    def changed(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The parameters that have other memory than was noted, in the order in which they were noted first."""
        return [index for index, address in self._addresses.items() if address and tensors[index].data_ptr() != address]

    def forget(self, first: int = 0) -> None:
        """Of this parameter and all after it."""
        self._addresses = {index: address for index, address in self._addresses.items() if index < first}


def _address(tensor: torch.Tensor) -> int:
    return 0 if isinstance(tensor, Absent) else tensor.data_ptr()


def starts_where(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same memory, from its first byte."""
    return tensor.data_ptr() == other.data_ptr()
