"""Adam's step as one pass over memory: edits adopted, gradients clipped, masters stepped and rounded; compiled."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# The dtypes of masters and of their weights, None where they are the same memory, and whether the new weights go elsewhere.
Kind = tuple[torch.dtype, torch.dtype | None, bool]
# Without it the compiler leaves out a rounding whose result is only compared, and takes every weight for an edit.
_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
_LEAST_NUMEL = 2  # of what is compiled; the compiler would make a version of its own for a single element


@dataclass(frozen=True)
class Variant:
    """What the compiler must know. Everything else may change from call to call."""

    masters: torch.dtype
    weights: torch.dtype | None
    apart: bool
    decoupled: bool  # weight decay that does not go through the moments, as in AdamW
    clips: bool


class OnePass:
    """The step of Adam and AdamW on the host.

    [Note: one code, several compilations]
    The compiler keeps what it made with the code object that it was made from, checks all of it at every call, and refuses
    after some number. Each variant therefore has a code object of its own, shared by every optimizer of the process. Its
    numbers come in a tensor and its lengths are left open, so nothing that changes in a training builds another.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def build(self, kinds: Iterable[Kind], clips: bool) -> None:
        """Waits for the compiler, so that no step has to."""
        for masters, weights, apart in kinds:
            for decoupled in {self._is_decoupled(group) for group in self._inner.param_groups}:
                for clipped in {False, clips}:
                    _try(Variant(masters, weights, apart, decoupled, clipped))

    @torch.no_grad()
    def step(
        self,
        group: dict[str, Any],
        master: torch.nn.Parameter,
        grad: torch.Tensor,
        weights: torch.Tensor | None,
        rounded: torch.Tensor | None,
        coefficient: float,
    ) -> None:
        """Steps one master with `grad`, of which `coefficient` is taken. `weights` are compared with and `rounded` is written;
        both None where the master is the weight itself."""
        state = self._inner.state[master]
        if not state:  # as torch makes it
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
        state["step"] += 1
        numbers = torch.tensor(self._numbers(group, float(state["step"]), coefficient), dtype=master.dtype)
        apart = weights is not None and rounded is not None and weights.data_ptr() != rounded.data_ptr()
        dtype = None if weights is None else weights.dtype
        variant = Variant(master.dtype, dtype, apart, self._is_decoupled(group), coefficient != 1.0)
        run = _compiled(variant) if master.numel() >= _LEAST_NUMEL else _one_pass
        run(
            variant.decoupled,
            variant.clips,
            numbers,
            master.detach(),
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            weights,
            rounded if apart else None,
        )

    def _is_decoupled(self, group: dict[str, Any]) -> bool:
        return bool(group.get("decoupled_weight_decay", isinstance(self._inner, torch.optim.AdamW)))

    def _numbers(self, group: dict[str, Any], step: float, coefficient: float) -> tuple[float, ...]:
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
        kept = 1.0 - lr * decay if self._is_decoupled(group) else decay
        rate, inverse_root = -lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5
        sign = -1.0 if group["maximize"] else 1.0
        return coefficient, sign, kept, 1.0 - beta1, beta2, 1.0 - beta2, rate, inverse_root, float(group["eps"])


def _one_pass(
    decoupled: bool,
    clips: bool,
    numbers: torch.Tensor,
    master: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor | None,
    rounded: torch.Tensor | None,
) -> None:
    coefficient, sign, kept, new_mean, old_square, new_square, rate, inverse_root, eps = numbers.unbind()
    value, slope = master, grad
    if weights is not None:  # an edit is where a weight is not its master's rounded value
        value = torch.where(weights != master.to(weights.dtype), weights.to(master.dtype), master)
    if clips:
        slope = slope * coefficient
        grad.copy_(slope)
    slope = slope * sign
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
    if weights is not None:
        (weights if rounded is None else rounded).copy_(value)


@functools.cache
def _compiled(variant: Variant) -> Callable[..., None]:
    name = "_".join(str(part).removeprefix("torch.") for part in vars(variant).values())
    code = _one_pass.__code__.replace(co_name=f"one_pass_{name}")
    return torch.compile(types.FunctionType(code, globals()), dynamic=True, fullgraph=True, options=_OPTIONS)


@functools.cache
def _try(variant: Variant) -> None:
    """Builds, by running: the compiler works at the first call."""
    masters = [torch.zeros(64, dtype=variant.masters) for _ in range(4)]
    weights = None if variant.weights is None else torch.zeros(64, dtype=variant.weights)
    rounded = torch.zeros(64, dtype=variant.weights) if variant.apart else None
    numbers = torch.zeros(9, dtype=variant.masters)
    with torch.no_grad():
        _compiled(variant)(variant.decoupled, variant.clips, numbers, *masters, weights, rounded)
