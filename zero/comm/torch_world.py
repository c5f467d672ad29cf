"""The world of torch.distributed: its ranks and meshes, the process groups that are made in it, and their end.

The world begins before any group and ends after the last one, with the process. A group that was made for messages of two
ranks is kept when a training ends, for the next one of the same ranks, as making one takes time and threads.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import datetime
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero.comm import health
from zero.comm.health import StoreClient

_begun: tuple[int, Callable[[], object]] | None = None  # the process and the world that it began, if not the user did
_clients: weakref.WeakKeyDictionary[Any, StoreClient] = weakref.WeakKeyDictionary()  # by world

# ranks and meshes -----------------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """The ranks of a DeviceMesh, and the number of ranks that share one copy of the states; None if all do."""

    ranks: tuple[int, ...]
    shard_ranks: int | None


def is_up() -> bool:
    """Returns True if torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size()


def rank_in_world() -> int:
    return dist.get_rank()


def world() -> Any:
    """Returns the group of all ranks; None if torch.distributed is not up."""
    return dist.group.WORLD


def is_process_group(group: object) -> bool:
    """Returns whether this is a process group of torch's own."""
    return isinstance(group, dist.ProcessGroup)


def ranks_of(base: Any) -> list[int]:
    """Returns the ranks of a process group, or those in a tuple or list; for None, all ranks of the world."""
    return list(base) if isinstance(base, (tuple, list)) else dist.get_process_group_ranks(base)


def mesh_of(group: object) -> Mesh | None:
    """Returns the ranks of a DeviceMesh; None for any other object. If the mesh has two dimensions, states are sharded along
    the inner one and replicated along the outer one."""
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
        raise ValueError(
            f"Cannot use a DeviceMesh of ranks {list(ranks)} on rank {dist.get_rank()}: this rank is not in it. Shard on its "
            "ranks only."
        )
    return Mesh(ranks, sizes[1] if len(sizes) == 2 else None)


def new_mesh(device: torch.device, **sizes: int) -> DeviceMesh:
    """Makes a DeviceMesh of all ranks of the world, with dimensions of these names and sizes. A collective."""
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def not_copied() -> Iterator[None]:
    """Lets copies of objects that are made inside refer to the groups of their originals, as groups cannot be copied."""
    before = {kind: copyreg.dispatch_table.get(kind) for kind in (dist.ProcessGroup, DeviceMesh)}
    copyreg.dispatch_table.update(dict.fromkeys(before, lambda group: "itself"))  # to `copy`, a string means the object itself
    try:
        yield
    finally:
        for kind, reduce in before.items():
            if reduce is None:
                copyreg.dispatch_table.pop(kind, None)
            else:
                copyreg.dispatch_table[kind] = reduce


def ranks_along(mesh: object) -> tuple[int, ...]:
    """Returns the ranks of a DeviceMesh of one dimension or of a process group, in their order there."""
    if isinstance(mesh, DeviceMesh) and mesh.mesh.dim() == 1:
        return tuple(map(int, mesh.mesh.tolist()))
    if is_process_group(mesh):
        return tuple(ranks_of(mesh))
    what = f"a DeviceMesh of {mesh.mesh.dim()} dimensions" if isinstance(mesh, DeviceMesh) else repr(mesh)
    raise TypeError(
        f"Cannot take {what} for the ranks that hold parts of a parameter. Pass one dimension of a DeviceMesh, as mesh['ep'], "
        "or a process group."
    )


def groups_along(mesh: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the groups that the ranks along a mesh pass, each group once. A collective of these ranks."""
    store, place = dist.distributed_c10d._get_default_store(), mesh.index(dist.get_rank())
    number = store.add(f"zero groups along {list(mesh)} of {place}", 1)
    store.set(f"zero groups {number} along {list(mesh)} of {place}", json.dumps(list(map(list, groups))))
    texts = [store.get(f"zero groups {number} along {list(mesh)} of {other}").decode() for other in range(len(mesh))]
    return [list(ranks) for ranks in sorted({tuple(ranks) for text in texts for ranks in json.loads(text)})]


# process groups and their world ---------------------------------------------------------------------------------------


def new_group(lists: Sequence[list[int]], members: list[int], backend: str, limit_s: float) -> Any:
    """Makes a process group of each of these lists of ranks, and returns the one of `members`. All ranks of the world make all
    groups, so that torch gives each of them a name that no group had before."""
    limit = datetime.timedelta(seconds=limit_s)
    made = [dist.new_group(ranks, timeout=limit, backend=backend) for ranks in lists]
    return made[lists.index(members)]


def new_group_beside(ranks: list[int], backend: str, limit_s: float, name: str) -> Any:
    """Makes a process group of these ranks while the others of the world do something else. torch's `new_group` would name it
    by the number of groups that this rank has. Other ranks may have more; and if groups were destroyed that name is an old one,
    under which the store has old addresses. So the caller passes a `name` that no group of these ranks had before."""
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
    _begun = os.getpid(), weakref.ref(dist.group.WORLD)  # weak: the world outlives a training, as another one may begin


def is_begun_here() -> bool:
    """Returns True if this package began the world in this process, and not the user."""
    return _begun is not None and _begun[0] == os.getpid() and _begun[1]() is dist.group.WORLD


# process groups that are kept, and the end ----------------------------------------------------------------------------


class Purpose(NamedTuple):
    """The purpose of a process group: its world, its ranks, and the process, which alone has the group's threads."""

    world: Any
    ranks: tuple[int, ...]
    process: int


class KeptGroups:
    """The kept process groups, each with its purpose."""

    def __init__(self) -> None:
        self._kept: list[tuple[Purpose, Any]] = []

    def take(self, purpose: Purpose) -> Any:
        """Returns a process group that was made for this purpose, or None. Other ranks may have kept another."""
        position = next((index for index, (key, _) in enumerate(self._kept) if key == purpose), None)
        return None if position is None else self._kept.pop(position)[1]

    def keep(self, purpose: Purpose, group: Any) -> None:
        """Keeps a process group. Those of an older world are dropped."""
        self._kept = [kept for kept in self._kept if kept[0].world is purpose.world]
        self._kept.append((purpose, group))

    def end_process(self) -> None:
        """Drops the groups of this process. Groups of the process from which it was forked are left alone, as their threads
        are not in this process."""
        self._kept = [kept for kept in self._kept if kept[0].process != os.getpid()]


free_groups = KeptGroups()  # process groups that are free to carry messages of two ranks


def set_limit(group: Any, limit_s: float) -> None:
    """Sets the time limit for collectives of a process group that begin from now on."""
    limit = datetime.timedelta(seconds=limit_s)
    if hasattr(group, "set_timeout"):
        group.set_timeout(limit)
    else:
        dist.distributed_c10d._set_pg_timeout(limit, group)  # torch called this itself before 2.13


def end() -> None:
    """Ends this process's connections to other ranks, as the program ends. See [Note: the end] in zero/comm/health.py."""
    is_on = is_up()
    end_world = dist.destroy_process_group if is_on and is_begun_here() else None
    health.end(store_client() if is_on else None, dist.get_rank() if is_on else 0, end_world)
    free_groups.end_process()


atexit.register(end)


def store_client() -> StoreClient:
    """Returns the client of the world's store. All callers share one, as the store has one connection."""
    if dist.group.WORLD not in _clients:
        _clients[dist.group.WORLD] = StoreClient(dist.distributed_c10d._get_default_store())
    return _clients[dist.group.WORLD]
