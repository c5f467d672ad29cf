"""The part of a layout that is on disk, and what streams from there in a step, in bytes of one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zero.plan.layout import ITEM_BYTES, FlatLayout
from zero.plan.spans import round_up

_PAGE = 4096  # every line begins and ends at one
STREAMED = 3  # buckets in memory: one that is read, one that is stepped, and one that is written
_SUMS = 4  # of gradients in memory while they come: two that are used, and two on their way to disk
_READ_SUMS = 2  # in a step: one that is used, and one that comes


def disk_bytes(layout: FlatLayout, rank: int = 0, num_moments: float | Sequence[float] = 2) -> Counter[tuple[str, str]]:
    """By kind and place: what files of states take, with an optimizer of so many values an element, by group where they
    differ. Weights are in memory that is a file, and not among them."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    moments = lines_of_moments(layout, rank, num_moments)
    for index, bucket in enumerate(layout.buckets):
        for kind, place in bucket.away:
            if place != "host" and kind != "weights" and lives(layout, index, kind):
                num_bytes[kind, place] += line_bytes(layout, index) * (moments[index] if kind == "moments" else 1)
    return num_bytes


def weights_place(layout: FlatLayout, chunk: int) -> str | None:
    """The disk that the weights of a chunk live on; None where they are in memory. Those of a chunk are in one place."""
    places = {dict(layout.buckets[index].away).get("weights") for index in layout.buckets_in(chunk)}
    return places.pop() if len(places) == 1 and not layout.chunks[chunk].is_kept else None


def weights_bytes(layout: FlatLayout) -> int:
    """Of a rank's shares of weights on disks."""
    on_disk = (bucket for bucket in layout.buckets if weights_place(layout, bucket.chunk) is not None)
    return sum(bucket.share_numel * ITEM_BYTES[layout.chunks[bucket.chunk].dtype] for bucket in on_disk)


def lives(layout: FlatLayout, bucket: int, kind: str) -> bool:
    """Whether a kind of state is stored apart from the weights: masters as wide as the weights, in one memory, are the same."""
    entry = layout.buckets[bucket]
    item = ITEM_BYTES[layout.chunks[entry.chunk].dtype]
    return kind != "masters" or entry.offloaded or item < ITEM_BYTES["float32"]


def line_bytes(layout: FlatLayout, bucket: int) -> int:
    """Of a share, in the dtype of sums."""
    entry = layout.buckets[bucket]
    return round_up(entry.share_numel * max(ITEM_BYTES[layout.chunks[entry.chunk].dtype], ITEM_BYTES["float32"]), _PAGE)


def lines_of_moments(layout: FlatLayout, rank: int, num_moments: float | Sequence[float]) -> Counter[int]:
    """By bucket: as many lines as its parameter with the most values an element needs."""
    remembered = [num_moments] if isinstance(num_moments, (int, float)) else num_moments  # the last is that of all other groups
    lines: Counter[int] = Counter()
    for param, spec in enumerate(layout.params):
        number = remembered[min(spec.group, len(remembered) - 1)]
        for piece in layout.pieces(param, rank if layout.num_shares > 1 else 0):
            lines[piece.bucket] = max(lines[piece.bucket], math.ceil(number))
    return lines


class Streamed(NamedTuple):
    """Memory for what comes from elsewhere and leaves again."""

    filling: int = 0  # while gradients come: their sums
    stepping: int = 0  # while the optimizer steps: sums, masters and moments


def stream_bytes(layout: FlatLayout, rank: int, num_moments: float | Sequence[float]) -> dict[bool, Streamed]:
    """By whether it is on the host beside a device. Lines are of one size."""
    moments, most, buckets = lines_of_moments(layout, rank, num_moments), Counter[bool](), Counter[bool]()
    largest, sums = Counter[bool](), Counter[bool]()
    for index, bucket in enumerate(layout.buckets):
        if "gradients" in dict(bucket.away):
            sums[bucket.offloaded] = max(sums[bucket.offloaded], line_bytes(layout, index))
        kinds = [kind for kind, _ in bucket.away if kind in ("masters", "moments") and lives(layout, index, kind)]
        lines = sum(moments[index] if kind == "moments" else 1 for kind in kinds)
        if lines:
            buckets[bucket.offloaded] += 1
            most[bucket.offloaded] = max(most[bucket.offloaded], lines)
            largest[bucket.offloaded] = max(largest[bucket.offloaded], line_bytes(layout, index))
    coming = {where: min(STREAMED, buckets[where]) * most[where] * largest[where] for where in (False, True)}
    return {where: Streamed(_SUMS * sums[where], _READ_SUMS * sums[where] + coming[where]) for where in (False, True)}


def written_bytes(layout: FlatLayout, rank: int = 0, num_moments: float | Sequence[float] = 2, rounds: int = 1) -> int:
    """To disks in a step of so many rounds of gradients."""
    files = disk_bytes(layout, rank, num_moments)
    states = sum(number * (rounds if kind == "gradients" else 1) for (kind, _), number in files.items())
    return states + weights_bytes(layout)
