"""What a run says about itself while it trains: one line of the logger every so many steps, from rank 0."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from accelerators import Accelerator
from zero.config import Report

logger = logging.getLogger("zero")


class Progress:
    """Times the phases of training where that was asked for, and writes the lines."""

    def __init__(self, report: Report, accelerator: Accelerator, rank: int) -> None:
        self._report = report
        self._accelerator = accelerator
        self._rank = rank
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the time of what happens inside to its phase. Where nobody asked, it costs nothing and waits for nothing."""
        if not self._report.wall_clock:
            yield
            return
        self._accelerator.synchronize()  # or the device would still be at what came before
        begun = time.perf_counter()
        try:
            yield
            self._accelerator.synchronize()
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begun

    def tell(self, step: int, figures: dict[str, object]) -> None:
        """One line, where it is time for one: after so many steps, or each where only times or memory were asked for."""
        every = self._report.every_steps or (1 if self._report.wall_clock or self._report.memory else None)
        if every is None or step % every:
            return
        told = [f"step {step}", *(f"{name} {figure}" for name, figure in figures.items())]
        told += [f"{phase} {seconds / every * 1000:.1f} ms a step" for phase, seconds in self._seconds.items()]
        if self._report.memory:
            told.append(str(self._accelerator.memory()))
        self._seconds.clear()
        if self._rank == 0:
            logger.info("rank 0: %s", ", ".join(told))
