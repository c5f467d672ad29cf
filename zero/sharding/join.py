"""New parameters join a training: all parts take them in, or none does.

    optimizer.add_param_group({"params": head.parameters(), "lr": 1e-3})

They are checked as at the start, get a number in every part, and hooks. They get no memory in the layout yet: that is done when
some rank has a gradient for them, by all ranks as they settle.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero.memory.formats import ParamFormat
from zero.memory.leaves import local_of
from zero.optim.several import remove_last_group
from zero.plan.layout import FlatLayout, PartSpec
from zero.plan.stages import stage_of
from zero.runtime.kernels.select import check_kernels, host_step_dtypes
from zero.setup.checks import check_devices, check_dtypes, check_optimizer, check_params, check_settings_on_host
from zero.setup.selection import (
    check_parts,
    check_streams,
    homes_of,
    is_kept,
    longest_shapes,
    placement_of,
    specs_of,
    works_of,
)
from zero.sharding.loss_scaler import check_joining
from zero.sharding.state import ShardingState
from zero.window.short_path import hooks_of
from zero.window.window import check_unmanaged, leave, manage


def add_group(state: ShardingState, model: nn.Module, param_group: dict[str, Any]) -> None:
    """Takes in a group of the optimizer, with parameters that are new, or leaves everything as it was."""
    state.window.refuse_ahead("call add_param_group()")
    inner, homes = state.updater.inner, state.memory_guard.homes
    first, num_groups, layout = len(state.params.tensors), len(inner.param_groups), state.layout_ref.layout
    reserved = homes.reserved()
    try:
        inner.add_param_group(param_group)
        check_optimizer(inner, state.config)
        tensors = [param for param in inner.param_groups[-1]["params"] if id(param) not in state.params.index]
        state.parts.take(model, tensors)
        if not all(map(state.parts.knows_shapes, tensors)):
            state.parts.agree(tensors, state.group)
        add_params(state, state.params.names_in(model, tensors), tensors, len(inner.param_groups) - 1)
    except BaseException:
        _remove_params(state, first, layout)
        homes.give_back(reserved)
        if len(inner.param_groups) > num_groups:
            remove_last_group(inner)
        raise


def add_params(state: ShardingState, names: list[str], leaves: list[nn.Parameter], group: int) -> None:
    """Registers parameters that get a slot when some rank has a gradient for them."""
    first, inner, device = len(state.params.tensors), state.updater.inner, state.masters.shard.device
    placement = placement_of(inner.param_groups[group], state.config, device)
    tensors = list(map(local_of, leaves))
    dtypes = [tensor.dtype for tensor in tensors]
    groups = [group] * len(names)
    part_specs = _part_specs(state, leaves)
    shapes = longest_shapes(tensors, part_specs)
    works = works_of(inner, state.config, shapes, groups)
    kept = [is_kept(state.config, shape) for shape in shapes]
    check_parts(inner, names, tensors, groups, works, state.parts)
    specs = specs_of(names, tensors, groups, dtypes, [placement] * len(names), kept, works, part_specs)
    check_unmanaged(names, leaves)
    has_frozen = state.placer.weights.has_frozen  # frozen ones were checked when they were taken
    unknown = {name: tensor for name, tensor in zip(names, tensors, strict=True) if not has_frozen(tensor)}
    check_params(list(unknown), list(unknown.values()), stage_of(state.config.stage).shards_weights)
    check_devices(names, tensors, device)
    check_dtypes(state.accelerator, set(dtypes))
    check_joining(state.config, dtypes)
    check_settings_on_host(inner, {group: placement.offload})
    check_streams(inner, {group: placement})
    layout = state.layout_ref.layout.joined(specs)
    check_kernels(inner, state.config.kernels, device, bool(host_step_dtypes(layout.params, device)))
    waiting = [index for index, tensor in enumerate((*state.params.leaves, *leaves))
               if tensor.requires_grad and layout.slots[index] is None]  # fmt: skip
    homes = homes_of(inner.param_groups[group], state.config).values()
    state.memory_guard.reserve(homes, layout.extended(waiting), state.layout_ref.layout)
    state.layout_ref.replace(layout)
    state.params.add(tensors, names, leaves)
    state.window.grad_ops.formats.extend(ParamFormat.of(tensor) for tensor in tensors)
    state.window.register()
    state.window.sync.tracker.register()
    for index in range(first, len(state.params.tensors)):
        state.hooks.attach(index, state.params.leaves[index], *hooks_of(state.window, index))
    manage(leaves, state.window)


def _part_specs(state: ShardingState, leaves: list[nn.Parameter]) -> list[PartSpec]:
    part_specs = list(map(state.parts.spec_of, leaves))
    if any(each.family > len(state.layout_ref.layout.parted) for each in part_specs):
        raise ValueError(
            "Cannot add parts along a mesh that had none when the model was sharded: its ranks have no group. Have a "
            "parameter of it in the model from the start, or shard anew."
        )
    return part_specs


def _remove_params(state: ShardingState, first: int, layout: FlatLayout) -> None:
    """Removes the parameters from number `first` on, and puts `layout` in force again. Adding them may have failed at any
    point: each part forgets those that it has, and passes over the others."""
    leave(state.params.leaves[first:])
    state.hooks.detach(first)
    state.window.sync.tracker.forget(first)
    state.window.unregister(first)
    del state.window.grad_ops.formats[first:]
    state.params.forget(first)
    state.layout_ref.replace(layout)
