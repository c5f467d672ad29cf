"""Keeps the sum of a round that has come: stop 4 of docs/internals.md.

`keep` waits for the sum and does one of these with it:
    rows left     on the host, where the step can add up what ranks sent itself: their rows are left to it as they came, and
                  the buffer with them; see [Note: deferred sums] in zero/memory/deferred_sum.py
    sum left      the same, where rows are wider than weights: they are added up in the buffer, and the sum is left to the step
    added         to this rank's share of the gradient, in memory of its own; the buffer is given back

The rows of a round are what each rank sent, before they are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from zero.comm.group import Group, Pending
from zero.comm.results import UnreducedResult, wait_into
from zero.memory.addresses import share_memory
from zero.memory.deferred_sum import DeferredSum, Sums
from zero.memory.formats import DTYPES, sum_dtype
from zero.memory.gradient_shard import GradientShard
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.scaling import Scaling
from zero.profiling import Timed, stop

# The bytes that leaving rows may take, over those of adding them up at once: buffers have the size of the largest bucket.
_MOST_OF_A_SUM = 1.25


def _nothing() -> None:
    """Does nothing: nobody lent the memory of these rows, so nobody takes it back."""


class SumKeeper(Timed):
    """A sum is in this rank's share, or left to the step, when `keep` returns."""

    def __init__(
        self,
        layout_ref: LayoutRef,
        staging: Staging,
        shard: GradientShard,
        scaling: Scaling,
        sums: Sums,
        groups: Sequence[Group],
    ) -> None:
        self._layout_ref = layout_ref
        self._staging = staging
        self.shard = shard
        self.scaling = scaling  # says by what a sum is multiplied when it is kept
        self.sums = sums
        self._groups = groups  # the ranks that add up the buckets of each family

    @stop("keep", lambda _, bucket, *__, **___: f"bucket {bucket}")
    def keep(self, bucket: int, buffer: torch.Tensor, pending: Pending, counts: bool = True) -> None:
        """Waits for the sum of a round and keeps it. `buffer` was sent; `counts`: False if the window was thrown away."""
        if counts and isinstance(pending, UnreducedResult) and self._try_to_leave_rows(bucket, buffer, pending):
            return
        if counts and self.shard.home_of(bucket).device == buffer.device:
            target, fresh = self.shard.target(bucket)
            self._wait_into(pending, target, adds=not fresh)
            self._staging.give_back(buffer)
            return
        total = self.wait(pending)
        transfer = self.shard.add(bucket, total, self.scaling.accumulate_factor) if counts else None
        # The copy to the host may still be reading the buffer if it holds the total.
        self._staging.give_back(buffer, transfer if total is buffer else None)

    @stop("reduce")
    def wait(self, pending: Pending) -> torch.Tensor:
        """Waits for a round. The wait, and the addition of the rows that came, count as reduce."""
        return pending.wait()

    @stop("reduce")
    def _wait_into(self, pending: Pending, target: torch.Tensor, adds: bool) -> None:
        wait_into(pending, target, self.scaling.accumulate_factor, adds, self.sums.add)

    # what is left to the step ------------------------------------------------------------------------------------

    def may_leave_row(self, buckets: Iterable[int]) -> list[int]:
        """Returns those of some buckets of which the step takes a row of this rank alone."""
        if self.shard.device.type != "cpu":
            return []
        dtypes = {dtype for dtype in DTYPES.values() if self.sums.can_defer(dtype, 1, sum_dtype(dtype))}
        return [each for each in buckets if self._layout_ref.dtype_of(each) in dtypes and self.shard.can_defer(each)]

    def leave_row(self, bucket: int, row: torch.Tensor) -> None:
        """Leaves gradients of a bucket to the step, as the only row of their sum."""
        self._leave(bucket, [row], row.nbytes, _nothing, is_staged=False)

    def _leave(
        self, bucket: int, rows: Sequence[torch.Tensor], num_bytes: int, release: Callable[[], None], is_staged: bool
    ) -> None:
        factors = (self.scaling.accumulate_factor,)
        self.shard.defer(bucket, DeferredSum(rows, factors, self.sums, num_bytes, is_staged, release))

    def _try_to_leave_rows(self, bucket: int, buffer: torch.Tensor, pending: UnreducedResult) -> bool:
        """Leaves the rows that ranks sent to the step, or their sum, and returns True, if the step can take them."""
        dtype, num_ranks = buffer.dtype, self._group_of(bucket).size
        if not self.shard.can_defer(bucket) or not buffer.is_cpu:
            return False
        if dtype != self._layout_ref.dtype_of(bucket):
            return self._try_to_leave_sum(bucket, buffer, pending)
        if not self.sums.can_defer(dtype, num_ranks, pending.sum_dtype):
            return False
        rows = self._rows_of(pending)
        is_lent = any(share_memory(row, buffer) for row in rows)
        num_bytes = buffer.untyped_storage().nbytes() if is_lent else sum(row.nbytes for row in rows)
        if num_bytes > _MOST_OF_A_SUM * rows[0].numel() * pending.sum_dtype.itemsize:
            return False
        if not is_lent:
            self._staging.give_back(buffer)
        self._leave(bucket, rows, num_bytes, partial(self._release, pending, buffer if is_lent else None), is_lent)
        return True

    def _try_to_leave_sum(self, bucket: int, buffer: torch.Tensor, pending: UnreducedResult) -> bool:
        """Puts the sum where this rank's own part of it was, which nobody else reads, if the step takes it from there: buffers
        in the dtype of sums are all there at one time, and shares that were made of them would come on top."""
        rank, num_ranks = self._group_of(bucket).rank, self._group_of(bucket).size
        # Several ranks hold the same share, so all of them read the whole sum.
        is_whole = self._layout_ref.layout.buckets[bucket].num_shares < num_ranks
        if is_whole or not self.sums.can_defer(buffer.dtype, 1, pending.sum_dtype):
            return False
        rows, target = self._rows_of(pending), buffer.view(num_ranks, -1)[rank]
        if len(rows) > 1:
            self._add_up(rows, target)
        pending.release()
        self._leave(bucket, [target], buffer.untyped_storage().nbytes(), partial(self._staging.give_back, buffer), True)
        return True

    def _group_of(self, bucket: int) -> Group:
        return self._groups[self._layout_ref.layout.buckets[bucket].family]

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
