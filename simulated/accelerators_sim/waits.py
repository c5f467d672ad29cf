"""A record of who waited for whom, for tests of what must *not* wait: too many waits are right, and slow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from accelerators_sim.place import describe, here


class Wait(NamedTuple):
    """One wait, in the words that the race detector uses for streams and places."""

    waiter: str
    awaited: str
    place: str


class _Thread(threading.local):
    is_carrying = False


_thread = _Thread()
_records: list[list[Wait]] = []


def note(waiter: str, awaited: str) -> None:
    if _records and not _thread.is_carrying:
        wait = Wait(waiter, awaited, describe(here()))
        for record in _records:
            record.append(wait)


def is_carrying() -> bool:
    """Whether this thread does the work of a collective, which no program waits for by itself."""
    return _thread.is_carrying


@contextlib.contextmanager
def carrying() -> Iterator[None]:
    """The work inside is that of a collective whose uses of device memory were recorded when it was called."""
    _thread.is_carrying = True
    try:
        yield
    finally:
        _thread.is_carrying = False


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[Wait]]:
    """The waits made inside the `with`, in order: of streams for streams, and of "the host" for streams."""
    record: list[Wait] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [other for other in _records if other is not record]
