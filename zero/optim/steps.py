"""The step of an optimizer without what is around it."""

from __future__ import annotations

import torch

from zero.optim.muon import fused_step, is_fused


def has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Put there by somebody, who wants it to be called: once, with everything."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Those around its step are run by the optimizer that the user holds, once; around this one they would run again."""
    if has_step_of_its_own(optimizer):
        optimizer.step()
        return
    if is_fused(optimizer):
        fused_step(optimizer)
        return
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)
