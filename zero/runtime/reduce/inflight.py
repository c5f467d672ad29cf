"""Rounds of buckets that are going on between ranks, until their sums are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from accelerators.streams import Event
from zero.comm.group import Group, Pending
from zero.comm.results import CompletedResult, UnreducedResult, wait_into
from zero.memory.addresses import share_memory
from zero.memory.deferred_sum import DeferredSum, Sums
from zero.memory.formats import sum_dtype
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.home import Transfer
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.scaling import Scaling
from zero.runtime.kernels.sums import SumsByTorch
from zero.runtime.profiling import Timed, stop
from zero.runtime.reduce.across import SumsAcross
from zero.runtime.reduce.narrowing import AsItIs, Narrowing, in_shares
from zero.runtime.reduce.patience import Patience

_MOST_OF_A_SUM = 1.25  # that deferring it may take in bytes: buffers have the size of the largest bucket
_ALWAYS_SENT = 2  # rounds on their way: one that others work at, and one that is there when they are done with it
_AHEAD = 2  # buckets that the host may have filled on a device before that has come to filling them


class _InFlight(NamedTuple):
    """A round that is going on."""

    bucket: int
    buffer: torch.Tensor
    pending: Pending
    is_last: bool  # of those that are declared for its bucket
    filled: Event | None  # on this rank's device
    release: Callable[[], None] | None  # of where it waited


class _Waiting(NamedTuple):
    """A round that waits on the host to be sent."""

    bucket: int
    mirror: torch.Tensor
    transfer: Transfer  # to there
    sum_dtype: torch.dtype
    is_last: bool


class InflightReductions(Timed):
    """Rounds on their way, first in, first out, and the shard that they end in.

    `narrowing` says what buckets are made before they are sent. With `checks_finite` each is searched for what is not finite:
    in the sum it is not known any more which rank that came from.

    [Note: ahead of the device]
    Where a device works by itself, the host has soon sent a whole backward that the device has hardly begun, and every bucket
    would be one on its way. So the host waits until the device has filled the bucket before the last. That is a wait for its
    own device: the stream that fills waits for no round that is on its way, so ranks that branch apart cannot lock each other.
    It may be behind what was agreed on before, the weights of the last step or sums that settled, which the others send
    without anything more from this rank.

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
        narrowing: Narrowing | None = None,
        checks_finite: bool = False,
        sums: Sums | None = None,
    ) -> None:
        self._num_bytes = 0  # sent so far, by this rank
        self._layout_ref = layout_ref
        self._scaling = scaling  # says what a sum is multiplied with when it is kept
        self._staging = staging
        self.shard = shard
        self.checks_finite = checks_finite
        self._greatest: torch.Tensor | None = None  # magnitude that was sent in this window, NaN included
        self._narrowing = narrowing or AsItIs(layout_ref, group)
        self.sums = sums or SumsByTorch()
        self._ranks = group.inner.rank, group.inner.size
        self._device_waits = group.needs is not None  # for other ranks
        are_replicas = group.outer is not None and in_shares(layout_ref, group)
        self._across = SumsAcross(group.outer, shard, self.sums.add) if group.outer is not None and are_replicas else None
        self._in_flight: deque[_InFlight] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._patience = Patience()

    @property
    def num_bytes(self) -> int:
        """Sent so far, by this rank."""
        return self._num_bytes + (0 if self._across is None else self._across.num_bytes)

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._waiting)

    @stop("reduce")
    def send(self, bucket: int, buffer: torch.Tensor, keep: bool = True, is_last: bool = False) -> None:
        """Sends a round, or keeps it on the host until those before it have landed. `is_last`: no other is declared."""
        self._look_at(buffer)
        narrow = self._narrowing.narrow(bucket, buffer, self._staging)
        if narrow.is_floating_point() and narrow is not buffer:  # to which some were too large
            self._look_at(narrow)
        buffer, dtype = narrow, sum_dtype(narrow.dtype)
        self._num_bytes += buffer.nbytes
        on_host = self.shard.homes.host is self.shard.homes.device
        if on_host or self._has_room(buffer.nbytes):
            self._send(bucket, buffer, dtype, is_last)
        else:
            self._put_aside(bucket, buffer, dtype, is_last)
        if on_host and not self._has_room(0):
            self._patience.wait(self._in_flight[0].pending.done)
        while self._in_flight and self._in_flight[0].pending.done():
            self._retire(keep)
        if self._across is not None:
            self._across.retire_done(keep)

    def _look_at(self, buffer: torch.Tensor) -> None:
        if self.checks_finite:
            greatest = torch.linalg.vector_norm(buffer, torch.inf)
            self._greatest = greatest if self._greatest is None else torch.maximum(self._greatest, greatest)

    def _send(
        self, bucket: int, buffer: torch.Tensor, dtype: torch.dtype, is_last: bool, release: Callable[[], None] | None = None
    ) -> None:
        pending = self._narrowing.reduce(bucket, buffer, dtype)
        filled = None if pending.done() else self._staging.mark(buffer)
        self._in_flight.append(_InFlight(bucket, buffer, pending, is_last, filled, release))
        self._await_device()

    def _has_room(self, num_bytes: int) -> bool:
        """See [Note: ahead of other ranks]."""
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
            buffer = self._staging.borrow(mirror.numel(), mirror.dtype)
            arrival = self.shard.homes.host.read(mirror, buffer)
            arrival.wait()
            self._send(bucket, buffer, dtype, is_last, partial(self._release_mirror, mirror, arrival))

    def send_all_waiting(self) -> None:
        """Leaves nothing on the host that other ranks wait for. The device waits for earlier rounds, and not the host."""
        while self._waiting:
            self._retire(keep=True)

    def _mirror(self, buffer: torch.Tensor) -> torch.Tensor:
        """Where a round waits. A driver that makes pinned memory would wait for a device that waits for ranks."""
        return torch.empty_like(buffer, device="cpu") if self._device_waits else self.shard.homes.host.mirror(buffer)

    def _release_mirror(self, mirror: torch.Tensor, transfer: Transfer) -> None:
        transfer.finish()
        if not self._device_waits:
            self.shard.homes.host.give_back(mirror)

    def _await_device(self) -> None:
        """See [Note: ahead of the device]."""
        filled = self._in_flight[-1 - _AHEAD].filled if len(self._in_flight) > _AHEAD else None
        if filled is not None:
            filled.synchronize()

    @property
    def is_finite(self) -> bool:
        """Whether everything that this rank sent in this window was finite."""
        return self._greatest is None or bool(self._greatest.isfinite())

    def begin_window(self, is_used: bool) -> None:
        """`is_used`: whether a step has used what was sent before."""
        self._greatest = None
        if not is_used:
            self.forget_errors()

    def forget_errors(self) -> None:
        """What rounding took away from what was sent is not added to what will be, as that was thrown away."""
        self._narrowing.forget_errors()

    def retire(self, keep: bool, most: int = 0) -> None:
        """Waits for other ranks, until no more than so many rounds are on their way."""
        while len(self) > most:
            self._retire(keep)
        self._retire_across(most, keep)

    @stop("reduce")
    def _retire_across(self, most: int, keep: bool) -> None:
        if self._across is not None:
            self._across.retire(most, keep)

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
        self.forget_errors()
        if self._across is not None:
            self._across.abandon()

    def _retire(self, keep: bool) -> None:
        self._patience.one_came()
        in_flight = self._in_flight.popleft()
        if self._across is None:
            self._keep(in_flight.bucket, in_flight.buffer, in_flight.pending, keep)
        else:
            self._pass_on(in_flight, self._across, keep)
        if in_flight.release is not None:
            in_flight.release()
        self._send_waiting()

    def _pass_on(self, in_flight: _InFlight, across: SumsAcross, keep: bool) -> None:
        """Sends the sum of the inner group across, or keeps it for later; see [Note: across once]."""
        bucket, buffer, pending, is_last, *_ = in_flight
        inner, goes_on = self._wait(pending), is_last and buffer.is_cpu
        if goes_on and (bucket not in self.shard.partial or not keep):
            across.begin(bucket, inner, self._scaling.accumulate_factor, keep)
            self._staging.give_back(buffer)
            return
        if keep:
            self.shard.begin_partial(bucket)
        self._keep(bucket, buffer, CompletedResult(inner), keep)
        if goes_on:
            across.begin_partial(bucket)

    @stop("keep")
    def _keep(self, bucket: int, buffer: torch.Tensor, pending: Pending, keep: bool) -> None:
        if keep and isinstance(pending, UnreducedResult) and self._defers(bucket, buffer, pending):
            return
        if keep and self.shard.home_of(bucket).device == buffer.device:
            target, fresh = self.shard.target(bucket)
            self._wait_into(pending, target, adds=not fresh)
            self._staging.give_back(buffer)
            return
        total = self._wait(pending)
        transfer = self.shard.add(bucket, total, self._scaling.accumulate_factor) if keep else None
        self._staging.give_back(buffer, transfer if total is buffer else None)  # which the copy may still read

    def _defers(self, bucket: int, buffer: torch.Tensor, pending: UnreducedResult) -> bool:
        """Leaves what came as it is, if it can be; see [Note: deferred sums]."""
        dtype, (_, num_ranks) = buffer.dtype, self._ranks
        if not self.shard.can_defer(bucket) or not buffer.is_cpu:
            return False
        if dtype != self._layout_ref.dtype_of(bucket):
            return self._defers_in_place(bucket, buffer, pending)
        if not self.sums.can_defer(dtype, num_ranks, pending.sum_dtype):
            return False
        rows = self._rows_of(pending)
        is_lent = any(share_memory(row, buffer) for row in rows)
        num_bytes = buffer.untyped_storage().nbytes() if is_lent else sum(row.nbytes for row in rows)
        if num_bytes > _MOST_OF_A_SUM * rows[0].numel() * pending.sum_dtype.itemsize:
            return False
        if not is_lent:
            self._staging.give_back(buffer)
        release = partial(self._release, pending, buffer if is_lent else None)
        self.shard.defer(bucket, DeferredSum(rows, (self._scaling.accumulate_factor,), self.sums, num_bytes, is_lent, release))
        return True

    def _defers_in_place(self, bucket: int, buffer: torch.Tensor, pending: UnreducedResult) -> bool:
        """Puts the sum where this rank's own part of it was, which nobody else reads, if the step takes it from there: buffers
        in the dtype of sums are all there at one time, and shares that were made of them would come on top."""
        rank, num_ranks = self._ranks
        is_whole = self._layout_ref.layout.num_shares < num_ranks  # so that others read all of it
        if is_whole or not self.sums.can_defer(buffer.dtype, 1, pending.sum_dtype):
            return False
        rows, target = self._rows_of(pending), buffer.view(num_ranks, -1)[rank]
        if len(rows) > 1:
            self._add_up(rows, target)
        pending.release()
        release = partial(self._staging.give_back, buffer)
        factors, num_bytes = (self._scaling.accumulate_factor,), buffer.untyped_storage().nbytes()
        self.shard.defer(bucket, DeferredSum([target], factors, self.sums, num_bytes, True, release))
        return True

    def _release(self, pending: UnreducedResult, buffer: torch.Tensor | None) -> None:
        pending.release()
        if buffer is not None:
            self._staging.give_back(buffer)

    @stop("reduce")
    def _rows_of(self, pending: UnreducedResult) -> Sequence[torch.Tensor]:
        return pending.addends()

    @stop("reduce")
    def _add_up(self, rows: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        self.sums.add(rows, target, 1.0, False)

    @stop("reduce")
    def _wait(self, pending: Pending) -> torch.Tensor:
        """Waits for a round. Waiting, and adding up what came, count as reduce."""
        return pending.wait()

    @stop("reduce")
    def _wait_into(self, pending: Pending, target: torch.Tensor, adds: bool) -> None:
        """Waits for a round and writes or adds it where it is kept."""
        wait_into(pending, target, self._scaling.accumulate_factor, adds, self.sums.add)
