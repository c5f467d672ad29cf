"""Canonical names of a model's parameters and buffers, whatever is wrapped around the model or its parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# Modules that stand around another one, as an attribute of this name, and are no part of the model.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass
class Named:
    """A model by canonical names. A tensor with several names is listed by the first; the others are its aliases."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # persistent ones
    modules: dict[str, nn.Module] = field(default_factory=dict)  # that keep more than tensors
    aliases: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> Named:
        named = Named()
        first: dict[int, str] = {}
        for name, tensor in _tensors_of(model):
            name = unwrapped(name)
            if first.setdefault(id(tensor), name) != name:
                named.aliases[name] = first[id(tensor)]
            elif isinstance(tensor, nn.Parameter):
                named.parameters[name] = tensor
            else:
                named.buffers[name] = tensor
        for name, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                named.modules[unwrapped(name)] = module
        return named


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What `state_dict` has, in its order, under every name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        yield from ((before + name, param) for name, param in module._parameters.items() if param is not None)
        kept = ((name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set)
        yield from ((before + name, buffer) for name, buffer in kept if buffer is not None)


def num_wrappers(names: Collection[str]) -> int:
    """How many times everything lies in one attribute `module`, as what people write around a model calls it."""
    depth = 0
    parts = [name.split(".") for name in names]
    while parts and all(len(path) > depth + 1 and path[depth] == "module" for path in parts):
        depth += 1
    return depth


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def rewrapped(name: str, before: int, after: int) -> str:
    """Returns a name of one model with the wrappers of another one."""
    return ".".join(["module"] * after + name.split(".")[before:])
