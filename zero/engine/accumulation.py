"""The count of backwards in a step, as DeepSpeed counts: by calls of step, unless the caller says where a window ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Accumulation:
    """A window of counted micro-steps is at its end with the last of the declared ones, unless the caller says otherwise."""

    def __init__(self, declared: int, counted: bool, missing_scale: Callable[[], float] = lambda: 1.0) -> None:
        self.declared = declared  # the micro-steps that make a step
        self.counted = counted  # False if the window ends where the caller steps, after any number of micro-steps
        self._missing_scale = missing_scale  # returns the loss scale that the running backward does not carry
        self._coalescing = False
        self._in_engine = False
        self.begin()

    def begin(self) -> None:
        self._override: bool | None = None  # what the caller has said of this micro-step, until the window ends
        self.micro_steps = 0  # the number of this window's micro-steps so far
        self.divided = False  # the gradients of this window carry the declared divisor
        # Since the last micro-step: the backwards of the engine, and those of the caller.
        self._backwards = self._own_backwards = 0

    def resize(self, declared: int) -> None:
        """Sets how many micro-steps make a step, between two windows."""
        if self.num_micro_batches:
            raise ValueError(
                "Cannot change the batch size in the middle of an accumulation: its gradients were divided for another. Call "
                "it after a step, or after discard()."
            )
        self.declared = declared

    def set_boundary(self, is_boundary: bool) -> None:
        """Says whether this micro-step is the last of its window, whatever the count says."""
        if not self.counted:
            raise ValueError(
                f"Cannot use set_gradient_accumulation_boundary({is_boundary}): micro-steps are not counted "
                "(managed_gradient_accumulation is false), and every step ends a window. Call step where it should end."
            )
        self._override = is_boundary

    @contextlib.contextmanager
    def coalesce(self) -> Iterator[None]:
        """Marks a block of coalesce_grad_reduction, which refuses steps."""
        if self._coalescing:
            raise ValueError("Cannot nest coalesce_grad_reduction(): one block makes one reduction. Use the outer one.")
        self._coalescing = True
        try:
            yield
        finally:
            self._coalescing = False

    def check_step(self) -> None:
        """Raises inside a block of coalesce_grad_reduction."""
        if self._coalescing:
            raise ValueError(
                "Cannot step inside coalesce_grad_reduction(): gradients are reduced where the block ends. Step after it."
            )

    @property
    def at_end(self) -> bool:
        if self._override is not None:
            return self._override
        return self.counted and self.micro_steps + 1 >= self.declared

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of this window. A micro-step may have several backwards: of those that no micro-step has counted
        yet, each of the engine's is a micro-batch; where steps are counted, the caller's own are one together."""
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
        """Takes note that a backward, of the engine or the caller, reached its first parameter. One of the caller's without
        the loss scale, whose gradients could underflow, is refused."""
        if not self._in_engine:
            scale = self._missing_scale()
            if scale != 1.0:
                raise RuntimeError(
                    f"Cannot send this loss backward: it does not carry the loss scale of {scale:g}, so "
                    "gradients of fp16 weights could underflow. Call engine.backward(loss), or engine.scale(loss).backward()."
                )
            self._own_backwards += 1
            self.divided |= divides

    def end_window(self) -> None:
        """Does nothing: micro-steps go on, as they would in a plain loop."""

    def count(self) -> None:
        self.micro_steps += 1
        self._backwards = self._own_backwards = 0
