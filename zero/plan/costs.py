"""What a stage costs one rank, kind by kind: a budget, with the gradients that wait whole while a window accumulates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero.plan.budget import Shares, budget_of
from zero.plan.layout import FlatLayout
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
    layout: FlatLayout, stage: int, num_ranks: int, rank: int = 0, num_moments: int = 2, accumulation: int = 1
) -> Cost:
    """The cost of windows of so many backwards, to one rank of so many, with an optimizer that steps block by block.

    Before the last backward of a window, stages that accumulate locally have every gradient whole.
    """
    waits = accumulation > 1 and stage_of(stage).accumulates_locally
    sent = 1 if stage_of(stage).accumulates_locally else accumulation
    budget = budget_of(layout, rank, num_moments, sent, num_ranks=num_ranks, waits=waits)
    device = replace(budget.device, gradients=max(budget.waiting, budget.device.gradients))
    return Cost(budget.weights, device, budget.staging, budget.host, budget.peak, budget.host_peak)
