"""Sends rounds, and waits for them in the order of sending.

The path of a bucket from where `zero.window.rounds` closes it:
    `send`           narrows it, which rounds it to the dtype that travels, and has the group reduce it, by `_issue`; where too
                     much is on its way it waits on the host before
    `_land_oldest`   waits for the oldest round, and does one of the next two with its sum
    `keep`           of `SumKeeper` in keeping.py: adds it to this rank's share, or leaves it to the step
    `_pass_on`       sends it on to the ranks of other groups that have the same share, by `SumsAcross` in across.py
    `settle`         once nothing is on its way, makes sums those of all ranks

A mirror is host memory where a round waits to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zero.comm.group import Group, Pending
from zero.comm.levels import of_family
from zero.comm.results import CompletedResult
from zero.memory.deferred_sum import Sums
from zero.memory.formats import sum_dtype
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.home import Transfer
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.scaling import Scaling
from zero.profiling import Timed, stop
from zero.runtime.kernels.sums import SumsByTorch
from zero.window.across import SumsAcross
from zero.window.keeping import SumKeeper
from zero.window.narrowing import AsItIs, Narrowing
from zero.window.pace import DevicePace, Patience

_ALWAYS_SENT = 2  # the number of rounds that may always be on their way: other ranks work at one while the next has come


class _InFlight(NamedTuple):
    """A round that is going on."""

    bucket: int
    buffer: torch.Tensor
    pending: Pending
    is_last: bool  # no more rounds are declared for its bucket
    release: Callable[[], None] | None  # gives back what waited for this round


class _Waiting(NamedTuple):
    """A round that waits on the host to be sent."""

    bucket: int
    mirror: torch.Tensor
    transfer: Transfer  # the copy to `mirror`
    sum_dtype: torch.dtype
    is_last: bool


class InflightReductions(Timed):
    """Every round lands in the order of sending, and its sum is in the shard only once it has landed.

    `narrowings` say what buckets are made before they are sent, by family. With `checks_finite` each is searched for what is
    not finite: in the sum it is not known any more which rank that came from.

    [Note: ahead of other ranks]
    A rank that is ahead of others would have a whole backward on its way, as it never waits for them. Beside two rounds, only
    so much is as `Staging.room` has room for. On a device further rounds wait on the host, and are sent in their order as
    earlier ones land: a rank that is ahead has the time for two copies. On the host it waits for the others for a moment and no
    longer, as one of them may wait for this rank; see `Patience`.
    """

    def __init__(
        self,
        layout_ref: LayoutRef,
        group: Group,
        staging: Staging,
        shard: GradientShard,
        scaling: Scaling,
        narrowings: Sequence[Narrowing] = (),
        checks_finite: bool = False,
        sums: Sums | None = None,
    ) -> None:
        self._num_bytes = 0  # the bytes that this rank has sent so far
        self._layout_ref = layout_ref
        self._staging = staging
        self.shard = shard
        self.checks_finite = checks_finite
        self._greatest: torch.Tensor | None = None  # the greatest magnitude that was sent in this window; NaN if there was one
        self.is_alone = group.size == 1
        self._groups = groups_of(layout_ref, group)
        self._narrowings = narrowings or [AsItIs(each, in_shares) for each, in_shares in self._groups]
        self.sums = sums or SumsByTorch()
        inner = [each.inner for each, _ in self._groups]
        self.keeper = SumKeeper(layout_ref, staging, shard, scaling, self.sums, inner)
        self._device_waits = group.needs is not None  # the device itself waits for other ranks, and the host goes on
        outer = [each.outer if in_shares else None for each, in_shares in self._groups]
        self._across = SumsAcross(outer, shard, self.sums.add) if any(each is not None for each in outer) else None
        self._in_flight: deque[_InFlight] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._pace = DevicePace(staging)
        self._read: deque[Transfer] = deque()  # copies whose source waited on the host; the source is kept until they are done
        self._patience = Patience()

    @property
    def sends_to_nobody(self) -> bool:
        """True for a single rank whose sums stay on the device of its weights."""
        return self.is_alone and self._layout_ref.layout.stays_on_device

    def may_leave_row(self, buckets: Iterable[int]) -> set[int]:
        """Returns those of some buckets whose gradients may go to the step as they are, without a round: a rank that sends to
        nobody does nothing to them."""
        if not self.sends_to_nobody or self.checks_finite:
            return set()
        return {bucket for bucket in self.keeper.may_leave_row(buckets) if type(self._narrowing(bucket)) is AsItIs}

    def leave_row(self, bucket: int, row: torch.Tensor) -> None:
        """Leaves gradients of a bucket that `may_leave_row` to the step. Their memory is nobody else's."""
        self._num_bytes += row.nbytes  # counted as if the row had made a round
        self.keeper.leave_row(bucket, row)

    def has_landed(self, bucket: int) -> bool:
        """Returns whether everything that was sent of a bucket is in its sum. Waits for nothing."""
        shard = self.shard
        on_their_way = [each.bucket for each in self._in_flight] + [each.bucket for each in self._waiting]
        if bucket in on_their_way or bucket not in shard.shares:
            return False
        return shard.home_of(bucket).has_added(shard.shares[bucket])

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return self._num_bytes + (0 if self._across is None else self._across.num_bytes)

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._waiting)

    @stop("reduce", lambda _, bucket, *__, **___: f"bucket {bucket}")
    def send(self, bucket: int, buffer: torch.Tensor, counts: bool = True, is_last: bool = False) -> None:
        """Sends a round of gradients; those of a window that was thrown away do not count. `is_last`: no other is declared.

        1. to nobody: its sum is there at once, and is kept
        2. if there is room it goes; otherwise, on a device, it waits on the host
        3. what has come meanwhile is kept
        """
        buffer = self._narrowed(bucket, buffer)
        dtype = sum_dtype(buffer.dtype)
        if self.sends_to_nobody:  # 1
            self.keeper.keep(bucket, buffer, self._narrowing(bucket).reduce(bucket, buffer, dtype), counts)
            return
        on_host = self.shard.homes.host is self.shard.homes.device  # then there is no other memory to wait in
        if on_host or self._has_room(buffer.nbytes):  # 2
            self._issue(bucket, buffer, dtype, is_last)
        else:
            self._put_aside(bucket, buffer, dtype, is_last)
        if on_host and not self._has_room(0):
            self._patience.wait(self._in_flight[0].pending.done)
        while self._in_flight and self._in_flight[0].pending.done():  # 3
            self._land_oldest(counts)
        if self._across is not None:
            self._across.retire_done(counts)

    def _narrowed(self, bucket: int, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the form in which a bucket is sent. Counts its bytes, and looks for numbers that are not finite."""
        self._look_at(buffer)
        narrow = self._narrowing(bucket).narrow(bucket, buffer, self._staging)
        if narrow.is_floating_point() and narrow is not buffer:  # some values may have become infinite in the narrower dtype
            self._look_at(narrow)
        self._num_bytes += narrow.nbytes
        return narrow

    def _look_at(self, buffer: torch.Tensor) -> None:
        if self.checks_finite:
            greatest = torch.linalg.vector_norm(buffer, torch.inf)
            self._greatest = greatest if self._greatest is None else torch.maximum(self._greatest, greatest)

    def _issue(
        self, bucket: int, buffer: torch.Tensor, dtype: torch.dtype, is_last: bool, release: Callable[[], None] | None = None
    ) -> None:
        pending = self._narrowing(bucket).reduce(bucket, buffer, dtype)
        self._in_flight.append(_InFlight(bucket, buffer, pending, is_last, release))
        if self._staging.runs_behind and not pending.done():
            self._pace.wait(buffer)

    def _narrowing(self, bucket: int) -> Narrowing:
        return self._narrowings[self._layout_ref.layout.buckets[bucket].family]

    def _has_room(self, num_bytes: int) -> bool:
        """Returns True if a round of `num_bytes` may be sent beside those on their way; see [Note: ahead of other ranks]."""
        if len(self._in_flight) < _ALWAYS_SENT:
            return True
        sent = sum(in_flight.buffer.nbytes for in_flight in self._in_flight)
        return not self._waiting and sent + num_bytes <= self._staging.room()

    def _put_aside(self, bucket: int, buffer: torch.Tensor, dtype: torch.dtype, is_last: bool) -> None:
        mirror = self._mirror(buffer)
        transfer = self.shard.homes.host.write(buffer, mirror)
        self._waiting.append(_Waiting(bucket, mirror, transfer, dtype, is_last))
        self._staging.give_back(buffer, transfer)

    def _send_waiting(self) -> None:
        while self._waiting and len(self._in_flight) < _ALWAYS_SENT:
            bucket, mirror, transfer, dtype, is_last = self._waiting.popleft()
            transfer.wait()
            family = self._layout_ref.layout.buckets[bucket].family
            buffer = self._staging.borrow(mirror.numel(), mirror.dtype, family)
            arrival = self.shard.homes.host.read(mirror, buffer)
            arrival.wait()
            self._issue(bucket, buffer, dtype, is_last, partial(self._release_mirror, mirror, arrival))

    def send_all_waiting(self) -> None:
        """Leaves nothing on the host that other ranks wait for. The device waits for earlier rounds, and the host does not."""
        while self._waiting:
            self._land_oldest(counts=True)

    def _mirror(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns memory for a round to wait in. A driver that makes pinned memory would wait for a device that waits for
        ranks."""
        return torch.empty_like(buffer, device="cpu") if self._device_waits else self.shard.homes.host.mirror(buffer)

    def _release_mirror(self, mirror: torch.Tensor, transfer: Transfer) -> None:
        """Lets go of a mirror. If a device waits, the copy may be behind a round of ranks that need this host."""
        if self._device_waits:
            self._read.append(transfer)
            self._drop_read()
            return
        transfer.finish()
        self.shard.homes.host.give_back(mirror)

    def _drop_read(self) -> None:
        while self._read and self._read[0].done():
            self._read.popleft()

    @property
    def is_finite(self) -> bool:
        """True while everything that this rank sent in this window was finite."""
        return self._greatest is None or bool(self._greatest.isfinite())

    def begin_window(self, is_used: bool) -> None:
        """Forgets what was sent before; if no step has used it (`is_used`), also what rounding took from it."""
        self._greatest = None
        if not is_used:
            self.forget_errors()

    def end_window(self) -> None:
        """Ends a window, whose rounds have all landed, or are abandoned."""
        self._pace.end_window()
        self._drop_read()

    def forget_errors(self, found_inf: torch.Tensor | None = None) -> None:
        """Forgets the errors of rounding, as what was sent is thrown away; with `found_inf`, only if that is 1."""
        for narrowing in self._narrowings:
            narrowing.forget_errors(found_inf)

    def retire(self, counts: bool, most: int = 0) -> None:
        """Waits for rounds, until at most `most` are on their way."""
        while len(self) > most:
            self._land_oldest(counts)
        self._retire_across(most, counts)

    @stop("reduce")
    def _retire_across(self, most: int, counts: bool) -> None:
        if self._across is not None:
            self._across.retire(most, counts)

    @stop("reduce")
    def settle(self) -> None:
        """Makes sums of the inner group those of all ranks. Nothing is on its way inside. A collective."""
        self._patience.end_window()
        if self._across is not None:
            self._across.retire_all()

    def abandon(self) -> None:
        """Forgets the rounds that are going on and will not be waited for. They may still write to their buffers."""
        for in_flight in self._in_flight:
            self._staging.discard(in_flight.buffer)
            if in_flight.release is not None:
                in_flight.release()
        for waiting in self._waiting:
            self._release_mirror(waiting.mirror, waiting.transfer)
        self._in_flight.clear()
        self._waiting.clear()
        self.end_window()
        self.forget_errors()
        if self._across is not None:
            self._across.abandon()

    def _land_oldest(self, counts: bool) -> None:
        self._patience.one_came()
        in_flight = self._in_flight.popleft()
        if self._staging.runs_behind:
            self._pace.note_needed(in_flight.pending)
        if self._across is None or not self._across.crosses(in_flight.bucket):
            self.keeper.keep(in_flight.bucket, in_flight.buffer, in_flight.pending, counts)
        else:
            self._pass_on(in_flight, self._across, counts)
        if in_flight.release is not None:
            in_flight.release()
        self._send_waiting()

    def _pass_on(self, in_flight: _InFlight, across: SumsAcross, counts: bool) -> None:
        """Sends the sum of the inner group across, or keeps it for later; see [Note: across once] in zero/window/across.py."""
        bucket, buffer, pending, is_last, *_ = in_flight
        inner, goes_on = self.keeper.wait(pending), is_last and buffer.is_cpu
        if goes_on and (bucket not in self.shard.partial or not counts):
            across.begin(bucket, inner, self.keeper.scaling.accumulate_factor, counts)
            self._staging.give_back(buffer)
            return
        if counts:
            self.shard.begin_partial(bucket)
        self.keeper.keep(bucket, buffer, CompletedResult(inner), counts)
        if goes_on:
            across.begin_partial(bucket)


def groups_of(layout_ref: LayoutRef, group: Group) -> list[tuple[Group, bool]]:
    """Returns the ranks that add up the buckets of each family, and whether each of them wants its share of a sum alone."""
    groups = [of_family(group, family) for family in range(len(layout_ref.layout.families))]
    shares = (family.num_shares for family in layout_ref.layout.families)
    return [(each, number == each.inner.size) for each, number in zip(groups, shares, strict=True)]
