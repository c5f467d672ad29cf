"""The names of `deepspeed.utils`, `deepspeed.checkpoint` and `deepspeed.compression`: whole values, the log.

`import zero.compat.deepspeed.utils` gives the part of it that __init__.py has in its table.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zero.checkpoint.export import export, read_weights
from zero.checkpoint.weight_files import write_torch
from zero.compat.deepspeed import comm
from zero.engine.timers import ThroughputTimer  # noqa: F401 - a name of deepspeed.utils.timer
from zero.engine.timers import WallClockTimers as SynchronizedWallClockTimer  # noqa: F401 - as the one above
from zero.sharding import whole_values
from zero.sharding.optimizer import optimizer_of
from zero.sharding.optimizer_state import lies_nowhere

logger = logging.getLogger("zero")
Function = TypeVar("Function", bound=Callable[..., Any])

log_levels = {name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
TIME_EPSILON = 1e-6


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns the global gradient, in fp32, between backward and step; None if there is none. A collective."""
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
    """Returns the exact value of a weight; None if it is not trained. A collective."""
    optimizer = optimizer_of(param)
    if optimizer is None or lies_nowhere(optimizer.sharding, optimizer.sharding.params.index[id(param)]):
        return None
    return whole_values.whole_master(optimizer, param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the exact value of a weight, and the weight to its rounded value; every rank passes the same. Not a collective."""
    whole_values.set_master(_needed(param), param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Returns one entry of the optimizer's state, such as exp_avg, whole; None if there is none. A collective."""
    optimizer = optimizer_of(param)
    return None if optimizer is None else optimizer.whole_state(param).get(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets one entry of the optimizer's state; every rank passes the same. Not a collective."""
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
    """Logs on these ranks; on all ranks if none are given, or if -1 is among them."""
    rank = comm.get_rank() if comm.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs as `log_dist` does, the first time that a message is given."""
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


@functools.lru_cache(None)
def warning_once(*args: str, **options: str) -> None:
    """Logs a warning the first time that it is given."""
    logger.warning(*args, **options)  # type: ignore[arg-type]


def get_log_level_from_string(log_level_str: str) -> int:
    """Returns the number of a level."""
    level: int = getattr(logging, log_level_str.upper())
    return level


def get_current_level() -> int:
    """Returns the level of the logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Returns True if the logger lets messages of that level or a lower one through."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


class NoopTimer:
    """Timers by name that measure nothing."""

    class Timer:
        """A timer that measures nothing."""

        def start(self) -> None:
            """Does nothing."""

        def reset(self) -> None:
            """Does nothing."""

        def stop(self, **_: Any) -> None:
            """Does nothing."""

        def elapsed(self, **_: Any) -> int:
            return 0

        def mean(self) -> int:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, NoopTimer.Timer]:
        return {}

    def log(self, names: Iterable[str], *_: Any, **__: Any) -> None:
        """Does nothing."""

    def get_mean(self, names: Iterable[str], *_: Any, **__: Any) -> None:
        """Does nothing."""


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Returns the state dict of the plain model, with fp32 weights. Not a collective."""
    if exclude_frozen_parameters:
        raise ValueError(
            "Cannot leave out frozen parameters here: a checkpoint does not say which are. Save it with "
            "exclude_frozen_parameters=True."
        )
    state = read_weights(checkpoint_dir, tag)[1]
    floats = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return {**state, **{name: value.float() for name, value in floats.items()}}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Returns the model, on the host, with the checkpoint's fp32 weights. Not a collective."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes them into a folder: `model.safetensors`, or `pytorch_model.bin` without `safe_serialization`. Not a collective."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        export(checkpoint_dir, folder / "model.safetensors", tag, dtype=torch.float32)
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        write_torch(folder / "pytorch_model.bin", lambda _: state)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns the same dict, list or tuple with copies of its tensors, which have no more memory than they show."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Returns the attribute of that name, such as "decoder.layers.0.fc"."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute of that name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
