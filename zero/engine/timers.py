"""The timers that a DeepSpeed script finds on its engine, and may start and stop itself."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import accelerators

logger = logging.getLogger("zero")


class Timer:
    """Milliseconds between `start` and `stop`, added up; the device is waited for at both."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._begun_s = 0.0
        self._ms: list[float] = []

    def start(self) -> None:
        """Begins to measure."""
        accelerators.current().synchronize()
        self._begun_s, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Adds what passed since `start`; with `reset` it replaces what was measured before."""
        if not self.started_:
            raise ValueError(f"Cannot stop timer {self.name_!r}: it is not running. Call start() first.")
        accelerators.current().synchronize()
        if reset:
            self._ms.clear()
        self._ms.append(1000 * (time.perf_counter() - self._begun_s))
        self.started_ = False

    def reset(self) -> None:
        """Forgets what was measured."""
        self._ms, self.started_ = [], False

    def elapsed(self, reset: bool = True) -> float:
        """Returns the milliseconds so far, and forgets them unless `reset` is False. A timer that runs goes on."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._ms)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Returns the milliseconds from a `start` to its `stop`, on average; 0.0 for none."""
        return sum(self._ms) / len(self._ms) if self._ms else 0.0


class WallClockTimers:
    """Timers by name: `timers("data").start()`."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """Returns all timers, by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Returns a line on the memory of this rank's device."""
        return str(accelerators.current().memory())

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Returns the mean of each of these timers that exists, divided by `normalizer`."""
        known = [self.timers[name] for name in names if name in self.timers]
        means = {timer.name_: timer.mean() / normalizer for timer in known}
        if reset:
            for timer in known:
                timer.reset()
        return means

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, *_: Any, **__: Any) -> None:
        """Logs the milliseconds of these, divided by `normalizer`."""
        known = [self.timers[name] for name in names if name in self.timers]
        shown = [f"{timer.name_}: {timer.elapsed(reset) / normalizer:.2f}" for timer in known]
        logger.info("time (ms) | %s", " | ".join(shown))


class ThroughputTimer:
    """Only steps after the first `start_step` count for the samples of a second; every epoch and step is counted.

    It tells them every `steps_per_output` steps, with the memory if it is to monitor that. `config` may have `enabled` and
    `synchronized`.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._begun_s: float | None = None
        self._is_due()

    @property
    def started(self) -> bool:
        """True when a micro-step has begun."""
        return self._begun_s is not None

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begins a micro-step, unless one has begun."""
        if self._begun_s is None and getattr(self.config, "enabled", True):
            self._begun_s = self._now_s()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends a micro-step, which may be the last of a step."""
        if self._begun_s is None:
            return
        counts = self.global_step_count >= self.start_step
        if counts:
            seconds = self._now_s() - self._begun_s
            self.total_elapsed_time += seconds
            self.step_elapsed_time += seconds
        self._begun_s = None
        self.micro_step_count += 1
        self.global_step_count += global_step
        if counts and global_step:
            if report_speed and self._is_due():
                self._report()
            self.step_elapsed_time = 0.0

    def _now_s(self) -> float:
        if getattr(self.config, "synchronized", False) and self.global_step_count >= self.start_step:
            accelerators.current().synchronize()
        return time.perf_counter()

    def _is_due(self) -> bool:
        every = self.steps_per_output
        if every is not None and every <= 0:
            raise ValueError(f"Cannot use steps_per_output={every}: it is a number of steps. Use 1 or more, or None.")
        return every is not None and self.global_step_count % every == 0

    def _report(self) -> None:
        """Tells how fast it goes, and what DeepSpeed tells beside that."""
        count = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        average, now = self.avg_samples_per_sec(), self.batch_size / (self.step_elapsed_time or math.inf)
        self.logging(f"{count}, RunningAvgSamplesPerSec={average}, CurrSamplesPerSec={now}")
        if self.monitor_memory:
            self.logging(f"{count}, {WallClockTimers.memory_usage()}")

    def avg_samples_per_sec(self) -> float:
        """Returns the samples of a second so far; minus infinity before there is anything to tell from."""
        num_steps = self.global_step_count - self.start_step
        return num_steps * self.batch_size / self.total_elapsed_time if num_steps > 0 else float("-inf")
