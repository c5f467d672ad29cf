"""Layers of experts of DeepSpeed's kind: the groups that they name, and which parameters are parts along them.

A parameter of an expert has `allreduce=False`, and as `group_name` the name of the ranks that have all experts together. Such a
layer makes that group in `set_deepspeed_parallelism`, which an engine calls.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero.setup.parts import Parts, part

# The ranks that have all experts together, by the name of their group; None where torch.distributed is not up.
GROUPS: dict[str, Any] = {}


def is_of_expert(param: Any) -> bool:
    """Returns whether a parameter says that it is of an expert."""
    return getattr(param, "allreduce", True) is False


def mark_experts(model: nn.Module) -> None:
    """Has layers of experts make their groups, and marks as parts what says that it is of an expert. What `zero.part` was said
    of stays as it was said. A collective where a group is new."""
    for module in list(model.modules()):
        begin: Any = getattr(module, "set_deepspeed_parallelism", None)
        if begin is not None:
            begin()
    parts = Parts(model)
    named = [(name, param) for name, param in model.named_parameters() if is_of_expert(param)]
    waiting = {id(param): name for name, param in named if parts.mark_of(param) is None}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):  # the outer one of lists in lists comes first
            params = list(module.parameters())
            names = {getattr(param, "group_name", None) for param in params}
            if params and len(names) == 1 and all(id(param) in waiting for param in params):
                _mark(module, names.pop(), waiting[id(params[0])])
                for param in params:
                    del waiting[id(param)]
    for param in model.parameters():
        if id(param) in waiting:
            _mark(param, getattr(param, "group_name", None), waiting[id(param)])


def _mark(of_experts: Any, group_name: Any, name: str) -> None:
    if group_name not in GROUPS:
        raise ValueError(
            f"Cannot initialize: {name} is of an expert (allreduce=False), and no group has its group_name, {group_name!r}. "
            "Make it by deepspeed.utils.groups._create_expert_and_data_parallel(ep_size) first, whose groups are called "
            "'ep_size_2' and so on, or call zero.part."
        )
    if GROUPS[group_name] is not None:
        part(of_experts, GROUPS[group_name], dim=None)
