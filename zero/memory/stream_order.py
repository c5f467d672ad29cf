"""The order in which streams of a device use memory that is filled, read and filled again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from accelerators.streams import Stream


class StreamOrder(Protocol):
    """The streams that use one memory. A program makes its streams wait for what it computes, and does not know of this."""

    @property
    def filled_in(self) -> Stream | None:
        """The stream that needs to wait for nothing before it reads; None where all may."""

    def fill(self) -> None:
        """What is issued to the current stream next may write: it comes after all that used the memory."""

    def use(self) -> None:
        """What is issued to the current stream next may read: it comes after what filled the memory."""

    def free(self) -> None:
        """The memory goes back to the allocator, which gives it away in the order of the stream that it was made in."""


class InOrder:
    """Of a device without streams, and of memory that no stream but the program's writes to."""

    filled_in = None

    def fill(self) -> None:
        pass

    def use(self) -> None:
        pass

    def free(self) -> None:
        pass


class ByStreams:
    """Of memory that was made in the current stream."""

    def __init__(self, current: Callable[[], Stream]) -> None:
        self._current = current
        self._made_in = current()
        self._used_in = [self._made_in]  # the first filled it
        self._lock = threading.Lock()

    @property
    def filled_in(self) -> Stream:
        return self._used_in[0]

    def fill(self) -> None:
        current = self._current()
        with self._lock:
            self._let_wait(current)
            self._used_in = [current]

    def use(self) -> None:
        current = self._current()
        with self._lock:
            if current not in self._used_in:
                current.wait_stream(self.filled_in)
                self._used_in.append(current)

    def free(self) -> None:
        with self._lock:
            self._let_wait(self._made_in)

    def _let_wait(self, stream: Stream) -> None:
        for other in self._used_in:
            if other != stream:
                stream.wait_stream(other)
