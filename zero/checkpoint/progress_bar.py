"""The progress of a save, a load or an export, shown at a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_AFTER_S = 2.0  # what is done by then needs no bar


class ProgressBar:
    """Shows nothing in the first seconds, and nothing where there is no terminal."""

    def __init__(self, what: str, total: int, wanted: bool = True, unit: str = "bytes") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._wanted = wanted and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._so_far = 0
        self._lock = threading.Lock()
        self._shown: Any = None
        self._task: Any = None

    def advance(self, amount: int) -> None:
        if not self._wanted:
            return
        with self._lock:  # a file has several readers
            self._so_far += amount
            if self._shown is None and time.monotonic() - self._begun > _AFTER_S:
                self._show()
            if self._shown is not None:
                self._shown.update(self._task, completed=self._so_far)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        amount = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = ("{task.description}", BarColumn(), amount, TimeRemainingColumn())
        self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._shown.add_task(self._what, total=self._total)
        self._shown.start()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()
