"""What a stage costs one rank, kind by kind: a budget, with the gradients that wait whole while a window accumulates."""

from __future__ import annotations

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
    layout: FlatLayout, rank: int, stage: int, num_moments: int = 2, accumulation: int = 1, by_blocks: bool = True
) -> Cost:
    """The cost of windows of so many backwards.

    Before the last backward of a window, stages that accumulate locally have every gradient whole, in the dtype of sums.
    As it is sent its place goes to this rank's share of it, which is no larger: so the most is when the first is sent.
    """
    sent = 1 if stage_of(stage).accumulates_locally else accumulation
    budget: Budget = budget_of(layout, rank, num_moments, sent, by_blocks)
    device, filling = budget.device, budget.filling
    if accumulation > 1 and stage_of(stage).accumulates_locally:
        slots = [spec for spec, slot in zip(layout.params, layout.slots, strict=True) if slot is not None]
        whole = sum(spec.numel * max(ITEM_BYTES[spec.dtype], ITEM_BYTES["float32"]) for spec in slots)
        filling = max(filling, whole + filling - device.gradients)
        device = replace(device, gradients=max(whole, device.gradients))
    peak = budget.states + max(filling, budget.stepping)
    return Cost(budget.weights, device, budget.staging, budget.host, peak, budget.host_peak)
