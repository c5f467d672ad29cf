"""What a stage costs one rank, by kind of state: a budget, with the gradients that wait whole while a window accumulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero.plan.budget import Budget, Shares, budget_of
from zero.plan.layout import ITEM_BYTES, FlatLayout
from zero.plan.stages import stage_of


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank, on the device of the weights and on a host beside it."""

    device: Shares  # the gradients at their most
    buckets: int  # that are kept from window to window
    host: Shares
    peak: int = 0  # on the device; of model states alone
    host_peak: int = 0

    @property
    def total(self) -> int:
        return self.device.total + self.buckets


def cost_of(
    layout: FlatLayout,
    stage: int,
    num_ranks: int,
    rank: int = 0,
    num_moments: float | Sequence[float] = 2,
    accumulation: int = 1,
    one_host: bool = False,
    fused_step: bool = False,
    on_host: bool = False,
    gathered_bytes: float = 0,
) -> Cost:
    """The cost of windows of so many backwards, to one rank of so many, with an optimizer that steps block by block.

    Before the last backward of a window, stages that accumulate locally have every gradient whole. `one_host`: all ranks train
    in the memory of one; `fused_step`: they step in one pass over it. `on_host`: each trains in that of one.
    `gathered_bytes`: of whole weights, where they are in shares.
    """
    row = stage_of(stage)
    waits = accumulation > 1 and row.accumulates_locally
    sent = 1 if row.accumulates_locally else accumulation
    on_host |= one_host
    options = {"waits": waits, "one_host": one_host, "fused_step": fused_step, "on_host": on_host}
    budget = budget_of(layout, rank, num_moments, sent, num_ranks=num_ranks, shards_weights=row.shards_weights,
                       gathered_bytes=gathered_bytes, **options)  # fmt: skip
    if one_host:
        if fused_step and accumulation == 1:
            budget = _without_sums(budget, layout, num_ranks)
        if not row.shards_weights:
            budget = replace(budget, staging=budget.staging + _published_bytes(layout))
    device = replace(budget.device, gradients=max(budget.waiting, budget.device.gradients))
    return Cost(device, budget.staging, budget.host, budget.peak, budget.host_peak)


def _published_bytes(layout: FlatLayout) -> int:
    """Of shared memory from which other ranks read this rank's new weights: one share is written while another is read."""
    if layout.num_shares == 1:
        return 0
    items = [ITEM_BYTES[layout.chunks[bucket.chunk].dtype] for bucket in layout.buckets]
    largest = max((item * bucket.share_numel for item, bucket in zip(items, layout.buckets, strict=True)), default=0)
    return largest * min(2, len(layout.buckets))


def _without_sums(budget: Budget, layout: FlatLayout, num_ranks: int) -> Budget:
    """Where what was sent takes no more than its sum, a step that adds it up itself needs no other memory for gradients."""
    for chunk in layout.chunks:
        if num_ranks * ITEM_BYTES[chunk.dtype] > max(ITEM_BYTES[chunk.dtype], ITEM_BYTES["float32"]):
            return budget
    sent = sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks)
    latest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in layout.params), default=0)  # not copied to its bucket yet
    device = replace(budget.device, gradients=sent)
    return replace(budget, device=device, staging=0, filling=sent + latest, stepping=sent)
