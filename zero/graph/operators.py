"""The operator that a compiled backward calls with each gradient, at the place where it was made."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zero.graph.torch_private import cudagraph_unsafe, is_wanted
from zero.window.window import window_of

_numbers: dict[int, int] = {}  # by id
_params: list[weakref.ref[nn.Parameter]] = []  # by number, which stands in the graphs


def number_of(param: nn.Parameter) -> int:
    """Returns the number of a parameter in graphs."""
    number = _numbers.get(id(param))
    if number is None or _params[number]() is not param:
        number = _numbers[id(param)] = len(_params)
        _params.append(weakref.ref(param))
    return number


def param_of(number: int) -> nn.Parameter | None:
    """Returns the parameter of a number, or None once it is gone."""
    return _params[number]()


def has_hooks(param: nn.Parameter) -> bool:
    """Whether a hook of the user waits for the gradient, which then takes the ordinary way through autograd."""
    ours = 0 if window_of(param) is None else 1
    return len(param._backward_hooks or ()) > ours or bool(param._post_accumulate_grad_hooks)


# It says that it changes the gradient, which is true of what takes it: without that inductor has dropped it (torch 2.8).
torch.library.define("zero::hand_over", "(Tensor(a!) grad, int number) -> ()", tags=cudagraph_unsafe())


@torch.library.impl("zero::hand_over", "CompositeExplicitAutograd")
def hand_over(grad: torch.Tensor, number: int) -> None:
    """Hands a gradient to the window of the parameter with this number. The graph holds the number only, so that it keeps
    nothing alive."""
    param = param_of(number)
    if param is None or not is_wanted(param):
        return
    if has_hooks(param):  # which would be called with None, after all that this graph does
        raise RuntimeError(
            f"Cannot call the hook of a parameter of shape {tuple(param.shape)}: it was registered after the forward, which "
            "was compiled for none. Register hooks before the forward."
        )
    window, dtype = window_of(param), getattr(param, "grad_dtype", param.dtype)
    grad = grad if dtype is None else grad.to(dtype)  # as autograd does it
    if window is None:
        torch.autograd.backward(param, grad.clone())  # the graph goes on to use its own memory
    else:
        window.hand_over(window.params.index[id(param)], grad)


def _fake(grad: torch.Tensor, number: int) -> None:
    """Runs in place of the operator while torch traces."""


torch.library.register_fake("zero::hand_over", _fake)


OPERATOR = torch.ops.zero.hand_over.default
torch.fx.node.has_side_effect(OPERATOR)  # which is all it has
