"""DeepSpeed's Adams, as torch's: the same numbers, with the kernels of `kernels=`."""

from __future__ import annotations

from typing import Any

import torch


def FusedAdam(
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
    """torch's fused AdamW, or Adam without `adam_w_mode`."""
    if not bias_correction:
        raise ValueError("Cannot make an Adam with bias_correction=False: it is not served. Leave it out.")
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True)


def DeepSpeedCPUAdam(
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
    """The same; where it steps is what `offload_optimizer` says."""
    if not fp32_optimizer_states:
        raise ValueError("Cannot make an Adam with fp32_optimizer_states=False: states are fp32. Leave it out.")
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
