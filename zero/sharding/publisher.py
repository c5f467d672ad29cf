"""The publisher of stop 7: it makes every rank's new share part of the weights of all ranks.

Small neighbours are sent as one, by way of a buffer. Which these are follows from the buckets of an update alone, and not from
the batches that a rank steps, which depend on its threads: so it is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence

import torch

from zero.comm.group import Group, Pending
from zero.comm.levels import of_family
from zero.errors import GroupLost
from zero.memory.masters import Masters
from zero.memory.shard import LayoutRef
from zero.memory.weights import Weights
from zero.plan.layout import Block, set_bits
from zero.profiling import Timed, first_of, stop
from zero.runtime.params.table import Params

_MOST_IN_FLIGHT = 2**23  # bytes of this rank's shares in flight, if shared memory has copies of them


class WeightPublisher(Timed):
    """Nothing else sends weights, and every bucket that is to be sent is sent, even if another one cannot be taken in."""

    def __init__(
        self,
        layout_ref: LayoutRef,
        params: Params,
        group: Group,
        weights: Weights,
        masters: Masters,
    ) -> None:
        self._layout_ref = layout_ref
        self._params = params
        self._groups = [of_family(group, family).inner for family in range(len(layout_ref.layout.families))]
        self._weights = weights
        self._masters = masters
        self._has_copies = group.inner.shared_host_memory is not None  # buckets in flight are copies, in shared memory
        self.num_bytes = 0  # the bytes that this rank has sent so far
        self._in_flight: deque[tuple[Pending, int]] = deque()  # each with the bytes of this rank's share
        self._takes_in = True  # False once a bucket could not be taken in
        self._to_send: deque[list[int]] = deque()  # lists of buckets that are sent as one each, in this order
        self._complete: set[int] = set()  # the buckets in `_to_send` whose last block came
        self._arriving: list[Pending] | None = None  # the sends of the last update; None if the host waits
        if group.needs is not None:
            self._arriving = []
            group.needs.on_loss(self.note_loss)

    def begin(self, batches: Sequence[Sequence[Block]]) -> None:
        """Begins writing weights, of which these batches will come; `follow_edits` comes next. A collective if weights are in
        shares."""
        self._forget()
        buckets = [block.bucket for batch in batches for block in batch if block.is_last]
        sent = [bucket for bucket in buckets if self._weights.to_publish(bucket) is not None]
        self._to_send.extend(self._layout_ref.layout.published_as_one(sent))
        if self._arriving is not None:
            self._arriving.clear()  # all ranks have issued the sends of the last update by now
        self._weights.begin_step()

    def take_edits(self) -> None:
        """Takes over what the user edited, before a load. All ranks do it, and have met since they read weights."""
        self._forget()
        self._weights.take_edits()
        self.follow_edits()

    def follow_edits(self) -> None:
        """Points masters that are the weights themselves at the present weights."""
        for bucket in self._weights.renewed():
            self._masters.renew(bucket)

    def end(self) -> None:
        """Makes the values that were written the new weights."""
        self._weights.end_step()

    def prefetch(self, batch: Sequence[Block]) -> None:
        """Begins to copy weights that `adopt` will compare, and that are in other memory than their masters."""
        homes = self._masters.shard.homes
        for block in () if homes.host is homes.device else batch:
            # If all blocks stay on the device, their edits were adopted when the step was decided, and nobody would take a
            # copy.
            if not self._masters.stays_on_device(block.bucket):
                self._masters.fetch(block.bucket)

    @stop("publish", lambda _, batch: first_of([f"bucket {block.bucket}" for block in batch]))
    def send(self, batch: Sequence[Block]) -> None:
        """Sends the buckets that are complete with these blocks, and takes in those that have come (stop 7). If one cannot be
        taken in, all are still sent, as other ranks wait for them, and no other one is taken in."""
        self._complete.update(block.bucket for block in batch if block.is_last)
        while self._to_send and self._complete.issuperset(self._to_send[0]):
            try:
                self._make_room(self._to_send[0])
            except BaseException:
                self._takes_in = False
                with contextlib.suppress(GroupLost):
                    while self._to_send and self._complete.issuperset(self._to_send[0]):
                        self._send(self._to_send.popleft())
                raise
            self._send(self._to_send.popleft())

    def _send(self, buckets: Sequence[int]) -> None:
        num_bytes = self._num_share_bytes(buckets)
        group = self._groups[self._layout_ref.layout.buckets[buckets[0]].family]
        first, *others = [new for new in map(self._weights.to_publish, buckets) if new is not None]
        pending = _GatheredTogether(group, [first, *others]) if others else group.all_gather(first)
        self._in_flight.append((pending, num_bytes))
        self.num_bytes += num_bytes
        if self._arriving is not None:
            self._arriving.append(pending)

    def note_loss(self, any_failed: bool) -> None:
        """Marks weights as torn if sends of the last update have not arrived when the group is lost: they never will."""
        if self._arriving and (any_failed or not all(pending.done() for pending in self._arriving)):
            self._masters.wholeness.tear("the last update, of which a rank was lost,")

    def _make_room(self, buckets: Sequence[int]) -> None:
        """Takes in buckets that have come, and waits until these may be on their way."""
        most = _MOST_IN_FLIGHT if self._has_copies else math.inf
        while self._takes_in and self._in_flight:
            num_bytes = self._num_share_bytes(buckets) + sum(num_bytes for _, num_bytes in self._in_flight)
            if num_bytes <= most and not self._in_flight[0][0].done():
                return
            self._finish_first()

    def _num_share_bytes(self, buckets: Sequence[int]) -> int:
        of_layout, dtype_of = self._layout_ref.layout.buckets, self._layout_ref.dtype_of
        return sum(of_layout[bucket].share_numel * dtype_of(bucket).itemsize for bucket in buckets)

    def _finish_first(self) -> None:
        pending, _ = self._in_flight.popleft()
        pending.wait()

    def abandon(self) -> None:
        """Forgets buckets that were being sent over connections that are lost."""
        self._forget()

    def _forget(self) -> None:
        """Forgets what an operation that broke off had on its way, which would overwrite what comes next."""
        self._in_flight.clear()
        self._to_send.clear()
        self._complete.clear()
        self._takes_in = True

    @stop("publish")
    def wait(self, params: int) -> None:
        """Waits until every weight is the new one: on a device, for whatever is issued next."""
        try:
            while self._takes_in and self._in_flight:
                self._finish_first()
        finally:
            self._forget()
        # Writing the flat buffer does not raise the parameters' version counters. Without this, a backward through a graph from
        # before the step would take new weights for old ones, and give wrong gradients where plain torch raises. Parameters
        # beside these keep their values, and their graphs stay valid. Fails without it:
        # test_backward_through_a_graph_from_before_the_step_raises_as_in_plain_torch in tests/promises/test_sharded_grad.py.
        torch.autograd.graph.increment_version([self._params.leaves[param] for param in set_bits(params)])


class _GatheredTogether:
    """Buckets of one dtype that are filled by one collective."""

    def __init__(self, group: Group, buckets: Sequence[torch.Tensor]) -> None:
        self._rank = group.rank
        self._shares = [bucket.view(group.size, -1) for bucket in buckets]
        self._numels = [shares.shape[1] for shares in self._shares]
        buffer = buckets[0].new_empty(group.size, sum(self._numels))
        torch.cat([shares[self._rank] for shares in self._shares], out=buffer[self._rank])
        self._pending = group.all_gather(buffer.view(-1))

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> torch.Tensor:
        buffer = self._pending.wait()
        rows = buffer.view(-1, sum(self._numels))
        for rank, row in enumerate(rows):
            if rank != self._rank:
                torch._foreach_copy_([shares[rank] for shares in self._shares], torch.split(row, self._numels))
        return buffer
