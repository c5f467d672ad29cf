"""How ranks that share memory send each other small messages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zero.comm.group import Group, Pending
from zero.comm.pipes import MOST_BYTES, Call, Pipes

_EXCHANGES, _NUMBERS = range(_NUM_CHANNELS := 2)
_LENGTH = _NUMBER = struct.Struct("<q")


class Numbers(Protocol):
    """One of every rank, on their way."""

    def done(self) -> bool: ...

    def wait(self) -> list[int]: ...


class Messages:
    """Those of the group itself: its ranks are threads, which end otherwise than processes do."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def introduce(self) -> bytes:
        """What this rank says of itself, for `meet`."""
        return b""

    def meet(self, told: Sequence[bytes]) -> None:
        """Reaches all ranks, by what they say of themselves; an OSError where that cannot be."""

    def introduced(self) -> None:
        """All ranks have met."""

    def exchange(self, message: bytes) -> list[bytes]:
        """As the group's."""
        return self._group.exchange(message)

    def tell(self, number: int) -> Numbers:
        """Every rank's number; waits for nobody. In an order of its own."""
        numbers = torch.zeros(self._group.size, dtype=torch.int64, device="cpu")
        numbers[self._group.rank] = number
        return _Summed(self._group.all_reduce(numbers, torch.int64))

    def reconnect(self) -> None:
        """After the group is: nothing that was sent before counts."""

    def close(self) -> None:
        """Before the group is."""


class _Summed:
    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> list[int]:
        found: list[int] = self._pending.wait().tolist()
        return found


class Connected(Group, Protocol):
    """A group of processes, which knows what to do where one of them is lost."""

    def begin(self, call: Callable[[float], Any]) -> Any:
        """What `call` gives for the time limit that holds now; where it fails, or the group was lost before, it is lost."""

    def wait_for(self, work: Any) -> None: ...


class ByPipes(Messages):
    """Through pipes, with the time limits of the group, and lost as it is."""

    def __init__(self, group: Connected) -> None:
        super().__init__(group)
        self._connected = group
        self._pipes = Pipes(group.rank, group.size, _NUM_CHANNELS)

    def introduce(self) -> bytes:
        return self._pipes.introduce()

    def meet(self, told: Sequence[bytes]) -> None:
        self._pipes.meet(told)

    def introduced(self) -> None:
        self._pipes.introduced()

    def exchange(self, message: bytes) -> list[bytes]:
        framed = _LENGTH.pack(len(message)) + message
        call = self._call(_EXCHANGES, framed[:MOST_BYTES])
        self._connected.wait_for(call)
        told = call.messages
        if any(_LENGTH.unpack_from(head)[0] > MOST_BYTES - _LENGTH.size for head in told):
            told = [head + tail for head, tail in zip(told, self._group.exchange(framed[MOST_BYTES:]), strict=True)]
        return [whole[_LENGTH.size :] for whole in told]

    def tell(self, number: int) -> Numbers:
        return _Told(self._connected, self._call(_NUMBERS, _NUMBER.pack(number)))

    def reconnect(self) -> None:
        connections = self._group.exchange(_NUMBER.pack(self._pipes.connection))
        self._pipes.restart(1 + max(_NUMBER.unpack(message)[0] for message in connections))

    def close(self) -> None:
        self._pipes.close()

    def _call(self, channel: int, message: bytes) -> Call:
        call: Call = self._connected.begin(lambda limit_s: self._pipes.call(channel, message, limit_s))
        return call


def messages_of(group: Any) -> Messages:
    """The fastest between ranks of one host."""
    return ByPipes(group) if hasattr(group, "begin") else Messages(group)


class _Told:
    def __init__(self, group: Connected, call: Call) -> None:
        self._group = group
        self._call = call

    def done(self) -> bool:
        return self._call.is_completed()

    def wait(self) -> list[int]:
        self._group.wait_for(self._call)
        return [_NUMBER.unpack(message)[0] for message in self._call.messages]
