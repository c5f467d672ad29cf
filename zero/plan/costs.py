"""What a stage costs one rank, kind by kind: a budget, with the gradients that wait whole while a window accumulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero.plan.budget import Budget, Shares, budget_of
from zero.plan.layout import ITEM_BYTES, FlatLayout
from zero.plan.stages import stage_of


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank: on the device of the weights, and on a host beside it."""

    weights: int
    device: Shares  # beside the weights; the gradients at their most
    buckets: int  # that are kept from window to window
    host: Shares
    peak: int = 0  # on the device; of model states alone
    host_peak: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.device.total + self.buckets


def cost_of(
    layout: FlatLayout,
    stage: int,
    num_ranks: int,
    rank: int = 0,
    num_moments: int | Sequence[int] = 2,
    accumulation: int = 1,
    one_host: bool = False,
    one_pass: bool = False,
) -> Cost:
    """The cost of windows of so many backwards, to one rank of so many, with an optimizer that steps block by block.

    Before the last backward of a window, stages that accumulate locally have every gradient whole. `one_host`: all ranks train
    in the memory of one; `one_pass`: they step in one pass over it.
    """
    waits = accumulation > 1 and stage_of(stage).accumulates_locally
    sent = 1 if stage_of(stage).accumulates_locally else accumulation
    budget = budget_of(
        layout, rank, num_moments, sent, num_ranks=num_ranks, waits=waits, one_host=one_host, one_pass=one_pass
    )
    if one_host:
        budget = _on_one_host(budget, layout, num_ranks, one_pass and accumulation == 1)
    device = replace(budget.device, gradients=max(budget.waiting, budget.device.gradients))
    return Cost(budget.weights, device, budget.staging, budget.host, budget.peak, budget.host_peak)


def _on_one_host(budget: Budget, layout: FlatLayout, num_ranks: int, adds_in_step: bool) -> Budget:
    """There is one copy of narrow weights, of which this is the rank's part. Where what was sent takes no more than its sum,
    a step that adds it up itself needs no other memory for gradients, in a window of one backward."""
    weights, waiting = 0, adds_in_step
    for chunk in layout.chunks:
        item, wide = ITEM_BYTES[chunk.dtype], max(ITEM_BYTES[chunk.dtype], ITEM_BYTES["float32"])
        weights += chunk.numel * item // (layout.num_shares if item < wide else 1)
        waiting &= num_ranks * item <= wide
    if not waiting:
        return replace(budget, weights=weights)
    sent = sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks)
    latest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in layout.params), default=0)  # not copied to its bucket yet
    device = replace(budget.device, gradients=sent)
    return replace(budget, weights=weights, device=device, staging=0, filling=sent + latest, stepping=sent)
