"""Rank 0 alone reports the steps of an engine: by lines in the log, and by records for TensorBoard.

    reports = Reports(config.report, optimizer)     # the stops of a step are timed from now on, if the configuration says so
    reports.add(loss)                               # of each micro-step that is sent backward
    reports.tell(step, {"lr": 0.1, "norm": 2.0})    # after each step: logs a line if it is due, and writes a record
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from zero.config.schema import Report
from zero.sharding.metrics import MetricsWriter, by_phase
from zero.sharding.optimizer import ShardedOptimizer

logger = logging.getLogger("zero")


class Reports:
    """Writes the lines, with the times of the stops if the configuration says so, and the records for TensorBoard."""

    def __init__(self, report: Report, optimizer: ShardedOptimizer) -> None:
        sharding = optimizer.sharding
        self._report = report
        self._accelerator = sharding.accelerator
        self._rank = sharding.group.rank
        self._clock = sharding.clock() if report.wall_clock else None
        writes = report.tensorboard is not None and self._rank == 0
        self._records = MetricsWriter(None, optimizer, report.tensorboard) if writes else None
        self._last_times: dict[str, float] = {}  # milliseconds at the time when the last line was written
        self._loss: torch.Tensor | None = None  # the sum of the losses that this rank sent backward since the last step

    def add(self, loss: torch.Tensor) -> None:
        """Adds up the losses of a step that will be recorded."""
        if self._report.tensorboard is not None:
            loss = loss.detach().float().sum()
            self._loss = loss if self._loss is None else self._loss + loss

    def forget(self) -> None:
        """Drops the losses since the last step, as their window was thrown away."""
        self._loss = None

    def tell(self, step: int, figures: dict[str, object]) -> None:
        """Logs one line if it is due: after the configured number of steps, or after each where only times or memory were
        configured."""
        loss, self._loss = self._loss, None
        if self._records is not None:
            self._records.write(**({} if loss is None else {"loss": loss.item()}))
        every = self._report.every_steps or (1 if self._report.wall_clock or self._report.memory else None)
        if every is None or step % every:
            return
        parts = [f"step {step}", *(f"{name} {figure}" for name, figure in figures.items())]
        if self._clock is not None:
            now = by_phase(self._clock.read())
            parts += [f"{name} {(ms - self._last_times.get(name, 0.0)) / every:.1f} ms a step" for name, ms in now.items()]
            self._last_times = now
        if self._report.memory:
            parts.append(str(self._accelerator.memory()))
        if self._rank == 0:
            logger.info("rank 0: %s", ", ".join(parts))

    @property
    def enabled(self) -> bool:
        """True when this rank writes for TensorBoard."""
        return self._records is not None

    def write_events(self, event_list: Iterable[tuple[str, Any, int]], flush: bool = True) -> None:
        """Writes a script's own figures for TensorBoard: name, value and step of each."""
        if self._records is not None:
            self._records.add(event_list)

    def close(self) -> None:
        if self._records is not None:
            self._records.close()


class NoReports:
    """The monitor of an engine that does not train: it writes nothing."""

    enabled = False

    def write_events(self, event_list: Iterable[tuple[str, Any, int]], flush: bool = True) -> None:
        """Does nothing."""
