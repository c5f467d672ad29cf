"""Records of who waited for whom and of what was launched, for tests of what must *not* be: too many are right, and slow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from accelerators_sim.place import describe, here


class Wait(NamedTuple):
    """One wait, in the words that the race detector uses for streams and places."""

    waiter: str
    awaited: str
    place: str


class Launch(NamedTuple):
    """A piece of work that a stream was given."""

    operator: str
    stream: str
    place: str


class _Thread(threading.local):
    is_carrying = False


_thread = _Thread()
_Noted = TypeVar("_Noted")
_records: list[list[Wait]] = []
_launches: list[list[Launch]] = []


def note(waiter: str, awaited: str) -> None:
    if _records and not _thread.is_carrying:
        wait = Wait(waiter, awaited, describe(here()))
        for record in _records:
            record.append(wait)


def note_launch(operator: str, stream: str) -> None:
    if _launches and not _thread.is_carrying:
        launch = Launch(operator, stream, describe(here()))
        for record in _launches:
            record.append(launch)


def is_carrying() -> bool:
    """Returns whether this thread does the work of a collective, which no program waits for by itself."""
    return _thread.is_carrying


@contextlib.contextmanager
def carrying() -> Iterator[None]:
    """Marks the work inside as that of a collective whose uses of device memory were recorded when it was called."""
    _thread.is_carrying = True
    try:
        yield
    finally:
        _thread.is_carrying = False


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[Wait]]:
    """Records the waits made inside the `with`, in order: of streams for streams, and of "the host" for streams."""
    with _recorded(_records) as record:
        yield record


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Records the operators and copies inside the `with` that a device was given, in order; views are left out."""
    with _recorded(_launches) as record:
        yield record


@contextlib.contextmanager
def _recorded(records: list[list[_Noted]]) -> Iterator[list[_Noted]]:
    record: list[_Noted] = []
    records.append(record)
    try:
        yield record
    finally:
        records[:] = [other for other in records if other is not record]
