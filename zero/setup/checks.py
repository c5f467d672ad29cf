"""Refuses what cannot be sharded, before anything is changed, and what ranks build differently; warns of what has no effect.

Ranks compare lines of text and digests: these are the same on all of them, or all of them raise. A setting that changes nothing
where it is given is reported, so that none is ignored in silence.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from accelerators import Accelerator
from accelerators.tensor_bytes import bytes_of
from zero.comm.group import Group
from zero.comm.levels import first_holder, seats_of
from zero.comm.one_answer import exchange_about, exchange_texts, first_difference
from zero.config.blocks import Coded, StateHome
from zero.config.schema import ZeroConfig
from zero.errors import RanksDiffer, full_name
from zero.memory.addresses import overlapping, storage_of
from zero.memory.formats import DTYPES, dtype_name
from zero.memory.leaves import local_of
from zero.optim.several import members_of, name_of
from zero.optim.traits import (
    ELEMENTWISE,
    communicates_by,
    evaluates,
    is_elementwise,
    known_whole,
    of_all_tensors,
    overridden_by_place,
    settings_of,
)
from zero.plan.stages import stage_of
from zero.setup.selection import ManagedParams, names_and_parents, place_of

if TYPE_CHECKING:
    from zero.setup.parts import Parts

logger = logging.getLogger("zero")

BITS = 16  # the bytes that stand for the bits of one tensor


def check_model(model: nn.Module, stage: int = 0) -> None:
    """Refuses what is not a module, a model that another library distributes already, and at stage 3 what is scripted."""
    if not isinstance(model, nn.Module):
        type_name = type(model).__name__
        raise TypeError(
            f"Cannot shard: the first argument is of type {type_name} and not a module. Call zero.shard(model, optimizer, "
            "stage=...)."
        )
    for name, module in model.named_modules():
        kind = type(module)
        path = full_name(kind)
        if kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel") or "FSDP" in kind.__name__:
            where = f"its module {name}" if name else "it"
            raise ValueError(
                f"Cannot shard {type(model).__name__}: {where} is a {path}, which distributes gradients itself. "
                "Leave the wrapper out, and pass the plain model."
            )
        if isinstance(module, torch.jit.ScriptModule) and stage_of(stage).shards_weights:
            raise ValueError(
                f"Cannot shard at stage 3: {name or 'the model'} is a ScriptModule, which holds parameters of its own, and not "
                "those in shares. Use stage 2, or script it after it was sharded."
            )
        lazy = [param for param, tensor in module.named_parameters(name, recurse=False) if nn.parameter.is_lazy(tensor)]
        if lazy:
            raise ValueError(
                f"Cannot shard: {lazy[0]} has no shape yet. Run the model once, so that its lazy modules know theirs, then "
                "make its optimizer."
            )
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"Cannot shard: {name or kind.__name__} is an embedding with sparse=True, whose gradients are not dense. "
                "Use sparse=False."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, config: ZeroConfig) -> None:
    """Refuses an optimizer that looks at all parameters at once, if there are shares, and one of an unknown kind without the
    user's word."""
    if hasattr(optimizer, "sharding"):
        raise ValueError("Cannot shard: the optimizer is sharded already. Pass it once, or close() it first.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        type_name = type(optimizer).__name__
        raise TypeError(f"Cannot shard with a {type_name}: it is not an optimizer. Pass a torch.optim.Optimizer.")
    if any(group.get("differentiable") for group in (optimizer.defaults, *optimizer.param_groups)):
        raise ValueError(
            f"Cannot shard {name_of(optimizer)} with differentiable=True: a sharded step is not recorded by autograd. "
            "Leave it out."
        )
    for member in members_of(optimizer):
        _check_kind(member, config, is_alone=member is optimizer)


def _check_kind(optimizer: torch.optim.Optimizer, config: ZeroConfig, is_alone: bool) -> None:
    """Refuses what is known of an optimizer. What the user says of several optimizers holds for those of which nothing is
    known."""
    elementwise, whole_tensors = config.elementwise, config.whole_tensors
    kind, whole, why = type(optimizer), known_whole(optimizer), of_all_tensors(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("Cannot shard SparseAdam: it wants sparse gradients, and only dense ones are summed. Use AdamW.")
    if evaluates(optimizer):
        raise ValueError(
            f"Cannot shard {kind.__name__}: it evaluates the loss several times a step, each time with other weights, and a "
            "step here has one window of gradients. Use it on a plain model, or AdamW."
        )
    if why is not None and (stage_of(config.stage).shards_optimizer or (elementwise and is_alone)):
        raise ValueError(
            f"Cannot shard {kind.__name__}: it {why}, and each rank would have its own part of them alone. Use stage=0, where "
            "every rank has all, or an optimizer that steps one tensor at a time, such as AdamW or Muon, and clip with clip=."
        )
    if why is not None:
        return
    if stage_of(config.stage).shards_optimizer:
        _check_step(optimizer)
    said = [group.get("whole") for group in optimizer.param_groups]
    if whole is not None and ((elementwise and is_alone) or False in said):
        raise ValueError(
            f"Cannot shard {kind.__name__} element by element: {whole}, and would be given a share of a tensor. Leave "
            "elementwise=True and 'whole': False out: each of its tensors belongs to one rank."
        )
    if not is_elementwise(optimizer) and whole is None and not (elementwise or whole_tensors) and None in said:
        known = ", ".join(known.__name__ for known in ELEMENTWISE)
        raise ValueError(
            f"Cannot shard with {full_name(kind)}: it is not known to treat every element by itself. "
            "Pass elementwise=True if it does, whole_tensors=True if it looks at all of a tensor but at no other one, and try "
            f"that with zero.verify; or use one of {known}."
        )


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuses one whose step knows of other ranks, or knows its parameters by what a share of them is not."""
    name, call = full_name(type(optimizer)), communicates_by(optimizer)
    if call is not None:
        instead = "Use stage=0, or an optimizer for one device: each tensor is stepped by one rank anyway."
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # named by its class, as importing its module takes seconds
            wrapped = type(optimizer.optim).__name__  # type: ignore[attr-defined]
            instead = f"Pass {wrapped}(model.parameters(), ...), which it wraps, with stage=1."
        raise ValueError(
            f"Cannot shard {name}: it calls {call} itself, as if each rank had all gradients. {instead}"
        )
    if overridden_by_place(optimizer):
        raise ValueError(
            f"Cannot shard {name}: GlobalOptimManager has settings for single parameters, as of a StableEmbedding, and a step "
            "of shares does not find them. Use stage=0; or pass these parameters to an optimizer of 32 bits and shard both, as "
            "[optimizer, other], after GlobalOptimManager.get_instance().initialize()."
        )


def check_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses the optimizer of another model, and a parameter that it would update twice."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trainable = [param for param in model.parameters() if param.requires_grad]
    if trainable and not any(id(param) in known for param in model.parameters()):
        raise ValueError(
            f"Cannot shard {type(model).__name__}: none of its {len(trainable)} trainable parameters is in the "
            f"{type(optimizer).__name__} that was passed. Make the optimizer from this model's parameters, after it was copied "
            "or moved."
        )
    seen: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) in seen:
                name = next((name for name, tensor in model.named_parameters() if tensor is param), "a parameter")
                before = seen[id(param)]
                where = f"groups {before} and {index}" if before != index else f"group {index} twice"
                raise ValueError(f"Cannot shard: {name} is in {where} of the optimizer. List every parameter once.")
            seen[id(param)] = index


def check_settings_on_host(optimizer: torch.optim.Optimizer, ratios: Mapping[int, float]) -> None:
    """Refuses settings of groups that fail in a step on the host, before the first one fails in its middle. `ratios` says how
    much of each group is stepped there."""
    for index in sorted(index for index, ratio in ratios.items() if ratio):
        group, cannot = optimizer.param_groups[index], f"Cannot offload group {index} of the optimizer:"
        devices = {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor) and not value.is_cpu}
        for key, device in devices.items():
            raise ValueError(
                f"{cannot} its {key} is a tensor on {device}, which a step on the host cannot use. Give a number, or a tensor "
                "on the CPU."
            )
        if group.get("capturable"):
            raise ValueError(f"{cannot} it has capturable=True, which steps on an accelerator alone. Leave it out.")
        if ratios[index] < 1.0 and isinstance(optimizer, torch.optim.ASGD) and group.get("foreach") is not False:
            raise ValueError(
                f"{cannot} with ratio={ratios[index]} torch's loops for devices would round one part of a parameter's eta, "
                "those for the host another, and no one value could be saved. Make the optimizer with foreach=False."
            )


def check_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Refuses `capturable` on the host, which torch would refuse in the first step."""
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise ValueError(
                f"Cannot shard {type(optimizer).__name__} on the host: group {index} has capturable=True, which steps on an "
                "accelerator alone. Leave it out."
            )


def check_params(names: Sequence[str], tensors: Sequence[nn.Parameter], may_be_meta: bool = False) -> None:
    """Refuses parameters that cannot lie in flat memory. Those on the meta device are allowed where they get no memory of their
    own."""
    devices = {tensor.device for tensor in tensors if not (may_be_meta and tensor.is_meta)}
    if len(devices) > 1:
        first = {str(tensor.device): name for name, tensor in reversed(list(zip(names, tensors, strict=True)))}
        raise ValueError(f"Cannot shard: the parameters are on several devices, {first}. Move the model to one device first.")
    for name, tensor in zip(names, tensors, strict=True):
        problem = _problem_of(tensor, may_be_meta)
        if problem is not None:
            raise ValueError(f"Cannot shard: parameter {name} {problem}")
    pair = overlapping(tensors)
    if pair is not None:
        one, other = names[pair[0]], names[pair[1]]
        what = f"{one} overlaps itself" if one == other else f"{one} and {other} share memory without being one parameter"
        raise ValueError(f"Cannot shard: {what}. Tie parameters by using the same Parameter, or give each its own storage.")


def _problem_of(tensor: nn.Parameter, may_be_meta: bool) -> str | None:
    if type(tensor) is not nn.Parameter or type(tensor.data) is not torch.Tensor:
        kind = type(tensor.data) if type(tensor) is nn.Parameter else type(tensor)
        return f"is a {full_name(kind)}, whose bits cannot be laid flat. Leave it out of the optimizer."
    if tensor.is_meta and not may_be_meta:
        return (
            "is on the meta device and has no values yet. Materialise the model first, with to_empty and its initialisation; "
            "or shard it at stage 3, and initialise it then."
        )
    if tensor.is_complex():
        return "is complex, which is not supported. Make its view_as_real the parameter, and view it as complex in the module."
    if tensor.dtype not in DTYPES.values():
        return f"has dtype {tensor.dtype}, which cannot be trained in shares. Supported: {', '.join(DTYPES)}."
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}. Only dense parameters can be sharded."
    return None


def check_views(model: nn.Module, names: Sequence[str], tensors: Sequence[nn.Parameter]) -> None:
    """Refuses buffers and attributes that are views of the memory of a parameter, which will move."""
    managed = {id(tensor) for tensor in tensors}
    in_storage: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not tensor.is_meta:
            in_storage.setdefault(storage_of(tensor), []).append(index)
    for name, other in (*model.named_parameters(), *model.named_buffers()):
        if id(other) in managed or other.layout != torch.strided or type(other.data) is not torch.Tensor:
            continue
        for index in in_storage.get(storage_of(other), ()):
            if overlapping([tensors[index], other]) is not None:
                raise ValueError(
                    f"Cannot shard: {name} is a view of the memory of parameter {names[index]}, which moves. "
                    "Register such a view after sharding, or make it in forward."
                )


def check_devices(names: Sequence[str], tensors: Iterable[nn.Parameter], device: torch.device) -> None:
    """Refuses parameters on different devices."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != device:
            raise ValueError(
                f"Cannot add {name}: it is on {tensor.device}, and the sharded parameters are on {device}. Move it there first."
            )


def check_dtypes(accelerator: Accelerator, dtypes: Iterable[torch.dtype]) -> None:
    """Refuses dtypes that the device cannot compute in."""
    for dtype in dtypes:
        if not accelerator.supports(dtype):
            works = ", ".join(str(known).removeprefix("torch.") for known in accelerator.supported_dtypes())
            raise ValueError(f"Cannot use weights in {dtype}: {accelerator.name} does not compute in it. Use one of {works}.")


# alike on all ranks ---------------------------------------------------------------------------------------------------


def verify_same_setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    chosen: ManagedParams,
    config: ZeroConfig,
    group: Group,
    parts: Parts,
) -> None:
    """Raises on every rank, with the first difference, when ranks build different things."""
    lines = config.lines()
    for spec, tensor in zip(chosen.specs(), chosen.tensors, strict=True):
        given = dtype_name(tensor.dtype)  # the dtype in which rank 0's values are sent
        cast = "" if given == spec.dtype else f"{given} to be "
        mark = parts.mark_of(tensor)
        cut = "" if mark is None else f", one of {len(mark.ranks)} parts along {mark.where}"
        lines.append(f"parameter {spec.name} {spec.shape} {cast}{spec.dtype} in group {spec.group}{cut}")
    trained = {id(leaf) for leaf in chosen.leaves if leaf.requires_grad}
    others = [(name, param) for name, param in model.named_parameters() if id(param) not in trained]
    words = {True: "parameter left out", False: "frozen parameter"}
    shapes = [parts.spec_of(param).longest(local_of(param).shape) for _, param in others]
    for (name, param), shape in zip(others, shapes, strict=True):
        lines.append(f"{words[param.requires_grad]} {name} {shape} {param.dtype}")
    lines += [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    lines += [f"optimizer {name_of(optimizer)}", *settings_of(optimizer).split("\n")]
    if config.start == "verify":
        named = {name: tensor for name, tensor in zip(chosen.names, chosen.tensors, strict=True) if not tensor.is_meta}
        whole = {name: tensor for name, tensor in named.items() if parts.mark_of(tensor) is None}
        lines += [f"weights of {name}: {bits_of(tensor).hex()}" for name, tensor in whole.items()]
    text = "\n".join(lines)
    digests = exchange_about(group, "shard", hashlib.sha256(text.encode()).digest())
    if all(digest == digests[0] for digest in digests):
        if config.start == "verify" and parts.meshes:
            check_weights({name: tensor for name, tensor in named.items() if name not in whole}, group, parts)
        return
    texts = exchange_texts(group, text)
    rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
    raise RanksDiffer(
        f"Cannot shard: ranks of {group.size} built different things: {first_difference(texts[0], texts[rank], rank)}. "
        "Build the same model, optimizer and options on every rank; look for a seed, a path or `if rank == 0`."
    )


def check_weights(named: Mapping[str, torch.Tensor], group: Group, parts: Parts) -> None:
    """Raises on every rank unless all ranks that hold the same of these tensors have the same bits of it. A collective."""
    bits = b"".join(map(bits_of, named.values()))
    everyone, seats = exchange_about(group, "check", bits), seats_of(group)
    families = list(map(parts.family_of, named.values()))
    for rank, rank_bits in enumerate(everyone):
        for index, (name, family) in enumerate(zip(named, families, strict=True)):
            first = first_holder(seats[family - 1], rank) if family else 0
            part = slice(index * BITS, (index + 1) * BITS)
            if rank_bits[part] != everyone[first][part]:
                raise RanksDiffer(
                    f"Cannot go on: ranks {first} and {rank} have different weights in {name}. "
                    "Edit weights on all ranks alike, or load a checkpoint."
                )


def bits_of(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the values of a tensor."""
    return hashlib.sha256(bytes_of(local_of(tensor))).digest()[:BITS]


# settings without effect ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """The facts that decide, beside the settings themselves, which of them have an effect."""

    num_sharing: int = 1  # ranks that share the states
    is_host: bool = False  # weights are on the host
    halves: bool = True  # some weights train in 16 bits
    is_elementwise: bool = False  # the optimizer is known to treat every element by itself
    unmatched: Mapping[str, Sequence[str]] = field(default_factory=dict)  # patterns that match nothing, by setting


def warn_without_effect(
    model: nn.Module, optimizer: torch.optim.Optimizer, params: ManagedParams, config: ZeroConfig, group: Group
) -> None:
    """Logs a warning for each setting without effect, on rank 0."""
    if group.rank:
        return
    names = {part for name, _ in model.named_parameters(remove_duplicate=False) for part in names_and_parents(name)}
    buffers = [name for name, _ in model.named_buffers()]
    kept_buffers = {each: re.compile(each.replace("*", ".*")) for each in config.keep_fp32_buffers or ()}
    unmatched = {
        "keep_fp32": [each for each in config.keep_fp32 if not fnmatch.filter(names, each)],
        "keep_fp32_buffers": [each for each, pattern in kept_buffers.items() if not any(map(pattern.search, buffers))],
    }
    situation = Situation(
        num_sharing=group.inner.size,
        is_host=bool(params.tensors) and place_of(params.tensors[0]).type == "cpu",
        halves=any(dtype.itemsize == 2 for dtype in params.dtypes),
        is_elementwise=all(map(is_elementwise, members_of(optimizer))),
        unmatched=unmatched,
    )
    for name, why in without_effect(config, situation).items():
        logger.warning("%s has no effect here: %s.", name, why)


def without_effect(config: ZeroConfig, situation: Situation) -> dict[str, str]:
    """Returns the settings that change nothing where they are given, and why. One that asks for what holds anyway, as that all
    ranks have equal weights where there is one, is none of them."""
    stage, casts = stage_of(config.stage), config.dtype not in (None, "float32")
    kinds = [home for _, home in config.homes if isinstance(home, StateHome)]
    has_disk = any(home.home == "disk" for home in kinds)
    paced = (config.homes.threads, config.homes.piece_bytes) != ("auto", "auto")
    whole, alone = "weights are whole below stage 3", "one rank has all states, so nothing travels"
    on_host = "weights are on the host, and all other state is too"
    uncast = "no weight is cast, as no dtype is given" if config.dtype is None else "no weight is cast to 16 bits"
    scale = config.loss_scale
    moving = scale.model_fields_set - {"dynamic", "initial", "max_skips"} if scale is not None and not scale.dynamic else ()
    rules = (
        (config.gathered_bytes != "auto" and not stage.shards_weights, "gathered_bytes", whole),
        (config.keep_whole_numel > 0 and not stage.shards_weights, "keep_whole_numel", whole),
        (config.shard_ranks is not None and not stage.shards_optimizer, "shard_ranks", "nothing is in shares at stage 0"),
        (bool(config.keep_fp32) and not casts, "keep_fp32", uncast),
        (config.masters == "rounded" and not casts, "masters", uncast),
        (config.keep_fp32_buffers is not None and config.buffer_dtype is None, "keep_fp32_buffers", "no buffer_dtype is given"),
        (config.reduce_dtype in get_args(Coded) and situation.num_sharing == 1, "reduce_dtype", alone),
        (config.predivide != 1.0, "predivide", "sums are float32, so nothing overflows before it is divided"),
        (config.offload is not None and situation.is_host, "offload", on_host),
        (situation.is_host and any(home.home == "host" for home in kinds), "homes", on_host),
        (paced and not has_disk, "homes", "threads and piece_bytes say how disks are read, and no state is on one"),
        (bool(config.whole_tensors) and situation.is_elementwise, "whole_tensors", "the optimizer is known to be elementwise"),
        (bool(moving), "loss_scale", f"a fixed scale does not move, so nothing looks at its {', '.join(sorted(moving))}"),
        *((bool(which), name, f"nothing is called {', '.join(which)}") for name, which in situation.unmatched.items()),
    )
    return {name: why for asked, name, why in reversed(rules) if asked}
