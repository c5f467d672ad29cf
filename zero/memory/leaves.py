"""Parameters that are DTensors: autograd and the user have the leaf, and this library manages the leaf's local tensor.

The leaf gets a parameter in the place of its local tensor. So the leaf always computes with that parameter, whether its memory
is flat, was moved or is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def is_dtensor(tensor: object) -> bool:
    """Returns whether it is a DTensor. A plain tensor is not asked by a class that takes time to import."""
    return hasattr(tensor, "_local_tensor")


def local_of(leaf: Any) -> Any:
    """Returns the parameter that is managed of a leaf: itself, or that of its local tensor."""
    if not is_dtensor(leaf):
        return leaf
    local = leaf._local_tensor
    if not isinstance(local, nn.Parameter):
        leaf._local_tensor = local = nn.Parameter(local.detach(), requires_grad=False)
    return local


@torch.no_grad()
def local_grad(leaf: Any, grad: Any) -> torch.Tensor:
    """Returns the gradient of the local tensor, cut as the leaf is. If it is not, that is a collective of the leaf's mesh."""
    if not is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    local = grad.redistribute(leaf.device_mesh, leaf.placements).to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def local_state(leaf: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state that a plain optimizer has for a leaf, as it would have it for the local tensor."""
    return {key: local_grad(leaf, value) if getattr(value, "shape", None) == leaf.shape else _plain(value)
            for key, value in state.items()}  # fmt: skip


@torch.no_grad()
def local_operand(leaf: Any, operand: torch.Tensor) -> torch.Tensor:
    """Returns the part of an operand of an elementwise operator that lies beside the leaf's local tensor. What is no DTensor is
    whole on each rank."""
    if not operand.dim():
        return _plain(operand)  # type: ignore[no-any-return]
    if not is_dtensor(leaf):
        return operand
    operand = operand.detach().expand(leaf.shape)
    if is_dtensor(operand):
        return local_grad(leaf, operand)
    place = leaf.device_mesh.get_coordinate()
    for number, placement in enumerate(leaf.placements):
        if placement.is_shard():
            # The last parts may have fewer elements, or none.
            length = -(-operand.shape[placement.dim] // leaf.device_mesh.size(number))
            start = min(place[number] * length, operand.shape[placement.dim])
            operand = operand[(slice(None),) * placement.dim + (slice(start, start + length),)]
    return operand


def _plain(value: Any) -> Any:
    return value.full_tensor() if is_dtensor(value) else value


def like_leaf(leaf: Any, local: torch.Tensor) -> torch.Tensor:
    """Returns values of a local tensor as the leaf is."""
    if not is_dtensor(leaf):
        return local
    layout = {"run_check": False, "shape": leaf.shape, "stride": leaf.stride()}
    return leaf.data.from_local(local, leaf.device_mesh, leaf.placements, **layout)  # type: ignore[no-any-return]
