"""DeepSpeed's names for what its users' scripts import: `import zero.compat.deepspeed as deepspeed` is the whole change.

They are those of DeepSpeed 0.19.8; nothing of it is imported. A name that is missing here raises where it is used, and says
what to write instead.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

from zero.compat.deepspeed import absent as _absent
from zero.compat.deepspeed import accelerator as accelerator
from zero.compat.deepspeed import comm as comm
from zero.compat.deepspeed import experts as _experts
from zero.compat.deepspeed import parameters as _parameters
from zero.compat.deepspeed import ranks as _ranks
from zero.compat.deepspeed import runtime as runtime
from zero.compat.deepspeed import sequences as _sequences
from zero.compat.deepspeed import zero as zero
from zero.compat.deepspeed.absent import ABSENT, absent, is_known, rest_of
from zero.compat.deepspeed.accelerator import get_accelerator as get_accelerator
from zero.compat.deepspeed.accelerator import set_accelerator as set_accelerator
from zero.compat.deepspeed.comm import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from zero.compat.deepspeed.comm import init_distributed as init_distributed
from zero.compat.deepspeed.parameters import log_dist as log_dist
from zero.compat.deepspeed.parameters import logger as logger
from zero.compat.deepspeed.runtime import add_config_arguments as add_config_arguments
from zero.compat.deepspeed.runtime import add_tuning_arguments as add_tuning_arguments
from zero.config.deepspeed.mapping import ConfigProblems as DeepSpeedConfigError
from zero.engine.engine import Engine as DeepSpeedEngine
from zero.engine.initialize import initialize as initialize
from zero.sharding.optimizer import ShardedOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedConfigError", "DeepSpeedEngine", "DeepSpeedOptimizer", "add_config_arguments", "add_tuning_arguments",
           "get_accelerator", "init_distributed", "initialize", "log_dist", "logger", "set_accelerator"]  # fmt: skip

dist = comm  # DeepSpeed's own name for it once a group is up

__version__ = version = "0.19.8"  # the version of DeepSpeed whose names these are
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__ = __git_branch__ = git_hash = git_branch = None


class _Part(NamedTuple):
    """A row of the table: a module of DeepSpeed's, the names that it has, and which file here has them."""

    home: ModuleType
    names: str
    others: str | None = None  # a key of _OTHERS for the other names of the module; None if it has no others


_OTHERS: dict[str, dict[str, Any]] = {  # the settings of `rest_of`, by key
    "absent": {},
    "modules": {"has_modules": True},
    "in docs": {"hint": ". docs/from-deepspeed.md has what it is called here."},
    "in torch": {"hint": ". Use torch.utils.checkpoint."},
}
_TUNING = (
    "add_tuning_arguments get_config_from_args get_lr_from_config override_1cycle_params "
    "override_lr_range_test_params override_params override_warmupCosineLR_params "
    "override_warmupLR_params"
)
_WHOLE_VALUES = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_update_full_grad_vectorized"
)
_LEAVES = "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module"
_STAGE3 = (
    "GatheredParameters Init ZeroParamStatus ZeroParamType register_external_parameter "
    "unregister_external_parameter"
)

# Modules that scripts import by their paths, each after the module that contains it.
_PARTS: dict[str, _Part] = {
    "moe": _Part(_absent, "", "modules"),
    "moe.experts": _Part(_experts, "Experts", "absent"),
    "moe.layer": _Part(_experts, "Experts MoE", "absent"),
    "moe.utils": _Part(
        _experts,
        "MoE configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
        "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
        "split_params_into_shared_and_expert_params",
        "absent",
    ),
    "pipe": _Part(_absent, "", "absent"),
    "arguments": _Part(runtime, "add_config_arguments"),
    "constants": _Part(comm, "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout"),
    "accelerator.real_accelerator": _Part(accelerator, "get_accelerator set_accelerator"),
    "checkpointing": _Part(runtime, "checkpoint configure is_configured non_reentrant_checkpoint reset logger", "in torch"),
    "ops": _Part(runtime, "", "modules"),
    "ops.adam": _Part(runtime, "DeepSpeedCPUAdam FusedAdam", "modules"),
    "ops.adam.cpu_adam": _Part(runtime, "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _Part(runtime, "FusedAdam"),
    "ops.lion": _Part(runtime, "DeepSpeedCPULion FusedLion", "modules"),
    "ops.lion.cpu_lion": _Part(runtime, "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _Part(runtime, "FusedLion"),
    "runtime.engine": _Part(runtime, "DeepSpeedEngine", "absent"),
    "runtime.lr_schedules": _Part(
        runtime,
        f"{_TUNING} LRRangeTest LR_RANGE_TEST ONE_CYCLE OneCycle VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR "
        "WARMUP_LR WarmupCosineLR WarmupDecayLR WarmupLR",
        "in docs",
    ),
    "runtime.sequence_parallel": _Part(_sequences, "", "modules"),
    "runtime.sequence_parallel.ulysses_sp": _Part(
        _sequences, "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter", "absent"
    ),
    "runtime.tuning_arguments": _Part(runtime, _TUNING),
    "runtime.utils": _Part(
        runtime,
        "clip_grad_norm_ copy_to_device empty_cache ensure_directory_exists get_global_norm get_rank "
        "is_initialized logger move_to_device see_memory_usage set_random_seed",
        "in docs",
    ),
    "runtime.zero": _Part(zero, _STAGE3, "modules"),
    "runtime.zero.offload_config": _Part(zero, "OffloadDeviceEnum OffloadStateTypeEnum"),
    "runtime.zero.partition_parameters": _Part(
        zero,
        f"{_STAGE3} is_zero_param restore_init_context shutdown_init_context",
        "absent",
    ),
    "runtime.zero.utils": _Part(zero, "is_zero_param", "absent"),
    "utils": _Part(
        _parameters,
        f"{_WHOLE_VALUES} {_LEAVES} RepeatingLoader instrument_w_nvtx log_dist log_dist_once logger recursive_getattr "
        "recursive_setattr set_log_level_from_string",
        "in docs",
    ),
    "utils.groups": _Part(
        _ranks,
        "expert_tensor_parallel_world_size get_data_parallel_group get_data_parallel_rank "
        "get_data_parallel_world_size get_model_parallel_rank get_model_parallel_world_size "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size mesh_device mpu "
        "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_model_parallel_world_size _get_sequence_parallel_rank _get_sequence_parallel_world_size "
        "_create_expert_and_data_parallel _get_expert_broadcast_src_rank _get_expert_data_parallel_group "
        "_get_expert_data_parallel_group_dict _get_expert_data_parallel_group_ranks _get_expert_data_parallel_rank "
        "_get_expert_data_parallel_world_size _get_expert_model_parallel_world_size _get_expert_parallel_group "
        "_get_expert_parallel_group_dict _get_expert_parallel_group_ranks _get_expert_parallel_rank "
        "_get_expert_parallel_src_rank _get_expert_parallel_world_size _get_max_expert_parallel_group "
        "_get_max_expert_size _get_max_expert_size_name",
        "absent",
    ),
    "utils.logging": _Part(
        _parameters,
        "get_current_level get_log_level_from_string log_dist log_dist_once log_levels logger "
        "set_log_level_from_string should_log_le warning_once",
        "absent",
    ),
    "utils.nvtx": _Part(_parameters, "instrument_w_nvtx"),
    "utils.tensor_fragment": _Part(_parameters, _WHOLE_VALUES, "absent"),
    "utils.timer": _Part(
        _parameters,
        "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_MICRO_TIMER "
        "BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER "
        "NoopTimer STEP_GLOBAL_TIMER STEP_MICRO_TIMER SynchronizedWallClockTimer TIME_EPSILON ThroughputTimer",
    ),
    "utils.z3_leaf_module": _Part(_parameters, _LEAVES),
    "utils.zero_to_fp32": _Part(
        _parameters,
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint",
    ),
    "checkpoint": _Part(_parameters, "", "in docs"),
    "checkpoint.utils": _Part(_parameters, "clone_tensors_for_torch_save"),
    "compression": _Part(_parameters, "", "modules"),
    "compression.helper": _Part(_parameters, "recursive_getattr recursive_setattr", "absent"),
}


def _enter(name: str, module: ModuleType) -> None:
    """Makes a module what an import of this path gives. It has a path, so that an import of one below it comes to the importer
    of what is absent."""
    vars(module)["__path__"] = []
    sys.modules[f"{__name__}.{name}"] = module
    above, _, leaf = name.rpartition(".")
    setattr(sys.modules[f"{__name__}.{above}" if above else __name__], leaf, module)


def _enter_all() -> None:
    for home in (accelerator, comm, runtime):
        vars(home)["__path__"] = []
    for name, part in _PARTS.items():
        module = ModuleType(f"{__name__}.{name}", f"`deepspeed.{name}`; see {part.home.__name__}.")
        vars(module).update({each: getattr(part.home, each) for each in part.names.split()}, __package__=module.__name__)
        if part.others is not None:
            path = f"{__name__}.runtime.pipe" if name == "pipe" else module.__name__
            vars(module)["__getattr__"] = rest_of(path, **_OTHERS[part.others])
        _enter(name, module)
    zero.partition_parameters = sys.modules[f"{__name__}.runtime.zero.partition_parameters"]
    sys.modules[f"{__name__}.comm.comm"] = comm.comm = comm


_enter_all()


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    if is_known(name):  # `import deepspeed` imports this module in DeepSpeed
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
