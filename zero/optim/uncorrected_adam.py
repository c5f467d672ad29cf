"""Adam and AdamW without the correction of their first steps, which torch has not: BERT was trained so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class UncorrectedAdam(torch.optim.Optimizer):
    """Steps by the averages as they are, which begin at zero. The decay is AdamW's if `decoupled`, else added to gradients."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)
        return loss

    def _step(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        grad, (first, second) = param.grad, group["betas"]
        assert grad is not None
        state = self.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if group["weight_decay"] and group["decoupled"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])
