"""DeepSpeed's Adams, as torch's: the same numbers, with the kernels of `kernels=`."""

from __future__ import annotations

from typing import Any

import torch

from zero.compat.deepspeed.absent import rest_of
from zero.optim.optimizers import PlainAdam


class _Adam(type):
    """A name that makes torch's Adams, and that they are instances of, also inside a sharded optimizer."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(getattr(instance, "inner", instance), (torch.optim.Adam, PlainAdam))  # AdamW is an Adam


class FusedAdam(metaclass=_Adam):
    """torch's fused AdamW, or Adam without `adam_w_mode`; or one of ours without bias correction."""

    def __new__(  # type: ignore[misc]  # it makes an optimizer of torch's
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **_: Any,
    ) -> torch.optim.Optimizer:
        if not bias_correction:
            return PlainAdam(params, lr, betas, eps, weight_decay, decoupled=adam_w_mode, bias_correction=False)
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True)


class DeepSpeedCPUAdam(metaclass=_Adam):
    """The same; where it steps is what `offload_optimizer` says. With `fp32_optimizer_states=False` moments are bf16."""

    def __new__(  # type: ignore[misc]  # it makes an optimizer of torch's
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        if fp32_optimizer_states:
            return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
        if amsgrad:
            raise ValueError(
                "Cannot make an Adam with amsgrad=True and fp32_optimizer_states=False: amsgrad has fp32 states. Leave one out."
            )
        kind = {"decoupled": adamw_mode, "bias_correction": bias_correction}
        return PlainAdam(model_params, lr, betas, eps, weight_decay, **kind, moments="bfloat16")


__getattr__ = rest_of(__name__, has_modules=True)
