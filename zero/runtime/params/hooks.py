"""Stop 1, ready: autograd has finished a parameter's gradient, and every hook of the user has run."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from zero.memory.addresses import KnownMemory
from zero.runtime.params.absent import Absent
from zero.runtime.params.table import Params


@dataclass
class _Attached:
    """The hooks of one parameter, and the node that they are on."""

    param: torch.nn.Parameter
    before: Callable[[int], None]
    ready: Callable[[int], None]
    node: Node
    handles: list[Any] = field(default_factory=list)


class GradHooks:
    """Calls `before(i)` when autograd is about to write the gradient of parameter i, and `ready(i)` when it has.

    [Note: which hook]
    They sit on the parameter's AccumulateGrad node. A hook there runs after all hooks of the user on the
    parameter, whenever those were registered, and not under `autograd.grad`, which writes no `.grad`. Torch
    holds the node only weakly; we keep it, or our hooks would be gone with it. A parameter gets another node where
    its dtype or device changes through `.data`, as in `model.half(); model.float()`. What survives that is a hook on
    the parameter itself, which runs just before those of the node: it looks whether the memory is another one, and keeps
    which parameter it was, for an error that says where a backward broke off.
    """

    def __init__(self, params: Params) -> None:
        self._params = params
        self._attached: dict[int, _Attached] = {}
        self._memory = KnownMemory()  # as of the last look at the nodes

    def attach(
        self, index: int, param: torch.nn.Parameter, before: Callable[[int], None], ready: Callable[[int], None]
    ) -> None:
        ours = weakref.ref(self)  # the parameter keeps its hooks alive, and with us itself

        def follow(_: torch.Tensor) -> None:
            hooks = ours()
            if hooks is not None:
                hooks._follow(index)

        with _training(param):
            self._attached[index] = _Attached(param, before, ready, get_gradient_edge(param).node)
            self._memory.note(index, _memory_of(param))
            self._attached[index].handles.append(param.register_hook(follow))  # type: ignore[no-untyped-call]
        self._sit_on(index)

    def renew(self) -> None:
        """Attaches anew where a parameter has another node by now."""
        for index, attached in self._attached.items():
            with _training(attached.param):
                node = get_gradient_edge(attached.param).node
            self._memory.note(index, _memory_of(attached.param))
            if node is not attached.node:
                attached.node = node
                self._sit_on(index)

    def _follow(self, index: int) -> None:
        attached, self._params.reached = self._attached[index], index
        if self._memory.has_changed(index, _memory_of(attached.param)):
            self.renew()

    def _sit_on(self, index: int) -> None:
        attached = self._attached[index]
        before, ready = attached.before, attached.ready
        attached.handles.append(attached.node.register_prehook(lambda _: before(index)))
        attached.handles.append(attached.node.register_hook(lambda _, __: ready(index)))

    def detach(self, first: int = 0) -> None:
        """Removes the hooks of this parameter and of all after it."""
        for index in [index for index in self._attached if index >= first]:
            for handle in self._attached.pop(index).handles:
                handle.remove()
        self._memory.forget(first)


def _memory_of(param: torch.nn.Parameter) -> torch.Tensor | None:
    return None if isinstance(param, Absent) else param


@contextlib.contextmanager
def _training(param: torch.nn.Parameter) -> Iterator[None]:
    """A parameter that is frozen for now has no node, and takes no hook, before it requires a gradient; and no parameter shows
    its node where no gradients are recorded, as where clipping settles the window."""
    trainable = param.requires_grad
    param.requires_grad_(True)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        param.requires_grad_(trainable)
