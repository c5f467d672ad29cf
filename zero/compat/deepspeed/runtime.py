"""The names of `deepspeed.runtime`, `deepspeed.ops` and `deepspeed.checkpointing`: schedules, arguments, optimizers.

The classes make schedules and optimizers of torch's or of this library; an instance is one of the class whatever made it.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as by_torch
from torch.optim import Optimizer

import accelerators
from zero.compat.deepspeed.comm import get_rank, is_initialized
from zero.config.registry import SCHEDULES
from zero.config.schema import ScheduleSpec
from zero.engine.engine import Engine as DeepSpeedEngine  # noqa: F401 - a name of deepspeed.runtime.engine
from zero.optim.optimizers import Lion, PlainAdam
from zero.optim.schedules import Schedule, build_schedule

# The defaults of the command line, which differ from those of a file in some places. None stands for the schedule's own
# default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_step_size": 1000,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_first_step_size": 1000,
        "cycle_first_stair_count": None,
        "cycle_second_step_size": None,
        "cycle_second_stair_count": None,
        "decay_step_size": 1000,
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "decay_lr_rate": 0.0,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupCosineLR": {
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "warmup_min_ratio": 0.01,
        "cos_min_ratio": 0.01,
    },
}
_DEFAULTS["WarmupDecayLR"] = _DEFAULTS["WarmupLR"]
_RATE = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr", "WarmupLR": "warmup_max_lr",
         "WarmupDecayLR": "warmup_max_lr"}  # fmt: skip
_UNSET = -1  # a script may pass this to leave out an argument that has no default

logger = logging.getLogger("zero")
_configured = False  # `configure` was called


class _Kind(type):
    """A name that makes schedules of one kind, and that they are instances of, those of a file too."""

    def __call__(cls, optimizer: Optimizer, **params: Any) -> Schedule:
        kind = cls.__name__
        if params.pop("last_batch_iteration", -1) != -1:
            raise ValueError(f"Cannot make a {kind} with last_batch_iteration: it goes on from its state. Load its state_dict.")
        return build_schedule(ScheduleSpec.of(kind, params), optimizer)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Schedule) and instance.kind == cls.__name__


class LRRangeTest(metaclass=_Kind):
    """DeepSpeed's LRRangeTest, with its arguments by name."""


class OneCycle(metaclass=_Kind):
    """DeepSpeed's OneCycle, with its arguments by name."""


class WarmupCosineLR(metaclass=_Kind):
    """DeepSpeed's WarmupCosineLR, with its arguments by name."""


class WarmupDecayLR(metaclass=_Kind):
    """DeepSpeed's WarmupDecayLR, with its arguments by name."""


class WarmupLR(metaclass=_Kind):
    """DeepSpeed's WarmupLR, with its arguments by name."""


LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_COSINE_LR = "WarmupCosineLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_LR = "WarmupLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--lr_schedule` and the settings of all schedules. `--cycle_momentum` is read and has no effect, as in DeepSpeed
    0.19.8: a OneCycle of arguments moves momentum."""
    group = parser.add_argument_group("schedule", "of the learning rate")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(SCHEDULES)}")
    group.add_argument("--cycle_momentum", action="store_true", help="without effect: OneCycle moves momentum")
    settings = {name: default for kind in _DEFAULTS.values() for name, default in kind.items()}
    for name, default in settings.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true", help="off by default")
        else:
            kind = int if default is None else type(default)
            group.add_argument(f"--{name}", type=kind, default=default, help=f"{default} by default")
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Returns a scheduler block for a configuration and None; or None and what is wrong."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule was not given."
    if kind not in SCHEDULES:
        return None, f"Cannot use --lr_schedule {kind}: it is not one of {', '.join(SCHEDULES)}."
    params: dict[str, Any] = {}
    _override(kind, args, params)
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Returns the rate in a scheduler block, for an optimizer to start with, and an empty text; or None and what is wrong."""
    kind = config.get("type")
    if kind not in SCHEDULES or "params" not in config:
        return None, f"A block with a type among {', '.join(SCHEDULES)} and params is needed."
    if kind not in _RATE:
        return None, f"{kind} has no rate: it multiplies the optimizer's own."
    return config["params"][_RATE[kind]], ""


def _override(kind: str, args: argparse.Namespace, params: dict[str, Any]) -> None:
    for name, default in _DEFAULTS[kind].items():
        value = getattr(args, name, None)
        if value is not None and not (default is None and value == _UNSET):
            params[name] = value


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes what the arguments say of an LRRangeTest into the params of its block."""
    _override("LRRangeTest", args, params)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes what the arguments say of a OneCycle into the params of its block."""
    _override("OneCycle", args, params)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes what the arguments say of a WarmupLR or WarmupDecayLR into the params of its block."""
    _override("WarmupLR", args, params)


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes what the arguments say of a WarmupCosineLR into the params of its block."""
    _override("WarmupCosineLR", args, params)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes what the arguments say of all schedules into the params of one block."""
    for kind in _DEFAULTS:
        _override(kind, args, params)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config`, which `initialize(args=...)` reads."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="for scripts that ask; initialize is what shards")
    group.add_argument("--deepspeed_config", type=str, default=None, help="a DeepSpeed file")
    return parser


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` and computes it again in backward instead of keeping what it needs."""
    return by_torch.checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Does what `checkpoint` does, without a backward inside of the backward."""
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
    """Returns whether `configure` was called."""
    return _configured


def reset() -> None:
    """Does nothing: nothing is kept between forwards."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clips as `torch.nn.utils.clip_grad_norm_` does, which is global on parameters of a sharded optimizer."""
    if mpu is not None:
        raise ValueError("Cannot clip with mpu=: ranks do not split a model among them here. Leave mpu out.")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """Returns the norm of all, from the norms of parts."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs one line about the accelerator's memory, from rank 0; nothing without `force`."""
    if force and (not is_initialized() or get_rank() == 0):
        logger.info("%s: %s", message, accelerators.current().memory())


def empty_cache() -> None:
    """Returns the memory of torch's cache to the device."""
    accelerators.current().empty_cache()


def set_random_seed(seed: int) -> None:
    """Seeds Python's and torch's random numbers, and NumPy's if it was imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Moves tensors to a device, also those in lists, tuples and dicts, and returns the result. With `criterion_func` a tensor
    for which it is true moves in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple, dict)):
        return _of_each(item, lambda each: move_to_device(each, device, criterion_func))
    return item.to(device)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """Copies to a device what `criterion_func` is true for, also in lists, tuples and dicts, and returns the result; the rest
    is left as it is."""
    if criterion_func(item):
        return item.to(device)
    return _of_each(item, lambda each: copy_to_device(each, device, criterion_func))


def _of_each(item: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: function(each) for key, each in item.items()}
    if isinstance(item, (list, tuple)):
        return (list if isinstance(item, list) else tuple)(function(each) for each in item)
    return item


class _Adam(type):
    """A name that makes torch's Adams, and that they are instances of, also inside a sharded optimizer."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(getattr(instance, "inner", instance), (torch.optim.Adam, PlainAdam))  # AdamW is an Adam


class FusedAdam(metaclass=_Adam):
    """A name that makes torch's fused AdamW, or Adam without `adam_w_mode`; or one of ours without bias correction."""

    def __new__(  # type: ignore[misc]  # it makes an optimizer of torch's
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **_: Any,
    ) -> torch.optim.Optimizer:
        if not bias_correction:
            return PlainAdam(params, lr, betas, eps, weight_decay, decoupled=adam_w_mode, bias_correction=False)
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True)


class DeepSpeedCPUAdam(metaclass=_Adam):
    """The optimizer that `FusedAdam` makes; where it steps is what `offload_optimizer` says. With `fp32_optimizer_states=False`
    moments are bf16."""

    def __new__(  # type: ignore[misc]  # it makes an optimizer of torch's
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        if fp32_optimizer_states:
            return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
        if amsgrad:
            raise ValueError(
                "Cannot make an Adam with amsgrad=True and fp32_optimizer_states=False: amsgrad has fp32 states. Leave one out."
            )
        kind = {"decoupled": adamw_mode, "bias_correction": bias_correction}
        return PlainAdam(model_params, lr, betas, eps, weight_decay, **kind, moments="bfloat16")


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
    """The Lion that `FusedLion` makes."""

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
