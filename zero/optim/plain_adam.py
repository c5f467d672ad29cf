"""Adam and AdamW in plain operators, with what torch's have not: no correction of the first steps, or moments in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_HALF = "bfloat16"


class PlainAdam(torch.optim.Optimizer):
    """Without `bias_correction` it steps by the averages as they are, which begin at zero, as BERT was trained. With
    `moments="bfloat16"` they are rounded when a step is over. The decay is AdamW's if `decoupled`, else added to gradients."""

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
        mean, square = (state[key].to(param.dtype) for key in ("exp_avg", "exp_avg_sq"))  # themselves, unless they are narrower
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        steps = float(state["step"]) if group["bias_correction"] else float("inf")
        root = square.div(1 - second**steps).sqrt_().add_(group["eps"])
        param.addcdiv_(mean, root, value=-lr / (1 - first**steps))
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)


def has_narrow_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its moments are in bf16."""
    return isinstance(optimizer, PlainAdam) and any(group["moments"] == _HALF for group in optimizer.param_groups)
