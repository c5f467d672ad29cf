"""Finds the ranks to train with, and the fastest way between them."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

from accelerators import Accelerator
from accelerators.launch import read_launch
from zero.comm import torch_group
from zero.comm.group import Group, TimeLimits, checked
from zero.comm.loopback import solo
from zero.comm.shared_memory.control import ByPipes
from zero.comm.shared_memory.group import through_shared_memory
from zero.comm.torch_group import TorchGroup, is_process_group, world
from zero.errors import ZeroError


def connect(
    accelerator: Accelerator,
    group: Any = None,
    limits: TimeLimits | None = None,
    may_start: bool = True,
    shared_memory: bool | None = None,
) -> Group:
    """Returns the group to train with: the user's, else the launcher's, else a single rank. `shared_memory` says whether ranks
    of one host exchange host tensors through shared memory where they can; None leaves it out without a check."""
    if group is not None and not is_process_group(group):
        return checked(group)
    limits = limits or TimeLimits()
    if not torch_group.is_up():
        if group is not None:
            raise ValueError("Cannot use a process group: torch.distributed is not initialised. Call init_process_group first.")
        world_size = read_launch(os.environ).world_size
        if world_size == 1:
            return solo()
        if not may_start:
            raise ValueError(
                f"Cannot connect {world_size} ranks with dist_init_required=False: torch.distributed is not initialised. Call "
                "init_process_group first, or leave dist_init_required out."
            )
        _begin_world(accelerator, limits)
    elif group is None and world().size() == 1:
        read_launch(os.environ).check_group(1)
    made = TorchGroup(accelerator, world() if group is None else group, limits)
    return made if shared_memory is None else sharing(made, shared_memory)


def _begin_world(accelerator: Accelerator, limits: TimeLimits) -> None:
    try:
        torch_group.begin_world(accelerator.communication_backend, limits.first_s)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            said = str(error).partition("\n")[0].rstrip(".")
            raise ZeroError(
                f"Cannot connect rank {os.environ.get('RANK')} on {socket.gethostname()} to the others at {at}: {said}. Set "
                "MASTER_ADDR and MASTER_PORT to where rank 0 is reached, the same on all ranks, and start all of them."
            ) from error
        raise ZeroError(
            f"Cannot start rank 0: its port {os.environ.get('MASTER_PORT')} is in use by another program. Set MASTER_PORT to a "
            "free port, the same on all ranks."
        ) from error


def sharing(group: Group, wanted: bool) -> Group:
    """Returns the group with shared memory, where its tensors lie on the host and its ranks can share memory. A collective."""
    if not isinstance(group, TorchGroup) or not group.carries_host_tensors:
        return group
    return through_shared_memory(group, wanted, partial(ByPipes, group))
