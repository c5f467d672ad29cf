"""The parts of an engine's model: what a DeepSpeed file cuts by the model's plan in transformers, and DeepSpeed's experts.

A model that is cut by its plan is whole on each rank before. One that is too large for that is read by parts instead, by
`from_pretrained` with a `DistributedConfig`, and is taken as it is if it lies over as many ranks.

A parameter of an expert has `allreduce=False`, and as `group_name` the name of the ranks that have all experts together. Such a
layer makes that group in `set_deepspeed_parallelism`, which an engine calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.config.deepspeed.reader import parallel_sizes
from zero.config.schema import ZeroConfig
from zero.optim.several import members_of
from zero.setup.parts import Parts, is_of_expert, mark_of_dtensor, part

_WRITE = ("Load the model with from_pretrained(distributed_config=...), or cut it by torch's parallelize_module; take the key "
          "out and pass group=, the ranks that have samples of their own.")  # fmt: skip


class CutSizes(NamedTuple):
    """The numbers of ranks that layers and experts lie over."""

    tensor: int
    expert: int

    @classmethod
    def of(cls, source: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig) -> CutSizes:
        if isinstance(source, ZeroConfig):
            return cls(source.tensor_ranks, source.expert_ranks)
        return cls(*parallel_sizes(source))

    @property
    def are_several(self) -> bool:
        return self.tensor > 1 or self.expert > 1

    def __str__(self) -> str:
        return f"layers over {self.tensor} ranks and experts over {self.expert}"


class Replaced(dict[int, nn.Parameter]):
    """The parameters that a model has in place of others, by the ids of those."""

    def in_place_of(self, entry: Any) -> Any:
        """Returns what an entry of an optimizer's parameters is now: a parameter, one with its name, or a group of them."""
        if isinstance(entry, dict):
            params = entry["params"]
            several = [params] if isinstance(params, torch.Tensor) else params
            return {**entry, "params": [self.in_place_of(param) for param in several]}
        if isinstance(entry, tuple):
            return (entry[0], self.in_place_of(entry[1]))
        return self.get(id(entry), entry)

    def in_optimizer(self, optimizer: Any) -> None:
        """Gives an optimizer, or several, what is there now. It must not have stepped."""
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if isinstance(each, torch.optim.Optimizer):
                for member in (each, *members_of(each)):
                    for group in member.param_groups:
                        group["params"] = [self.in_place_of(param) for param in group["params"]]


def cut_by_plan(model: nn.Module, sizes: CutSizes, world: int, device: torch.device) -> tuple[Any, Replaced]:
    """Cuts a model over neighbours among so many ranks, and returns those that have samples of their own, and what it has in
    place of its whole parameters. A collective."""
    from zero.comm.torch_world import new_mesh  # imported late, as torch.distributed is needed only for training

    for size in sizes:
        if world % size:
            raise ValueError(f"Cannot cut {sizes}: {world} ranks cannot be divided so. Write divisors of {world}.")
    if sizes.expert > 1 and sizes.expert % sizes.tensor:
        raise ValueError(
            f"Cannot cut {sizes}: transformers spreads experts over all ranks of some groups with the same samples. Write a "
            f"multiple of {sizes.tensor}, or leave one of the two out."
        )
    marks = [mark for name, param in model.named_parameters() if (mark := mark_of_dtensor(name, param)) is not None]
    if marks:
        _check_cut(marks, sizes)
        return new_mesh(device, data=world // sizes.tensor, tensor=sizes.tensor)["data"], Replaced()
    tensor_plan, expert_plan = _plans(model, sizes)
    mesh = new_mesh(device, data=world // sizes.tensor, tensor=sizes.tensor)
    before, replaced = dict(model.named_parameters(remove_duplicate=False)), Replaced()
    _untie(model)
    _apply(model, mesh, sizes, tensor_plan, expert_plan, device)
    for name, param in model.named_parameters(remove_duplicate=False):
        mark_of_dtensor(name, param)  # raises if the parameter cannot be sharded
        if replaced.setdefault(id(before[name]), param) is not param:
            raise ValueError(f"Cannot cut {sizes}: {name} is tied in a way that transformers does not know. "
                             f"Untie it, or cut the model yourself. {_WRITE}")
    return mesh["data"], replaced


def _untie(model: nn.Module) -> None:
    """Makes two parameters over the same values of one that has two names, each of which a plan cuts; transformers ties them
    again."""
    known = set[int]()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and id(param) in known:
                module._parameters[name] = nn.Parameter(param.detach(), param.requires_grad)
            known.add(id(param))


def _check_cut(marks: list[Any], sizes: CutSizes) -> None:
    numbers = sorted({len(mark.ranks) for mark in marks})
    if numbers != sorted({*sizes} - {1}) or sizes.tensor == 1:
        raise ValueError(
            f"Cannot cut {sizes}: the model is cut already, over {', '.join(map(str, numbers))} ranks. Take the key out, and "
            "pass group=, the ranks that have samples of their own."
        )


def _plans(model: Any, sizes: CutSizes) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the plans of a model, by names of its modules and parameters. What the one of experts names is in no other."""
    kinds = {"tensor_parallel.autotp_size": (sizes.tensor, "tp_plan"), "expert_parallel.autoep_size": (sizes.expert, "ep_plan")}
    plans = []
    for key, (size, name) in kinds.items():
        plan = dict(getattr(model, name, None) or {}) if size > 1 else {}
        if size > 1 and not (plan and hasattr(model, "_expand_parallel_plan")):
            raise ValueError(f"Cannot use {key} {size}: {type(model).__name__} has no {name} in transformers. {_WRITE}")
        plans.append(plan)
    empty = [name for name, param in model.named_parameters() if param.is_meta]
    if empty:
        raise ValueError(f"Cannot cut {sizes}: {empty[0]} is on the meta device and has no values. {_WRITE}")
    of_experts = tuple(f"{name}." for name in plans[1])  # an empty tuple matches no name
    layers = {name: style for name, style in plans[0].items() if not f"{name}.".startswith(of_experts)}
    return model._expand_parallel_plan(layers), model._expand_parallel_plan(plans[1])


def _apply(model: Any, mesh: Any, sizes: CutSizes, tensor_plan: Any, expert_plan: Any, device: torch.device) -> None:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from zero.comm.torch_world import new_mesh

    model.to(device)
    if sizes.tensor > 1:
        apply_tensor_parallelism(model, mesh["tensor"], tensor_plan)
        model.config.distributed_config = DistributedConfig(tp_size=sizes.tensor, ep_size=min(sizes))
        # Save_pretrained needs these two to write the model whole.
        model._tp_size, model._device_mesh = sizes.tensor, mesh["tensor"]
    if sizes.expert > 1:
        same, is_same = mesh.size() // sizes.expert, sizes.expert == sizes.tensor
        experts = mesh["tensor"] if is_same else new_mesh(device, same=same, expert=sizes.expert)["expert"]
        apply_expert_parallelism(model, experts, mesh["tensor"], expert_plan, ep_implementation="all_to_all")
    model.tie_weights()


# experts of DeepSpeed -------------------------------------------------------------------------------------------------

# The ranks that have all experts together, by the name of their group; None if torch.distributed is not up.
GROUPS: dict[str, Any] = {}


def mark_experts(model: nn.Module) -> None:
    """Makes layers of experts make their groups, and marks the parameters of experts as parts. Marks of `zero.part` stay as
    they are. A collective if a group is new."""
    for module in list(model.modules()):
        begin: Any = getattr(module, "set_deepspeed_parallelism", None)
        if begin is not None:
            begin()
    parts = Parts(model)
    named = [(name, param) for name, param in model.named_parameters() if is_of_expert(param)]
    waiting = {id(param): name for name, param in named if parts.mark_of(param) is None}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):  # of lists in lists, the outer one comes first
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
