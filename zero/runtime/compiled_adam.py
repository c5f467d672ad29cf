"""Adam's step as one compiled pass over memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from zero.runtime.compiled import LONG, build, compiled
from zero.runtime.one_pass import Elements, Gradient, Kind, Settings, rows_that_wait
from zero.runtime.sums import RowKind, total_of


class Variant(NamedTuple):
    """What the compiler must know. Everything else may change from call to call."""

    masters: torch.dtype
    weights: torch.dtype | None
    rounded: torch.dtype | None
    decoupled: bool
    rows: torch.dtype
    num_rows: int  # that the gradient is the sum of


class CompiledAdam:
    name = "compiled"
    lacks = ("amsgrad", "capturable", "differentiable")

    def build(self, kinds: Iterable[Kind], num_ranks: int = 1, decoupled: Iterable[bool] = (True,)) -> None:
        """Waits for the compiler, so that no step has to."""
        for kind in kinds:
            for is_decoupled in set(decoupled):
                for rows, number, _ in {RowKind(kind.masters, 1, kind.masters), *rows_that_wait([kind], num_ranks)}:
                    _build(Variant(*kind, is_decoupled, rows, number))

    def step(self, settings: Settings, gradient: Gradient, elements: Elements) -> None:
        master, moments, weights, rounded, *_ = elements
        if weights is not None and rounded is not None and weights.data_ptr() == rounded.data_ptr():
            rounded = None
        rows, (old, new) = gradient.rows, (None if each is None else each.dtype for each in (weights, rounded))
        variant = Variant(master.dtype, old, new, settings.decoupled, rows[0].dtype, len(rows))
        coefficient = math.prod(gradient.factors)
        numbers = torch.tensor(_numbers(settings, coefficient), dtype=master.dtype, device="cpu")
        step_all = compiled(_one_pass, *variant)
        step_all(variant.decoupled, numbers, master, list(rows), *moments, weights, rounded)


def _numbers(settings: Settings, coefficient: float) -> tuple[float, ...]:
    lr, decay, (beta1, beta2) = settings.lr, settings.weight_decay, settings.betas
    kept = 1.0 - lr * decay if settings.decoupled else decay
    rate, inverse_root = -lr / (1.0 - beta1**settings.step), (1.0 - beta2**settings.step) ** -0.5
    factor = -coefficient if settings.maximize else coefficient
    return factor, kept, 1.0 - beta1, beta2, 1.0 - beta2, rate, inverse_root, settings.eps


def _one_pass(
    decoupled: bool,
    numbers: torch.Tensor,
    master: torch.Tensor,
    rows: list[torch.Tensor],
    mean: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor | None,
    rounded: torch.Tensor | None,
) -> None:
    factor, kept, new_mean, old_square, new_square, rate, inverse_root, eps = numbers.unbind()
    value, slope = master, total_of(rows, master.dtype) * factor
    if weights is not None:  # an edit is where a weight is not its master's rounded value
        value = torch.where(weights != master.to(weights.dtype), weights.to(master.dtype), master)
    if decoupled:
        value = value * kept
    else:
        slope = slope + value * kept
    momentum = mean + (slope - mean) * new_mean
    energy = square * old_square + slope * slope * new_square
    value = value + rate * (momentum / (energy.sqrt() * inverse_root + eps))
    mean.copy_(momentum)
    square.copy_(energy)
    master.copy_(value)
    target = weights if rounded is None else rounded
    if target is not None:
        target.copy_(value)


@functools.cache
def _build(variant: Variant) -> None:
    def example() -> list[Any]:
        master = torch.linspace(-1.0, 1.0, LONG, dtype=variant.masters)
        numbers = torch.full((8,), 0.5, dtype=variant.masters)
        # other memory, whatever the dtype: what the compiler once saw to be the same it takes for the same ever after
        weights = None if variant.weights is None else master.to(variant.weights, copy=True)
        rounded = None if variant.rounded is None else torch.zeros(LONG, dtype=variant.rounded)
        rows = [master.flip(0).to(variant.rows) for _ in range(variant.num_rows)]
        return [variant.decoupled, numbers, master, rows, master * 0.1, master.square(), weights, rounded]

    build(_one_pass, variant, example)
