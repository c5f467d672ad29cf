"""Collectives of torch that are going on."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from zero.comm.group import ANYONES, Message
from zero.comm.results import UnreducedResult

_SUCCESS = 0  # torch's WorkResult.SUCCESS, as futures have it
_FAREWELL_S = 2.0  # for the others to end their programs too
_NEVER_SENT = 2**31 - 1  # a tag
_AT_ONCE = datetime.timedelta(milliseconds=1)


class Owner(Protocol):
    """The group that began a collective."""

    rank: int
    size: int

    def wait_for(self, work: Any) -> None: ...


def has_failed(work: Any) -> bool:
    """Returns whether a collective that a stream waits for is known to have failed. NCCL calls it completed, and waiting for it
    does not raise. Other backends do not say."""
    try:
        result = work.get_future_result()
        return bool(result.done()) and result.value() != _SUCCESS
    except (AttributeError, RuntimeError):
        return False


def wait_in_stream(work: Any) -> None:
    """The current stream waits for a collective."""
    work.wait()
    if has_failed(work):
        raise RuntimeError("it failed on its device")


class CollectiveWork:
    """Collectives that belong together, and what is done with their output."""

    def __init__(self, owner: Owner, works: list[Any], finish: Callable[[], torch.Tensor]) -> None:
        self._owner, self._works, self._finish = owner, works, finish

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        for work in self._works:
            self._owner.wait_for(work)
        return self._finish()


class _Move(NamedTuple):
    """What comes from some ranks, while others are sent something."""

    work: Any
    come: torch.Tensor
    place: torch.Tensor  # where it belongs
    sent: torch.Tensor


class AllToAllReduce(UnreducedResult):
    """What all ranks sent to this one, to be added. It takes the place of what this rank sent."""

    def __init__(
        self, owner: Owner, exchange: Callable[..., Any], bucket: torch.Tensor, sum_dtype: torch.dtype, both_ways: bool
    ) -> None:
        super().__init__(sum_dtype)
        self._owner, self._parts, rank, size = owner, bucket.view(owner.size, -1), owner.rank, owner.size
        # What is sent must lie side by side, so in one go who is not the first or the last sends itself its own part too.
        below, above, others = range(rank), range(rank + 1, size), range(int(rank == 0), size - int(rank == size - 1))
        ways = [(above, below), (below, above)] if both_ways else [(others, others)]
        self._moves = [self._begin(exchange, *way, back=bool(number)) for number, way in enumerate(ways)]

    def _begin(self, exchange: Callable[..., Any], to: range, source: range, back: bool) -> _Move:
        sent, place = (bits(self._parts[ranks.start : ranks.stop].view(-1)) for ranks in (to, source))
        come, numel = torch.empty_like(place), bits(self._parts).shape[1]
        sizes = [[numel * (rank in ranks) for rank in range(self._owner.size)] for ranks in (source, to)]
        return _Move(exchange(come, sent, *sizes, back=back), come, place, sent)

    def done(self) -> bool:
        return all(bool(move.work.is_completed()) for move in self._moves)

    def addends(self) -> Sequence[torch.Tensor]:
        for move in self._moves:
            self._owner.wait_for(move.work)
        for move in self._moves:  # when all that was sent from there has gone
            move.place.copy_(move.come)
        self._moves.clear()
        return list(self._parts)


class WireOwner(Owner, Protocol):
    """The group that a wire belongs to."""

    def guarded(self, call: Callable[[], Any]) -> Any: ...

    def wait_for_message(self, work: Any) -> None: ...


class _Receipt:
    """A message that is received. Where it does not come, the group is lost."""

    def __init__(self, owner: WireOwner, receive: Callable[[], Any]) -> None:
        self._owner = owner
        self._work = owner.guarded(receive)

    def wait(self) -> None:
        self._owner.wait_for_message(self._work)


class _Sending:
    """A message that is sent. Waiting for it raises if it could not be sent."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._work: Any = None
        self._error: RuntimeError | None = None
        try:
            self._work = send()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._work.wait()


class TorchWire:
    """Messages over a process group of gloo that has no time limit of its own."""

    def __init__(
        self,
        owner: WireOwner,
        limit_s: float,
        process_group: Any,
        give_back: Callable[[Any], None],
        report: Callable[[Exception], None],
    ) -> None:
        self.rank, self.size, self.limit_s = owner.rank, owner.size, limit_s
        self._owner = owner
        self._process_group = process_group
        self._give_back = give_back
        self._report = report  # to other ranks, what ends this one
        self._end: weakref.WeakMethod[Callable[[float], bool]] | None = None

    def on_exit(self, end: Callable[[float], bool]) -> None:
        self._end = weakref.WeakMethod(end)

    def exit(self) -> None:
        """A thread that still waits here must not wake while the interpreter ends: what it waits for stays until then."""
        end = None if self._end is None else self._end()
        if end is not None and not end(_FAREWELL_S):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._process_group))

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message:
        return _Sending(lambda: self._process_group.send([bits(values)], rank, tag))

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        return _Receipt(self._owner, lambda: self._process_group.recv([bits(memory)], rank, tag))

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        received: Message = self._process_group.recv_anysource([memory], ANYONES)
        return received

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        def again() -> None:
            if is_local:
                self._report(error)
                self.break_off()
            raise error

        self._owner.guarded(again)
        raise error

    def break_off(self) -> None:
        """Ends whatever ranks wait for here: gloo closes all connections where a message does not come in time."""
        if self._process_group is None:  # others use it by now
            return
        other = int(self.rank == 0)
        with contextlib.suppress(RuntimeError):
            self._process_group.recv([torch.empty(1, device="cpu")], other, _NEVER_SENT).wait(_AT_ONCE)

    def close(self) -> None:
        self._end = None
        process_group, self._process_group = self._process_group, None
        self._give_back(process_group)


def exit_all(wires: Sequence[TorchWire], then: Callable[[], None]) -> None:
    """The program ends."""
    for wire in wires:
        wire.exit()
    then()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What is only moved, as what every backend moves: some have no 16-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
