"""Steps an optimizer without the hooks around its step."""

from __future__ import annotations

import torch

from zero.optim.muon import fused_step, is_fused


def has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody put another `step` on the object, which is then called once, with everything."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Steps without hooks. The optimizer that the user holds runs them, once."""
    if has_step_of_its_own(optimizer):
        optimizer.step()
        return
    if is_fused(optimizer):
        fused_step(optimizer)
        return
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)
