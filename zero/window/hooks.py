"""The hooks of stop 1, ready: they run when autograd has finished a parameter's gradient, after every hook of the user."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import unserializable_hook

from zero.runtime.params.table import Params


@dataclass
class _Attached:
    """The hooks of one parameter: on itself, and on its last nodes."""

    param: torch.nn.Parameter
    before: Callable[[object], None]
    ready: Callable[[object, object], None]
    on_param: list[Any] = field(default_factory=list)
    nodes: list[tuple[Node, list[Any]]] = field(default_factory=list)


_attached: weakref.WeakValueDictionary[int, _Attached] = weakref.WeakValueDictionary()  # by the id of the parameter
_MOST_NODES = 2  # a parameter has one node for new graphs, and one for a graph from before a cast


class GradHooks:
    """Calls a parameter's `before` when autograd is about to write its gradient, and its `ready` when it has.

    [Note: which hook]
    They sit on the parameter's AccumulateGrad node. A hook there runs after all hooks of the user on the
    parameter, whenever those were registered, and not under `autograd.grad`, which writes no `.grad`. Torch
    holds the node only weakly; we keep it, or our hooks would be gone with it. A parameter gets another node if
    its dtype or device changes through `.data`, as in `model.half(); model.float()`, also if its memory is the same
    again. What survives that is a hook on the parameter itself, which runs just before those of the node: if the node
    that runs has none of ours, it gets them. It also keeps which parameter it was, for an error that says where a
    backward broke off.
    """

    def __init__(self, params: Params) -> None:
        self._params = params
        self._attached: dict[int, _Attached] = {}

    def attach(
        self,
        index: int,
        param: torch.nn.Parameter,
        before: Callable[[object], None],
        ready: Callable[[object, object], None],
    ) -> None:
        # Weak, as a parameter keeps its hooks alive, and this object would keep the nodes and all that their hooks hold.
        ours = weakref.ref(self)

        @unserializable_hook  # type: ignore[untyped-decorator]  # or torch warns if a model is sent to a process
        def follow(_: torch.Tensor) -> None:
            hooks = ours()
            if hooks is not None:
                hooks._params.reached = index
                node = torch._C._current_autograd_node()
                if node is not hooks._attached[index].nodes[-1][0]:
                    hooks._sit_on(index, node)

        with _training(param):
            self._attached[index] = _attached[id(param)] = _Attached(param, before, ready)
            self._attached[index].on_param.append(param.register_hook(follow))  # type: ignore[no-untyped-call]
            self._sit_on(index, get_gradient_edge(param).node)

    def renew(self) -> None:
        """Attaches anew if a parameter has another node by now."""
        for index, attached in self._attached.items():
            with _training(attached.param):
                self._sit_on(index, get_gradient_edge(attached.param).node)

    def _sit_on(self, index: int, node: Node) -> None:
        """Puts our hooks on a node that has none of them."""
        attached = self._attached[index]
        if any(node is each for each, _ in attached.nodes):
            return
        handles = list[Any]()
        # Noted before there is a hook, so that `remove` finds all of them wherever this breaks off.
        attached.nodes.append((node, handles))
        handles.append(node.register_prehook(attached.before))
        handles.append(node.register_hook(attached.ready))
        if len(attached.nodes) > _MOST_NODES:
            _remove(attached.nodes.pop(0)[1])

    def detach(self, first: int = 0) -> None:
        """Removes the hooks of this parameter and of all after it."""
        for index in [index for index in self._attached if index >= first]:
            attached = self._attached.pop(index)
            _remove((*attached.on_param, *(handle for _, handles in attached.nodes for handle in handles)))


def nodes_of(param: torch.nn.Parameter) -> Sequence[Node]:
    """Returns the nodes of a parameter that hooks of ours sit on."""
    attached = _attached.get(id(param))
    return () if attached is None else [node for node, _ in attached.nodes]


def are_alone(param: torch.nn.Parameter) -> bool:
    """Returns whether no hook of the user waits for the gradient of a parameter, on itself or on its nodes."""
    attached = _attached.get(id(param))
    if attached is None:
        return not (param._backward_hooks or param._post_accumulate_grad_hooks)
    for handles in (attached.on_param, *(handles for _, handles in attached.nodes)):
        for handle in handles:
            # A handle knows all hooks beside its own. Torch does not tell those of a node otherwise.
            if len(handle.hooks_dict_ref() or ()) != 1:
                return False
    return not param._post_accumulate_grad_hooks


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def _training(param: torch.nn.Parameter) -> Iterator[None]:
    """A parameter that is frozen for now has no node, and takes no hook, before it requires a gradient; and no parameter shows
    its node if no gradients are recorded, as when clipping settles the window."""
    trainable = param.requires_grad
    param.requires_grad_(True)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        param.requires_grad_(trainable)
