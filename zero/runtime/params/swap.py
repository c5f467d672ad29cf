"""Makes parameters absent and plain again. They stay the same objects: for optimizers, modules, hooks and weak references."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accelerators.tensor_bytes import as_bytes
from zero.memory.gathered import ChunkState, GatheredChunk
from zero.memory.leaves import local_of
from zero.runtime.params.absent import AbsentParameter

# Attributes of parameters without memory, which are exchanged with the implementation.
_OWN = ("in_chunk", "label", "shadow", "source")


def can_swap() -> bool:
    """Returns whether this torch can exchange two tensors in place."""
    return hasattr(torch._C, "_swap_tensor_impl") and hasattr(torch._C, "_set_throw_on_mutable_data_ptr")


def become_plain(param: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Gives a parameter memory. Returns the parameter without memory that it was, which `swap` makes it again."""
    other = nn.Parameter(values, param.requires_grad)
    swap(param, other)
    return other


@contextlib.contextmanager
def gathered(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Makes the absent parameters among these plain ones inside. What is written to them there is an edit. A graph leads to the
    memory that a parameter had when the graph was made, so a backward reaches them on the same side of the block only."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for param in dict.fromkeys(map(local_of, params)):
            if isinstance(param, AbsentParameter):
                absent: Any = become_plain(param, param.data.clone(memory_format=torch.preserve_format))
                absent.in_chunk.cache.num_plain += 1
                stack.callback(_return, param, absent, absent.in_chunk)
                if absent.requires_grad:
                    absent.register_hook(_refuse_inside)
        yield


def params_of(what: Any) -> list[nn.Parameter]:
    """Returns the parameters of a module, a parameter as a list of one, or the parameters of several modules and parameters."""
    if isinstance(what, nn.Module):
        return list(what.parameters())
    if isinstance(what, nn.Parameter):
        return [what]
    if isinstance(what, Iterable) and not isinstance(what, torch.Tensor):
        return [param for each in what for param in params_of(each)]
    raise TypeError(f"Cannot gather a {type(what).__name__}: it has no parameters. Pass a module, a parameter, or several.")


def _return(param: nn.Parameter, absent: Any, chunk: GatheredChunk) -> None:
    chunk.cache.num_plain -= 1
    if chunk.state is not ChunkState.DROPPED:  # otherwise its optimizer was closed meanwhile
        values, label = param.data, absent.label
        absent._backward_hooks = None  # the hook goes, and so does the table, to which the plain memory would not refer
        swap(param, absent)
        param.requires_grad_(absent.requires_grad)  # frozen or thawed inside
        if absent.requires_grad:  # `absent` has the plain memory by now, which goes with it
            absent.register_hook(_refuse_outside)
        if (values.shape, values.dtype) != (param.shape, param.dtype):
            raise RuntimeError(
                f"Cannot keep what was assigned to {label} within gathered(): it is {tuple(values.shape)} {values.dtype}, and "
                f"the weights are {tuple(param.shape)} {param.dtype}. They are as they were. Assign a tensor of their shape "
                "and dtype."
            )
        before = param.data.clone(memory_format=torch.preserve_format)
        if not torch.equal(as_bytes(values.contiguous()), as_bytes(before.contiguous())):
            param.data.copy_(values)


def _refuse_inside(_: torch.Tensor) -> None:
    raise RuntimeError(
        "Cannot send a gradient to a parameter within gathered() through a graph that was made outside. Run the backward "
        "before the block, or after it."
    )


def _refuse_outside(_: torch.Tensor) -> None:
    raise RuntimeError(
        "Cannot send a gradient to a parameter through a graph that was made within gathered(), which has ended. Run forward "
        "outside, and give kernels that want memory a clone of the parameter."
    )


def swap(param: nn.Parameter, other: nn.Parameter) -> None:
    """Exchanges the implementations and classes of two parameters. The gradient, the user's attributes and hooks stay."""
    hooks, accumulated, grad = param._backward_hooks, param._post_accumulate_grad_hooks, param.grad
    param.grad = None  # the gradient would be exchanged with the implementation
    try:
        torch._C._swap_tensor_impl(param, other)
    except RuntimeError as error:
        param.grad = grad
        raise RuntimeError(
            f"Cannot exchange the memory of a parameter of shape {tuple(param.shape)}: something else holds it, as the graph "
            "of a forward does. Run its backward or let go of its results first."
        ) from error
    param.__class__, other.__class__ = other.__class__, param.__class__
    ours, others = ({name: each.__dict__.pop(name) for name in _OWN if name in each.__dict__} for each in (param, other))
    param.__dict__.update(others)
    other.__dict__.update(ours)
    # Tables of hooks stay with the object, and each implementation refers to the table that was set on it. An empty table is
    # set too: torch sets none if there is one, and later hooks would be in a table that nothing refers to.
    if hooks is not None:
        param._backward_hooks = hooks
    if accumulated is not None:
        param._post_accumulate_grad_hooks = accumulated
    param.grad = grad
