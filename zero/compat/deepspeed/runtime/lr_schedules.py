"""DeepSpeed's schedules, with its names and arguments, on any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from zero.config.schema import ScheduleSpec
from zero.optim.schedules import Schedule, build_schedule


def _named(kind: str) -> Callable[..., Schedule]:
    def make(optimizer: Optimizer, **params: Any) -> Schedule:
        if params.pop("last_batch_iteration", -1) != -1:
            raise ValueError(f"Cannot make a {kind} with last_batch_iteration: it goes on from its state. Load its state_dict.")
        return build_schedule(ScheduleSpec.of(kind, params), optimizer)

    make.__name__ = make.__qualname__ = kind
    make.__doc__ = f"DeepSpeed's {kind}, with its arguments by name."
    return make


LRRangeTest = _named("LRRangeTest")
OneCycle = _named("OneCycle")
WarmupCosineLR = _named("WarmupCosineLR")
WarmupDecayLR = _named("WarmupDecayLR")
WarmupLR = _named("WarmupLR")
