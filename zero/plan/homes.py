"""Which buckets have their states elsewhere than on the device: of each kind of state as much as is configured.

A bucket is stepped where its masters are: on the device, or *offloaded*, on the host beside it. A kind of its states that is
kept in another place is *away*, and comes for the step, a bucket at a time: on a disk, or on the host where the device steps.
Weights on a disk are memory that is a file, and are stepped there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("gradients", "masters", "moments")  # of states that come for the step


class Away(NamedTuple):
    """A kind of state of a parameter that is kept apart from where it is stepped."""

    kind: str
    place: str  # "host", or "disk:" and a directory
    ratio: float = 1.0  # how much of it


class Asked(NamedTuple):
    """What is configured for a bucket: its elements, how much of its kind is offloaded, and what is away."""

    numel: int
    offload: float
    away: tuple[Away, ...]

    @property
    def shares(self) -> list[tuple[tuple[str, str], float]]:
        return [(("", "offloaded"), self.offload), *(((each.kind, each.place), each.ratio) for each in self.away)]


def homes_of(buckets: Sequence[Asked]) -> Iterator[tuple[bool, tuple[tuple[str, str], ...]]]:
    """Returns for each bucket whether it is offloaded, and which kinds are away, with their places. Those that backward fills
    first go away, as their copies have the most time."""
    total, so_far = Counter[tuple[tuple[str, str], float]](), Counter[tuple[tuple[str, str], float]]()
    for bucket in buckets:
        for each in bucket.shares:
            total[each] += bucket.numel
    for bucket in buckets:
        [offloaded, *away] = [so_far[each] < each[1] * total[each] for each in bucket.shares]
        for each in bucket.shares:
            so_far[each] += bucket.numel
        stays = ("weights",) if bucket.offload and not offloaded else ()  # what is stepped on the device is there
        going = (each for each, is_away in zip(bucket.away, away, strict=True) if is_away and each.kind not in stays)
        yield offloaded, tuple((each.kind, each.place) for each in going)
