"""A record of who waited for whom, for tests of what must *not* wait: too many waits are right, and slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from accelerators.simulated.place import describe, here


class Wait(NamedTuple):
    """One wait, in the words that the race detector uses for streams and places."""

    waiter: str
    awaited: str
    place: str


_records: list[list[Wait]] = []


def note(waiter: str, awaited: str) -> None:
    if _records:
        wait = Wait(waiter, awaited, describe(here()))
        for record in _records:
            record.append(wait)


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[Wait]]:
    """The waits made inside the `with`, in order: of streams for streams, and of "the host" for streams."""
    record: list[Wait] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [other for other in _records if other is not record]
