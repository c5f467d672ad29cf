"""The loss scale of fp16 training: the next scale, given whether the gradients were finite. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LossScale:
    """A scale and the rule by which it changes; `window=None` keeps it as it is.

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
    good_steps: int | None = None  # finite steps that count; None stands for the start, and for what follows an overflow
    patience: int | None = None  # overflows still forgiven; None stands for all of `hysteresis`
    stuck: int = 0  # overflows in a row that the scale could not answer by falling

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
                f"Cannot make a loss scale with {wrong}={getattr(self, wrong)}. Give a positive, finite value and minimum, a "
                "factor above 1, a window and hysteresis of at least 1, and a cooldown of at least 0."
            )

    @property
    def at_minimum(self) -> bool:
        return self.value <= self.minimum

    @property
    def progress(self) -> dict[str, Any]:
        """How far it has come, to be saved; the rule is the configuration's."""
        return {"value": self.value, "good_steps": self.good_steps, "patience": self.patience, "stuck": self.stuck}

    def at(self, progress: Mapping[str, Any]) -> LossScale:
        """This rule, come as far as that; a fixed scale stays where it is."""
        return self if self.window is None else replace(self, **progress)

    def after(self, finite: bool) -> LossScale:
        """The scale for the next step."""
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
