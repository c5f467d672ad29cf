"""Sends sums of gradients on to the ranks that have the same share, where states are in shares within a part of all ranks only.

[Note: across once] A share goes across when the last round that is declared for it has been reduced inside: on the host at
once, while backward goes on, as nothing there waits for another rank. What came otherwise waits in the share, added up, and
goes across when the window settles. On a device everything does: its collectives run in the order in which they were begun,
which must be the same on all ranks, and at the settling it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zero.comm.group import Group, Pending
from zero.comm.results import wait_into
from zero.memory.gradient_shard import GradientShard


class _Sum(NamedTuple):
    """A sum over replicas that is on its way."""

    bucket: int
    pending: Pending
    factor: float  # multiplies the sum when it is kept
    counts: bool


class SumsAcross:
    """Sums over replicas on their way, first in, first out, in an order that is the same on all ranks."""

    def __init__(self, outer: Sequence[Group | None], shard: GradientShard, add: Callable[..., None]) -> None:
        self.num_bytes = 0  # the bytes that this rank has sent so far
        self._outer = outer  # the groups of replicas by family; None for a family without replicas
        self._shard = shard
        self._add = add
        self._in_flight: deque[_Sum] = deque()

    def crosses(self, bucket: int) -> bool:
        """Returns whether other ranks have the same share of a bucket."""
        return self._outer_of(bucket) is not None

    def _outer_of(self, bucket: int) -> Group | None:
        return self._outer[self._shard.layout_ref.layout.buckets[bucket].family]

    def begin(self, bucket: int, inner: torch.Tensor, factor: float, counts: bool = True) -> None:
        """Sends a sum of the inner group, which may be written again when this returns."""
        outer = self._outer_of(bucket)
        assert outer is not None, "nothing crosses that has no replicas"
        pending = outer.all_reduce(inner, inner.dtype)
        self.num_bytes += inner.nbytes
        self._in_flight.append(_Sum(bucket, pending, factor, counts))

    def begin_partial(self, bucket: int) -> None:
        """Sends the partial sum of a share."""
        inner = self._shard.end_partial(bucket)
        self.begin(bucket, inner.to(self._shard.device), 1.0)
        self._shard.reuse(bucket, inner)

    def retire_all(self) -> None:
        """Sends all partial sums, and waits for everything that is on its way."""
        for bucket in sorted(self._shard.partial):
            self.retire(most=1)
            self.begin_partial(bucket)
        self.retire()

    def retire_done(self, counts: bool) -> None:
        while self._in_flight and self._in_flight[0].pending.done():
            self._retire(counts)

    def retire(self, most: int = 0, counts: bool = True) -> None:
        """Waits for sums over replicas, until at most `most` are on their way."""
        while len(self._in_flight) > most:
            self._retire(counts)

    def _retire(self, counts: bool) -> None:
        bucket, pending, factor, counted = self._in_flight.popleft()
        counts &= counted
        shard = self._shard
        if counts and bucket not in shard.partial and shard.home_of(bucket).device == shard.device:
            target, fresh = shard.target(bucket)
            wait_into(pending, target, factor, not fresh, self._add)
            return
        total = pending.wait()
        if counts:
            shard.add_across(bucket, total, factor)

    def abandon(self) -> None:
        """Forgets the sums that are on their way, without waiting for them."""
        self._in_flight.clear()
