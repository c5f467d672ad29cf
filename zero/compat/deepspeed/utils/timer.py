"""`deepspeed.utils.timer`: the timers that an engine has."""

from __future__ import annotations

from zero.engine.timers import ThroughputTimer as ThroughputTimer
from zero.engine.timers import WallClockTimers as SynchronizedWallClockTimer

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer"]
