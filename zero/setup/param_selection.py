"""Which parameters are managed, in which dtype, and where their shares live."""

from __future__ import annotations

import fnmatch
import logging
from dataclasses import dataclass

import torch
from torch import nn

import accelerators
from zero.config.schema import ZeroConfig
from zero.memory.formats import DTYPES, dtype_name
from zero.optim.traits import whole_groups, work_of
from zero.plan.layout import ParamSpec
from zero.plan.stages import stage_of
from zero.setup.homes import Places, places_of

logger = logging.getLogger("zero")


@dataclass(frozen=True)
class ManagedParams:
    """The parameters to manage, in the model's order, and the dtype each will have."""

    names: list[str]
    tensors: list[nn.Parameter]
    groups: list[int]
    dtypes: list[torch.dtype]
    places: list[Places]  # where the states of each are to live
    works: list[int]  # of the update of each, where it has one owner; else 0
    kept: list[bool]  # whether every rank keeps it whole where weights are in shares
    unmanaged: list[str]  # trainable, but in no group of the optimizer

    @property
    def frozen(self) -> set[int]:
        """Returns the frozen parameters. They get memory when they are trained."""
        return {index for index, tensor in enumerate(self.tensors) if not tensor.requires_grad}

    def specs(self) -> list[ParamSpec]:
        return specs_of(self.names, self.tensors, self.groups, self.dtypes, self.places, self.kept, self.works)


def specs_of(
    names: list[str],
    tensors: list[nn.Parameter],
    groups: list[int],
    dtypes: list[torch.dtype],
    places: list[Places],
    kept: list[bool],
    works: list[int],
) -> list[ParamSpec]:
    shapes, named = [tuple(tensor.shape) for tensor in tensors], map(dtype_name, dtypes)
    return [
        ParamSpec(name, shape, dtype, group, place.offload, stays, work, place.away)
        for name, shape, dtype, group, place, stays, work in zip(names, shapes, named, groups, places, kept, works, strict=True)
    ]


def is_kept(config: ZeroConfig, tensor: torch.Tensor) -> bool:
    """Whether every rank keeps the parameter whole where weights are in shares."""
    return stage_of(config.stage).shards_weights and tensor.numel() <= config.keep_whole_numel


def works_of(
    optimizer: torch.optim.Optimizer, config: ZeroConfig, tensors: list[nn.Parameter], groups: list[int]
) -> list[int]:
    """Returns the work of the update of each tensor that has one owner, and 0 for others. `groups` are the optimizer's, by
    tensor."""
    is_whole = whole_groups(optimizer, config.whole_tensors)
    return [
        work_of(optimizer, group, tensor.shape) if is_whole[group] else 0
        for tensor, group in zip(tensors, groups, strict=True)
    ]


def place_of(param: torch.Tensor) -> torch.device:
    """The device of a parameter, or what it will be for one on the meta device."""
    return accelerators.current().device() if param.is_meta else param.device


def choose(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> ManagedParams:
    """Returns the parameters of the optimizer that can be trained: the model's in its order, then those that only the optimizer
    has."""
    group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    known = {id(param) for _, param in model.named_parameters()}
    extra = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in known]
    named = [(name, param) for name, param in model.named_parameters() if id(param) in group_of]
    named += [(f"optimizer.{index}", param) for index, param in enumerate(extra)]
    named = [(name, param) for name, param in named if param.requires_grad or param.dtype in DTYPES.values()]
    left_out = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in group_of]
    if left_out:
        logger.warning("Trainable parameters in no group of the optimizer, left alone: %s", ", ".join(left_out))
    islands = fp32_islands(model, config.keep_fp32)
    dtypes = [_dtype_for(name, param, config.dtype, id(param) in islands) for name, param in named]
    groups = [group_of[id(param)] for _, param in named]
    placed = zip(groups, (place_of(param) for _, param in named), strict=True)
    places = [places_of(optimizer.param_groups[group], config, device) for group, device in placed]
    tensors = [param for _, param in named]
    works = works_of(optimizer, config, tensors, groups)
    kept = [is_kept(config, tensor) for tensor in tensors]
    return ManagedParams([name for name, _ in named], tensors, groups, dtypes, places, works, kept, left_out)


def fp32_islands(model: nn.Module, patterns: tuple[str, ...]) -> set[int]:
    """Returns the parameters that stay in fp32: their name, or their module's, matches one of the patterns."""
    islands = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        if any(fnmatch.fnmatch(part, pattern) for part in names_and_parents(name) for pattern in patterns):
            islands.add(id(param))
    return islands


def names_and_parents(name: str) -> list[str]:
    """Returns the names of the modules that a parameter is in, and its own."""
    return [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)]


def _dtype_for(name: str, param: nn.Parameter, dtype: str | None, island: bool) -> torch.dtype:
    return param.dtype if dtype is None or island else DTYPES[dtype]
