"""`deepspeed.utils`: values of one parameter, whole, and a few things that scripts use."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from zero.compat.deepspeed import comm
from zero.compat.deepspeed.absent import ABSENT, absent
from zero.compat.deepspeed.compression.helper import recursive_getattr as recursive_getattr
from zero.compat.deepspeed.compression.helper import recursive_setattr as recursive_setattr
from zero.compat.deepspeed.utils import groups as groups
from zero.compat.deepspeed.utils import timer as timer
from zero.sharding import whole_values
from zero.sharding.live import optimizer_of
from zero.sharding.optimizer_state import lies_nowhere

logger = logging.getLogger("zero")
Function = TypeVar("Function", bound=Callable[..., Any])


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The global gradient, in fp32, between backward and step; None where there is none. A collective."""
    optimizer = optimizer_of(param)
    return param.grad if optimizer is None else whole_values.whole_grad(optimizer, param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the global gradient; every rank passes the same. A collective."""
    whole_values.set_grad(_needed(param), param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Sets each global gradient to what the function makes of it. A collective."""
    for param in param_list:
        grad = safe_get_full_grad(param) if param.requires_grad else None
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The exact value of a weight; None where it is not trained. A collective."""
    optimizer = optimizer_of(param)
    if optimizer is None or lies_nowhere(optimizer.sharding, optimizer.sharding.params.index[id(param)]):
        return None
    return whole_values.whole_master(optimizer, param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the exact value of a weight, and the weight to its rounded value; every rank passes the same. No collective."""
    whole_values.set_master(_needed(param), param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """One entry of the optimizer's state, such as exp_avg, whole; None where there is none. A collective."""
    optimizer = optimizer_of(param)
    return None if optimizer is None else optimizer.whole_state(param).get(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets one entry of the optimizer's state; every rank passes the same. No collective."""
    whole_values.set_state(_needed(param), param, optim_state_key, value)


def _needed(param: nn.Parameter) -> Any:
    optimizer = optimizer_of(param)
    if optimizer is None:
        raise ValueError(
            f"Cannot set values of a parameter of shape {tuple(param.shape)}: no sharded optimizer manages it. Call this after "
            "initialize, with a parameter that is trained."
        )
    return optimizer


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[Any]) -> list[nn.Module]:
    """Does nothing, since ranks may take different branches. Returns the modules of these classes, or names of classes."""
    given = list(leaf_module_classes)
    classes = tuple(each for each in given if isinstance(each, type))
    return [module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in given]


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[Any]) -> list[nn.Module]:
    """Does nothing."""
    return set_z3_leaf_modules(model, leaf_module_classes)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns none: no module is a leaf here, as ranks may take different branches."""
    return []


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Does nothing."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns False, as for any module."""
    return False


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; on all where none are given, or where -1 is among them."""
    rank = comm.get_rank() if comm.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, the first time that a message is given."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of this library's logger, or of another, by its name."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def instrument_w_nvtx(func: Function) -> Function:
    """Returns the function as it is: torch.profiler shows what runs."""
    return func


class RepeatingLoader:
    """A loader that begins again at its end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
