"""Small messages between ranks of one host, through pipes.

[Note: pipes]
Gloo carries a small message by two threads on either side, and where every core computes that takes a millisecond; a step has
several. A pipe carries it in two calls of the system, without a thread. For each two ranks and each way there is one. Who reads
it made it; who writes opens it by /proc/PID/fd, as ranks reach each other's memory. It ends with the process on its other side,
however that ends, which is noticed at once. What is in shared memory before a message is sent is there for who has received it.

Messages are short, so that a pipe takes one as a whole or not at all. What it has no room for waits here, and goes with the
next call; nobody who sends waits for others to read.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

MOST_BYTES = 2048  # of a message

_HEAD = struct.Struct("<qHH")  # which connection it belongs to, its channel, and how many bytes follow
_READ_BYTES = 2**16
_LOOK_MS = 50  # at most, before a look whether another thread has read what this one waits for

_alive: weakref.WeakSet[Pipes] = weakref.WeakSet()


class Pipes:
    """Those between this rank and all others, for messages of several channels, each in an order of its own."""

    def __init__(self, rank: int, size: int, num_channels: int) -> None:
        self.rank = rank
        self.size = size
        self.connection = 0
        self._others = [other for other in range(size) if other != rank]
        self._in: dict[int, int] = {}  # descriptors, by rank
        self._out: dict[int, int] = {}
        self._offered: dict[int, int] = {}  # what others open to write to this rank
        self._cut: dict[int, bytes] = {}  # what was read of a message that is not all there
        self._channels = [_Channel(self._others) for _ in range(num_channels)]
        self._unsent = {other: deque[bytes]() for other in self._others}
        self._gone: set[int] = set()
        self._lock = threading.Lock()
        _alive.add(self)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for other in self._others:
                self._in[other], self._offered[other] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            on_failure.pop_all()

    def introduce(self) -> bytes:
        """What this rank says of itself, for `meet`."""
        return struct.pack(f"<{1 + self.size}q", os.getpid(), *(self._offered.get(other, -1) for other in range(self.size)))

    def meet(self, told: Sequence[bytes]) -> None:
        """Opens what the others offer; an OSError where that cannot be reached."""
        for other in self._others:
            process, *offered = struct.unpack(f"<{1 + self.size}q", told[other])
            self._out[other] = os.open(
                f"/proc/{process}/fd/{offered[self.rank]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )

    def introduced(self) -> None:
        """All have opened what this rank offered, so that nobody else holds it open."""
        while self._offered:
            os.close(self._offered.popitem()[1])

    def close(self) -> None:
        with self._lock:
            for descriptors in (self._in, self._out, self._offered):
                while descriptors:
                    os.close(descriptors.popitem()[1])

    __del__ = close

    def restart(self, connection: int) -> None:
        """What was sent before is thrown away, here and wherever it arrives, once all have done the same."""
        with self._lock:
            self.connection = connection
            self._channels = [_Channel(self._others) for _ in self._channels]
            for queue in self._unsent.values():
                queue.clear()

    def call(self, channel: int, message: bytes, limit_s: float) -> Call:
        """Sends a message to all others. They do the same: the n-th calls of a channel belong together."""
        with self._lock:
            number = self._channels[channel].num_calls
            self._channels[channel].num_calls += 1
            for queue in self._unsent.values():
                queue.append(_HEAD.pack(self.connection, channel, len(message)) + message)
            self._read()
            self._write()
        return Call(self, self._channels[channel].come, number, message, limit_s)

    def take(self, come: Mapping[int, dict[int, bytes]], number: int, found: dict[int, bytes]) -> set[int]:
        """Adds what has come by now of the messages with that number; says which ranks will send none any more."""
        with self._lock:
            self._write()
            self._read()
            found |= {other: messages.pop(number) for other, messages in come.items() if number in messages}
            return self._gone - found.keys()

    def look_out(self, ranks: Sequence[int], milliseconds: float) -> None:
        """Waits until one of them may have sent something."""
        poll = select.poll()
        for descriptor in [self._in[rank] for rank in ranks if rank in self._in]:
            poll.register(descriptor, select.POLLIN)
        poll.poll(min(_LOOK_MS, max(0.0, milliseconds)))

    def _write(self) -> None:
        for other, queue in self._unsent.items():
            while queue and other not in self._gone:
                try:
                    os.write(self._out[other], queue[0])
                except BlockingIOError:
                    break
                except BrokenPipeError:
                    self._gone.add(other)
                    break
                queue.popleft()

    def _read(self) -> None:
        for other, descriptor in self._in.items():
            with contextlib.suppress(BlockingIOError):
                while other not in self._gone:
                    content = os.read(descriptor, _READ_BYTES)
                    if not content:
                        self._gone.add(other)
                    self._sort(other, content)
                    if len(content) < _READ_BYTES:
                        break

    def _sort(self, other: int, content: bytes) -> None:
        """Into its channel goes what belongs to this connection."""
        content, begin = self._cut.pop(other, b"") + content, 0
        while len(content) >= begin + _HEAD.size:
            connection, channel, num_bytes = _HEAD.unpack_from(content, begin)
            end = begin + _HEAD.size + num_bytes
            if len(content) < end:
                break
            if connection == self.connection:
                self._channels[channel].add(other, content[begin + _HEAD.size : end])
            begin = end
        if begin < len(content):
            self._cut[other] = content[begin:]


class _Channel:
    """Messages that nobody has taken, by rank and by the number of the call that each is for."""

    def __init__(self, others: Iterable[int]) -> None:
        self.num_calls = 0
        self.come: dict[int, dict[int, bytes]] = {other: {} for other in others}
        self._num_come = dict.fromkeys(self.come, 0)

    def add(self, other: int, message: bytes) -> None:
        self.come[other][self._num_come[other]] = message
        self._num_come[other] += 1


class Call:
    """A message of every rank, on its way. It is waited for as torch's own works are."""

    def __init__(
        self, pipes: Pipes, come: Mapping[int, dict[int, bytes]], number: int, message: bytes, limit_s: float
    ) -> None:
        self._pipes = pipes
        self._come = come
        self._number = number
        self._found = {pipes.rank: message}
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s
        self._error = ""

    @property
    def messages(self) -> list[bytes]:
        """By rank, once it was waited for."""
        return [self._found[rank] for rank in range(self._pipes.size)]

    def is_completed(self) -> bool:
        """Whether they are all here, or will never be."""
        if len(self._found) < self._pipes.size and not self._error:
            gone = self._pipes.take(self._come, self._number, self._found)
            if gone:
                self._error = f"connection closed by rank {min(gone)}"
            elif self._missing and time.monotonic() > self._end:
                self._error = f"nothing came from rank {self._missing[0]} within {self._limit_s:g} s"
        return not self._missing or bool(self._error)

    def wait(self, turn: datetime.timedelta | None = None) -> None:
        """A RuntimeError where they never will be, or are not after so long."""
        end = time.monotonic() + (float("inf") if turn is None else turn.total_seconds())
        while not self.is_completed():
            rest = min(end, self._end) - time.monotonic()
            if rest <= 0 and end < self._end:
                raise RuntimeError(f"nothing came from rank {self._missing[0]} so far")
            self._pipes.look_out(self._missing, rest * 1e3)
        if self._error:
            raise RuntimeError(self._error)

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._pipes.size) if rank not in self._found]


def _in_child() -> None:
    """A process that was forked would keep pipes open beyond the end of the one that it was forked from."""
    for pipes in list(_alive):
        pipes._lock = threading.Lock()  # which another thread may have held
        pipes.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
