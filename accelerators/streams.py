"""The protocols of streams and events, and their stand-ins for a device whose work is in order by itself.

A device without streams runs all work in the order in which it was issued. So code written for streams runs unchanged there: to
wait for another stream is no work. Only the host may have to wait, and then the whole device is synchronised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Event(Protocol):
    """A point in the work of a stream, for which other streams and the host can wait."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Stream(Protocol):
    """A queue of work that runs in the order of issue, beside that of other streams."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any: ...


class InOrderEvent:
    """The event of a device without events. Recording waits for the device, so that times are those of finished work."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._recorded_at: float | None = None

    def record(self, stream: Any = None) -> None:
        if stream is None:
            self._finish()
        else:
            stream.synchronize()
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: InOrderEvent) -> float:
        """Returns the milliseconds from this event to `end_event`."""
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Cannot measure the time between two events: one was not recorded. Call record() on both.")
        return (end_event._recorded_at - self._recorded_at) * 1e3


class InOrderStream:
    """The one stream of a device without streams."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def synchronize(self) -> None:
        self._finish()

    def query(self) -> bool:
        self._finish()  # the device cannot be asked whether work is left, so this waits until none is
        return True

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else InOrderEvent(self._finish)
        event.record(self)
        return event
