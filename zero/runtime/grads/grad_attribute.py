"""Puts a `ShardedGrad` into `.grad` of every parameter, and finds what the user did to it."""

from __future__ import annotations

import sys
from enum import Enum

import torch

from zero.plan.layout import set_bits
from zero.runtime.grads.grad_ops import ShardedGradOps
from zero.runtime.params.grad_proxy import ShardedGrad
from zero.runtime.params.table import Params

_HELD_BY_US = 2  # references: the table's, and that of the question


class Edit(Enum):
    """What was found in one `.grad`."""

    NONE = "none"
    CLEARED_ALL = "cleared all"  # the user cleared every .grad by a way that we are not told of, such as model.zero_grad()
    CHANGED = "changed"  # the user removed the gradient, or put a tensor of his own there


class GradAttribute:
    """Puts a `ShardedGrad` into the `.grad` of every parameter, and later compares what is there with what was put there."""

    def __init__(self, params: Params, ops: ShardedGradOps) -> None:
        self.params = params
        self.has_proxy = 0  # parameters whose .grad holds a `ShardedGrad` of ours
        self.is_complete = False  # every trainable parameter's .grad holds one
        self.writing: dict[int, int] = {}  # parameters whose .grad autograd is writing, and the thread
        self.user_grads: dict[int, torch.Tensor] = {}  # the user's own tensors
        self.removed = 0  # parameters whose .grad the user set to None
        self.replaced = 0  # parameters whose .grad the user set to a tensor of his own
        self._ops = ops
        self.proxies: list[ShardedGrad] = []  # by parameter

    def register(self) -> None:
        """Makes a `ShardedGrad` for each parameter that has none yet."""
        for index in range(len(self.proxies), len(self.params.tensors)):
            self.proxies.append(self._new_proxy(index))

    def forget(self, first: int) -> None:
        """Removes the `ShardedGrad` of this parameter and of all after it."""
        del self.proxies[first:]

    def _new_proxy(self, index: int) -> ShardedGrad:
        return ShardedGrad(self.params.tensors[index], index, self.params.names[index], self._ops)

    # writing -----------------------------------------------------------------------------------------------------

    def remove(self, index: int) -> None:
        self.params.set_grad(index, None)

    def install(self, index: int) -> None:
        self.params.set_grad(index, self.proxies[index])
        self.has_proxy |= 1 << index

    def put_back(self, index: int) -> None:
        """What was there before autograd wrote."""
        self.params.set_grad(index, self.proxies[index] if self.has_proxy >> index & 1 else None)

    def can_install(self, index: int) -> bool:
        """Whether a `ShardedGrad` may be put into `.grad`. Not where autograd is about to write, in this thread or another: it
        would add to what it finds. And not where the parameter has another dtype by now, which settling reports."""
        param = self.params.tensors[index]
        is_free = not self.has_proxy >> index & 1 and index not in self.writing and param.requires_grad
        return is_free and param.dtype == self.proxies[index].own_dtype

    def install_where(self, used: int) -> None:
        """A `ShardedGrad` for each parameter that is `used`, and None for all others."""
        members = set(set_bits(used))
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, self.proxies[index] if index in members else None)
        self.has_proxy = used

    def clear(self) -> None:
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, None)

    # looking -----------------------------------------------------------------------------------------------------

    @property
    def edited(self) -> int:
        """The parameters whose gradient the user removed."""
        return self.removed | self.replaced

    @property
    def is_cleared(self) -> bool:
        return all(param.grad is None for param in self.params.tensors)

    @property
    def was_cleared(self) -> bool:
        """Whether the user cleared `.grad` of every parameter."""
        return bool(self.has_proxy) and self.is_cleared

    def scan(self, index: int) -> Edit:
        """Takes note of what the user did to one `.grad`. Raises for a gradient that stands for another one."""
        held, bit = self.params.tensors[index].grad, 1 << index
        if held is self.proxies[index]:
            return Edit.NONE
        if isinstance(held, ShardedGrad):
            raise ValueError(
                f"Cannot set the gradient of {self.params.names[index]} to that of {held.label}"
                f"{' in an earlier window' if held.param == index else ''}: a sharded gradient belongs to its parameter and "
                "window. Assign optimizer.whole_grad(parameter), on all ranks."
            )
        if held is None:
            if not self.has_proxy & bit:
                return Edit.NONE
            if self.is_cleared:
                return Edit.CLEARED_ALL
            self.removed |= bit
            self.user_grads.pop(index, None)
        else:
            self.replaced |= bit & self.has_proxy
            self.user_grads[index] = held.detach()
        return Edit.CHANGED

    # between windows ---------------------------------------------------------------------------------------------

    def forget_edits(self) -> None:
        """Takes the present `.grad` as the one that was put there: edits were synchronized."""
        self.is_complete, self.removed, self.replaced = False, 0, 0
        self.writing, self.user_grads = {}, {}

    def begin(self) -> None:
        """Begins a new window. Every `.grad` is None."""
        self.forget_edits()
        self.has_proxy = 0
        for index in range(len(self.proxies)):
            if sys.getrefcount(self.proxies[index]) > _HELD_BY_US:  # by code that kept a gradient of the old window
                self.proxies[index].ended = True
                self.proxies[index] = self._new_proxy(index)
