"""The names of `deepspeed.utils.groups`: which ranks have samples of their own, and which have all experts together."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed import comm
from zero.engine.parts import GROUPS

mpu = mesh_device = None  # an engine has the mpu that it was given
expert_tensor_parallel_world_size = 1

_same_part: dict[str, Any] = {}  # by the name of the group that has all experts: the ranks that have the same ones
_world: Any = None  # the world in which those groups were made


def _made(of_experts: dict[str, Any]) -> dict[str, Any]:
    """Returns these groups; none if torch.distributed was started again after they were made."""
    global _world
    world = comm.group.WORLD if comm.is_initialized() else None
    if _world is not world:
        GROUPS.clear()
        _same_part.clear()
        _world = world
    return of_experts


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, *_: Any, use_data_before_expert_parallel_: bool = False, **__: Any
) -> None:
    """Makes the groups of ranks that have all experts together, so many that follow each other, and of those that have the
    same ones. With `use_data_before_expert_parallel_` the latter follow each other. A collective of all ranks, unless they are
    there."""
    size, name = expert_parallel_size_, f"ep_size_{expert_parallel_size_}"
    if name in _made(GROUPS):
        return
    world = get_data_parallel_world_size()
    if world % size:
        raise ValueError(
            f"Cannot have experts over {size} ranks: {world} ranks cannot be divided so. Make ep_size a divisor of {world}."
        )
    if not comm.is_initialized():
        GROUPS[name] = _same_part[name] = None
        return
    near = [list(range(first, first + size)) for first in range(0, world, size)]
    far = [list(range(first, world, world // size)) for first in range(world // size)]
    together = far if use_data_before_expert_parallel_ else near
    for groups, lists in ((_same_part, [list(ranks) for ranks in zip(*together, strict=True)]), (GROUPS, together)):
        for ranks in lists:
            group = comm.new_group(ranks)
            if get_data_parallel_rank() in ranks:
                groups[name] = group


def _named(groups: dict[str, Any], group_name: str) -> Any:
    if group_name not in _made(groups):
        raise KeyError(
            f"Cannot find the group {group_name!r}: nobody made it. Make it with _create_expert_and_data_parallel, or call "
            "initialize first."
        )
    return groups[group_name]


def _get_expert_parallel_group(group_name: str) -> Any:
    """Returns the ranks that have all experts together."""
    return _named(GROUPS, group_name)


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """Returns the ranks that have the same experts."""
    return _named(_same_part, group_name)


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Returns the groups of ranks that have all experts together, by name; None if torch.distributed is not up."""
    return _made(GROUPS)


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Returns the groups of ranks that have the same experts, by name."""
    return _made(_same_part)


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """Returns the numbers of the ranks that have all experts together."""
    return _ranks_of(_made(GROUPS)[group_name])


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """Returns the numbers of the ranks that have the same experts."""
    return _ranks_of(_made(_same_part)[group_name])


def _ranks_of(group: Any) -> list[int]:
    return [get_data_parallel_rank()] if group is None else comm.get_all_ranks_from_group(group)


def _get_expert_parallel_world_size(group_name: str) -> int:
    """Returns how many ranks have all experts together."""
    return len(_get_expert_parallel_group_ranks(group_name))


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """Returns how many ranks have the same experts."""
    return len(_get_expert_data_parallel_group_ranks(group_name))


def _get_expert_parallel_rank(group_name: str) -> int:
    """Returns this rank's number among those that have all experts together."""
    return _get_expert_parallel_group_ranks(group_name).index(get_data_parallel_rank())


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """Returns this rank's number among those that have the same experts."""
    return _get_expert_data_parallel_group_ranks(group_name).index(get_data_parallel_rank())


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """Returns the first of the ranks that have all experts together with this one."""
    return _get_expert_parallel_group_ranks(group_name)[0]


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Returns the first of the ranks that have the same experts as this one."""
    return _get_expert_data_parallel_group_ranks(group_name)[0]


def _get_max_expert_size() -> int:
    """Returns over how many ranks the experts lie that lie over most."""
    return max(int(name.removeprefix("ep_size_")) for name in _made(GROUPS))


def _get_max_expert_size_name() -> str:
    """Returns the name of the group of the ranks over which those experts lie."""
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    """Returns the ranks over which those experts lie."""
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Returns 1, as no expert is cut."""
    return 1


def get_data_parallel_group() -> Any:
    """Returns the group of all ranks."""
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    """Returns how many ranks there are; 1 if torch.distributed is not up."""
    return int(comm.get_world_size()) if comm.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """Returns this rank's number; 0 if torch.distributed is not up."""
    return int(comm.get_rank()) if comm.is_initialized() else 0


def get_model_parallel_world_size() -> int:
    """Returns 1, as ranks do not split a model among them unless an engine was given its mpu or group."""
    return 1


def get_model_parallel_rank() -> int:
    """Returns 0, as ranks do not split a model among them."""
    return 0


get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
