"""Compares what the ranks build, as lines of text: it is the same on all of them, or all of them raise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero.comm.exchange import exchange_about, exchange_texts, first_difference
from zero.comm.group import Group
from zero.config.schema import ZeroConfig
from zero.errors import RanksDiffer
from zero.memory.formats import bytes_of, dtype_name
from zero.optim.several import name_of

if TYPE_CHECKING:
    from zero.setup.param_selection import ManagedParams


def verify_same_setup(
    model: nn.Module, optimizer: torch.optim.Optimizer, chosen: ManagedParams, config: ZeroConfig, group: Group
) -> None:
    """Raises on every rank, with the first difference, when ranks build different things."""
    lines = config.lines()
    for spec, tensor in zip(chosen.specs(), chosen.tensors, strict=True):
        given = dtype_name(tensor.dtype)  # in which rank 0's values are sent
        cast = "" if given == spec.dtype else f"{given} to be "
        lines.append(f"parameter {spec.name} {spec.shape} {cast}{spec.dtype} in group {spec.group}")
    trained = {id(tensor) for tensor in chosen.tensors if tensor.requires_grad}
    others = [(name, param) for name, param in model.named_parameters() if id(param) not in trained]
    words = {True: "parameter left out", False: "frozen parameter"}
    lines += [f"{words[param.requires_grad]} {name} {tuple(param.shape)} {param.dtype}" for name, param in others]
    lines += [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    lines += [f"optimizer {name_of(optimizer)}", *settings_of(optimizer).split("\n")]
    if config.start == "verify":
        named = zip(chosen.names, chosen.tensors, strict=True)
        lines += [f"weights of {name}: {bits_of(tensor).hex()}" for name, tensor in named if not tensor.is_meta]
    text = "\n".join(lines)
    digests = exchange_about(group, "shard", hashlib.sha256(text.encode()).digest())
    if all(digest == digests[0] for digest in digests):
        return
    texts = exchange_texts(group, text)
    rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
    raise RanksDiffer(
        f"Cannot shard: ranks of {group.size} built different things: {first_difference(texts[0], texts[rank], rank)}. "
        "Build the same model, optimizer and options on every rank; look for a seed, a path or `if rank == 0`."
    )


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns a line for each group, with its settings that can be compared as text."""
    return "\n".join(f"group {_settings_of(group)}" for group in optimizer.param_groups)


def _settings_of(group: dict[str, Any]) -> str:
    settings = {}
    for key, value in sorted(group.items()):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (int, float, str, tuple, type(None))):
            settings[key] = repr(value)
    return ", ".join(f"{key}={value}" for key, value in settings.items())


BITS = 16  # bytes that stand for the bits of one tensor


def check_weights(named: Mapping[str, torch.Tensor], group: Group) -> None:
    """Raises on every rank unless all ranks have the same bits in each of these tensors. A collective."""
    bits = b"".join(map(bits_of, named.values()))
    everyone = exchange_about(group, "check", bits)
    for rank, rank_bits in enumerate(everyone):
        for index, name in enumerate(named):
            part = slice(index * BITS, (index + 1) * BITS)
            if rank_bits[part] != everyone[0][part]:
                raise RanksDiffer(
                    f"Cannot go on: ranks 0 and {rank} have different weights in {name}. "
                    "Edit weights on all ranks alike, or load a checkpoint."
                )


def bits_of(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the values of a tensor."""
    return hashlib.sha256(bytes_of(tensor)).digest()[:BITS]
