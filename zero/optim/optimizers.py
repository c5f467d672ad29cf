"""Optimizers that torch does not have, in plain operators and element by element.

PlainAdam is Adam and AdamW with no correction of the first steps, or with moments in bf16. Lion is that of Chen et al. (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_HALF = "bfloat16"


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Returns the loss that a closure evaluates, with autograd on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class _OneByOne(torch.optim.Optimizer):
    """An optimizer that steps one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)
        return loss

    def _step(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        raise NotImplementedError


class PlainAdam(_OneByOne):
    """Adam or AdamW. Without `bias_correction` it steps by the averages as they are, which begin at zero, as BERT was trained.
    With `moments="bfloat16"` they are rounded when a step is over. The decay is AdamW's if `decoupled`, else added to
    gradients."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        bias_correction: bool = True,
        moments: str | None = None,
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**adam, "decoupled": decoupled, "bias_correction": bias_correction, "moments": moments})

    def _step(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        grad, lr, (first, second) = param.grad, group["lr"], group["betas"]
        assert grad is not None
        state = self.state[param]
        if not state:
            dtype = torch.bfloat16 if group["moments"] == _HALF else param.dtype
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        if group["weight_decay"] and group["decoupled"]:
            param.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        # `to` returns the state itself unless it is narrower.
        mean, square = (state[key].to(param.dtype) for key in ("exp_avg", "exp_avg_sq"))
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        steps = float(state["step"]) if group["bias_correction"] else float("inf")
        root = square.div(1 - second**steps).sqrt_().add_(group["eps"])
        param.addcdiv_(mean, root, value=-lr / (1 - first**steps))
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)


def has_narrow_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if any moments of the optimizer are in bf16."""
    return isinstance(optimizer, PlainAdam) and any(group["moments"] == _HALF for group in optimizer.param_groups)


class Lion(_OneByOne):
    """An optimizer that steps by `lr` against the sign of the interpolated momentum; the decay is AdamW's, apart from the
    gradient."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        grad, (now, later) = param.grad, group["betas"]
        assert grad is not None
        momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param, memory_format=torch.preserve_format))
        direction = momentum.lerp(grad, 1 - now).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
        momentum.lerp_(grad, 1 - later)
