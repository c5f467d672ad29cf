"""DeepSpeed's schedules, with its names and arguments, on any torch optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from zero.compat.deepspeed.absent import ABSENT, absent
from zero.compat.deepspeed.runtime.tuning_arguments import add_tuning_arguments as add_tuning_arguments
from zero.compat.deepspeed.runtime.tuning_arguments import get_config_from_args as get_config_from_args
from zero.compat.deepspeed.runtime.tuning_arguments import get_lr_from_config as get_lr_from_config
from zero.compat.deepspeed.runtime.tuning_arguments import override_1cycle_params as override_1cycle_params
from zero.compat.deepspeed.runtime.tuning_arguments import override_lr_range_test_params as override_lr_range_test_params
from zero.compat.deepspeed.runtime.tuning_arguments import override_params as override_params
from zero.compat.deepspeed.runtime.tuning_arguments import override_warmupCosineLR_params as override_warmupCosineLR_params
from zero.compat.deepspeed.runtime.tuning_arguments import override_warmupLR_params as override_warmupLR_params
from zero.config.schema import ScheduleSpec
from zero.optim.schedules import Schedule, build_schedule


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


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
