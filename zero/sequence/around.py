"""Modules whose forward runs inside of something else.

A module gets a class of its own for it, and not a hook or a forward of its own: a block that has one of these is no region of
`zero.compile`, a copy would call the forward of the module it was copied from, and PEFT calls `forward` past all hooks.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import nn

_AROUND = "_zero_around_forward"  # the attribute of a module that has what is around its forward
_classes: dict[type, type] = {}


class Around(Protocol):
    """The surroundings of a module's forward."""

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `forward(module, *args, **kwargs)`, and returns what it returns."""


@runtime_checkable
class Outlasting(Protocol):
    """Surroundings that have set more in a module than its forward."""

    def undone_in(self, module: nn.Module) -> nn.Module:
        """Returns a copy, with the same tensors, in which nothing of that is set."""


def set_around(module: nn.Module, around: Around) -> None:
    """Runs the forward of a module inside of this from now on, in place of one of the same class, and around all others."""
    assigned = vars(module).get("forward")  # called in place of the class's forward
    if _AROUND not in vars(module):
        module.__class__ = _class_around(type(module))
        if assigned is not None:
            vars(module)[_AROUND] = (_Assigned(vars(module).pop("forward")),)
    elif assigned is not None:  # the new forward may call the class's, which has another around it already
        raise ValueError(
            f"Cannot run the forward of a {type(module).__name__} inside of another: it was replaced by an attribute of the "
            "module. Make all calls of zero that take the model before it is replaced."
        )
    others = tuple(each for each in vars(module).get(_AROUND, ()) if type(each) is not type(around))
    vars(module)[_AROUND] = (*others, around)


def arounds_of(module: nn.Module) -> tuple[Around, ...]:
    """Returns what the forward of a module runs inside of, the outermost last."""
    arounds: tuple[Around, ...] = vars(module).get(_AROUND, ())
    return arounds


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module was made of."""
    kind = type(module)
    return kind.__mro__[1] if _classes.get(kind.__mro__[1]) is kind else kind


class _Assigned:
    """A forward that was assigned to a module, in place of that of its class."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(*args, **kwargs)


def _class_around(kind: type[nn.Module]) -> type[nn.Module]:
    known = _classes.get(kind)
    if known is not None:
        return known

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        *inner, around = vars(self)[_AROUND]
        return around.run(_inside_of(inner, kind.forward), self, args, kwargs)

    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        names |= {"__reduce_ex__": _reduce, "__copy__": _copy}
        names |= {} if hasattr(kind, "__deepcopy__") else {"__deepcopy__": _deepcopy}
    made = _classes[kind] = type(kind.__name__, (kind,), names)
    return made


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Returns what a pickle has: the module as it was made, as what runs around its forward belongs to this process."""
    plain = self
    for around in vars(self)[_AROUND]:
        if isinstance(around, Outlasting):
            plain = around.undone_in(plain)
    state = {name: value for name, value in _state_of(plain).items() if name != _AROUND}
    assigned = [each.forward for each in vars(self)[_AROUND] if type(each) is _Assigned]
    state |= {"forward": assigned[0]} if assigned else {}
    return copyreg._reconstructor, (kind_of(self), object, None), state  # type: ignore[attr-defined]


def _copy(self: nn.Module) -> nn.Module:
    copied = type(self).__new__(type(self))
    copied.__setstate__(dict(_state_of(self)))  # type: ignore[no-untyped-call]
    return copied


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copied = memo[id(self)] = type(self).__new__(type(self))
    copied.__setstate__(copy.deepcopy(_state_of(self), memo))  # type: ignore[no-untyped-call]
    return copied


def _state_of(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = object.__reduce_ex__(module, 2)[2]  # type: ignore[assignment]
    return state


def _inside_of(arounds: list[Around], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that runs inside of these, the last of them outermost."""
    if not arounds:
        return forward
    *inner, around = arounds
    inside = _inside_of(inner, forward)

    @functools.wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around.run(inside, module, args, kwargs)

    return run
