"""Exact values, gradients and moments of one parameter: read whole on every rank, or set from a tensor that every rank passes
alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zero.memory.formats import sum_dtype
from zero.memory.leaves import like_leaf, local_grad, local_operand
from zero.plan.layout import Piece
from zero.sharding.optimizer import ShardedOptimizer
from zero.sharding.optimizer_state import lies_nowhere


@torch.no_grad()
def whole_master(optimizer: ShardedOptimizer, param: nn.Parameter) -> torch.Tensor:
    """Returns the exact value of a weight, in the dtype of sums, with edits of the weight in it. A collective."""
    sharding, index = optimizer.sharding, optimizer._index(param)
    sharding.offloader.check("reading a master")
    dtype = sum_dtype(param.dtype)
    if lies_nowhere(sharding, index) or index in sharding.window.sync.tracker.relocated():
        return like_leaf(param, local_grad(param, param.detach()).to(dtype, copy=True))
    sharding.adopt_on_all()
    return like_leaf(param, sharding.window.grad_ops.whole(index, sharding.masters.streams.piece, dtype))


@torch.no_grad()
def set_master(optimizer: ShardedOptimizer, param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the exact value of a parameter, and the weight to its rounded value. Not a collective."""
    sharding, index = optimizer.sharding, optimizer._index(param)
    sharding.offloader.check("writing a master")
    value = _here(param, value, "value")
    sharding.window.sync.tracker.copy_back()  # otherwise what lies elsewhere would be taken in later, over this value
    sharding.params.tensors[index].copy_(value)
    sharding.publisher.follow_edits()
    if not lies_nowhere(sharding, index):
        _fill(optimizer, index, value, lambda _, master: master)


@torch.no_grad()
def set_state(optimizer: ShardedOptimizer, param: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Sets one moment of a parameter. Not a collective."""
    sharding, index = optimizer.sharding, optimizer._index(param)
    sharding.offloader.check("writing optimizer state", "masters", "moments", "weights")
    value = _here(param, value, f"state {key!r}")
    state = optimizer.inner.state

    def entry(_: Piece, master: torch.Tensor) -> torch.Tensor:
        moment = state.get(master, {}).get(key)
        if not isinstance(moment, torch.Tensor) or moment.shape != master.shape:
            raise ValueError(
                f"Cannot set state {key!r} of {sharding.params.names[index]}: the optimizer keeps no such moment of it yet. "
                "Step once before, and use one of its own keys."
            )
        return moment

    _fill(optimizer, index, value, entry)


def whole_grad(optimizer: ShardedOptimizer, param: nn.Parameter) -> torch.Tensor | None:
    """Returns the global gradient in the dtype of sums; None if no rank had one. A collective."""
    rounded = optimizer.whole_grad(param)
    if rounded is None or rounded.dtype == sum_dtype(rounded.dtype):
        return rounded
    grad_ops, index = optimizer.sharding.window.grad_ops, optimizer._index(param)
    return like_leaf(param, grad_ops.whole(index, grad_ops.shard.piece, sum_dtype(param.dtype)))


@torch.no_grad()
def set_grad(optimizer: ShardedOptimizer, param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the global gradient of a parameter that has one. A collective."""
    optimizer.settle()
    _here(param, value, "gradient")
    if param.grad is None:
        name = optimizer.sharding.params.names[optimizer._index(param)]
        raise ValueError(f"Cannot set the gradient of {name}: no rank has one. Send a loss backward before.")
    param.grad.copy_(value)


def _fill(
    optimizer: ShardedOptimizer, index: int, value: torch.Tensor, target: Callable[[Piece, torch.Tensor], torch.Tensor]
) -> None:
    sharding = optimizer.sharding
    form = sharding.window.grad_ops.formats[index]
    line = form.flatten(value.detach())
    for piece, master in sharding.masters.of(index):
        sharding.masters.streams.use(piece.bucket)
        tensor = target(piece, master)
        tensor.copy_(form.shaped_like(tensor, line[piece.in_param.start : piece.in_param.stop]))


def _here(param: nn.Parameter, value: torch.Tensor, what: str) -> torch.Tensor:
    """Returns what this rank holds of a whole value."""
    if tuple(value.shape) != tuple(param.shape):
        raise ValueError(
            f"Cannot set the {what} of a parameter of shape {tuple(param.shape)} from a tensor of shape {tuple(value.shape)}. "
            "Pass a whole one."
        )
    return local_operand(param, value)
