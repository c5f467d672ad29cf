"""How what ranks sent is added: by torch's kernels, as one compiled pass over memory, or as part of that of the step."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from zero.comm.group import add_rows, add_stretch
from zero.memory.norms import PIECE, squares_of_pieces
from zero.memory.rows import add_scaled
from zero.plan.spans import round_up
from zero.runtime.compiled import LONG, build, compiled

_LEAST_STRETCH, _MOST_STRETCHES = 2**16, 16  # elements for each thread, and how many stretches at most


def stretch_of(numel: int) -> int:
    """Elements that torch's kernels work on at a time: few enough for the cache, and enough that calls cost little. A multiple
    of PIECE, so that norms are taken of the same pieces whatever the stretch."""
    return round_up(max(_LEAST_STRETCH * torch.get_num_threads(), numel // _MOST_STRETCHES), PIECE)


class RowKind(NamedTuple):
    """What must be known of rows and of what becomes of them."""

    rows: torch.dtype
    number: int
    total: torch.dtype


class SumsByTorch:
    """By torch's own kernels."""

    def __init__(self, waiting: Collection[RowKind] = ()) -> None:
        self._waiting = waiting  # what the step takes as well

    def add(self, rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
        add_rows(rows, target, factor, adds)

    def may_wait(self, rows: torch.dtype, number: int, total: torch.dtype) -> bool:
        return RowKind(rows, number, total) in self._waiting

    def square(self, rows: Sequence[torch.Tensor], factors: Sequence[float], sum_dtype: torch.dtype) -> float:
        """To the bit that of what is summed."""
        stretch = stretch_of(rows[0].numel())
        scratch, squares = torch.empty(min(stretch, rows[0].numel()), dtype=sum_dtype, device="cpu"), list[float]()
        for parts in zip(*(torch.split(row, stretch) for row in rows), strict=True):
            scratch = scratch[: parts[0].numel()]
            add_scaled(add_stretch, parts, scratch, factors)
            squares += squares_of_pieces([scratch])[0]
        return sum(squares, 0.0)


class CompiledSums(SumsByTorch):
    """Where nothing was built for some rows, as for what seldom comes, torch's own kernels add them."""

    def add(self, rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
        kind = RowKind(rows[0].dtype, len(rows), target.dtype)
        if kind not in _built or not target.is_cpu:
            super().add(rows, target, factor, adds)
            return
        number = torch.full((), factor, dtype=target.dtype, device="cpu")
        compiled(_sum, *kind, adds)(adds, list(rows), target, number)

    def square(self, rows: Sequence[torch.Tensor], factors: Sequence[float], sum_dtype: torch.dtype) -> float:
        found = torch.empty(1, dtype=sum_dtype, device="cpu")  # 0-dim and fp64, torch 2.13 writes nothing
        compiled(_square, rows[0].dtype, len(rows), sum_dtype)(list(rows), found)
        square = math.prod(factors) ** 2 * found.item()
        # The factors come last here, and before them squares may be too large or too small to be numbers.
        return square if math.isfinite(square) and square > 0.0 else super().square(rows, factors, sum_dtype)


_built: set[RowKind] = set()


@functools.cache
def build_sums(kind: RowKind) -> None:
    """Waits for the compiler, so that no backward has to."""

    def rows() -> list[torch.Tensor]:
        return [(torch.arange(LONG) % (3 + rank) - 1).to(kind.rows) for rank in range(kind.number)]  # whose sums are exact

    def example(adds: bool) -> list[Any]:
        return [adds, rows(), torch.linspace(0.0, 1.0, LONG, dtype=kind.total), torch.full((), 0.5, dtype=kind.total)]

    for adds in (False, True):
        build(_sum, (*kind, adds), functools.partial(example, adds))
    build(_square, kind, lambda: [rows(), torch.zeros(1, dtype=kind.total)])
    _built.add(kind)


def total_of(rows: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """To be compiled into what needs it."""
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total = total + row
    return total


def _sum(adds: bool, rows: list[torch.Tensor], target: torch.Tensor, factor: torch.Tensor) -> None:
    total = total_of(rows, target.dtype) * factor
    target.copy_(target + total if adds else total)


def _square(rows: list[torch.Tensor], found: torch.Tensor) -> None:
    total = total_of(rows, found.dtype)
    found.copy_((total * total).sum())
