"""Decides which backwards send their gradients: those at the declared accumulation boundary, unless the user says otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol


class Counting(Protocol):
    """Counts what a window consists of, and says where it ends."""

    @property
    def at_end(self) -> bool:
        """True when the backward that runs, or comes next, is the last one declared, or one beyond."""

    @property
    def micro_steps(self) -> int:
        """The micro-steps of this window, if they are counted; ranks stay at the same one when a window was lost."""

    def begin(self) -> None:
        """Counts from the first micro-step again."""

    def note_backward(self, divides: bool) -> None:
        """Takes note of a backward that reached its first parameter. `divides`: an engine divides it by the accumulation."""

    def end_window(self) -> None:
        """Takes note that all gradients were cleared."""


class BackwardCount:
    """Counts the backwards of a window against the declared accumulation."""

    micro_steps = 0

    def __init__(self, accumulation: int | None) -> None:
        self._accumulation = accumulation
        self._backwards = 0

    @property
    def at_end(self) -> bool:
        return self._accumulation is None or self._backwards >= self._accumulation

    def begin(self) -> None:
        self._backwards = 0

    def note_backward(self, divides: bool) -> None:
        self._backwards += 1

    end_window = begin


class SyncPolicy:
    """Decides by the count of backwards, unless the user says otherwise: by a method of the optimizer, or as with DDP by an
    attribute of the model."""

    def __init__(
        self, accumulation: int | None, accumulates_locally: bool, of_model: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self.counting: Counting = BackwardCount(accumulation)
        self.override: bool | None = None  # the answer that set_gradient_accumulation_boundary gave, until the window ends
        # The number of backwards of a window that send, as declared.
        self.num_sends = 1 if accumulates_locally else accumulation or 1
        self._accumulates_locally = accumulates_locally
        self._of_model = of_model  # returns the attributes of the model
        self._no_sync_depth = 0

    @property
    def synchronises(self) -> bool:
        """True when gradients that come now should leave for their owners."""
        if self._no_sync_depth or not self._of_model().get("require_backward_grad_sync", True):
            return False
        return not self._accumulates_locally or (self.counting.at_end if self.override is None else self.override)

    @property
    def is_last(self) -> bool:
        """True while a backward synchronises that is the last one declared, or one beyond."""
        return self.synchronises and (self.counting.at_end if self.override is None else self.override)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def end_window(self) -> None:
        self.override = None
        self.counting.end_window()
