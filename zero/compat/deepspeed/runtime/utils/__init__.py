"""`deepspeed.runtime.utils`: what scripts take from it."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Iterable
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


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The same on a device: tensors, also those in lists, tuples and dicts. With `criterion_func` a tensor for which it is
    true moves in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple, dict)):
        return _of_each(item, lambda each: move_to_device(each, device, criterion_func))
    return item.to(device)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """The same with copies on a device of what `criterion_func` is true for, also in lists, tuples and dicts; the rest is left
    as it is."""
    if criterion_func(item):
        return item.to(device)
    return _of_each(item, lambda each: copy_to_device(each, device, criterion_func))


def _of_each(item: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: function(each) for key, each in item.items()}
    if isinstance(item, (list, tuple)):
        return (list if isinstance(item, list) else tuple)(function(each) for each in item)
    return item


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
