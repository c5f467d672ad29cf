"""Which loss scale a training has: the configuration's, the one that fp16 weights need, or the one that was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero.config.schema import LossScale as LossScaleConfig
from zero.config.schema import ZeroConfig
from zero.plan.loss_scale import LossScale


def with_loss_scale(config: ZeroConfig, optimizer: torch.optim.Optimizer) -> ZeroConfig:
    """The configuration with the scale that fp16 weights always have, since their gradients underflow without."""
    if config.loss_scale is not None or config.dtype not in (None, "float16"):
        return config
    if config.dtype == "float16":
        return config.model_copy(update={"loss_scale": LossScaleConfig()})
    params = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
    if all(param.dtype != torch.float16 for param in params):
        return config
    # The model came in fp16, which the configuration could not know; a scale is found by skipping what it makes overflow.
    on_nonfinite = "skip" if config.on_nonfinite == "propagate" else config.on_nonfinite
    return config.model_copy(update={"loss_scale": LossScaleConfig(), "on_nonfinite": on_nonfinite})


def loss_scale_of(config: ZeroConfig) -> LossScale | None:
    """The scale that the configuration asks for, where it begins."""
    given = config.loss_scale
    if given is None:
        return None
    return LossScale(given.initial, given.window if given.dynamic else None, hysteresis=given.hysteresis, minimum=given.minimum)


def loaded_scale(now: LossScale | None, state_dict: Mapping[str, Any], under_way: bool) -> LossScale | None:
    """The scale after loading; what plain torch saved has none, and leaves it as it is."""
    if now is None or "loss_scale" not in state_dict:
        return now
    scale = now.at(state_dict["loss_scale"])
    if under_way and scale.value != now.value:
        raise ValueError(
            f"State with a loss scale of {scale.value:g} was passed, but this window has gradients that were scaled by "
            f"{now.value:g}. Load it before the first backward, or after step or zero_grad."
        )
    return scale
