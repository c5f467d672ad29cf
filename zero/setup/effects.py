"""Finds the settings that have no effect where they are given, so that none is ignored in silence."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import nn

from zero.comm.group import Group
from zero.config.schema import Coded, StateHome, ZeroConfig
from zero.optim.several import members_of
from zero.optim.traits import is_elementwise
from zero.plan.stages import stage_of
from zero.setup.selection import ManagedParams, names_and_parents, place_of

logger = logging.getLogger("zero")


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
