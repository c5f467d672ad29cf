"""DeepSpeed's Lions, as the one of this library."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed.absent import rest_of
from zero.optim.optimizers import Lion


class _Lion(type):
    """A name that makes a Lion, and that it is an instance of, also inside a sharded optimizer."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(getattr(instance, "inner", instance), Lion)


class FusedLion(metaclass=_Lion):
    """A Lion, whose state is fp32; where it steps is what `offload_optimizer` says."""

    def __new__(  # type: ignore[misc]  # it makes a Lion
        cls, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0, **_: Any
    ) -> Lion:
        return Lion(params, lr, betas, weight_decay)


class DeepSpeedCPULion(metaclass=_Lion):
    """The same."""

    def __new__(  # type: ignore[misc]  # it makes a Lion
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Lion:
        if not fp32_optimizer_states:
            raise ValueError("Cannot make a Lion with fp32_optimizer_states=False: states are fp32. Leave it out.")
        return Lion(model_params, lr, betas, weight_decay)


__getattr__ = rest_of(__name__, has_modules=True)
