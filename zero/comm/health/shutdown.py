"""How a process leaves the ranks that it trains with when its interpreter ends.

[Note: the end] The error that ends the process, if there is one, is told to the ranks that wait for this one, or will. Then the
connections and their threads are closed. Threads of gloo take the lock of the interpreter to free a tensor, and one that waits
for that lock while the interpreter ends kills the process, even after a successful training. A thread ends when its work is
done; work with a rank that hangs is waited for only briefly, as it will not end now either.

The process that holds the store may hang too. So everything here that waits for another process does so by `at_once`, and all
of it together takes a few seconds at most. See [Note: limits].
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

from zero.comm.health.limits import at_once, reserve
from zero.comm.health.monitor import leave, raised
from zero.comm.health.store import StoreClient

_WORDS_S = 2.0  # for telling the error
_CLOSE_S = 3.0  # for closing connections


class Leaving(Protocol):
    """A group that has connections to close."""

    def release(self) -> Callable[[], None]:
        """Forgets them; what is returned closes them, and may wait for what is under way."""


_open: weakref.WeakKeyDictionary[Leaving, int] = weakref.WeakKeyDictionary()  # with the process that they are of


def prepare() -> None:
    """Reserves threads for the end, before a group is made: one for each group, and one for the error and the world."""
    reserve(len(_open) + 3)


def opened(group: Leaving) -> None:
    _open[group] = os.getpid()


def end(store: StoreClient | None, rank: int, end_world: Callable[[], None] | None = None) -> None:
    at_once([partial(leave_words, store, rank)], _WORDS_S)
    are_closed = close_within_limit([group.release() for group, process in list(_open.items()) if process == os.getpid()])
    if are_closed and end_world is not None:  # it would wait for the same
        close_within_limit([end_world])


def close_within_limit(closings: list[Callable[[], None]]) -> bool:
    """Closes connections on which work with a rank that hangs may be going on. Returns whether they are closed."""
    return at_once(closings, _CLOSE_S)


def leave_words(store: StoreClient | None, rank: int) -> None:
    """Tells the others the error that ends this process; `store` is that of all ranks, if it can still be used."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return
    leave(error)
    if store is not None:
        store.tell(_key_of(rank), f"{raised(error)}, before it sharded")


def words_of(store: StoreClient, rank: int) -> str:
    """Returns the error of a rank that ended before it sharded; nothing where it did not."""
    return store.line(_key_of(rank)) or ""


def _key_of(rank: int) -> str:
    return f"zero ended/{rank}"
