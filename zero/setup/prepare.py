"""Everything that is decided before memory is allocated: check, select, lay out, agree with the other ranks."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
from torch import nn

import accelerators
from accelerators import Accelerator
from zero.comm.group import Group
from zero.comm.levels import copies_of, of_family, seats_of
from zero.comm.one_answer import exchange_texts, run_on_all
from zero.config.blocks import StateHomes
from zero.config.schema import ZeroConfig
from zero.memory.homes.file import Pace
from zero.memory.weights import Place
from zero.plan.budget import default_bucket_bytes
from zero.plan.families import Family
from zero.plan.layout import ITEM_BYTES, FlatLayout
from zero.plan.stages import stage_of
from zero.setup.checks import (
    check_capturable,
    check_dtypes,
    check_groups,
    check_model,
    check_optimizer,
    check_params,
    check_settings_on_host,
    check_views,
)
from zero.setup.memory_guard import MemoryGuard
from zero.setup.parts import Parts
from zero.setup.selection import ManagedParams, check_streams, choose, homes_of, place_of, placement_of

# The elements of a block on the host. A step needs 18 MiB for them, which stay in the last cache between two of torch's passes.
# Smaller blocks would cost more in calls.
BLOCK_NUMEL = 2**20


@dataclass(frozen=True)
class ShardingPlan:
    """The things that all ranks agreed to build."""

    params: ManagedParams
    layout: FlatLayout
    place: Place
    memory_guard: MemoryGuard


def select_params(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, parts: Parts
) -> ManagedParams:
    """Refuses models and optimizers that cannot be sharded; returns the parameters to manage."""
    check_optimizer(optimizer, config)
    check_model(model, config.stage)
    check_groups(optimizer, model)
    return choose(model, optimizer, config, parts)


def check_params_and_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, params: ManagedParams, may_be_meta: bool
) -> None:
    """Refuses parameters and settings that cannot be sharded."""
    check_params(params.names, params.tensors, may_be_meta)
    check_views(model, params.names, params.tensors)
    check_dtypes(accelerators.of(device_of(params)), set(params.dtypes))
    placements = dict(zip(params.groups, params.placements, strict=True))
    check_settings_on_host(optimizer, {group: each.offload for group, each in placements.items()})
    check_streams(optimizer, placements)
    if device_of(params).type == "cpu":
        check_capturable(optimizer)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ZeroConfig,
    params: ManagedParams,
    group: Group,
    has_fused_step: bool,
) -> ShardingPlan:
    """Lays out the parameters and checks host memory. A collective, of ranks that are known to build the same.
    `has_fused_step`: the step is one pass over a bucket, which needs no blocks."""
    device = device_of(params)
    shards = stage_of(config.stage).shards_optimizer
    num_shares = group.inner.size if shards else 1
    parted = tuple(
        Family(of_family(group, family).inner.size if shards else 1, seats, len({seat.part for seat in seats}))
        for family, seats in enumerate(seats_of(group), 1)
    )
    is_on_host = any(each.offload for each in params.placements) or device.type == "cpu"
    block_numel = BLOCK_NUMEL if is_on_host and not has_fused_step else None
    unplaced = range(len(params.names))  # they get their places one by one as the plan is carried out
    place = Place(accelerators.of(device), device, _ranks_that_share_memory(group, device))
    ranks_here, shards_weights = _ranks_that_share_memory(group, torch.device("cpu")), stage_of(config.stage).shards_weights
    specs, bucket_bytes = params.specs(), config.bucket_bytes
    if bucket_bytes == "auto":
        weight_bytes, is_host = sum(spec.numel * ITEM_BYTES[spec.dtype] for spec in specs), device.type == "cpu"
        bucket_bytes = default_bucket_bytes(weight_bytes, group.size, is_host and ranks_here < group.size, is_host)
    families = parted, copies_of(group)
    layout = FlatLayout.build(specs, num_shares, bucket_bytes, config.align_bytes, unplaced, block_numel, *families)
    memory_guard = MemoryGuard(place, optimizer, has_fused_step, ranks_here, shards_weights)
    if config.homes.threads != "auto" and config.homes.piece_bytes != "auto":
        memory_guard.homes.pace = Pace(config.homes.threads, config.homes.piece_bytes)
    filled = layout.extended([index for index in unplaced if index not in params.frozen])
    groups = [optimizer.param_groups[number] for number in sorted(set(params.groups))]
    homes = [home for param_group in groups for home in homes_of(param_group, config).values()]
    try:
        plans_homes = config.homes != StateHomes() or any("homes" in param_group for param_group in groups)
        held = sum(tensor.nbytes for tensor in params.tensors if not tensor.is_meta) if plans_homes else None
        coming = _frozen_to_come(model, config, device, num_shares)
        run_on_all(group, lambda: memory_guard.reserve(homes, filled, held=held, frozen=coming))
    except BaseException:
        memory_guard.homes.close()  # removes files that were made
        raise
    return ShardingPlan(params, layout, place, memory_guard)


def _frozen_to_come(model: nn.Module, config: ZeroConfig, device: torch.device, num_shares: int) -> int:
    """Returns the bytes of memory that frozen parameters on the meta device will take, if they are in shares."""
    if not stage_of(config.stage).shards_weights:
        return 0
    on_disk = sum(away.ratio for away in placement_of({}, config, device).away if away.kind == "weights")
    empty = [param for param in model.parameters() if param.is_meta and not param.requires_grad]
    casts = config.dtype is not None
    items = [ITEM_BYTES[str(config.dtype)] if casts and param.is_floating_point() else param.element_size() for param in empty]
    return int((1 - on_disk) * sum(param.numel() * item for param, item in zip(empty, items, strict=True))) // num_shares


def accelerator_of(optimizer: torch.optim.Optimizer) -> Accelerator:
    """Returns the accelerator of the first parameter that is not on the meta device."""
    tensors = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    return accelerators.current() if device is None else accelerators.of(device)


def device_of(params: ManagedParams) -> torch.device:
    return place_of(params.tensors[0]) if params.tensors else accelerators.current().device()


def _ranks_that_share_memory(group: Group, device: torch.device) -> int:
    """Returns how many ranks of the group use the same memory as this one."""
    # Devices are told apart by themselves: if a launcher shows each rank one device, all of them have the index 0.
    where = f"{socket.gethostname()} {device.type} {accelerators.of(device).identity(device.index)}"
    places = exchange_texts(group, where)
    return places.count(where)
