"""A stretch of elements, and what can be done with two of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """The elements from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Span) -> Span | None:
        """What both have; None where that is nothing."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def piece(self, rank: int, num_pieces: int) -> Span:
        """The `rank`th of `num_pieces` equal parts; the span must divide evenly."""
        numel, rest = divmod(self.numel, num_pieces)
        assert rest == 0, f"{self} does not divide into {num_pieces}"
        return Span(self.start + rank * numel, self.start + (rank + 1) * numel)

    def cut(self, every: int | None) -> Iterator[Span]:
        """Its parts between multiples of `every`; all of it where there is none."""
        start = self.start
        while start < self.stop:
            stop = self.stop if every is None else min(self.stop, (start // every + 1) * every)
            yield Span(start, stop)
            start = stop
