"""Sums that are computed only when they are needed.

[Note: deferred sums] A step that is one pass over memory can add what the ranks sent as it reads it. The sum is then written
nowhere, which saves a third of what landing a gradient costs, and the memory for it. So what was sent is kept as it came, if
that takes hardly more bytes than its sum, as with bf16 on one rank or two. A gradient that is read, changed or added to is
summed first. As that may happen in every window, nothing is deferred in the window after, which would take memory for both; nor
in the first one, of which it is not known yet. What was added up over micro-batches in the dtype of sums is kept as one row,
and the sum takes the place of what this rank sent to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Sums(Protocol):
    """The arithmetic that adds the rows that ranks sent."""

    def add(self, rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
        """Writes `factor` times the sum of the rows to `target`; if `adds`, adds it to the values there."""

    def can_defer(self, rows: torch.dtype, number: int, total: torch.dtype) -> bool:
        """Returns True if the step on the host adds up this number of rows itself, so that no sum need be written before."""

    def square(self, rows: Sequence[torch.Tensor], factors: Sequence[float], sum_dtype: torch.dtype) -> float:
        """Returns the square of the norm of the sum of the rows, multiplied by the factors. The rows may be deferred ones."""

    def squares(
        self, sums: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()
    ) -> tuple[list[float], list[list[float]]]:
        """Returns the square of the norm of each sum: the same bits as `square` gives of the rows that the sum is made of. Also
        returns the numbers of vectors `beside` them, which come to the host in the same transfer."""

    def squares_of_rows(self, sums: Sequence[DeferredSum], sum_dtypes: Sequence[torch.dtype]) -> list[float]:
        """Returns what `square` does for each of several sums of rows, each computed in its own dtype."""


@dataclass
class DeferredSum:
    """A share of the gradient: the sum of its rows, multiplied by one factor after the other."""

    addends: Sequence[torch.Tensor]
    factors: tuple[float, ...]
    sums: Sums
    num_bytes: int  # the bytes of this rank's memory in which the rows lie
    is_staged: bool  # that memory is a staging buffer
    release: Callable[[], None]  # gives the memory of the rows back to its lender, once nobody reads them any more

    def add_into(self, share: torch.Tensor) -> None:
        add_scaled(self.sums.add, self.addends, share, self.factors)

    @property
    def numel(self) -> int:
        return self.addends[0].numel()


def merged(factors: Sequence[float]) -> list[float]:
    """Returns as few factors as give the same bits: a product with a power of two is exact, unless it is nearly 0 or
    infinite."""
    result = [1.0]
    for factor in factors:
        if math.frexp(result[-1])[0] == 0.5 or math.frexp(factor)[0] == 0.5:
            result[-1] *= factor
        else:
            result.append(factor)
    return result


def add_scaled(add: Callable[..., None], rows: Sequence[torch.Tensor], target: torch.Tensor, factors: Sequence[float]) -> None:
    """Writes the sum of the rows times the factors, rounded as often as if the factors were applied one after the other."""
    first, *others = merged(factors)
    add(rows, target, first, False)
    for factor in others:
        target.mul_(factor)


def sum_together(
    parts: Sequence[tuple[Sequence[torch.Tensor], Sequence[float]]], total: torch.Tensor, targets: Sequence[torch.Tensor]
) -> None:
    """Writes what `add_scaled` writes for the rows and factors of each part into `targets`, which `total` consists of: by
    operators on lists, for parts of so few elements that calls cost more than these. Some may be rows, and others sums."""
    alike: dict[Any, list[tuple[torch.Tensor, Sequence[torch.Tensor]]]] = {}
    for target, (rows, factors) in zip(targets, parts, strict=True):
        alike.setdefault((tuple(factors), *(row.dtype for row in rows)), []).append((target, rows))
    for (factors, *_), together in alike.items():
        of_kind = [target for target, _ in together]
        first, *others = (list(rows) for rows in zip(*(rows for _, rows in together), strict=True))
        torch._foreach_copy_(of_kind, first)
        for rows in others:
            torch._foreach_add_(of_kind, rows)
        for factor in merged(factors):
            if factor != 1.0:
                torch._foreach_mul_(of_kind if len(alike) > 1 else [total], factor)
