"""Addresses of memory: code that finds out by an address which memory a tensor has asks here.

Everywhere else a parameter is its number in the table. Code that exchanges memory through `.data`, or by `model.half()`,
reports it nowhere, and no version counter counts it: only the address shows it. What hands addresses on, to C++, to files or to
other ranks, takes them itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's first element; 0 if it has no elements."""
    return tensor.data_ptr()


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns what `address_of` does for each of many tensors."""
    return list(map(torch.Tensor.data_ptr, tensors))


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the address at which the storage of a tensor begins, which all views of it share."""
    return tensor.untyped_storage().data_ptr()


def users_of(tensor: torch.Tensor) -> int:
    """Returns a number that is greater the more tensors there are in the storage of a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def starts_where(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether the first elements of two tensors have one address."""
    return tensor.data_ptr() == other.data_ptr()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two contiguous tensors overlap in memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Returns the indexes of two tensors that share memory, or (i, i) for one that overlaps itself; None if all are apart."""
    stretches: list[tuple[str, int, int, int]] = []
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        axes = list(zip(tensor.shape, tensor.stride(), strict=True))
        reach = sum((size - 1) * stride for size, stride in axes) + 1
        if reach < tensor.numel():
            return index, index
        start = tensor.data_ptr()
        stretches.append((str(tensor.device), start, start + reach * tensor.element_size(), index))
    for before, after in itertools.pairwise(sorted(stretches)):
        if before[0] == after[0] and after[1] < before[2]:
            return before[3], after[3]
    return None


class KnownMemory:
    """The memory that each parameter had when it was noted."""

    def __init__(self) -> None:
        self._addresses: dict[int, int] = {}  # by parameter; 0 for memory that is not looked at

    def unknown(self, number: int) -> list[int]:
        """Returns those of this many parameters whose memory was not noted."""
        return [] if len(self._addresses) == number else [index for index in range(number) if index not in self._addresses]

    def note(self, index: int, memory: torch.Tensor | None) -> None:
        """Takes this for the memory of a parameter; None: whatever it has is right."""
        self._addresses[index] = 0 if memory is None else memory.data_ptr()

    def changed(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the parameters that have other memory than was noted, in the order in which they were noted first."""
        return [index for index, address in self._addresses.items() if address and tensors[index].data_ptr() != address]

    def forget(self, first: int = 0) -> None:
        """Forgets the memory of this parameter and of all after it."""
        self._addresses = {index: address for index, address in self._addresses.items() if index < first}
