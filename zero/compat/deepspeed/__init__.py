"""DeepSpeed's names for what its users' scripts import: `import zero.compat.deepspeed as deepspeed` is the whole change.

They are those of DeepSpeed 0.19.8; nothing of it is imported. A name that is missing here raises where it is used, and says
what to write instead.
"""

from __future__ import annotations

import importlib
from typing import Any

from zero.compat.deepspeed import checkpoint as checkpoint
from zero.compat.deepspeed import checkpointing as checkpointing
from zero.compat.deepspeed import comm as comm
from zero.compat.deepspeed import compression as compression
from zero.compat.deepspeed import moe as moe
from zero.compat.deepspeed import ops as ops
from zero.compat.deepspeed import pipe as pipe
from zero.compat.deepspeed import runtime as runtime
from zero.compat.deepspeed import utils as utils
from zero.compat.deepspeed import zero as zero
from zero.compat.deepspeed.absent import ABSENT, absent, is_known
from zero.compat.deepspeed.accelerator import get_accelerator as get_accelerator
from zero.compat.deepspeed.accelerator import set_accelerator as set_accelerator
from zero.compat.deepspeed.arguments import add_config_arguments as add_config_arguments
from zero.compat.deepspeed.comm import init_distributed as init_distributed
from zero.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from zero.compat.deepspeed.runtime.lr_schedules import add_tuning_arguments as add_tuning_arguments
from zero.compat.deepspeed.utils import log_dist as log_dist
from zero.compat.deepspeed.utils import logger as logger
from zero.config.deepspeed.mapping import ConfigProblems as DeepSpeedConfigError
from zero.engine.engine import Engine as DeepSpeedEngine
from zero.engine.initialize import initialize as initialize
from zero.sharding.optimizer import ShardedOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedConfigError", "DeepSpeedEngine", "DeepSpeedOptimizer", "add_config_arguments", "add_tuning_arguments",
           "get_accelerator", "init_distributed", "initialize", "log_dist", "logger", "set_accelerator"]  # fmt: skip

dist = comm  # as it is called there once a group is up

__version__ = version = "0.19.8"  # whose names these are
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__ = __git_branch__ = git_hash = git_branch = None


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    if is_known(name):  # import deepspeed imports it there
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
