"""Finds the ranks to train with, and the fastest way between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerators import Accelerator
from accelerators.launch import read_launch
from zero.comm.group import Group, TimeLimits, checked
from zero.comm.levels import (
    HOST,
    Part,
    Seats,
    SoloGroup,
    agreed_seats,
    agreed_shard_ranks,
    by_hosts,
    meshes_of,
    ranks_of_a_host,
    replicated,
    with_families,
)
from zero.comm.pipes import ByPipes
from zero.comm.shared_memory import SharedMemoryGroup, through_shared_memory
from zero.comm.torch_group import TorchGroup
from zero.comm.torch_world import begin_world, groups_along, is_process_group, is_up, mesh_of, world_size
from zero.errors import ZeroError
from zero.plan.families import Seat


def connect(
    accelerator: Accelerator,
    group: Any = None,
    limits: TimeLimits | None = None,
    may_start: bool = True,
    shared_memory: bool | None = None,
    shard_ranks: int | str | None = None,
    meshes: Sequence[Sequence[int]] = (),
) -> Group:
    """Returns the group to train with: the user's, else the launcher's, else a single rank. `shared_memory` says whether ranks
    of one host exchange host tensors through shared memory if they can; None leaves that, `shard_ranks` and the `meshes`
    along which this rank holds parts out without a check."""
    mesh = None if group is None else mesh_of(group)
    if _is_made(group):
        made = checked(group)
    else:
        made = _connected(accelerator, group if mesh is None else mesh.ranks, limits or TimeLimits(), may_start)
    if shared_memory is None:
        return made
    try:
        return made_ready(made, group, shared_memory, shard_ranks, meshes)
    except BaseException:
        if made is not group:
            made.close()
        raise


def made_ready(
    made: Group, given: Any, shared_memory: bool, shard_ranks: int | str | None, meshes: Sequence[Sequence[int]]
) -> Group:
    """Returns a group that was connected from what the user gave as a training uses it. A collective. See `sharing`."""
    if _is_made(given):
        return _given(made, shard_ranks, meshes)
    mesh = None if given is None else mesh_of(given)
    if mesh is not None:
        shard_ranks = _of_mesh(mesh.shard_ranks, shard_ranks)
    return sharing(made, shared_memory, shard_ranks, meshes)


def _is_made(group: Any) -> bool:
    """Returns whether a group is none of torch's, and so is used as it is."""
    return group is not None and mesh_of(group) is None and not is_process_group(group)


def start(accelerator: Accelerator, limits: TimeLimits, may_start: bool = True) -> bool:
    """Starts the process group that a launcher asks for, unless one is up. Returns whether there is one now."""
    if is_up():
        return True
    num_ranks = read_launch(os.environ).world_size
    if num_ranks == 1:
        return False
    if not may_start:
        raise ValueError(
            f"Cannot connect {num_ranks} ranks with dist_init_required=False: torch.distributed is not initialised. Call "
            "init_process_group first, or leave dist_init_required out."
        )
    _begin_world(accelerator, limits)
    return True


def _connected(accelerator: Accelerator, group: Any, limits: TimeLimits, may_start: bool) -> Group:
    if group is not None and not is_up():
        raise ValueError("Cannot use a process group: torch.distributed is not initialised. Call init_process_group first.")
    if not start(accelerator, limits, may_start):
        return SoloGroup()
    if group is None and world_size() == 1:
        read_launch(os.environ).check_group(1)
    return TorchGroup(accelerator, group, limits)


def _of_mesh(inner_size: int | None, shard_ranks: int | str | None) -> int | str | None:
    if inner_size is not None and shard_ranks not in (None, inner_size):
        raise ValueError(
            f"Cannot use shard_ranks={shard_ranks!r} with a DeviceMesh whose inner dimension has {inner_size} ranks. Leave "
            "shard_ranks out."
        )
    return inner_size or shard_ranks


def _given(group: Group, shard_ranks: int | str | None, meshes: Sequence[Sequence[int]]) -> Group:
    if meshes and list(meshes) != list(meshes_of(group)):
        raise ValueError(
            f"Cannot shard parts over {group!r}: it was made for other parts than those along ranks "
            f"{', '.join(map(str, map(list, meshes)))}. Pass a process group or a DeviceMesh, or leave group out."
        )
    if shard_ranks not in (None, HOST, group.inner.size):
        raise ValueError(
            f"Cannot use shard_ranks={shard_ranks!r} with {group!r}: what is no process group of torch says itself which ranks "
            "share, and has it as inner. Leave shard_ranks out."
        )
    return group


def _begin_world(accelerator: Accelerator, limits: TimeLimits) -> None:
    try:
        begin_world(accelerator.communication_backend, limits.first_s)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            said = str(error).partition("\n")[0].rstrip(".")
            raise ZeroError(
                f"Cannot connect rank {os.environ.get('RANK')} on {socket.gethostname()} to the others at {address}: {said}. "
                "Set MASTER_ADDR and MASTER_PORT to where rank 0 is reached, the same on all ranks, and start all of them."
            ) from error
        raise ZeroError(
            f"Cannot start rank 0: its port {os.environ.get('MASTER_PORT')} is in use by another program. Set MASTER_PORT to a "
            "free port, the same on all ranks."
        ) from error


def sharing(
    group: Group, shared_memory: bool, shard_ranks: int | str | None = None, meshes: Sequence[Sequence[int]] = ()
) -> Group:
    """Returns the group as a training uses it, made of one that was connected: with shared memory, if its tensors lie on the
    host and its ranks can share memory, with states in shares inside groups of `shard_ranks`, and with groups of the ranks that
    hold the same parts. A collective."""
    of_world = group.ranks if isinstance(group, TorchGroup) else [0]
    across = [ranks for ranks in meshes if not {*ranks}.issubset(of_world)]
    agreed, hosts = agreed_shard_ranks(group, shard_ranks, bool(across))
    if across:
        return _across(group, across, shared_memory, (agreed, hosts), meshes)
    seats = agreed_seats(group, of_world, meshes)
    if group.size == 1:
        return group
    of_data = _summing(group, shared_memory, agreed, hosts, _watched)
    return with_families(of_data, of_data, (), agreed, seats, meshes, _part(group, shared_memory)) if seats else of_data


def _across(
    group: Group,
    across: Sequence[Sequence[int]],
    shared_memory: bool,
    agreed: tuple[int, list[str]],
    meshes: Sequence[Sequence[int]],
) -> Group:
    """Returns the ranks of all groups that lie across meshes, whose ranks have the same data. A collective of all of them."""
    assert isinstance(group, TorchGroup)
    lists = [list(group.ranks)]
    for ranks in across:
        lists = groups_along(ranks, lists)
    everyone = group.beyond(sorted({rank for ranks in lists for rank in ranks}))
    made: list[Group] = [everyone]
    try:
        numbers = [[everyone.ranks.index(rank) for rank in ranks] for ranks in lists]
        copies = _copies(everyone, lists, numbers)
        seats = agreed_seats(everyone, everyone.ranks, meshes, copies)
        of_data: Group = SoloGroup()
        together = 1
        if group.size > 1:
            made.append(everyone.part(numbers))
            together, hosts = agreed
            made.append(_summing(made[-1], shared_memory, together, hosts))
            of_data = made[-1]
        return with_families(_watched(everyone, shared_memory), of_data, copies, together, seats, meshes,
                             _part(everyone, shared_memory))  # fmt: skip
    except BaseException:
        for each in reversed(made):
            each.close()
        raise
    finally:
        group.close()


def _copies(everyone: Group, lists: Sequence[Sequence[int]], numbers: Sequence[Sequence[int]]) -> Seats:
    """Returns the seats of ranks in the family of whole parameters, of which each of these groups trains a copy."""
    seats = {rank: Seat(0, number, copy) for copy, ranks in enumerate(numbers) for number, rank in enumerate(ranks)}
    if len(seats) != sum(map(len, numbers)) or len(set(map(len, numbers))) > 1:
        raise ValueError(
            f"Cannot shard: groups of ranks {', '.join(map(str, lists))} lie across the parts of parameters, and are not "
            "disjoint and of one size. Pass one dimension of a DeviceMesh as group, as mesh['dp']."
        )
    return tuple(seats[rank] for rank in range(everyone.size))


def _shared(group: TorchGroup, wanted: bool) -> Group:
    return through_shared_memory(group, wanted, partial(ByPipes, group)) if group.carries_host_tensors else group


def _watched(group: TorchGroup, wanted: bool) -> Group:
    """Returns a group that is no part of another one, as `_shared` does. Ranks that share memory write into it what they
    do."""
    sharing = _shared(group, wanted)
    if isinstance(sharing, SharedMemoryGroup):
        group.phases = sharing.phases
        group.set_phase(group.phase)  # written at once, as this rank may be lost before its next phase
    return sharing


def _summing(
    group: Group, shared_memory: bool, agreed: int, hosts: list[str], share: Callable[[TorchGroup, bool], Group] = _shared
) -> Group:
    """Returns a group as it sums gradients of whole parameters. A collective."""
    assert isinstance(group, TorchGroup)  # no other kind of group connects several ranks
    num_local, part = ranks_of_a_host(hosts), _part(group, shared_memory)
    if num_local not in (0, 1, group.size) and agreed == group.size and group.carries_host_tensors:
        return by_hosts(group, num_local, part)
    return replicated(share(group, shared_memory), agreed, part)


def _part(group: Group, shared_memory: bool) -> Part:
    assert isinstance(group, TorchGroup)
    return lambda parts: _shared(group.part(parts), shared_memory)
