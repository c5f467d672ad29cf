"""Which buckets have their states elsewhere than on the device: of each kind of state as much as asked for.

A bucket is stepped where its masters are: on the device, or *offloaded* on the host beside it. What of its states is kept in
another place is *away*, and comes for the step, a bucket at a time: on a disk, or on the host where the device steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from zero.plan.layout import Bucket, ParamSpec

KINDS = ("gradients", "masters", "moments")


class Away(NamedTuple):
    """A kind of state of a parameter that is kept apart from where it is stepped."""

    kind: str
    place: str  # "host", or "disk:" and a directory
    ratio: float = 1.0  # how much of it


def with_homes(buckets: Sequence[Bucket], params: Sequence[ParamSpec]) -> Iterator[Bucket]:
    """Those that backward fills first go away, as their copies have the most time."""
    total: Counter[tuple[object, float]] = Counter()
    for bucket in buckets:
        for key, ratio in _asked(bucket, params):
            total[key, ratio] += bucket.span.numel
    so_far: Counter[tuple[object, float]] = Counter()
    for bucket in buckets:
        has = {key for key, ratio in _asked(bucket, params) if so_far[key, ratio] < ratio * total[key, ratio]}
        for each in _asked(bucket, params):
            so_far[each] += bucket.span.numel
        away = tuple((each.kind, each.place) for each in params[bucket.params[0]].away if (each.kind, each.place) in has)
        yield replace(bucket, offloaded="offloaded" in has, away=away)


def _asked(bucket: Bucket, params: Sequence[ParamSpec]) -> list[tuple[object, float]]:
    spec = params[bucket.params[0]]
    return [("offloaded", spec.offload), *(((each.kind, each.place), each.ratio) for each in spec.away)]
