"""The factors of gradients between autograd and the step, and the loss scale of fp16 training. Numbers only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass
class Scaling:
    """Factors of gradients as they come, of sums as they are kept, and of sums when they are settled.

    A power of two is exact at any time, and is applied as sums are kept, which costs nothing. Another factor would round each
    round's sum by itself, so it waits until all are in; sums that come to a settled window cannot wait.
    """

    reduce: float = 1.0  # the factor of the sum over ranks
    loss_scale: float = 1.0
    divisor: float = 1.0  # the number of micro-steps that an engine divides by
    is_scaled: bool = False  # the backward that runs was sent from a loss that carries the loss scale
    is_divided: bool = False  # the backward that runs was divided, or need not be
    weight: float | None = None  # the weight of the micro-batch to come, if micro-batches have any
    has_final_sums: bool = False  # what comes now is added to sums that a settling made final

    @property
    def multiplier(self) -> float | None:
        """The factor of the gradients to come, or None."""
        if self.weight is not None:
            return self.weight * self.missing_scale
        factor = self.missing_scale / self.missing_divisor
        return None if factor == 1.0 else factor

    @property
    def is_plain(self) -> bool:
        """True if gradients count as they come, whichever backward sent them."""
        return self.weight is None and self.loss_scale == self.divisor == 1.0

    @property
    def missing_scale(self) -> float:
        """The part of the loss scale that is left to multiply by."""
        return 1.0 if self.is_scaled else self.loss_scale

    @property
    def missing_divisor(self) -> float:
        """The part that is left to divide by; a mean over weights is divided by nothing else."""
        return 1.0 if self.is_divided or self.weight is not None else self.divisor

    @contextlib.contextmanager
    def divided(self) -> Iterator[None]:
        """Holds while a backward runs whose loss was divided, or is not to be."""
        before, self.is_divided = self.is_divided, True
        try:
            yield
        finally:
            self.is_divided = before

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """Holds while a backward runs whose loss carries the loss scale."""
        before, self.is_scaled = self.is_scaled, True
        try:
            yield
        finally:
            self.is_scaled = before

    def expect_plain(self) -> None:
        """Notes that the next backward is not scaled."""
        self.is_scaled = self.is_divided = False

    def expect_scaled(self) -> None:
        """Notes that the backward that runs is scaled, and divided by what it is to be divided by."""
        self.is_scaled = self.is_divided = True

    def weigh(self, weight: float | None) -> None:
        """Sets the weight of the micro-batch to come."""
        self.weight = weight

    def begin(self, has_final_sums: bool = False) -> None:
        """Notes that what comes now is added to no sum yet, or to sums that are settled. It has no weight so far."""
        self.weight, self.has_final_sums = None, has_final_sums

    @property
    def accumulate_factor(self) -> float:
        """The factor of a sum as it is kept."""
        return self._whole if self.has_final_sums else self._exact

    def sync_factor(self, total_weight: float | None) -> float:
        if total_weight is None:
            return self._whole / self._exact
        return 1.0 / (total_weight * self.loss_scale * self._exact) if total_weight else 0.0

    def user_grad_factor(self, total_weight: float | None) -> float:
        """Returns the factor that undoes the rest, for a gradient that carries neither loss scale nor weight."""
        return self.loss_scale * (1.0 if total_weight is None else total_weight * self.reduce)

    @property
    def _whole(self) -> float:
        return self.reduce / self.loss_scale

    @property
    def _exact(self) -> float:
        return 2.0 ** (math.frexp(self._whole)[1] - 1)


@dataclass(frozen=True)
class LossScale:
    """A loss scale and the rule by which it changes, given whether gradients were finite; `window=None` keeps it as it is.

    An overflow first uses up `hysteresis`, then divides the scale; `window` finite steps in a row multiply it, of which
    the first `cooldown` at the start and after an overflow do not count. What was used up of `hysteresis` comes back when
    the scale grows, with `refill` at every finite step.
    """

    value: float = 2.0**16
    window: int | None = 1000
    factor: float = 2.0
    hysteresis: int = 2
    minimum: float = 1.0
    cooldown: int = 0
    refill: bool = False
    good_steps: int | None = None  # the finite steps that count; None at the start and after an overflow
    patience: int | None = None  # the overflows that are still forgiven; None stands for all of `hysteresis`
    stuck: int = 0  # the overflows in a row that the scale could not answer by falling

    def __post_init__(self) -> None:
        wrong = (
            "value" if not 0 < self.value < float("inf") else
            "window" if self.window is not None and self.window < 1 else
            "factor" if not 1 < self.factor < float("inf") else
            "hysteresis" if self.hysteresis < 1 else
            "minimum" if not 0 < self.minimum < float("inf") else
            "cooldown" if self.cooldown < 0 else None
        )  # fmt: skip
        if wrong is not None:
            raise ValueError(
                f"Cannot make a loss scale with {wrong}={getattr(self, wrong)}: it is out of range. Give a positive, finite "
                "value and minimum, a factor above 1, a window and hysteresis of at least 1, and a cooldown of at least 0."
            )

    @property
    def at_minimum(self) -> bool:
        return self.value <= self.minimum

    @property
    def progress(self) -> dict[str, Any]:
        """The state of the scale, to be saved; the rule is the configuration's."""
        return {"value": self.value, "good_steps": self.good_steps, "patience": self.patience, "stuck": self.stuck}

    def at(self, progress: Mapping[str, Any]) -> LossScale:
        """Returns this rule, come as far as `progress` says; a fixed scale stays where it is."""
        return self if self.window is None else replace(self, **progress)

    def after(self, finite: bool) -> LossScale:
        """Returns the scale for the next step."""
        stuck = 0 if finite or not (self.at_minimum or self.window is None) else self.stuck + 1
        return replace(self._moved(finite), stuck=stuck)

    def _moved(self, finite: bool) -> LossScale:
        if self.window is None:
            return self
        if finite:
            good = (-self.cooldown if self.good_steps is None else self.good_steps) + 1
            if good < self.window:
                return replace(self, good_steps=good, patience=None if self.refill else self.patience)
            return replace(self, value=self.value * self.factor, good_steps=0, patience=None)
        patience = (self.hysteresis if self.patience is None else self.patience) - 1
        if patience > 0:
            return replace(self, good_steps=None, patience=patience)
        return replace(self, value=max(self.value / self.factor, self.minimum), good_steps=None, patience=0)
