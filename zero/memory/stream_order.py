"""Orders the streams of a device that use memory which is filled, read and filled again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from accelerators.streams import Stream


class StreamOrder(Protocol):
    """Orders the streams that use one memory. The user's program orders its streams by the tensors that it passes between them;
    it does not know of memory that this library fills again, so this order is kept beside."""

    @property
    def filled_in(self) -> Stream | None:
        """The stream that filled the memory, which alone may read without waiting; None if every stream may."""

    def fill(self) -> None:
        """Makes the current stream wait for all that used the memory, so that what is issued to it next may write."""

    def use(self) -> None:
        """Makes the current stream wait for what filled the memory, so that what is issued to it next may read."""

    def free(self) -> None:
        """Prepares the return of the memory to the allocator, which lends it in the order of the stream that it was made in."""


class InOrder:
    """The order on a device without streams, and of memory that only the program's own stream writes to."""

    filled_in = None

    def fill(self) -> None:
        pass

    def use(self) -> None:
        pass

    def free(self) -> None:
        pass


class ByStreams:
    """The order of memory that was made in the current stream, which counts as the one that filled it."""

    def __init__(self, current: Callable[[], Stream]) -> None:
        self._current = current
        self._made_in = current()
        self._used_in = [self._made_in]  # the first one filled it
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
