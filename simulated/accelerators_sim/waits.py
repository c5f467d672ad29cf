"""The line of the user's code that asks for work, and records of who waits there for whom and of what is launched.

A test that reads the records finds what must *not* be: too many waits give right results, and slow ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

import torch

from accelerators import staged
from accelerators_sim import torch_private

Place = tuple[str, int]  # a file and a line, or the name of a backward node and 0

_OURS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(staged.__file__)) + os.sep,
)
_WRAPPERS = ("contextlib.py", "functools.py", "typing_extensions.py")  # files between torch's functions and their callers
_is_ours: dict[CodeType, bool] = {}


def here() -> Place:
    """Returns the innermost line that is neither torch's nor ours; in an autograd thread, the backward node at work."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = _is_ours.get(code)
        if ours is None:
            name = code.co_filename
            ours = _is_ours[code] = name.startswith((*_OURS, "<frozen")) or name.endswith(_WRAPPERS)
        if not ours:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    node = torch_private.current_node()
    return (f"the backward of {node.name()}" if node is not None else "an unknown place"), 0


def describe(place: Place) -> str:
    name, line = place
    return f"{name}:{line}" if line else name


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
