"""How many backwards make a step, as DeepSpeed counts: by calls of step, unless the caller says where a window ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Accumulation:
    """Counts the micro-steps of a window, and says where the window ends."""

    def __init__(self, declared: int, counted: bool) -> None:
        self.declared = declared  # micro-steps that make a step
        self.counted = counted  # False: the window ends where the caller steps, whatever their number
        self.coalescing = False  # inside coalesce_grad_reduction
        self._in_engine = False
        self.begin()

    def begin(self) -> None:
        self.override: bool | None = None  # the caller's own word, until the window ends
        self.micro_steps = 0  # of this window
        self.divided = False  # whether the gradients of this window carry the declared divisor
        self._backwards = self._own_backwards = 0  # since the last micro-step, by the engine and by the caller

    @property
    def at_end(self) -> bool:
        if self.override is not None:
            return self.override
        return self.counted and self.micro_steps + 1 >= self.declared

    @property
    def num_micro_batches(self) -> int:
        """A micro-step may have several backwards. Of those that no micro-step has counted yet, each of the engine's is a
        micro-batch; where steps are counted, the caller's own are one together."""
        by_caller = min(self._own_backwards, 1) if self.counted else self._own_backwards
        return self.micro_steps + self._backwards + by_caller

    @contextlib.contextmanager
    def engine_backward(self, divides: bool) -> Iterator[None]:
        """Marks a backward that the engine runs."""
        self._in_engine = True
        try:
            yield
        finally:
            self._in_engine = False
        self._backwards += 1
        self.divided |= divides

    def note_backward(self, divides: bool) -> None:
        """Takes note that a backward, of the engine or the caller, reached its first parameter."""
        if not self._in_engine:
            self._own_backwards += 1
            self.divided |= divides

    def end_window(self) -> None:
        """Micro-steps go on, as they would in a plain loop."""

    def count(self) -> None:
        self.micro_steps += 1
        self._backwards = self._own_backwards = 0
