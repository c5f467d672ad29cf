"""The launcher's variables: the rank of this process and the number of ranks, as pure functions of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Schedulers that know nothing of torch, each with its variables for the number of tasks and for the number of this one.
_SCHEDULERS = {
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),
}


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were started with it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # the rank on this host; None if no launcher said

    def check_group(self, num_ranks: int) -> None:
        """Raises if the default process group has fewer ranks than the launcher started: they would train apart.

        More ranks are no contradiction, as a program may start processes of its own and number them in its own way.
        """
        if num_ranks < self.world_size:
            raise ValueError(
                f"Cannot train: {self.world_size} ranks were started, and the process group has {num_ranks}, so it would train "
                "apart from the others. Initialise the group from RANK and WORLD_SIZE, or start as many ranks as it has."
            )


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Reads the launcher's variables; without them it is a single process. Raises ValueError if they contradict each other."""
    rank, world_size = whole_number(environment, "RANK"), whole_number(environment, "WORLD_SIZE")
    local_rank, local_world_size = whole_number(environment, "LOCAL_RANK"), whole_number(environment, "LOCAL_WORLD_SIZE")
    if world_size is None:
        if rank is not None:
            raise ValueError(f"Cannot use RANK={rank}: WORLD_SIZE is not set. Set both, as torchrun does, or neither.")
        _check_scheduler(environment)
        world_size = 1
    if rank is None:
        if world_size != 1:
            raise ValueError(f"Cannot use WORLD_SIZE={world_size}: RANK is not set. Set both, as torchrun does, or neither.")
        rank = 0
    for name, place, size_name, size in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
        ("LOCAL_RANK", local_rank, "WORLD_SIZE", world_size if environment.get("WORLD_SIZE", "").strip() else None),
    ):
        if place is not None and size is not None and place >= size:
            raise ValueError(f"Cannot use {name}={place}: {size_name} is {size}. Set it to 0 to {size_name} - 1.")
    return Launch(rank, world_size, local_rank)


def whole_number(environment: Mapping[str, str], variable: str) -> int | None:
    """Returns the value of a variable, or None if it is unset or empty."""
    text = environment.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"Cannot use {variable}={text}: it takes a whole number of 0 or more. Let the launcher set it.")
    return int(text)


def _check_scheduler(environment: Mapping[str, str]) -> None:
    for scheduler, (size_variable, rank_variable) in _SCHEDULERS.items():
        size = whole_number(environment, size_variable)
        if size is not None and size > 1:
            raise ValueError(
                f"Cannot train: {scheduler} started {size} tasks ({size_variable}), and RANK and WORLD_SIZE are not set, "
                "so each would train apart from the others. Start torchrun in each task, or set "
                f"RANK=${rank_variable} and WORLD_SIZE=${size_variable}, with LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
            )
