"""Adam's step as one compiled pass over memory."""

from __future__ import annotations

from zero.runtime.compiled import step_adam
from zero.runtime.one_pass import Elements, Gradient, Settings


class CompiledAdam:
    name = "compiled"
    lacks = ("amsgrad", "capturable", "differentiable")

    def step(self, settings: Settings, gradient: Gradient, elements: Elements) -> None:
        masters, moments, weights, rounded, _ = elements
        factors = (*gradient.factors, -1.0) if settings.maximize else gradient.factors
        step_adam(_numbers(settings), settings.decoupled, gradient.rows, factors, masters, moments, weights, rounded)


def _numbers(settings: Settings) -> tuple[float, ...]:
    """In the order of `Numbers` in passes.cpp."""
    lr, decay, (beta1, beta2) = settings.lr, settings.weight_decay, settings.betas
    kept = 1.0 - lr * decay if settings.decoupled else decay
    rate, inverse_root = -lr / (1.0 - beta1**settings.step), (1.0 - beta2**settings.step) ** -0.5
    return kept, 1.0 - beta1, beta2, 1.0 - beta2, rate, inverse_root, settings.eps
