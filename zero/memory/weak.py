"""Methods that an object passes to its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """Returns the method without a reference to its object: a cycle would be freed by the garbage collector only."""
    ref = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = ref()
        assert bound is not None, "a part outlived the object it belongs to"
        return bound(*args, **kwargs)

    return call
