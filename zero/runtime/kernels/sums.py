"""Adds the rows that ranks sent: by torch's kernels, as one compiled pass over memory, or in the pass of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from zero.comm.results import add_rows, add_stretch
from zero.memory.deferred_sum import DeferredSum, add_scaled, sum_together
from zero.memory.norms import PIECE, squares_and, squares_of, squares_of_pieces
from zero.plan.layout import round_up
from zero.runtime.kernels import native

_LEAST_STRETCH, _MOST_STRETCHES = 2**16, 16  # the least elements of a thread's stretch, and the most stretches of a line


def stretch_of(numel: int) -> int:
    """Returns how many elements torch's kernels work on at a time: few enough for the cache, and enough that calls cost little.
    It is a multiple of PIECE, so that norms are taken of the same pieces whatever the stretch."""
    return round_up(max(_LEAST_STRETCH * torch.get_num_threads(), numel // _MOST_STRETCHES), PIECE)


class SumDtypes(NamedTuple):
    """The dtypes of rows and of their sum."""

    rows: torch.dtype
    number: int
    total: torch.dtype


class SumsByTorch:
    """Sums by torch's own kernels."""

    def __init__(self, deferrable: Collection[SumDtypes] = ()) -> None:
        self._deferrable = deferrable  # dtypes of rows that the step itself adds up

    def add(self, rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
        add_rows(rows, target, factor, adds)

    def can_defer(self, rows: torch.dtype, number: int, total: torch.dtype) -> bool:
        return SumDtypes(rows, number, total) in self._deferrable

    def square(self, rows: Sequence[torch.Tensor], factors: Sequence[float], sum_dtype: torch.dtype) -> float:
        stretch = stretch_of(rows[0].numel())
        scratch, squares = torch.empty(min(stretch, rows[0].numel()), dtype=sum_dtype, device="cpu"), list[float]()
        for parts in zip(*(torch.split(row, stretch) for row in rows), strict=True):
            scratch = scratch[: parts[0].numel()]
            add_scaled(add_stretch, parts, scratch, factors)
            [of_pieces], _ = squares_of_pieces([scratch])
            squares += of_pieces
        return sum(squares, 0.0)

    def squares(
        self, sums: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()
    ) -> tuple[list[float], list[list[float]]]:
        return squares_and(sums, beside)

    def squares_of_rows(self, sums: Sequence[DeferredSum], sum_dtypes: Sequence[torch.dtype]) -> list[float]:
        squares: list[float] = []
        for together in _together(list(zip(sums, sum_dtypes, strict=True))):
            first, dtype = together[0]
            if len(together) == 1:
                squares.append(self.square(first.addends, first.factors, dtype))
            else:
                numels = [each.numel for each, _ in together]
                total = torch.empty(sum(numels), dtype=dtype, device="cpu")
                of_sums = torch.split(total, numels)
                sum_together([(each.addends, each.factors) for each, _ in together], total, of_sums)
                squares += squares_of(of_sums)
        return squares


def _together(sums: Sequence[tuple[DeferredSum, torch.dtype]]) -> Iterator[Sequence[tuple[DeferredSum, torch.dtype]]]:
    """Yields neighbours that fit into the cache together, and are computed in one dtype."""
    together: list[tuple[DeferredSum, torch.dtype]] = []
    room = 0
    for each in sums:
        if together and (each[0].numel > room or each[1] != together[0][1]):
            yield together
            together = []
        if not together:
            room = stretch_of(0)
        together.append(each)
        room -= each[0].numel
    if together:
        yield together


class CompiledSums(SumsByTorch):
    """Sums as one compiled pass over memory."""

    def add(self, rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
        add = native.add if target.is_cpu else super().add
        add(rows, target, factor, adds)

    def square(self, rows: Sequence[torch.Tensor], factors: Sequence[float], sum_dtype: torch.dtype) -> float:
        return native.square(rows, factors, sum_dtype)

    def squares(
        self, sums: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()
    ) -> tuple[list[float], list[list[float]]]:
        on_host = {number: native.square([tensor], (), tensor.dtype) for number, tensor in enumerate(sums) if tensor.is_cpu}
        squares, numbers = super().squares([tensor for tensor in sums if not tensor.is_cpu], beside)
        others = iter(squares)
        return [on_host[number] if number in on_host else next(others) for number in range(len(sums))], numbers

    def squares_of_rows(self, sums: Sequence[DeferredSum], sum_dtypes: Sequence[torch.dtype]) -> list[float]:
        return [self.square(each.addends, each.factors, dtype) for each, dtype in zip(sums, sum_dtypes, strict=True)]
