"""Finds the window of a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from zero.runtime.grads.window import Window

_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()


def window_of(param: nn.Parameter) -> Window | None:
    """Returns the window that a parameter's gradients belong to; None for a parameter that is not sharded."""
    window = _windows.get(id(param))
    return window if window is not None and id(param) in window.params.index else None


def manage(params: Iterable[nn.Parameter], window: Window) -> None:
    """Registers parameters of a window. No two windows ever send the same gradient. Nothing is kept alive by it."""
    _windows.update((id(param), window) for param in params)


def leave(params: Iterable[nn.Parameter]) -> None:
    """Unregisters parameters."""
    for param in params:
        _windows.pop(id(param), None)


def check_unmanaged(names: Sequence[str], tensors: Sequence[nn.Parameter]) -> None:
    """Raises where a parameter belongs to another sharded optimizer."""
    for name, tensor in zip(names, tensors, strict=True):
        if window_of(tensor) is not None:
            raise ValueError(
                f"Cannot shard parameter {name}: it is sharded already. Call close() on its optimizer first."
            )
