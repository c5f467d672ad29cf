"""The factors of gradients between autograd and the step, and when they are applied. Numbers only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Scaling:
    """Factors of gradients as they come, of sums as they are kept, and of sums when they are settled.

    A power of two is exact at any time, and is applied as sums are kept, which costs nothing. Another factor would round each
    round's sum by itself, so it waits until all are in; sums that come to a settled window cannot wait.
    """

    reduce: float = 1.0  # of the sum over ranks
    loss_scale: float = 1.0
    divisor: float = 1.0  # the accumulation that an engine divides by
    is_scaled: bool = False  # the backward that runs was sent from a loss that carries the loss scale
    is_divided: bool = False  # or was divided, or is not to be
    weight: float | None = None  # of the micro-batch to come, where micro-batches have any
    has_final_sums: bool = False  # what comes now is added to sums that a settling made final

    @property
    def multiplier(self) -> float | None:
        """The factor of the gradients to come, or None."""
        if self.weight is not None:
            return self.weight * self.missing_scale
        factor = self.missing_scale / self.missing_divisor
        return None if factor == 1.0 else factor

    @property
    def missing_scale(self) -> float:
        """What is left of the loss scale to multiply by."""
        return 1.0 if self.is_scaled else self.loss_scale

    @property
    def missing_divisor(self) -> float:
        """What is left to divide by; a mean over weights is divided by nothing else."""
        return 1.0 if self.is_divided or self.weight is not None else self.divisor

    @contextlib.contextmanager
    def divided(self) -> Iterator[None]:
        """While a backward runs whose loss was divided, or is not to be."""
        before, self.is_divided = self.is_divided, True
        try:
            yield
        finally:
            self.is_divided = before

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """While a backward runs whose loss carries the loss scale."""
        before, self.is_scaled = self.is_scaled, True
        try:
            yield
        finally:
            self.is_scaled = before

    def expect_plain(self) -> None:
        """The next backward is not scaled."""
        self.is_scaled = self.is_divided = False

    def expect_scaled(self) -> None:
        """The backward that runs is scaled, and divided by what it is to be divided by."""
        self.is_scaled = self.is_divided = True

    def weigh(self, weight: float | None) -> None:
        """Sets the weight of the micro-batch to come."""
        self.weight = weight

    def begin(self, has_final_sums: bool = False) -> None:
        """What comes now is added to no sum yet, or to sums that are settled. It has no weight so far."""
        self.weight, self.has_final_sums = None, has_final_sums

    @property
    def accumulate_factor(self) -> float:
        """Of a sum as it is kept."""
        return self._whole if self.has_final_sums else self._exact

    def sync_factor(self, total_weight: float | None) -> float:
        if total_weight is None:
            return self._whole / self._exact
        return 1.0 / (total_weight * self.loss_scale * self._exact) if total_weight else 0.0

    def user_grad_factor(self, total_weight: float | None) -> float:
        """What undoes the rest, for a gradient that carries neither loss scale nor weight."""
        return self.loss_scale * (1.0 if total_weight is None else total_weight * self.reduce)

    @property
    def _whole(self) -> float:
        return self.reduce / self.loss_scale

    @property
    def _exact(self) -> float:
        return 2.0 ** (math.frexp(self._whole)[1] - 1)
