"""The loss scale of a training: of the configuration, the default for fp16 weights, or one that was loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from zero.comm import backwards
from zero.config.schema import PROPAGATES_FP16, ZeroConfig
from zero.config.schema import LossScale as LossScaleConfig
from zero.plan.scaling import LossScale, Scaling


def with_loss_scale(config: ZeroConfig, optimizer: torch.optim.Optimizer) -> ZeroConfig:
    """Returns the configuration with the default loss scale if weights are fp16, whose gradients would underflow without one.
    A scale is found by skipping the steps that it makes overflow."""
    params = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
    # Weights that the user made fp16, of which the configuration says nothing.
    came_so = config.dtype is None and any(param.dtype == torch.float16 for param in params)
    if not came_so and config.dtype != "float16":
        return config
    if config.on_nonfinite == "propagate" and "on_nonfinite" in config.model_fields_set:
        raise ValueError(PROPAGATES_FP16)
    on_nonfinite = "skip" if config.on_nonfinite == "propagate" else config.on_nonfinite
    return config.model_copy(update={"loss_scale": config.loss_scale or LossScaleConfig(), "on_nonfinite": on_nonfinite})


def check_joining(config: ZeroConfig, dtypes: Iterable[torch.dtype]) -> None:
    """Refuses fp16 weights in a training that has no loss scale for their gradients, or applies what is not finite."""
    if torch.float16 in dtypes and (config.loss_scale is None or config.on_nonfinite == "propagate"):
        raise ValueError(
            "Cannot add float16 weights: this training was sharded without a loss scale, and their gradients would overflow or "
            "vanish. Shard with loss_scale='dynamic', or add weights in float32 or bfloat16."
        )


class LossScaler:
    """Owns the loss scale, and the factors that it puts on gradients and their sums."""

    def __init__(self, config: ZeroConfig, scaling: Scaling) -> None:
        given = config.loss_scale
        self._scaling = scaling
        self._most_skips = None if given is None else given.max_skips
        self.scale = None
        if given is not None:
            window = given.window if given.dynamic else None
            self.scale = LossScale(
                given.initial,
                window,
                hysteresis=given.hysteresis,
                minimum=given.minimum,
                cooldown=given.cooldown,
                refill=given.refill_hysteresis,
            )

    @property
    def scale(self) -> LossScale | None:
        return self._scale

    @scale.setter
    def scale(self, scale: LossScale | None) -> None:
        """Sets the scale. Sums are divided by it as they are kept; gradients of a backward without it are multiplied first."""
        self._scale = scale
        self._scaling.loss_scale = 1.0 if scale is None else scale.value

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Scales a loss for a backward that the caller runs, and marks the gradients of that backward as scaled."""
        if self._scale is None:
            return loss
        scaled = loss.float() * self._scale.value
        if scaled.requires_grad:
            scaled.register_hook(self._note_scaled)  # type: ignore[no-untyped-call]
        return scaled

    def _note_scaled(self, grad: torch.Tensor) -> torch.Tensor:
        """Marks the backward that begins as scaled, and divides its gradient by the divisor that is still missing, which
        overflows nothing here. If the backward raises, its end is not called; a new window or forward resets the mark."""
        scaling = self._scaling
        grad = grad / scaling.missing_divisor
        scaling.expect_scaled()
        backwards.at_end(scaling.expect_plain)
        return grad

    @contextlib.contextmanager
    def scaled(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the loss to send backward."""
        if self._scale is not None:
            loss = loss.float() * self._scale.value  # in fp32, as the product may be beyond what fp16 can hold
        with self._scaling.scaled():
            yield loss

    def update(self, is_finite: bool) -> None:
        """Moves the scale after a step that was applied, or that was skipped because something was not finite."""
        if self._scale is not None:
            self.scale = self._scale.after(is_finite)

    @property
    def is_stuck(self) -> bool:
        """True if step after step is skipped at the smallest scale, so that no step would ever be applied."""
        return self._scale is not None and self._most_skips is not None and self._scale.stuck >= self._most_skips


def loaded_scale(now: LossScale | None, state_dict: Mapping[str, Any], under_way: bool) -> LossScale | None:
    """Returns the scale after loading. State of plain torch has none, and leaves it as it is."""
    if now is None or "loss_scale" not in state_dict:
        return now
    scale = now.at(state_dict["loss_scale"])
    if under_way and scale.value != now.value:
        raise ValueError(
            f"Cannot load a loss scale of {scale.value:g}: this window has gradients that were scaled by {now.value:g}. "
            "Load it before the first backward, or after step or zero_grad."
        )
    return scale
