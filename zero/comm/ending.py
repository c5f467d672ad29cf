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
from collections.abc import Callable
from typing import Protocol

from zero.comm.watch import Store, leave, raised

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
    groups = [group for group, process in list(_open.items()) if process == os.getpid()]
    closings = [threading.Thread(target=group.let_go(), daemon=True) for group in groups]
    for closing in closings:
        closing.start()
    deadline = time.monotonic() + _MOMENT_S
    for closing in closings:
        closing.join(max(0.0, deadline - time.monotonic()))


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
