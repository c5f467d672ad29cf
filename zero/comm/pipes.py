"""Small messages between ranks of one host, through pipes.

[Note: pipes] Gloo carries a small message by two threads on either side. If every core is busy, that takes a millisecond,
and a step has several messages. A pipe carries one in two system calls, without a thread. There is one pipe for each two ranks
and each direction. The reader makes it; the writer opens it by /proc/PID/fd, as ranks reach each other's memory. When the
process on the other side ends, for whatever reason, the pipe closes, which is noticed at once. What is in shared memory before
a message is sent can be read by the rank that received the message.

Messages are short, so that a pipe takes one as a whole or not at all. A message that does not fit waits here and is written at
the next call; a sender never waits for readers. A rank that gives up says of which calls it had all messages. What it sent for
other calls is void: a rank that comes too late learns that in the call that the others gave up in, not in the next one.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zero.comm.group import Group, Pending
from zero.errors import GroupLost

MOST_BYTES = 2048  # the longest message

_HEAD = struct.Struct("<HH")  # the channel of a message, and the number of bytes that follow
_READ_BYTES = 2**16
# The channel in which a rank gives up: the message names, for each other channel, the first call that it gives up.
_GIVEN_UP = 2**16 - 1
_LOOK_MS = 50  # the milliseconds after which a waiting thread looks whether another one has read its message

_alive: weakref.WeakSet[Pipes] = weakref.WeakSet()

_EXCHANGES, _NUMBERS = range(_NUM_CHANNELS := 2)
_LENGTH = _NUMBER = struct.Struct("<q")


class Pipes:
    """The pipes between this rank and all others, for messages of several channels, each in an order of its own."""

    def __init__(self, rank: int, size: int, num_channels: int) -> None:
        self.rank = rank
        self.size = size
        self._ways: dict[int, _Way] = {}  # by rank: a pipe to it and one from it
        inboxes = [{other: _Inbox() for other in range(size) if other != rank} for _ in range(num_channels)]
        self._channels = [_Channel(boxes) for boxes in inboxes]
        self._lock = threading.Lock()
        self._is_torn = False
        _alive.add(self)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for other in range(size):
                if other != rank:
                    self._ways[other] = _Way([boxes[other] for boxes in inboxes])
            on_failure.pop_all()

    def handshake(self) -> bytes:
        """Returns this process and the pipes that it offers to each rank, for `meet`."""
        offered = (self._ways[other].offered if other in self._ways else -1 for other in range(self.size))
        return struct.pack(f"<{1 + self.size}q", os.getpid(), *offered)

    def meet(self, handshakes: Sequence[bytes]) -> None:
        """Opens what the others offer; an OSError if that cannot be reached."""
        for other, way in self._ways.items():
            process, *offered = struct.unpack(f"<{1 + self.size}q", handshakes[other])
            way.open(f"/proc/{process}/fd/{offered[self.rank]}")

    def introduced(self) -> None:
        """Closes this rank's own ends of what it offered, as all others have opened theirs."""
        for way in self._ways.values():
            way.withdraw()

    def close(self) -> None:
        with self._lock:
            for way in self._ways.values():
                way.close()

    __del__ = close

    def call(self, channel: int, message: bytes, limit_s: float) -> Call:
        """Sends a message to all others. They do the same: the n-th calls of a channel belong together."""
        with self._whole():
            of_channel = self._channels[channel]
            number = of_channel.begin()
            for way in self._ways.values():
                way.send(channel, message)
            return Call(self, of_channel, number, message, limit_s)

    def take(self, channel: _Channel, number: int, received: dict[int, bytes]) -> set[int]:
        """Adds what has come by now of the messages with that number; says which ranks will send none any more."""
        with self._whole():
            for way in self._ways.values():
                way.move()
            never = channel.take(number, received)
            return never | {other for other, way in self._ways.items() if way.is_gone} - received.keys()

    def give_up(self) -> None:
        """Tells all others that this rank takes part in no call any more."""
        with self._whole():
            firsts = [channel.first_open for channel in self._channels]
            for way in self._ways.values():
                way.send(_GIVEN_UP, struct.pack(f"<{len(firsts)}q", *firsts))

    def look_out(self, ranks: Sequence[int], milliseconds: float) -> None:
        """Waits until one of these ranks may have sent something."""
        poll = select.poll()
        for way in [self._ways[rank] for rank in ranks]:
            if not way.is_gone:
                poll.register(way.reads, select.POLLIN)
        poll.poll(min(_LOOK_MS, max(0.0, milliseconds)))

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Runs what is done all or not at all. An exception may come from a signal at any place; then nobody knows what was
        read, and these pipes serve for nothing more."""
        with self._lock:
            if self._is_torn:
                raise RuntimeError("an exception broke off in the midst of a message, so that those after it are lost")
            self._is_torn = True
            yield
            self._is_torn = False


@dataclass
class _Inbox:
    """The messages that have come from another rank, in a channel."""

    messages: dict[int, bytes] = field(default_factory=dict)  # by the number of their call; not taken yet
    num_come: int = 0
    end: float = float("inf")  # the first call in which the other rank gave up

    def put(self, message: bytes) -> None:
        self.messages[self.num_come] = message
        self.num_come += 1


@dataclass
class _Channel:
    """The calls that are in one order."""

    inboxes: Mapping[int, _Inbox]  # by rank
    num_calls: int = 0
    open: set[int] = field(default_factory=set)  # the calls of which messages are still missing

    def begin(self) -> int:
        self.open.add(self.num_calls)
        self.num_calls += 1
        return self.num_calls - 1

    def take(self, number: int, received: dict[int, bytes]) -> set[int]:
        """Adds the messages with that number that were read; says which of the other ranks gave up and will send none."""
        never = set[int]()
        for other, inbox in self.inboxes.items():
            if number >= inbox.end:
                never.add(other)
            elif number in inbox.messages:
                received[other] = inbox.messages.pop(number)
        if received.keys() >= self.inboxes.keys():
            self.open.discard(number)
        return never - received.keys()

    @property
    def first_open(self) -> int:
        return min(self.open, default=self.num_calls)


class _Way:
    """A pipe to another rank, and one from it."""

    def __init__(self, inboxes: Sequence[_Inbox]) -> None:
        self.reads, self.offered = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the other rank opens `offered` to write
        self.is_gone = False
        self._inboxes = inboxes  # by channel
        self._writes = -1
        self._unsent = deque[bytes]()
        self._cut = b""  # the beginning of a message of which the rest has not come

    def open(self, path: str) -> None:
        self._writes = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def withdraw(self) -> None:
        if self.offered >= 0:
            os.close(self.offered)
        self.offered = -1

    def close(self) -> None:
        self.is_gone = True
        self.withdraw()
        for descriptor in (self.reads, self._writes):
            if descriptor >= 0:
                os.close(descriptor)
        self.reads = self._writes = -1

    def send(self, channel: int, message: bytes) -> None:
        self._unsent.append(_HEAD.pack(channel, len(message)) + message)
        self._write_out()

    def move(self) -> None:
        """Reads what has come, which also shows who is gone, and writes what there is room for."""
        with contextlib.suppress(BlockingIOError):
            is_full = True
            while is_full and not self.is_gone:
                content = os.read(self.reads, _READ_BYTES)
                self.is_gone, is_full = not content, len(content) == _READ_BYTES
                self._cut = self._sort(self._cut + content)
        if self._unsent:
            self._write_out()

    def _write_out(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent and not self.is_gone:
                try:
                    _write(self._writes, self._unsent[0])
                except BrokenPipeError:
                    self.is_gone = True
                else:
                    self._unsent.popleft()

    def _sort(self, content: bytes) -> bytes:
        """Puts whole messages into their channels, and returns what is not whole yet."""
        begin = 0
        while len(content) >= begin + _HEAD.size:
            channel, num_bytes = _HEAD.unpack_from(content, begin)
            end = begin + _HEAD.size + num_bytes
            if len(content) < end:
                break
            if channel == _GIVEN_UP:
                firsts = struct.unpack(f"<{len(self._inboxes)}q", content[begin + _HEAD.size : end])
                for inbox, first in zip(self._inboxes, firsts, strict=True):
                    inbox.end = first
            else:
                self._inboxes[channel].put(content[begin + _HEAD.size : end])
            begin = end
        return content[begin:]


def _write(descriptor: int, message: bytes) -> None:
    """Writes a message. Raises if nobody reads any more, and never leaves the signal, which ends programs that do not ignore
    it."""
    # The signal is always blocked, as a library in C may have changed what Python knows of it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
    try:
        os.write(descriptor, message)
    except BrokenPipeError:
        signal.sigtimedwait((signal.SIGPIPE,), 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Call:
    """A message of every rank, on its way. It is waited for as torch's own works are."""

    def __init__(self, pipes: Pipes, channel: _Channel, number: int, message: bytes, limit_s: float) -> None:
        self._pipes = pipes
        self._channel = channel
        self._number = number
        self._found = {pipes.rank: message}
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s
        self._error = ""

    @property
    def messages(self) -> list[bytes]:
        """The messages by rank, once they were waited for."""
        return [self._found[rank] for rank in range(self._pipes.size)]

    def is_completed(self) -> bool:
        """Returns whether all messages are here, or will never be."""
        if len(self._found) < self._pipes.size and not self._error:
            gone = set[int]()
            try:
                gone = self._pipes.take(self._channel, self._number, self._found)
            except RuntimeError as error:  # kept for `wait` to raise, as a question whether a message has come must not
                self._error = str(error)
            if gone:
                self._error = f"connection closed by rank {min(gone)}"
            elif not self._error and self._missing and time.monotonic() > self._end:
                self._error = f"nothing came from rank {self._missing[0]} within {self._limit_s:g} s"
        return not self._missing or bool(self._error)

    def wait(self, turn: datetime.timedelta | None = None) -> None:
        """Waits for all messages. Raises RuntimeError if they will never be here, or are not within `turn`."""
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
    """Closes the pipes in a process that was forked, which would keep them open beyond the end of the one that it was forked
    from."""
    for pipes in list(_alive):
        pipes._lock = threading.Lock()  # another thread of the parent may have held the lock at the fork
        pipes.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Numbers(Protocol):
    """The numbers of all ranks, one of each, on their way."""

    def done(self) -> bool: ...

    def wait(self) -> list[int]: ...


class Messages:
    """A way of small messages, by the group's own means; a faster way overrides some methods."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def handshake(self) -> bytes:
        """Returns what this rank says of itself, for `meet`."""
        return b""

    def meet(self, handshakes: Sequence[bytes]) -> None:
        """Reaches all ranks, by what they say of themselves; an OSError if that cannot be."""

    def introduced(self) -> None:
        """Ends the introduction: all ranks have met."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Returns every rank's message, by rank, as the group's `all_gather_bytes` does."""
        return self._group.all_gather_bytes(message)

    def tell(self, number: int) -> Numbers:
        """Sends a number to every rank, in an order of its own, and waits for none. Its result gives every rank's number."""
        numbers = torch.zeros(self._group.size, dtype=torch.int64, device="cpu")
        numbers[self._group.rank] = number
        return _SummedNumbers(self._group.all_reduce(numbers, torch.int64))

    def reconnect(self) -> None:
        """Begins anew, after the group has reconnected: nothing that was sent before counts."""

    def close(self) -> None:
        """Closes the way of the messages, before the group is closed."""


class _SummedNumbers:
    """Numbers that travel as a sum over ranks."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> list[int]:
        numbers: list[int] = self._pending.wait().tolist()
        return numbers


class Connected(Group, Protocol):
    """A group of processes, which knows what follows when one of them is lost."""

    def begin(self, call: Callable[[float, object], Any]) -> Any:
        """Returns what `call` returns, given the time limit and the connection that hold now. If it fails, or the group was
        lost before, the group is lost."""

    def wait_for(self, work: Any) -> None: ...


class ByPipes(Messages):
    """A way of small messages through pipes, with the time limits of the group. A failure loses the group."""

    def __init__(self, group: Connected) -> None:
        super().__init__(group)
        self._connected = group
        self._pipes = Pipes(group.rank, group.size, _NUM_CHANNELS)
        self._connection: object = group.begin(lambda _, connection: connection)

    def handshake(self) -> bytes:
        return self._pipes.handshake()

    def meet(self, handshakes: Sequence[bytes]) -> None:
        self._pipes.meet(handshakes)

    def introduced(self) -> None:
        self._pipes.introduced()

    def exchange(self, message: bytes) -> list[bytes]:
        framed = _LENGTH.pack(len(message)) + message
        frames = self.messages(self._call(_EXCHANGES, framed[:MOST_BYTES]))
        if any(_LENGTH.unpack_from(head)[0] > MOST_BYTES - _LENGTH.size for head in frames):
            frames = [head + tail for head, tail in zip(frames, self._group.all_gather_bytes(framed[MOST_BYTES:]), strict=True)]
        return [whole[_LENGTH.size :] for whole in frames]

    def tell(self, number: int) -> Numbers:
        return _PipedNumbers(self, self._call(_NUMBERS, _NUMBER.pack(number)))

    def reconnect(self) -> None:
        """Makes new pipes: what an exception broke off in the old ones, here or on another rank, is lost with them."""
        pipes = Pipes(self._group.rank, self._group.size, _NUM_CHANNELS)
        pipes.meet(self._group.all_gather_bytes(pipes.handshake()))
        self._group.all_gather_bytes(b"")  # returns once all ranks have met
        pipes.introduced()
        self._pipes.close()
        self._pipes = pipes
        self._connection = self._connected.begin(lambda _, connection: connection)

    def close(self) -> None:
        self._pipes.close()

    def messages(self, call: Call) -> list[bytes]:
        with self._giving_up():
            self._connected.wait_for(call)
        return call.messages

    def _call(self, channel: int, message: bytes) -> Call:
        def call(limit_s: float, connection: object) -> Call:
            if connection is not self._connection:
                raise RuntimeError("the ranks were connected again, but not all of the way")
            return self._pipes.call(channel, message, limit_s)

        with self._giving_up():
            begun: Call = self._connected.begin(call)
        return begun

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Tells the others, if the group is lost on this rank, that it goes on with nothing that it began."""
        try:
            yield
        except GroupLost:
            with contextlib.suppress(RuntimeError):  # pipes that are torn need no such message
                self._pipes.give_up()
            raise


class _PipedNumbers:
    """Numbers that travel through pipes."""

    def __init__(self, messages: ByPipes, call: Call) -> None:
        self._messages = messages
        self._call = call

    def done(self) -> bool:
        return self._call.is_completed()

    def wait(self) -> list[int]:
        return [_NUMBER.unpack(message)[0] for message in self._messages.messages(self._call)]
