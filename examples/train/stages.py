"""Measures what each stage holds on one rank: counted in a training of two steps, beside the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from accelerators.memory import format_bytes
from zero.optim.traits import num_moments
from zero.plan.budget import Cost, PlannedTraining, cost_of
from zero.plan.stages import STAGES
from zero.sharding.memory_usage import measured_bytes
from zero.tools.commands import table

from .loop import build
from .options import Options


@dataclass(frozen=True)
class Both:
    """The count, and the prediction of `zero plan`."""

    counted: Cost
    predicted: Cost

    def as_dict(self) -> dict[str, Any]:
        return {name: kinds(cost) for name, cost in (("counted", self.counted), ("predicted", self.predicted))}


def kinds(cost: Cost) -> dict[str, int]:
    """Returns bytes by kind, those on the device first."""
    shares = {name: getattr(cost.device, name) for name in ("weights", "gradients", "masters", "moments")}
    return {**shares, "buckets": cost.buckets, "all": cost.total, "on_host": cost.host.total}


def stages_table(stages: Mapping[int, Both]) -> str:
    rows = []
    for stage, both in stages.items():
        for name, cost in (("counted", both.counted), ("predicted", both.predicted)):
            rows.append((str(stage), name, *map(format_bytes, kinds(cost).values())))
    return table(("stage", "", *(name.replace("_", " ") for name in kinds(both.counted))), rows, left=2)


def measure_stages(options: Options) -> Mapping[int, Both]:
    """Trains two steps at each stage, and returns what that took and what was predicted, by stage. A collective."""
    return {stage: _measure(options, stage) for stage in STAGES}


def _measure(options: Options, stage: int) -> Both:
    engine = build(replace(options, compile=False), stage)
    try:
        sharding = engine.optimizer.sharding
        sample = torch.zeros(1, 2, dtype=torch.long, device=engine.device)
        gradients = host_gradients = 0
        for _ in range(2):  # the first makes the optimizer's state, and learns the order of the gradients
            for micro in range(options.accumulation):
                engine.backward(engine(sample))
                if micro == options.accumulation - 1:
                    engine.settle()
                now = measured_bytes(sharding)
                gradients = max(gradients, now.device.gradients)
                host_gradients = max(host_gradients, now.host.gradients)
                engine.step()
        now = measured_bytes(sharding)
        counted = Cost(replace(now.device, gradients=gradients), now.buckets,
                       replace(now.host, gradients=host_gradients))  # fmt: skip
        moments, group = num_moments(sharding.updater.inner), sharding.group
        training = PlannedTraining(moments, num_ranks=group.size, on_host=sharding.accelerator.device().type == "cpu")
        predicted = cost_of(sharding.layout_ref.layout, stage, group.rank, options.accumulation, training)
        return Both(counted, predicted)
    finally:
        engine.close()
