"""Recomputation under DeepSpeed's names, by `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as by_torch

from zero.compat.deepspeed.absent import ABSENT, absent
from zero.compat.deepspeed.utils import logger

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` and computes it again in backward instead of keeping what it needs."""
    return by_torch.checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same without a backward inside of the backward."""
    return by_torch.checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Takes DeepSpeed's options. A warning lists those that have no effect."""
    global _configured
    given = {
        "mpu_": mpu_ is not None,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    idle = [name for name, asks in given.items() if asks]
    if idle:
        logger.warning("checkpointing.configure: %s without effect; torch.utils.checkpoint recomputes.", ", ".join(idle))
    _configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Does nothing: nothing is kept between forwards."""


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Use torch.utils.checkpoint.")
