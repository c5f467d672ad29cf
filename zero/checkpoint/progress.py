"""Progress of a save, a load or an export is counted in bytes as they pass, and shown to those who wait for it at a terminal.

    with ProgressBar("saving step9", total) as bar:
        disk.write(path, parts, bar.advance)
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Written = Callable[[int], None]  # called with a number of bytes each time that so many are written, or read

_AFTER_S = 2.0  # the seconds after which a bar is shown


class ProgressBar:
    """Nothing is shown in the first seconds, and nothing at all unless it is wanted and there is a terminal.

    It is the progress of a save, a load or an export, whose `advance` is a `Written`.
    """

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
        with self._lock:  # several threads read one file
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
