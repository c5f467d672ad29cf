"""The families of parameters: which ranks hold which part of a larger parameter, and which share of that part.

A parameter may be one rank's *part* of a larger one, as an expert is. Parameters whose parts are held by the same ranks are a
*family*. Their buckets are shared among the ranks that hold the same part, so each family has a number of shares of its own,
and so has every bucket. Family 0 is that of whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Seat(NamedTuple):
    """The place of a rank in a family."""

    part: int  # the number of the part that it holds
    number: int  # its number among the ranks that sum the gradients of this part
    copy: int = 0  # the number of its copy of the part; each copy is trained by the ranks that sum the gradients of it


@dataclass(frozen=True)
class Family:
    """The place of each rank among those that train some parameters: the part that it holds, and its share of that part.

    Whole parameters have one part. Under tensor parallelism several groups of ranks each train a copy of the whole parameters,
    with shares inside of each group. Experts have such copies too, if they are not cut with the layers.
    """

    num_shares: int
    seats: tuple[Seat, ...] = ()  # by rank; () if all ranks sum one part
    num_parts: int = 1  # kept beside `seats`, as the family of a plan has no seats

    def num_summing(self, size: int) -> int:
        """Returns the number of ranks that sum the gradients of a part, out of `size` ranks."""
        together = [(seat.part, seat.copy) for seat in self.seats]
        return together.count(together[0]) if together else size // self.num_parts

    def seat_of(self, rank: int) -> Seat:
        return self.seats[rank] if self.seats else Seat(0, rank)

    def share_of(self, rank: int) -> int:
        """Returns the number of the share that a rank has. Each of `num_shares` ranks that follow each other has another
        one."""
        return (self.seats[rank].number if self.seats else rank) % self.num_shares

    def holders(self, size: int) -> list[list[int]]:
        """Returns, by part, the ranks out of `size` that hold it."""
        holders: dict[int, list[int]] = {}
        for rank in range(size):
            holders.setdefault(self.seat_of(rank).part, []).append(rank)
        return [holders[part] for part in sorted(holders)]

    def counts(self, rank: int) -> bool:
        """Returns True if norms count a rank's shares: the ranks for which it is True have every share of every part once."""
        seat = self.seat_of(rank)
        return seat.number < self.num_shares and not seat.copy

    def is_first(self, rank: int) -> bool:
        """Returns True if a rank is the first of those that hold its part."""
        seat = self.seat_of(rank)
        return not seat.number and not seat.copy


def seated(parts: Sequence[int], copies: Sequence[Seat]) -> tuple[Seat, ...]:
    """Returns the seat of each rank in a family, from the part that it holds. `copies` are the seats in the family of whole
    parameters, if several groups of ranks train copies of these, and else empty."""
    of_data = [seat.copy for seat in copies] or [0] * len(parts)
    cells = list(zip(parts, of_data, strict=True))
    copies_of_part = [sorted({data for other, data in cells if other == part}) for part in parts]
    return tuple(
        Seat(cell[0], cells[:rank].count(cell), copies_of_part[rank].index(cell[1])) for rank, cell in enumerate(cells)
    )
