"""The store of torch.distributed, asked with a time limit. See [Note: limits]."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from zero.comm.health.limits import at_once
from zero.errors import GroupLost

Answer = TypeVar("Answer")

_ANSWER_S = 5.0  # how long the store may take for one answer


class Store(Protocol):
    """The methods of a store of torch.distributed that are used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class StoreClient:
    """A client of a store, or of the part of it under a prefix. `whole` is then the client of all of it, as there is one
    connection."""

    def __init__(self, store: Store, whole: StoreClient | None = None) -> None:
        self.store: Any = store  # as torch.distributed has it
        # Set for good when there is no answer in time: the thread that waits for that answer holds the connection, so that
        # any other question would wait for that thread.
        self._lost: threading.Event = threading.Event() if whole is None else whole._lost

    @property
    def is_lost(self) -> bool:
        """Whether the process that holds the store was found to be gone, or not to answer."""
        return self._lost.is_set()

    def ask(self, question: Callable[[Store], Answer], limit_s: float | None = None) -> Answer | None:
        """Returns the answer, or None when there is none in time: the process that holds the store may be the missing one."""
        if self.is_lost:
            return None
        answers: list[Answer] = []

        def put() -> None:
            with contextlib.suppress(RuntimeError):  # its connection is closed
                answers.append(question(self.store))

        if not at_once([put], _ANSWER_S if limit_s is None else limit_s):
            self._lost.set()
        return answers[0] if answers else None

    def line(self, key: str) -> str | None:
        """Returns what was written under a key, or None."""
        return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def count(self, key: str, limit_s: float) -> int:
        """Returns how often this was called with a key on any rank, this call included."""
        number = self.ask(lambda store: store.add(key, 1), limit_s)
        if number is None:
            raise GroupLost(
                "Cannot connect the ranks: the process that holds their store, which is rank 0 or the launcher, does not "
                "answer. Start the ranks again from a checkpoint."
            )
        return number

    def tell(self, key: str, value: str) -> None:
        """Writes a line under a key. The store does not answer, so it takes some microseconds."""
        if not self.is_lost:
            try:
                self.store.set(key, value)
            except RuntimeError:  # who held the store is gone: that is found out, and told, elsewhere
                self._lost.set()
