"""`deepspeed.utils.timer`: the timers that an engine has, one that measures nothing, and the names of DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero.engine.timers import ThroughputTimer as ThroughputTimer
from zero.engine.timers import WallClockTimers as SynchronizedWallClockTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
TIME_EPSILON = 1e-6


class NoopTimer:
    """Timers by name that measure nothing."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Does nothing."""

        def reset(self) -> None:
            """Does nothing."""

        def stop(self, **_: Any) -> None:
            """Does nothing."""

        def elapsed(self, **_: Any) -> int:
            return 0

        def mean(self) -> int:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, NoopTimer.Timer]:
        return {}

    def log(self, names: Iterable[str], *_: Any, **__: Any) -> None:
        """Does nothing."""

    def get_mean(self, names: Iterable[str], *_: Any, **__: Any) -> None:
        """Does nothing."""
