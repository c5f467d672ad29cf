"""Shows how a training goes: a bar at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from accelerators.memory import format_bytes
from accelerators.output import write

from .launch import unless_nobody_reads

_BAR = 8  # the columns of a bar


class Display:
    """The display of rank 0; `quiet` shows nothing."""

    def __init__(self, steps: int, log_every: int, quiet: bool) -> None:
        self._steps = steps
        self._log_every = log_every
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._beside = 0  # the columns of the terminal that are taken

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows one record."""
        if self._quiet:
            return
        step, words = record["step"], _words(record)
        if sys.stdout.isatty():
            self._advance(step, "  ".join(words))
        elif step % self._log_every == 0 or step == self._steps:
            with unless_nobody_reads():
                write(f"step {step:>{len(str(self._steps))}}/{self._steps}  {'  '.join(words)}\n")

    def _advance(self, step: int, words: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            widths = 2 * len(str(self._steps)) + 1, _BAR, 7
            counted, _, left = (Column(width=width) for width in widths)
            columns = (
                MofNCompleteColumn(table_column=counted), BarColumn(_BAR), TimeRemainingColumn(table_column=left),
                TextColumn("{task.description}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=Console())
            self._beside = sum(widths) + len(widths)  # each column is followed by a space
            self._task = self._bar.add_task("", total=self._steps, completed=step - 1)
            self._bar.start()
        # Cut here, as rich would take the room from the other columns, down to nothing.
        room = max(0, self._bar.console.width - self._beside)
        shown = words if len(words) <= room else f"{words[: room - 1]}…"[:room]
        self._bar.update(self._task, completed=step, description=shown)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _words(record: Mapping[str, Any]) -> list[str]:
    """Returns the numbers of a record in words, which fit 80 columns for up to 99,999 steps. The memory is that of the rank
    that has most."""
    amount, unit = format_bytes(max(record["memory_by_rank"])).split()
    norm = "none" if record["norm"] is None else f"{record['norm']:.3f}"
    memory = f"{float(amount):.{0 if float(amount) >= 100 else 1}f} {unit}"
    return [f"loss {record['loss']:.4f}", f"{record['tokens_per_second']:,.0f} tok/s", f"norm {norm}", memory]
