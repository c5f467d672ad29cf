"""Parameters become absent and plain again, and stay the same objects: for optimizers, modules, hooks and weak references."""

from __future__ import annotations

import torch
from torch import nn

from zero.runtime.params.absent import AbsentParameter

_OWN = ("in_chunk", "param_index", "label", "shadow")  # what an absent parameter knows, and a plain one does not


def can_swap() -> bool:
    """Whether this torch has what exchanging two tensors in place needs."""
    return hasattr(torch._C, "_swap_tensor_impl") and hasattr(torch._C, "_set_throw_on_mutable_data_ptr")


def become_absent(param: nn.Parameter, absent: AbsentParameter) -> None:
    """From now on the parameter has no memory. `absent` is used up."""
    _exchange(param, absent, AbsentParameter)
    param.__dict__.update({name: absent.__dict__.pop(name) for name in _OWN})


def become_plain(param: nn.Parameter, values: torch.Tensor) -> None:
    """From now on the parameter has this memory."""
    _exchange(param, nn.Parameter(values, param.requires_grad), nn.Parameter)
    for name in _OWN:
        del param.__dict__[name]


def _exchange(param: nn.Parameter, other: nn.Parameter, cls: type[nn.Parameter]) -> None:
    """Gives a parameter the implementation and class of another. Its gradient and the hooks of the user stay."""
    hooks, accumulated, grad = param._backward_hooks, param._post_accumulate_grad_hooks, param.grad
    param.grad = None  # which would go with the implementation
    torch._C._swap_tensor_impl(param, other)
    param.__class__ = cls
    if hooks:
        param._backward_hooks = hooks
    if accumulated:
        param._post_accumulate_grad_hooks = accumulated
    param.grad = grad
