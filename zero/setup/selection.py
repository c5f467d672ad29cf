"""Chooses the parameters that are managed, their dtypes, and the homes of their states."""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

import accelerators
from zero.comm.group import Group
from zero.comm.one_answer import exchange_texts, run_on_all
from zero.config.blocks import Offload, StateHome, StateHomes
from zero.config.schema import ZeroConfig
from zero.memory.formats import DTYPES, dtype_name
from zero.memory.homes.file import Pace, probe
from zero.memory.leaves import is_dtensor, local_of
from zero.optim.optimizers import has_narrow_moments
from zero.optim.several import members_of
from zero.optim.traits import sees_across, steps_by_blocks, whole_groups, work_of
from zero.plan.homes import Away
from zero.plan.layout import ParamSpec, PartSpec
from zero.plan.stages import stage_of
from zero.setup.parts import Parts

logger = logging.getLogger("zero")

_DEVICE = StateHome(home="device")
_AT = {"host": "on the host", "disk": "on disk"}
_STATE_BYTES = 12  # the bytes of an element, about: a master and two moments
_WORTH_A_TRY = 256 * 2**20  # the bytes of a rank's states from which a disk is tried


@dataclass(frozen=True)
class ManagedParams:
    """The parameters to manage, in the model's order, and the dtype each will have."""

    names: list[str]
    tensors: list[nn.Parameter]
    leaves: list[nn.Parameter]  # the parameters that autograd and the user have
    groups: list[int]
    dtypes: list[torch.dtype]
    placements: list[Placement]  # where the states of each parameter live
    works: list[int]  # the work of each update if the parameter has one owner; else 0
    kept: list[bool]  # every rank keeps the parameter whole at stage 3
    part_specs: list[PartSpec]  # which part of a larger one each parameter is
    unmanaged: list[str]  # parameters that require a gradient and are in no group of the optimizer

    @property
    def frozen(self) -> set[int]:
        """The frozen parameters, by their numbers. They get memory when they are trained."""
        return {index for index, tensor in enumerate(self.leaves) if not tensor.requires_grad}

    def specs(self) -> list[ParamSpec]:
        return specs_of(
            self.names, self.tensors, self.groups, self.dtypes, self.placements, self.kept, self.works, self.part_specs
        )


def specs_of(
    names: list[str],
    tensors: list[nn.Parameter],
    groups: list[int],
    dtypes: list[torch.dtype],
    placements: list[Placement],
    kept: list[bool],
    works: list[int],
    part_specs: list[PartSpec],
) -> list[ParamSpec]:
    shapes, named = longest_shapes(tensors, part_specs), map(dtype_name, dtypes)
    offloads, away = [each.offload for each in placements], [each.away for each in placements]
    facts = zip(names, shapes, named, groups, offloads, kept, works, away, strict=True)
    specs = [ParamSpec(*of_param) for of_param in facts]
    return [replace(spec, **each._asdict()) for spec, each in zip(specs, part_specs, strict=True)]


def longest_shapes(tensors: list[nn.Parameter], part_specs: list[PartSpec]) -> list[tuple[int, ...]]:
    """Returns the shapes by which all ranks decide alike: of uneven parts those of the longest."""
    return [each.longest(tensor.shape) for tensor, each in zip(tensors, part_specs, strict=True)]


def is_kept(config: ZeroConfig, shape: Sequence[int]) -> bool:
    """Returns True if every rank keeps a parameter of this shape whole where weights are in shares."""
    return stage_of(config.stage).shards_weights and math.prod(shape) <= config.keep_whole_numel


def works_of(
    optimizer: torch.optim.Optimizer, config: ZeroConfig, shapes: Sequence[Sequence[int]], groups: list[int]
) -> list[int]:
    """Returns the work of the update of each tensor that has one owner, by its shape, and 0 for others. `groups` are the
    optimizer's, by tensor."""
    is_whole = whole_groups(optimizer, config.whole_tensors)
    return [
        work_of(optimizer, group, torch.Size(shape)) if is_whole[group] else 0
        for shape, group in zip(shapes, groups, strict=True)
    ]


def check_parts(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    tensors: Sequence[nn.Parameter],
    groups: Sequence[int],
    works: Sequence[int],
    parts: Parts,
) -> None:
    """Raises where an update looks at whole tensors, of which a rank has only its part."""
    for name, tensor, group, work in zip(names, tensors, groups, works, strict=True):
        mark = parts.mark_of(tensor)
        dims = () if mark is None else mark.dims
        if mark is not None and work and any(sees_across(optimizer, group, dim, tensor.dim()) for dim in dims):
            raise ValueError(
                f"Cannot shard {name}: it is a part along {mark.where}, and its optimizer looks at more than a part. "
                "Give it to one that steps each element by itself, as AdamW does."
            )


def place_of(param: torch.Tensor) -> torch.device:
    """Returns the device of a parameter, or what it will be for one on the meta device."""
    return accelerators.current().device() if param.is_meta else param.device


def choose(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, parts: Parts) -> ManagedParams:
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
    dtypes = [_dtype_for(param, config.dtype, id(param) in islands) for _, param in named]
    groups = [group_of[id(param)] for _, param in named]
    placed = zip(groups, (place_of(param) for _, param in named), strict=True)
    placements = [placement_of(optimizer.param_groups[group], config, device) for group, device in placed]
    leaves = [param for _, param in named]
    for (name, param), dtype in zip(named, dtypes, strict=True):
        if is_dtensor(param) and param.dtype != dtype:
            raise ValueError(
                f"Cannot shard in {dtype_name(dtype)}: {name} is a DTensor in {dtype_name(param.dtype)}, which cannot be cast "
                "in place. Cast the model before its layers are cut, and leave dtype out."
            )
    tensors = [local_of(param) for param in leaves]
    names, part_specs = [name for name, _ in named], list(map(parts.spec_of, leaves))
    shapes = longest_shapes(tensors, part_specs)
    works = works_of(optimizer, config, shapes, groups)
    kept = [is_kept(config, shape) for shape in shapes]
    check_parts(optimizer, names, tensors, groups, works, parts)
    return ManagedParams(names, tensors, leaves, groups, dtypes, placements, works, kept, part_specs, left_out)


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


def _dtype_for(param: nn.Parameter, dtype: str | None, is_island: bool) -> torch.dtype:
    return param.dtype if dtype is None or is_island else DTYPES[dtype]


# homes of states ------------------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """The homes of a group, as a layout has them."""

    offload: float = 0.0  # the ratio that is stepped on the host beside a device
    away: tuple[Away, ...] = ()


def homes_of(group: Mapping[str, Any], config: ZeroConfig) -> dict[str, StateHome | None]:
    """Returns the home of each kind of state: the group's "homes", else those of the configuration; else the group's "offload",
    else that of the configuration."""
    given = group.get("homes", config.homes)
    homes = given if isinstance(given, StateHomes) else StateHomes(**(given or {}))
    if "homes" in group and (homes.threads, homes.piece_bytes) != ("auto", "auto"):
        raise ValueError("Cannot set threads or piece_bytes for a group: they hold for all. Say them in homes= of zero.shard.")
    offload = Offload.of(group["offload"]) if "offload" in group else config.offload
    if "offload" in group and offload is not None and offload.step_in_backward:
        raise ValueError("Cannot set step_in_backward for a group: it holds for all. Say it in offload= of zero.shard.")
    general = None if offload is None else StateHome(home="host", ratio=offload.ratio, pinned=offload.pinned)
    return {kind: getattr(homes, kind) or general for kind in ("weights", "gradients", "masters", "moments")}


def placement_of(group: Mapping[str, Any], config: ZeroConfig, device: torch.device) -> Placement:
    """Returns where the states of a group live. Raises if its homes contradict each other."""
    homes = homes_of(group, config)
    # If weights are on the host, the step can only be there.
    masters, is_host = homes["masters"] or _DEVICE, device.type == "cpu"
    steps_here = is_host or masters.home == "device" or not masters.ratio
    _check_homes(homes, steps_here, is_host, stage_of(config.stage).shards_weights)
    away = []
    for kind in ("weights", "gradients", "masters", "moments"):
        home = homes[kind] or _DEVICE
        is_apart = home.home == "disk" or (home.home == "host" and steps_here and not is_host and kind != "weights")
        if is_apart and home.ratio:
            away.append(Away(kind, home.place, home.ratio))
    return Placement(0.0 if steps_here else masters.ratio, tuple(away))


def _check_homes(homes: Mapping[str, StateHome | None], steps_here: bool, is_host: bool, shards_weights: bool) -> None:
    weights, gradients, moments = homes["weights"], homes["gradients"], homes["moments"]
    if weights is not None and weights.home == "disk" and not shards_weights:
        raise ValueError("Cannot keep weights on disk: they are whole on the device below stage 3. Use stage=3.")
    if is_host:
        return
    names = {"gradients": gradients, "moments": moments}
    if shards_weights:
        names["weights"] = weights
    elif weights is not None and weights.home == "host" and homes["masters"] is not weights:
        raise ValueError("Cannot keep weights on the host: they are whole on the device below stage 3. Use stage=3.")
    for name, home in names.items():
        if home is not None and not steps_here and home.home == "device":
            raise ValueError(
                f"Cannot keep {name} on the device: masters are stepped on the host. Leave {name} out, and they go there too."
            )
    masters = homes["masters"]
    for name, home in names.items():
        if home is None or masters is None or steps_here or home.home != "host" or home.ratio == masters.ratio:
            continue
        raise ValueError(
            f"Cannot keep {home.ratio:.0%} of {name} on the host: {masters.ratio:.0%} of masters are stepped there, and "
            f"{name} are where their masters are stepped. Give both one ratio, or leave {name} out."
        )
    for name, places in (("gradients", ("host",)), ("weights", ("host", "disk"))):
        home = names.get(name)
        if home is not None and steps_here and home.home in places and home.ratio:
            raise ValueError(
                f"Cannot keep {name} {_AT[home.home]}: masters are stepped on the device. Give masters the home 'cpu' or a "
                "disk too."
            )
    if weights is not None and weights.home == "disk" and masters is not None and weights.ratio > masters.ratio:
        raise ValueError(
            f"Cannot keep {weights.ratio:.0%} of weights on disk: {masters.ratio:.0%} of masters are stepped on the host, and "
            "weights on disk are stepped there. Give weights that ratio or less."
        )


def with_pace(config: ZeroConfig, group: Group, groups: Sequence[Mapping[str, Any]], numel: int) -> ZeroConfig:
    """Fills in how disks are read and written, if the configuration says "auto": as fast as rank 0 finds by trying, if there
    are enough elements to make that worth while. A collective if states are on a disk."""
    homes = config.homes
    streamed = (home for settings in groups for kind, home in homes_of(settings, config).items() if kind != "weights")
    places = [home.path for home in streamed if home is not None and home.path is not None]
    if not places or (homes.threads != "auto" and homes.piece_bytes != "auto"):
        return config
    tries = group.rank == 0 and numel * _STATE_BYTES // group.inner.size >= _WORTH_A_TRY
    pace = run_on_all(group, lambda: probe(places[0]) if tries else Pace())
    threads, piece_bytes = map(int, exchange_texts(group, f"{pace.threads} {pace.piece_bytes}")[0].split())
    update = {
        "threads": threads if homes.threads == "auto" else homes.threads,
        "piece_bytes": piece_bytes if homes.piece_bytes == "auto" else homes.piece_bytes,
    }
    return config.model_copy(update={"homes": homes.model_copy(update=update)})


def check_streams(optimizer: torch.optim.Optimizer, placements: Mapping[int, Placement]) -> None:
    """Raises if states of some groups come for the step a bucket at a time, and the optimizer needs all of them at once."""
    apart = {each.kind for placement in placements.values() for each in placement.away} & {"masters", "moments"}
    if apart and any(map(has_narrow_moments, members_of(optimizer))):
        raise ValueError(
            f"Cannot keep {' and '.join(sorted(apart))} apart from where they are stepped: moments of this "
            f"{type(optimizer).__name__} are bf16, and those that come for a step are fp32. Leave moments='bfloat16' out, or "
            "fp32_optimizer_states=False of DeepSpeedCPUAdam, or use offload='cpu'."
        )
    if apart and not steps_by_blocks(optimizer):
        raise ValueError(
            f"Cannot keep {' and '.join(sorted(apart))} apart from where they are stepped: {type(optimizer).__name__} is not "
            "known to step one parameter after the other, so all of them would be in memory. Use an optimizer of torch, or "
            "offload='cpu'."
        )
