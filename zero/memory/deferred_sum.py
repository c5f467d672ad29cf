"""Sums that are computed only when they are needed.

[Note: deferred sums] A step that is one pass over memory can add what the ranks sent as it reads it. The sum is then written
nowhere, which saves a third of what landing a gradient costs, and the memory for it. So what was sent is kept as it came, where
that takes hardly more bytes than its sum, as with bf16 on one rank or two. A gradient that is read, changed or added to is
summed first. As that may happen in every window, nothing is deferred in the window after, which would take memory for both; nor
in the first one, of which it is not known yet. What was added up over micro-batches in the dtype of sums is kept as one row,
and the sum takes the place of what this rank sent to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Sums(Protocol):
    """How what ranks sent is added."""

    def add(self, rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
        """Writes `factor` times the sum of the rows, or adds it to what is there."""

    def can_defer(self, rows: torch.dtype, number: int, total: torch.dtype) -> bool:
        """Whether the step takes so many rows of that dtype themselves, on the host."""

    def square(self, rows: Sequence[torch.Tensor], factors: Sequence[float], sum_dtype: torch.dtype) -> float:
        """The square of the norm of their sum times the factors; of rows that may wait."""

    def squares(self, sums: Sequence[torch.Tensor]) -> list[float]:
        """The same of each of these, and to the bit what it is of the rows of which one is the sum."""

    def squares_of_rows(self, sums: Sequence[DeferredSum], sum_dtypes: Sequence[torch.dtype]) -> list[float]:
        """Returns the same for several sums of rows, each in its dtype."""


@dataclass
class DeferredSum:
    """A share of the gradient: the sum of its rows, multiplied by one factor after the other."""

    addends: Sequence[torch.Tensor]
    factors: tuple[float, ...]
    sums: Sums
    num_bytes: int  # of this rank's memory that they keep
    is_staged: bool  # whether that is a staging buffer
    release: Callable[[], None]  # of all of it, which is lent

    def add_into(self, share: torch.Tensor) -> None:
        add_scaled(self.sums.add, self.addends, share, self.factors)

    @property
    def numel(self) -> int:
        return self.addends[0].numel()


def merged(factors: Sequence[float]) -> list[float]:
    """As few as give the same bits: times a power of two nothing is rounded, short of what is nearly 0 or infinite."""
    result = [1.0]
    for factor in factors:
        if math.frexp(result[-1])[0] == 0.5 or math.frexp(factor)[0] == 0.5:
            result[-1] *= factor
        else:
            result.append(factor)
    return result


def add_scaled(add: Callable[..., None], rows: Sequence[torch.Tensor], target: torch.Tensor, factors: Sequence[float]) -> None:
    """Writes their sum times the factors, rounded as often as if one after the other had come."""
    first, *others = merged(factors)
    add(rows, target, first, False)
    for factor in others:
        target.mul_(factor)


def sum_together(parts: Sequence[Sequence[torch.Tensor]], factors: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Returns what `add_scaled` writes for the rows of each part, one behind the other: by operators on lists, for parts of so
    few elements that calls cost more than these. All have as many rows, of the same dtypes."""
    numels = [rows[0].numel() for rows in parts]
    total = torch.empty(sum(numels), dtype=dtype, device=parts[0][0].device)
    of_parts = torch.split(total, numels)
    first, *others = (list(rows) for rows in zip(*parts, strict=True))
    torch._foreach_copy_(of_parts, first)
    for rows in others:
        torch._foreach_add_(of_parts, rows)
    for factor in merged(factors):
        if factor != 1.0:
            total.mul_(factor)
    return total
