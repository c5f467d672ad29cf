"""Norms of tensors, and of what is in parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from zero.memory.flat import by_device

_PIECE = 2**15  # elements: what one thread adds up by itself, however many there are


def squares_of_pieces(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The squares of the norms of short pieces, one after the other: torch adds up millions of squares one after the other,
    and is wrong in the third digit then."""
    return [norm * norm for norm in norms_of([piece for tensor in tensors for piece in torch.split(tensor, _PIECE)])]


def squares_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The square of the norm of each."""
    squares = iter(squares_of_pieces(tensors))
    return [sum(itertools.islice(squares, -(-tensor.numel() // _PIECE)), 0.0) for tensor in tensors]


def norms_of(tensors: Sequence[torch.Tensor], order: float = 2.0) -> list[float]:
    """Norms as numbers of the host, brought there together; made fp64 only there, as not every device has it."""
    norms = [0.0] * len(tensors)
    for indices in by_device(tensors):
        found = torch._foreach_norm([tensors[index] for index in indices], order)
        numbers = torch.stack(list(found)).tolist()  # of mixed dtypes, where there are any, the widest
        for index, number in zip(indices, numbers, strict=True):
            norms[index] = number
    return norms


def joined(norms: Sequence[float], order: float) -> float:
    """The norm of something from those of its parts. What is raised to the order is at most 1, which cannot overflow."""
    if len(norms) == 1:
        return norms[0]
    if any(math.isnan(norm) for norm in norms):
        return math.nan  # max would drop it, depending on the order
    if order == 0.0:
        return sum(norms)
    largest = max(norms, default=0.0)
    if order == math.inf or largest in (0.0, math.inf):
        return largest
    return float(largest * sum((norm / largest) ** order for norm in norms) ** (1.0 / order))
