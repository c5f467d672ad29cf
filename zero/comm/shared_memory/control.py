"""How ranks that share memory send each other small messages."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from zero.comm.group import Group, Pending
from zero.comm.shared_memory.pipes import MOST_BYTES, Call, Pipes
from zero.errors import GroupLost

_EXCHANGES, _NUMBERS = range(_NUM_CHANNELS := 2)
_LENGTH = _NUMBER = struct.Struct("<q")


class Numbers(Protocol):
    """One of every rank, on their way."""

    def done(self) -> bool: ...

    def wait(self) -> list[int]: ...


class Messages:
    """Small messages by the group's own means, for ranks that are threads; the other transports build on it."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def handshake(self) -> bytes:
        """What this rank says of itself, for `meet`."""
        return b""

    def meet(self, handshakes: Sequence[bytes]) -> None:
        """Reaches all ranks, by what they say of themselves; an OSError where that cannot be."""

    def introduced(self) -> None:
        """All ranks have met."""

    def exchange(self, message: bytes) -> list[bytes]:
        """As the group's."""
        return self._group.all_gather_bytes(message)

    def tell(self, number: int) -> Numbers:
        """Sends a number to every rank, in an order of its own, and waits for none. Its result gives every rank's number."""
        numbers = torch.zeros(self._group.size, dtype=torch.int64, device="cpu")
        numbers[self._group.rank] = number
        return _SummedNumbers(self._group.all_reduce(numbers, torch.int64))

    def reconnect(self) -> None:
        """After the group is: nothing that was sent before counts."""

    def close(self) -> None:
        """Before the group is."""


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
        """What `call` gives, of the time limit and the connection that hold now. Where it fails, or the group was lost before,
        the group is lost."""

    def wait_for(self, work: Any) -> None: ...


class ByPipes(Messages):
    """Small messages through pipes, with the time limits of the group. A failure loses the group."""

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
        self._group.all_gather_bytes(b"")  # all have met
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
        """Where the group is lost on this rank, the others are to know that it goes on with nothing that it began."""
        try:
            yield
        except GroupLost:
            with contextlib.suppress(RuntimeError):  # what was torn stays so
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
