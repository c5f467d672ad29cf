"""Optimizers and learning rate schedules by name: the settings of each, their ranges and their defaults.

It has data and checks only. `zero/optim/schedules.py` and the engine build what is described.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Value = bool | int | float | str | None | tuple[float, ...]
Check = Callable[[str, object], Value]


class Setting(NamedTuple):
    """A named setting: its default, and the check that makes a plain value of what was given."""

    default: object
    check: Check


class Required:
    """The default of a setting that must be given."""


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns ' Did you mean ...?' if one of the known names is close, otherwise nothing."""
    by_lower = {choice.lower(): choice for choice in sorted(known)}
    near = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=cutoff)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def complete(kind: str, settings: Mapping[str, Setting], given: Mapping[str, object]) -> dict[str, Value]:
    """Returns every setting of a recipe, checked: given values, and defaults for the rest."""
    known = ", ".join(settings)
    problems = [
        f"Cannot use {name!r} for {kind}: it has no such setting. Use one of {known}.{did_you_mean(name, settings)}"
        for name in given
        if name not in settings
    ]
    values: dict[str, Value] = {}
    for name, setting in settings.items():
        value = given.get(name, setting.default)
        if value is Required:
            problems.append(f"Cannot make {kind}: {name!r} is missing and has no default. Give it in the params of {kind}.")
            continue
        try:
            values[name] = value if name not in given and value is None else setting.check(f"{kind}.{name}", value)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return values


def real(name: str, value: object) -> float:
    """Returns a finite number. Refuses a bool, and an integer too large for a float, which would be rounded to infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"Cannot use {name} {brief(value)}: it has to be a number. Write a plain number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"Cannot use {name} {brief(value)}: it has to be finite. Write a finite number.")
    return number


def whole(name: str, value: object) -> int:
    """Returns an integer: 1e3 is one, 1.5 and True are refused."""
    number = real(name, value)
    if number != math.floor(number):
        raise ValueError(f"Cannot use {name} {brief(value)}: it has to be a whole number. Write it without a fraction.")
    return value if isinstance(value, int) else int(number)


def brief(value: object) -> str:
    """Returns a value as an error message shows it: never longer than a line."""
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "an integer of more than 60 digits"
    return text if len(text) <= 80 else text[:77] + "..."


def _between(least: float, most: float, *, open_left: bool = False, open_right: bool = False) -> Check:
    def check(name: str, value: object) -> Value:
        number = real(name, value)
        low = number > least if open_left else number >= least
        high = number < most if open_right else number <= most
        if not (low and high):
            left, right = "(" if open_left else "[", ")" if open_right else "]"
            raise ValueError(f"Cannot use {name} {brief(value)}: it has to lie in {left}{least:g}, {most:g}{right}. "
                             "Write a value in that range.")
        return number

    return check


def _at_least(least: int) -> Check:
    def check(name: str, value: object) -> Value:
        number = whole(name, value)
        if number < least:
            raise ValueError(f"Cannot use {name} {brief(value)}: it has to be at least {least}. Write a larger whole number.")
        return number

    return check


def _one_of(*choices: str) -> Check:
    def check(name: str, value: object) -> Value:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"Cannot use {name} {brief(value)}: it has to be one of {', '.join(choices)}."
                             f"{did_you_mean(value, choices) or ' Write one of them.'}")
        return value

    return check


def _pair_of(first: Check, second: Check) -> Check:
    def check(name: str, value: object) -> Value:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise ValueError(f"Cannot use {name} {brief(value)}: it has to be two numbers. Write a list of two.")
        return (real(name, first(f"{name}[0]", value[0])), real(name, second(f"{name}[1]", value[1])))

    return check


def _per_group(one: Check) -> Check:
    """Checks one value for all parameter groups, or a list with one for each; only with the optimizer is it known how many."""

    def check(name: str, value: object) -> Value:
        if not isinstance(value, (list, tuple)):
            return one(name, value)
        if not value:
            raise ValueError(f"Cannot use an empty list for {name}: it takes one number, or one for each parameter group. "
                             "Write a number.")
        return tuple(real(name, one(f"{name}[{i}]", item)) for i, item in enumerate(value))

    return check


def _flag(name: str, value: object) -> Value:
    if not isinstance(value, bool):
        raise ValueError(f"Cannot use {name} {brief(value)}: it has to be true or false. Write one of these.")
    return value


def _maybe(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


_not_negative = _between(0.0, math.inf)
_positive = _between(0.0, math.inf, open_left=True)
_decay_of_mean = _between(0.0, 1.0, open_right=True)
_ratio = _between(0.0, 1.0)
_shrinks = _between(0.0, 1.0, open_left=True, open_right=True)
_grows = _between(1.0, math.inf, open_left=True)
_betas = Setting((0.9, 0.999), _pair_of(_decay_of_mean, _decay_of_mean))
_no_decay = Setting(0.0, _not_negative)
_off = Setting(False, _flag)
_own_rate = Setting(None, _maybe(_not_negative))


def _rate(default: float) -> Setting:
    return Setting(default, _not_negative)


def _adam_like(lr: float, **more: Setting) -> dict[str, Setting]:
    return {"lr": _rate(lr), "betas": _betas, "eps": Setting(1e-8, _not_negative), "weight_decay": _no_decay, **more,
            "maximize": _off, "foreach": Setting(None, _maybe(_flag))}


def _plain(lr: float, **more: Setting) -> dict[str, Setting]:
    return {"lr": _rate(lr), **more, "weight_decay": _no_decay, "maximize": _off, "foreach": Setting(None, _maybe(_flag))}


OPTIMIZERS: dict[str, dict[str, Setting]] = {
    "AdamW": _adam_like(1e-3, amsgrad=_off),
    "Adam": _adam_like(1e-3, amsgrad=_off),
    "SGD": _plain(1e-3, momentum=_no_decay, dampening=Setting(0.0, real), nesterov=_off),
    "Adagrad": _plain(1e-2, lr_decay=_no_decay, initial_accumulator_value=_no_decay, eps=Setting(1e-10, _not_negative)),
    "RMSprop": _plain(
        1e-2, alpha=Setting(0.99, _not_negative), eps=Setting(1e-8, _not_negative), momentum=_no_decay, centered=_off
    ),
    "PlainAdam": {"lr": _rate(1e-3), "betas": _betas, "eps": Setting(1e-8, _not_negative), "weight_decay": _no_decay,
                  "decoupled": Setting(True, _flag), "bias_correction": Setting(True, _flag),
                  "moments": Setting(None, _maybe(_one_of("bfloat16")))},
    "Lion": {"lr": _rate(1e-3), "betas": _betas, "weight_decay": _no_decay},
    "Adadelta": _plain(1.0, rho=Setting(0.9, _ratio), eps=Setting(1e-6, _not_negative)),
    "Adamax": _adam_like(2e-3),
    "NAdam": _adam_like(2e-3, momentum_decay=Setting(4e-3, _not_negative), decoupled_weight_decay=_off),
    "RAdam": _adam_like(1e-3, decoupled_weight_decay=_off),
    "Muon": {  # the settings of matrices; the other parameters get AdamW
        "lr": _own_rate, "muon_lr": _own_rate, "adam_lr": _own_rate, "momentum": Setting(0.95, _decay_of_mean),
        "weight_decay": _no_decay, "betas": Setting((0.9, 0.95), _pair_of(_decay_of_mean, _decay_of_mean)),
        "eps": Setting(1e-10, _not_negative), "ns_method": Setting("gram", _one_of("gram", "standard")),
    },
    "ASGD": _plain(1e-2, lambd=Setting(1e-4, real), alpha=Setting(0.75, real), t0=Setting(1e6, real)),
    "Rprop": {
        "lr": _rate(1e-2),
        "etas": Setting((0.5, 1.2), _pair_of(_shrinks, _grows)),
        "step_sizes": Setting((1e-6, 50.0), _pair_of(_not_negative, _positive)),
        "maximize": _off,
        "foreach": Setting(None, _maybe(_flag)),
    },
}

# Optimizers of those for which torch has one kernel that does the whole update.
FUSED_IN_TORCH = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})

_NOT_TORCHS = "torch has none of that name. Make one of a package that has it, and pass it as optimizer="
_BY_HAND = "it has no recipe here. Make it, and pass it as optimizer="
_ONE_BIT = "its compressed communication replaces the reduction that keeps sharded training equal to plain training"
_MUP = "its per-parameter rates come from the mup package; build it there and pass it as optimizer="
OPTIMIZERS_REFUSED: dict[str, str] = {
    "Lamb": _NOT_TORCHS,
    "FusedLamb": "it divides by the norm of all gradients together, and each rank would have its own part of them alone",
    "Adafactor": _BY_HAND,
    "LBFGS": "it evaluates the loss several times a step, each time with other weights",
    "Shampoo": _NOT_TORCHS,
    "SparseAdam": "sparse gradients are not sharded",
    "OneBitAdam": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
}

_warmup = {"warmup_num_steps": Setting(1000, _at_least(1)), "warmup_type": Setting("log", _one_of("log", "linear"))}
_total = {"total_num_steps": Setting(Required, _at_least(1))}
_group_rate = _per_group(_not_negative)
SCHEDULES: dict[str, dict[str, Setting]] = {
    "WarmupLR": {
        "warmup_min_lr": Setting(0.0, _group_rate), "warmup_max_lr": Setting(None, _maybe(_group_rate)), **_warmup,
    },
    "WarmupDecayLR": {
        **_total, "warmup_min_lr": Setting(0.0, _group_rate), "warmup_max_lr": Setting(0.001, _group_rate), **_warmup,
    },
    "WarmupCosineLR": {
        **_total, "warmup_min_ratio": Setting(0.0, _not_negative), **_warmup, "cos_min_ratio": Setting(0.0001, _not_negative),
    },
    "OneCycle": {
        "cycle_min_lr": Setting(Required, _group_rate),
        "cycle_max_lr": Setting(Required, _group_rate),
        "decay_lr_rate": Setting(0.0, _not_negative),
        "cycle_first_step_size": Setting(2000, _at_least(1)),
        "cycle_second_step_size": Setting(None, _maybe(_at_least(0))),
        "cycle_first_stair_count": Setting(0, whole),
        "cycle_second_stair_count": Setting(None, _maybe(whole)),
        "decay_step_size": Setting(0, _not_negative),
        "cycle_momentum": Setting(True, _flag),
        "cycle_min_mom": Setting(0.8, _per_group(_decay_of_mean)),
        "cycle_max_mom": Setting(0.9, _per_group(_decay_of_mean)),
        "decay_mom_rate": Setting(0.0, _not_negative),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": Setting(1e-3, _group_rate),
        "lr_range_test_step_size": Setting(2000, _at_least(1)),
        "lr_range_test_step_rate": Setting(1.0, _not_negative),
        "lr_range_test_staircase": Setting(False, _flag),
    },
}


def canonical(kind: object, known: Mapping[str, object], refused: Mapping[str, str], what: str) -> str:
    """Returns the known name that `kind` spells in any case. Raises for others, with the reason or the nearest known name."""
    if not isinstance(kind, str):
        raise ValueError(f"Cannot use {brief(kind)} as {what}: it is not a name. Use one of {', '.join(known)}.")
    spelled = {name.lower(): name for name in known}
    if kind.lower() in spelled:
        return spelled[kind.lower()]
    for name, why in refused.items():
        if name.lower() == kind.lower():
            raise ValueError(f"Cannot use the {what} {kind!r}: {why}. Use one of {', '.join(known)}.")
    raise ValueError(f"Cannot use the {what} {kind[:60]!r}: none has that name. Use one of {', '.join(known)}."
                     f"{did_you_mean(kind, known)}")
