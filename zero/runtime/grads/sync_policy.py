"""Decides which backwards synchronise. It decides when ranks communicate, never what the result is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Counting(Protocol):
    """What counts the micro-steps of a window, so that ranks stay at the same one when a window was lost."""

    micro_steps: int

    def begin(self) -> None: ...

    def note_backward(self, divides: bool) -> None: ...


class SyncPolicy:
    """Counts the backwards of a window against the declared accumulation."""

    def __init__(self, accumulation: int | None, accumulates_locally: bool) -> None:
        self.accumulation = accumulation
        self.override: bool | None = None  # set_gradient_accumulation_boundary, until the window ends
        self.backwards = 0
        self.counting: Counting | None = None
        self._accumulates_locally = accumulates_locally
        self._no_sync_depth = 0

    @property
    def synchronises(self) -> bool:
        """True when gradients that come now should leave for their owners."""
        if self._no_sync_depth:
            return False
        return not self._accumulates_locally or self.is_last

    @property
    def num_sends(self) -> int:
        """Backwards of a window that send gradients, as far as it is declared."""
        return 1 if self._accumulates_locally else self.accumulation or 1

    @property
    def is_last(self) -> bool:
        """True when the backward going on is the last one declared, or one beyond."""
        if self.override is not None:
            return self.override
        return self.accumulation is None or self.backwards >= self.accumulation

    def note_backward(self, divides: bool) -> None:
        """Counts a backward that reached its first parameter. `divides`: an engine divides it by the accumulation."""
        self.backwards += 1
        if self.counting is not None:
            self.counting.note_backward(divides)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def end_window(self) -> None:
        self.override = None
        self.backwards = 0
