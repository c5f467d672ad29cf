"""How a process leaves the ranks that it trains with, when its interpreter ends.

[Note: the end]
The error that ends it, where there is one, is told to the ranks that wait for this one, or will. Then the connections are
closed, and their threads with them: gloo's take the lock of the interpreter to let go of a tensor, and one that waits for
that lock while the interpreter ends takes the whole process down, whatever had been trained. A thread ends when it has done
what it was given, so what is under way with a rank that stands still is waited for a moment only: it will not end now either.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from zero.comm.health.monitor import Store, leave, raised

_MOMENT_S = 3.0


class Leaving(Protocol):
    """A group that has connections."""

    def let_go(self) -> Callable[[], None]:
        """Forgets them; what is returned closes them, and may wait for what is under way."""


_open: weakref.WeakKeyDictionary[Leaving, int] = weakref.WeakKeyDictionary()  # with the process that they are of


def opened(group: Leaving) -> None:
    _open[group] = os.getpid()


def end(store: Store | None, rank: int) -> None:
    leave_words(store, rank)
    at_once([group.let_go() for group, process in list(_open.items()) if process == os.getpid()], _MOMENT_S)


def at_once(acts: Iterable[Callable[[], object]], limit_s: float) -> None:
    """Does what consists of waiting, each in a thread of its own; those that take longer than that are not waited for. What
    gets no thread is done here, however long it takes."""
    threads = []
    for act in acts:
        thread = threading.Thread(target=act, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are no more threads to be had, as at the very end
            act()
        else:
            threads.append(thread)
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def leave_words(store: Store | None, rank: int) -> None:
    """Tells the others what error ends this process; `store` is that of all ranks, where they can still be told something."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return
    leave(error)
    if store is not None:
        with contextlib.suppress(RuntimeError):  # who kept the store is gone
            store.set(_key_of(rank), f"{raised(error)}, before it sharded")


def words_of(store: Store, rank: int) -> str:
    """What a rank left that ended before it sharded, for the first time or once more; nothing where it did not."""
    return store.get(_key_of(rank)).decode() if store.check([_key_of(rank)]) else ""


def _key_of(rank: int) -> str:
    return f"zero ended/{rank}"
