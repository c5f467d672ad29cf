"""`deepspeed.runtime.utils`: what scripts take from it."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import accelerators
from zero.compat.deepspeed.absent import ABSENT, absent
from zero.compat.deepspeed.comm import get_rank, is_initialized

logger = logging.getLogger("zero")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, which is global on parameters of a sharded optimizer."""
    if mpu is not None:
        raise ValueError("Cannot clip with mpu=: ranks do not split a model among them here. Leave mpu out.")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """The norm of all, from the norms of parts."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def see_memory_usage(message: str, force: bool = False) -> None:
    """One line of the logger about the accelerator's memory, from rank 0; nothing without `force`."""
    if force and (not is_initialized() or get_rank() == 0):
        logger.info("%s: %s", message, accelerators.current().memory())


def empty_cache() -> None:
    """Gives memory that torch keeps for later back to the device."""
    accelerators.current().empty_cache()


def set_random_seed(seed: int) -> None:
    """Seeds Python's and torch's random numbers, and NumPy's where it was imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
