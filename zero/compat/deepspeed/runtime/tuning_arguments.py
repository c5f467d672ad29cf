"""DeepSpeed's command-line arguments for a schedule of the learning rate, with its defaults, and a scheduler block of them."""

from __future__ import annotations

import argparse
from typing import Any

from zero.config.registry import SCHEDULES

# The defaults of the command line, which are not always those of a file. None stands for what the schedule has by default.
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
_UNSET = -1  # with which a script may leave one of those without a default out


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
    """A scheduler block for a configuration and None; or None and what is wrong."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule was not given."
    if kind not in SCHEDULES:
        return None, f"Cannot use --lr_schedule {kind}: it is not one of {', '.join(SCHEDULES)}."
    params: dict[str, Any] = {}
    _override(kind, args, params)
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The rate that a scheduler block is made from, for an optimizer to start with, and nothing; or None and what is wrong."""
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
    """The same of a OneCycle."""
    _override("OneCycle", args, params)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """The same of a WarmupLR or WarmupDecayLR."""
    _override("WarmupLR", args, params)


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """The same of a WarmupCosineLR."""
    _override("WarmupCosineLR", args, params)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """The same of all schedules."""
    for kind in _DEFAULTS:
        _override(kind, args, params)
