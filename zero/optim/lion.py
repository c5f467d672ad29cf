"""Lion (Chen et al., 2023), which torch does not have: the sign of a moving average, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps by `lr` against the sign of the interpolated momentum; the decay is AdamW's, apart from the gradient."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

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
        grad, (now, later) = param.grad, group["betas"]
        assert grad is not None
        momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param, memory_format=torch.preserve_format))
        direction = momentum.lerp(grad, 1 - now).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
        momentum.lerp_(grad, 1 - later)
