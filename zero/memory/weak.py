"""References that keep nothing alive: to what an object is a part of, and to what is the user's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """Returns the method without a reference to its object: a cycle would be freed by the garbage collector only."""
    ref = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = ref()
        assert bound is not None, "a part outlived the object it belongs to"
        return bound(*args, **kwargs)

    return call


def of_user(thing: T) -> Callable[[], T]:
    """Returns a function that gives something of the user's, which the sharded optimizer keeps. See [Note: the user's] in
    zero/sharding/optimizer.py."""
    ref = weakref.ref(thing)

    def get() -> T:
        present = ref()
        assert present is not None, "a training is used whose optimizer is gone"
        return present

    return get
