"""`deepspeed.comm`: torch.distributed under another name, how it starts, and where and how long its ranks meet."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import accelerators
from accelerators.launch import read_launch
from zero.compat.deepspeed.absent import ABSENT, absent

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = datetime.timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Starts torch.distributed unless that is up: as the arguments say, as a launcher says, or for one rank.
    `auto_mpi_discovery`, `distributed_port`, `verbose` and `config` are without effect: a launcher sets the environment."""
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ValueError("Cannot go on with dist_init_required=False: torch.distributed is not up. Leave it out.")
    backend = dist_backend or accelerators.current().communication_backend
    if init_method is not None or rank >= 0:
        dist.init_process_group(backend, init_method, timeout, world_size, rank)
    elif read_launch(os.environ).world_size > 1 or "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def get_local_rank() -> int:
    """Returns this rank's number on its host, as the launcher said; 0 if none did."""
    return read_launch(os.environ).local_rank or 0


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns the numbers of the ranks of a group, among all."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def has_all_gather_into_tensor() -> bool:
    """Returns True: torch has it."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


def allgather_fn(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False, debug: Any = None) -> Any:
    """Calls `torch.distributed.all_gather_into_tensor`."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(output_tensor: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False,
                      prof: bool = False, debug: Any = None) -> Any:  # fmt: skip
    """Calls `torch.distributed.reduce_scatter_tensor`."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has torch.distributed.") from None
