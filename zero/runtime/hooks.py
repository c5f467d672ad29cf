"""Stop 1, ready: autograd has finished a parameter's gradient, and every hook of the user has run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge


class GradHooks:
    """Calls `before(i)` when autograd is about to write the gradient of parameter i, and `ready(i)` when it has.

    [Note: which hook]
    They sit on the parameter's AccumulateGrad node. A hook there runs after all hooks of the user on the
    parameter, whenever those were registered, and not under `autograd.grad`, which writes no `.grad`. Torch
    holds the node only weakly; we keep it, or our hooks would be gone with it.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._handles: list[Any] = []
        self._at_work = threading.RLock()  # backwards of several threads may meet here
        self._attached: list[tuple[int, torch.nn.Parameter, Callable[[int], None], Callable[[int], None]]] = []

    def attach(
        self, index: int, param: torch.nn.Parameter, before: Callable[[int], None], ready: Callable[[int], None]
    ) -> None:
        self._attached.append((index, param, before, ready))
        self._sit_on(self._node_of(param), index, before, ready)

    def renew(self) -> None:
        """Attaches anew where a parameter has another node by now, as one has whose memory was set or dtype changed."""
        known = set(map(id, self._nodes))
        for index, param, before, ready in self._attached:
            node = self._node_of(param)
            if id(node) not in known:
                self._sit_on(node, index, before, ready)

    def _node_of(self, param: torch.nn.Parameter) -> Node:
        trainable = param.requires_grad
        if not trainable:  # frozen for now: it has no node before it requires a gradient
            param.requires_grad_(True)
        node = get_gradient_edge(param).node
        if not trainable:
            param.requires_grad_(False)
        return node

    def _sit_on(self, node: Node, index: int, before: Callable[[int], None], ready: Callable[[int], None]) -> None:
        self._nodes.append(node)
        self._handles.append(node.register_prehook(lambda _: self._call(before, index)))
        self._handles.append(node.register_hook(lambda _, __: self._call(ready, index)))

    def _call(self, what: Callable[[int], None], index: int) -> None:
        with self._at_work:
            what(index)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self._attached.clear()
