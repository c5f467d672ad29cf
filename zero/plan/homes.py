"""The homes of a bucket's states, as a layout has them: whether it is stepped on the host, and which kinds of states are away.

A bucket is stepped where its masters are: on the device, or, if it is *offloaded*, on the host beside it. A kind of its states
that is kept elsewhere is *away*, and comes for the step, a bucket at a time: from a disk, or from the host if the device steps.
Weights on a disk are memory that is mapped to a file, and are stepped there.

All parameters of a chunk ask for the same homes. If they ask for a ratio, its first buckets go there, until they have that
ratio of the elements or more: backward fills these first, so their copies have the most time.

    half = Away("moments", "disk:/scratch", 0.5)
    list(assign_homes([Asked(100, 0.0, (half,))] * 3))
    # [(False, (("moments", "disk:/scratch"),)), (False, (("moments", "disk:/scratch"),)), (False, ())]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("gradients", "masters", "moments")  # the kinds of states that may be away, and come for the step


class Away(NamedTuple):
    """A kind of state of a parameter that is kept apart from where it is stepped."""

    kind: str
    place: str  # "host", or "disk:" and a directory
    ratio: float = 1.0  # the ratio of it that is kept there


class Asked(NamedTuple):
    """The wishes for a bucket, which are those of each of its parameters."""

    numel: int
    offload: float  # the ratio of sharded states that is stepped on the host beside a device
    away: tuple[Away, ...]  # the kinds of states that are kept apart from where they are stepped


def assign_homes(buckets: Sequence[Asked]) -> Iterator[tuple[bool, tuple[tuple[str, str], ...]]]:
    """Yields, for each bucket, whether it is offloaded, and the kinds of its states that are away, with their places.

    Args:
        buckets: The wishes for each, in the order in which backward fills them.
    """
    total, so_far = Counter[tuple[tuple[str, str], float]](), Counter[tuple[tuple[str, str], float]]()
    for bucket in buckets:
        for each in _wishes(bucket):
            total[each] += bucket.numel
    for bucket in buckets:
        [offloaded, *away] = [so_far[each] < each[1] * total[each] for each in _wishes(bucket)]
        for each in _wishes(bucket):
            so_far[each] += bucket.numel
        # Weights live where they are stepped, so those of a bucket that may be offloaded and is not stay on the device.
        stays = ("weights",) if bucket.offload and not offloaded else ()
        going = (each for each, is_away in zip(bucket.away, away, strict=True) if is_away and each.kind not in stays)
        yield offloaded, tuple((each.kind, each.place) for each in going)


def _wishes(bucket: Asked) -> list[tuple[tuple[str, str], float]]:
    """Returns each kind and its place, with the ratio of it that is to be there. The first is that of what is offloaded."""
    return [(("", "offloaded"), bucket.offload), *(((each.kind, each.place), each.ratio) for each in bucket.away)]
