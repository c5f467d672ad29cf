"""The windows by parameter: for code that has a parameter at hand and nothing of its training.

    manage(params, window)    a training is built, or a group is added to it (zero/sharding/build.py and join.py)
    window_of(param)          the graph of a compiled backward asks where a gradient belongs; integrations, who is sharded
    leave(params)             the training is closed (zero/sharding/state.py), or the group could not be added

[Note: by id] The table keeps nothing alive: windows are in it weakly, and parameters by id. The id of a parameter that is gone
may come again for another one. So a window is asked too, which keeps its parameters alive: an id that it knows is that of its
parameter.

An attribute of each parameter would need no table, but pickle writes those with the parameter: a window would go along with
every model that is saved whole, or sent to another process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from zero.window.window import Window

_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()  # by id of the parameter


def window_of(param: nn.Parameter) -> Window | None:
    """Returns the window that a parameter's gradients belong to; None for a parameter that is not sharded."""
    window = _windows.get(id(param))
    return window if window is not None and id(param) in window.params.index else None


def manage(params: Iterable[nn.Parameter], window: Window) -> None:
    """Registers the parameters of a window, so that no two windows send the same gradient."""
    _windows.update((id(param), window) for param in params)


def leave(params: Iterable[nn.Parameter]) -> None:
    """Unregisters parameters; those that are not registered are passed over."""
    for param in params:
        _windows.pop(id(param), None)


def check_unmanaged(names: Sequence[str], tensors: Sequence[nn.Parameter]) -> None:
    """Raises if a parameter belongs to another sharded optimizer."""
    for name, tensor in zip(names, tensors, strict=True):
        if window_of(tensor) is not None:
            raise ValueError(
                f"Cannot shard parameter {name}: it is sharded already. Call close() on its optimizer first."
            )
