"""`deepspeed.utils.groups`: all ranks are data-parallel ones, and each has the whole model."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed import comm
from zero.compat.deepspeed.absent import ABSENT, absent

_NO_OTHERS = "parameters are sharded over data-parallel ranks only"


mpu = mesh_device = None  # ranks do not split a model among them
expert_tensor_parallel_world_size = 1


def get_data_parallel_group() -> Any:
    """All ranks."""
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    """How many ranks there are; 1 where torch.distributed is not up."""
    return int(comm.get_world_size()) if comm.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """This rank's number; 0 where torch.distributed is not up."""
    return int(comm.get_rank()) if comm.is_initialized() else 0


def get_model_parallel_world_size() -> int:
    """1: ranks do not split a model among them."""
    return 1


def get_model_parallel_rank() -> int:
    """0: ranks do not split a model among them."""
    return 0


get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return absent(name, ABSENT.get(name, _NO_OTHERS))
