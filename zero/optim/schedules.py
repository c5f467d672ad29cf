"""The learning rate schedules that a configuration can name, with the numbers that DeepSpeed's have.

Step 0 is what holds before the first optimizer step. DeepSpeed's warm-ups count from the step after it, so a rate computed for
"iteration i" below holds at step i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero.config.schema import ScheduleSpec

# The settings of the lowest and the highest rate, by the schedules' own names.
_LIMITS = {
    "min_lrs": ("warmup_min_lr", "cycle_min_lr", "lr_range_test_min_lr"),
    "max_lrs": ("warmup_max_lr", "cycle_max_lr"),
}
DEEPSPEEDS_ITERATION = "last_batch_iteration"  # the one key in the states of DeepSpeed's schedules
# DeepSpeed's OneCycle sets the second moment's decay to this while it cycles the first one's.
_CYCLED_SECOND_BETA = 0.99


class Schedule(LRScheduler):
    """A schedule by name. It sets each group's rate, and the betas of a cycle that moves momentum, as a function of the
    step."""

    def __init__(self, optimizer: Optimizer, spec: ScheduleSpec) -> None:
        self.kind = spec.kind
        self._groups = _per_group(spec, len(optimizer.param_groups))
        self._rate = _RATES[spec.kind]
        self._momentum = spec.kind == "OneCycle" and bool(spec.kwargs["cycle_momentum"])
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Returns the rates at the current step, a pure function of it. Sets the betas too, so that both are of one step."""
        for group, settings in zip(self.optimizer.param_groups, self._groups, strict=True):
            if self._momentum and "betas" in group:
                group["betas"] = (one_cycle_momentum(self.last_epoch, settings), _CYCLED_SECOND_BETA)
        return [self._rate(self.last_epoch, float(base), settings)
                for base, settings in zip(self.base_lrs, self._groups, strict=True)]

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next step; or, as DeepSpeed's do, to the one after that iteration, of which 0 is the first."""
        if epoch is not None:
            self.last_epoch = epoch
        super().step()

    def get_lr_ratio(self) -> float:
        """Returns the factor by which a WarmupCosineLR multiplies each group's own rate at the current step."""
        if self.kind != "WarmupCosineLR":
            raise ValueError(f"Cannot return get_lr_ratio() of a {self.kind}: only WarmupCosineLR has one. Call get_lr().")
        return self._rate(self.last_epoch, 1.0, self._groups[0])

    def __getattr__(self, name: str) -> Any:
        """Returns, by DeepSpeed's names, the rates between which each group moves, and a setting that is one value for all
        groups."""
        groups = vars(self).get("_groups") or [{}]
        limits = [setting for setting in _LIMITS.get(name, ()) if setting in groups[0]]
        if limits:
            given = [settings[limits[0]] for settings in groups]
            return [float(base) if rate is None else rate for base, rate in zip(self.base_lrs, given, strict=True)]
        if name in groups[0] and all(settings[name] == groups[0][name] for settings in groups):
            return groups[0][name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_mom(self) -> list[Any] | None:
        """Returns the betas of each group, or its momentum, if this schedule moves them; else None. Before the first step they
        are the cycle's first value, as in DeepSpeed, although the optimizer has its lowest."""
        if not self._momentum:
            return None
        if self.last_epoch == 0:
            tops = [settings["cycle_max_mom"] for settings in self._groups]
            return [(top, _CYCLED_SECOND_BETA) if "betas" in group else group.get("momentum")
                    for top, group in zip(tops, self.optimizer.param_groups, strict=True)]
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns where the schedule stands. Its settings are in the configuration."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(base) for base in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved state, also of DeepSpeed's schedules, which know their iteration alone. Sets the rates at once:
        the optimizer's state need not have them."""
        if DEEPSPEEDS_ITERATION in state_dict:
            self.last_epoch = state_dict[DEEPSPEEDS_ITERATION] + 1
        else:
            self.base_lrs = list(state_dict["base_lrs"])
            self.last_epoch = state_dict["last_epoch"]
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            _set_rate(group, rate)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def build_schedule(spec: ScheduleSpec, optimizer: Optimizer) -> Schedule:
    """Makes the schedule of a recipe on an optimizer. A list in the recipe needs one entry for each parameter group."""
    return Schedule(optimizer, spec)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    # A rate that is a tensor is filled, not replaced: a captured graph or the user may hold it.
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _per_group(spec: ScheduleSpec, num_groups: int) -> list[dict[str, Any]]:
    for name, value in spec.kwargs.items():
        if isinstance(value, tuple) and len(value) != num_groups:
            raise ValueError(f"Cannot use {len(value)} values for {spec.kind}.{name}: the optimizer has {num_groups} parameter "
                             "groups. Give one value, or one for each group.")
    return [{name: value[i] if isinstance(value, tuple) else value for name, value in spec.kwargs.items()}
            for i in range(num_groups)]


def _warmed(iteration: int, settings: Mapping[str, Any]) -> float:
    """Returns how much of the warm-up is done, from 0 to 1; 1 once it is over."""
    # The warm-up takes at least two steps, because the logarithm of one is zero, by which it would divide.
    steps = max(2, settings["warmup_num_steps"])
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1) / math.log(steps) if settings["warmup_type"] == "log" else iteration / steps


def warmup(step: int, base: float, settings: Mapping[str, Any]) -> float:
    """Rises from the lower to the upper rate, and stays there."""
    low: float = settings["warmup_min_lr"]
    top: float = base if settings["warmup_max_lr"] is None else settings["warmup_max_lr"]
    return low if step == 0 else low + (top - low) * _warmed(step - 1, settings)


def warmup_decay(step: int, base: float, settings: Mapping[str, Any]) -> float:
    """Rises from the lower to the upper rate, then falls in a line that reaches the lower one at the last step."""
    low: float = settings["warmup_min_lr"]
    top: float = settings["warmup_max_lr"]
    steps, total, iteration = max(2, settings["warmup_num_steps"]), settings["total_num_steps"], step - 1
    if step == 0:
        return low
    part = _warmed(iteration, settings) if iteration < steps else max(0.0, (total - iteration) / max(1.0, total - steps))
    return low + (top - low) * part


def warmup_cosine(step: int, base: float, settings: Mapping[str, Any]) -> float:
    """Rises to the group's own rate, then falls along half a cosine to a fraction of it."""
    start: float = settings["warmup_min_ratio"]
    end: float = settings["cos_min_ratio"]
    steps, iteration = max(2, settings["warmup_num_steps"]), step - 1
    if step == 0:
        return 0.0
    if iteration < steps:
        return base * (start + (1.0 - start) * _warmed(iteration, settings))
    done = min(1.0, (iteration - steps + 1) / max(1, settings["total_num_steps"] - steps))
    return base * max(0.0, end + (1.0 - end) * (1.0 + math.cos(math.pi * done)) / 2.0)


def range_test(step: int, base: float, settings: Mapping[str, Any]) -> float:
    """Rises from the lower rate without end, in a line or in stairs."""
    low: float = settings["lr_range_test_min_lr"]
    intervals: float = step / settings["lr_range_test_step_size"]
    if settings["lr_range_test_staircase"]:
        intervals = math.floor(intervals)
    return low * (1.0 + float(settings["lr_range_test_step_rate"]) * intervals)


def one_cycle(step: int, base: float, settings: Mapping[str, Any]) -> float:
    """Rises and falls once, then decays from the lower rate if a decay is configured."""
    low: float = settings["cycle_min_lr"]
    top: float = settings["cycle_max_lr"]
    decay_steps = _steps_after_cycle(step, settings)
    if decay_steps:
        return low / (1.0 + float(settings["decay_lr_rate"]) * decay_steps)
    return low + (top - low) * _height(step, settings)


def one_cycle_momentum(step: int, settings: Mapping[str, Any]) -> float:
    """Falls and rises once, then moves on from the upper value."""
    low: float = settings["cycle_min_mom"]
    top: float = settings["cycle_max_mom"]
    if step == 0:
        return low
    decay_steps = _steps_after_cycle(step, settings)
    if decay_steps:
        return top * (1.0 + float(settings["decay_mom_rate"]) * decay_steps)
    return top - (top - low) * _height(step, settings)


def _halves(settings: Mapping[str, Any]) -> tuple[int, int]:
    first, second = settings["cycle_first_step_size"], settings["cycle_second_step_size"]
    return first, first if second is None else second


def _steps_after_cycle(step: int, settings: Mapping[str, Any]) -> float:
    """Returns the decay intervals since the cycle ended; 0 within it, and always 0 if no decay was asked for."""
    beyond = step - sum(_halves(settings))
    size: float = settings["decay_step_size"]
    return beyond / size if beyond >= 1 and size else 0.0


def _height(step: int, settings: Mapping[str, Any]) -> float:
    """Returns where in the cycle the step is: 0 at its ends and after it, 1 at its top; in stairs where stairs were asked
    for."""
    first, second = _halves(settings)
    stairs: int = settings["cycle_first_stair_count"]
    rise, half = step, first
    if step > first:
        rise, half = first + second - step, second
        stairs = stairs if settings["cycle_second_stair_count"] is None else settings["cycle_second_stair_count"]
    if rise <= 0:
        return 0.0
    # Computed in whole numbers, because a quotient a little below a stair would be rounded down to the one before.
    return rise * stairs // half / stairs if stairs > 0 else rise / half


_RATES = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "OneCycle": one_cycle,
    "LRRangeTest": range_test,
}
