"""The world of torch.distributed: its beginning, which of its ranks were given, and process groups of them.

[Note: both ways] Gloo sends nothing before the receiver has said that it has a place for it, and it says so on the connection
on which it sends to that rank: behind all that it is sending there. So a rank that comes late to a collective sends first and
receives when that has gone, and a link carries one direction at a time. On gloo tensors have two groups, so two connections
between two ranks: what goes to higher ranks takes one, what goes to lower ones the other. Broadcasts take them in turns.
"""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_begun: tuple[int, Callable[[], object]] | None = None  # the process, and the world that was begun here and not by the user


class Mesh(NamedTuple):
    """The ranks of a DeviceMesh, and how many of them states are in shares of; None for all."""

    ranks: tuple[int, ...]
    shard_ranks: int | None


def is_up() -> bool:
    """Whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size()


def is_process_group(group: object) -> bool:
    """Whether this is torch's own."""
    return isinstance(group, dist.ProcessGroup)


def ranks_of(base: Any) -> list[int]:
    """Those of a process group, or of a tuple or list of them; all of the world for None."""
    return list(base) if isinstance(base, (tuple, list)) else dist.get_process_group_ranks(base)


def mesh_of(group: object) -> Mesh | None:
    """Returns what a DeviceMesh says, and None for anything else. In one of two dimensions states are in shares along the inner
    one, and replicated along the outer one."""
    if not isinstance(group, DeviceMesh):
        return None
    sizes, ranks = tuple(group.mesh.shape), tuple(map(int, group.mesh.flatten().tolist()))
    if len(sizes) > 2 or list(ranks) != sorted(ranks):
        raise ValueError(
            f"Cannot use a DeviceMesh of {len(sizes)} dimensions with ranks {list(ranks)}: it has one dimension, or an outer "
            "one that replicates and an inner one that shards, and its ranks ascend. Pass that part of it, as "
            "mesh['replicate', 'shard']."
        )
    if dist.get_rank() not in ranks:
        raise ValueError(f"Cannot use a DeviceMesh of ranks {list(ranks)} on rank {dist.get_rank()}. Shard on its ranks only.")
    return Mesh(ranks, sizes[1] if len(sizes) == 2 else None)


def new_group(lists: Sequence[list[int]], members: list[int], backend: str, limit_s: float) -> Any:
    """Makes a process group of each of these lists of ranks, and returns that of our own. All ranks of the world make all of
    them, so that torch gives each a name which none had before."""
    limit = datetime.timedelta(seconds=limit_s)
    made = [dist.new_group(ranks, timeout=limit, backend=backend) for ranks in lists]
    return made[lists.index(members)]


def new_group_beside(ranks: list[int], backend: str, limit_s: float, name: str) -> Any:
    """Makes a process group of these ranks without the others of the world. `new_group` would name it by how many groups this
    rank has: others may have more, and where some were destroyed that is an old name, under which the store has old addresses.
    So it is given a name, of which the ranks know that none had it before."""
    c10d, limit = dist.distributed_c10d, datetime.timedelta(seconds=limit_s)
    place, store = ranks.index(dist.get_rank()), c10d._get_default_store()
    make: Callable[..., Any] = c10d._new_process_group_helper
    made, _ = make(len(ranks), place, ranks, backend, store, name, timeout=limit)
    c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made


def begin_world(backend: str, limit_s: float) -> None:
    """Initialises torch.distributed, which ends with this process."""
    global _begun
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=limit_s))
    _begun = os.getpid(), weakref.ref(dist.group.WORLD)  # which stays: when one training is closed, another may begin


def is_begun_here() -> bool:
    """Whether the world is one that this process began, and not the user."""
    return _begun is not None and _begun[0] == os.getpid() and _begun[1]() is dist.group.WORLD


class Wires(NamedTuple):
    """A process group for tensors, one for host messages, one for tensors that go the other way; see [Note: both ways]."""

    tensors: Any
    messages: Any
    back: Any


def end_wires(wires: list[Wires]) -> None:
    """Destroys the groups. Of a native backend this waits for what is on the device."""
    for group in {id(group): group for them in wires for group in them if group is not None}.values():
        dist.destroy_process_group(group)
    wires.clear()
