"""Gathers by collectives of what all ranks fetched in the last two windows.

[Note: schedule]
Ranks mostly fetch what they fetched before. So what all of them fetched in the last two windows, in one order, is gathered by
collectives now. Who wants the n-th of these issues all before it too, into memory that nobody reads: so collectives have one
order, whatever each rank does. They carry the weights as the last step left them. A rank that edited a chunk since pulls it,
and takes part with what was there before. It also pulls what is not in the schedule, and what it comes to late.

A rank that branches apart, ends early or sleeps does not come to a collective that others wait for. After a grace time they
tell it so, and its thread that answers requests issues all up to that one, and a few more that they have issued. They say in
which window that is: what is of an earlier one was issued when that ended, and what is of the next one is issued when this rank
has ended its step.

[Note: one order]
Streams of a device share its queues, and each of these hands its entries out in order. A collective is not handed out before
the one that its communicator has before it is done, and holds up what is behind it until then. So if one rank had a gather
before two rounds of gradients and another one behind them, each could wait for the other for good. But all ranks issue gathers
and rounds in one order. It is learned with the gathers: each comes behind as many rounds as in the last window. Who sends a
round issues first the gathers before it. Who comes to a gather and has not sent all rounds before it pulls the chunk.

Waits hold up a queue, too. Those for rounds keep the order: all gathers before these were issued. For other collectives a
device is given one only after all ranks have exchanged a message, and with that they even out their gathers: see [Note: even]
in zero/comm/device_waits.py. What only others have issued then is issued as soon as the rounds before it are sent.

What a rank is told of late may come before its turn, as others wait for it, and this rank may have no gradients yet. That is
one gather at a time, of which those before are done: it is handed out at once, and holds up nothing.

Ranks that do different things may still wait for each other where streams share a queue, until the time limit ends it with an
error:
- A rank needs a gather behind two rounds, which another one sends only after it has heard from the first.
- Rounds of a rank wait on the host, for lack of room. It pulls what is gathered behind them, and another rank may have what
  is pulled in a queue behind those rounds.
- The user's own collectives have no place in this order, nor have gathers of several families or trainings among themselves,
  nor what a thread reads between a message and the collectives after it.
"""

from __future__ import annotations

import itertools
import struct
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zero.comm.group import Group, GroupBeside
from zero.comm.one_answer import exchange_about
from zero.memory.homes.home import MemoryHome
from zero.runtime.unshard.gathers import Gather, Gathers, Scheduled, Turn

_NUMBER_BYTES = 4
_REACH = 16  # places by which a chunk may differ in two orders
_MORE = 4  # gathers that a rank is told of at one time

Issue = Callable[[Turn, Scheduled], None]


class _Fetch(NamedTuple):
    """A fetch of a chunk by this rank."""

    chunk: Scheduled
    number: int  # how often this rank had fetched the chunk in this window
    rounds: int  # the rounds of gradients that come before it


class _Fetched(NamedTuple):
    """A chunk that was fetched, by a collective or otherwise."""

    chunk: Scheduled
    rounds: int  # the rounds of gradients that were full before in this window


@dataclass
class _Window:
    """The gathers of a window are issued in its order, each once. It also has the fetches that were made."""

    number: int
    order: Sequence[_Fetch] = ()
    num_issued: int = 0  # the gathers of `order` that were issued
    num_closed: int = 0  # the rounds of gradients that are full, sent or not: all ranks count the same
    num_sent: int = 0  # those of them that were sent
    fetched: list[_Fetched] = field(default_factory=list)
    num_fetched: Counter[int] = field(default_factory=Counter)  # by the number of a chunk: how often it was fetched

    def __post_init__(self) -> None:
        self.places = {(fetch.chunk.number, fetch.number): place for place, fetch in enumerate(self.order)}
        self._rounds = [fetch.rounds for fetch in self.order]

    @property
    def num_in_turn(self) -> int:
        """The gathers of `order` before which no round is missing."""
        return bisect_right(self._rounds, self.num_sent)


class Schedule:
    """All ranks issue the same gathers of a window in one order, and every other fetch is pulled; see [Note: schedule].

    `tell` sends all other ranks the arguments of their `issue_told`.
    """

    def __init__(
        self, group: Group, beside: GroupBeside, device: torch.device, host: MemoryHome, tell: Callable[[int, int, int], None]
    ) -> None:
        self._group = group
        self._tell = tell
        self._window = _Window(0)
        self._next: Sequence[_Fetch] = ()  # the order of the next window, once this one is settled
        self._before: Sequence[Sequence[int]] = ()  # by rank: the chunks that it fetched in the last window
        self._now: Sequence[Sequence[int]] = ()  # the same of this window, once it is settled
        self._rounds: Sequence[Sequence[int]] = ()  # beside `_now`: the rounds that came before
        self._requested = 0, 0  # the most that another rank waits for: a window, and a number of gathers
        self._due = 0, 0  # the same of what another rank has issued, to be issued in turn
        self._lock = threading.Lock()
        self._gathers = Gathers(beside, device, host, self._lock, self._tell_late)
        beside.even(self.issued, self.catch_up)

    @property
    def num_bytes(self) -> int:
        """Bytes that other ranks sent to this one."""
        return self._gathers.num_bytes

    def fetch(self, chunk: Scheduled, memory: torch.Tensor, is_edited: bool) -> Gather | None:
        """Begins to fill memory with a chunk, or returns None if it is to be pulled. Every fetch of a chunk comes here."""
        with self._lock:
            window, key = self._window, (chunk.number, self._window.num_fetched[chunk.number])
            window.fetched.append(_Fetched(chunk, window.num_closed))
            window.num_fetched[chunk.number] += 1
            place = window.places.get(key)
            if is_edited or place is None or not window.num_issued <= place < window.num_in_turn:
                return None
            self._issue_before(place)
            gather = self._gathers.issue(Turn(window.number, place), chunk, memory)
            window.num_issued += 1
            return gather

    def issued(self) -> tuple[int, int]:
        """Returns the window, and how many of its gathers this rank has issued."""
        window = self._window
        return window.number, window.num_issued

    def forget(self, number: int) -> None:
        """Forgets a chunk that is gone. All ranks have settled since they read it."""
        with self._lock:
            self._window.fetched = [fetched for fetched in self._window.fetched if fetched.chunk.number != number]
            self._next = [fetch for fetch in self._next if fetch.chunk.number != number]

    def issue_told(self, window: int, num_needed: int, num_issued: int) -> None:
        """Issues so many gathers of a window, as another rank waits for the last of them, and all before it are done; and of
        those that it has issued since what is in turn. Called by the thread that answers requests."""
        with self._lock:
            self._requested = max(self._requested, (window, num_needed))
            if window == self._window.number:
                self._issue_before(num_needed, self._gathers.issue_in_thread)
                self._issue_in_turn(num_issued, self._gathers.issue_in_thread)

    def catch_up(self, window: int, num_issued: int) -> None:
        """Issues so many gathers of a window, as another rank has: each as soon as the rounds before it are sent."""
        with self._lock:
            self._due = max(self._due, (window, num_issued))
            self._issue_due(self._gathers.issue_in_thread)

    # rounds of gradients -----------------------------------------------------------------------------------------

    def close_round(self) -> None:
        """Notes that a round is full: what is fetched now comes behind it from the next window on. It may wait on the host."""
        self._window.num_closed += 1

    def begin_round(self) -> None:
        """Issues the gathers that come before the round which is sent now."""
        with self._lock:
            self._issue_before(self._window.num_in_turn)

    def end_round(self) -> None:
        """Issues what others have issued behind the round which was sent now."""
        with self._lock:
            self._window.num_sent += 1
            self._issue_due()

    def _issue_due(self, issue: Issue | None = None) -> None:
        if self._due[0] == self._window.number:
            self._issue_in_turn(self._due[1], issue)

    def _issue_in_turn(self, place: int, issue: Issue | None = None) -> None:
        self._issue_before(min(place, self._window.num_in_turn), issue)

    def _issue_before(self, place: int, issue: Issue | None = None) -> None:
        window = self._window
        for chunk, *_ in window.order[window.num_issued : place]:
            (issue or self._gathers.issue_for_others)(Turn(window.number, window.num_issued), chunk)
            window.num_issued += 1

    def _tell_late(self, turn: Turn) -> None:
        window = self._window
        if turn.window == window.number:  # a gather of an earlier window was issued by all ranks when that window was settled
            self._tell(window.number, turn.place + 1, min(turn.place + _MORE, window.num_issued))

    # a step ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for all gathers that any rank has issued, and learns the order of the next window. Until that begins nothing is
        scheduled. A collective."""
        window = self._window
        pairs = ((fetched.chunk.number, fetched.rounds) for fetched in window.fetched)
        numbers = [window.num_issued, *itertools.chain.from_iterable(pairs)]
        messages = exchange_about(self._group, "weights in shares", struct.pack(f"<{len(numbers)}I", *numbers))
        everyones = [struct.unpack(f"<{len(message) // _NUMBER_BYTES}I", message) for message in messages]
        with self._lock:
            self._issue_before(max(num_issued for num_issued, *_ in everyones))
            window.order, window.places = (), {}
            self._now, self._rounds = [pairs[1::2] for pairs in everyones], [pairs[2::2] for pairs in everyones]
            self._next = self._common()
        self._gathers.wait_for_all()

    def _common(self) -> list[_Fetch]:
        """Returns this rank's fetches that all ranks made, in one order, in this window and in the one before. Each comes
        behind as many rounds as on the rank where these were most."""
        fetches, seen = [], Counter[int]()
        common = in_common([*self._now, *self._before]) if self._before else []
        stable = {
            places[self._group.rank]: max(rounds[place] for rounds, place in zip(self._rounds, places, strict=False))
            for places in common
        }
        for position, (chunk, _) in enumerate(self._window.fetched):
            if position in stable:
                fetches.append(_Fetch(chunk, seen[chunk.number], stable[position]))
            seen[chunk.number] += 1
        return fetches

    def begin_window(self) -> None:
        """Begins a window: the weights are those of the step, and gathers follow the order that was learned."""
        self._gathers.end_warmup()
        with self._lock:
            self._window, self._next = _Window(self._window.number + 1, self._next), ()
            self._before, self._now = self._now, ()
            if self._requested[0] == self._window.number:
                self._issue_before(self._requested[1])
            self._issue_due()

    def end(self) -> None:
        """Tells other ranks to issue all that this one has issued. Nothing is fetched any more."""
        with self._lock:
            self._tell(self._window.number, self._window.num_issued, self._window.num_issued)

    def abandon(self) -> GroupBeside:
        """Forgets what is on its way over lost connections, and returns the group that had them."""
        return self._gathers.abandon()

    def close(self) -> None:
        """Ends the collectives, when other ranks have been told to end too."""
        self._gathers.close()


def in_common(lists: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns the places, in each of these lists, of the numbers that all of them have in one order."""
    first, *others = lists
    if all(other == first for other in others):
        return [(position,) * len(lists) for position in range(len(first))]
    starts, common = [0] * len(others), []
    for position, value in enumerate(first):
        ends = (start + _REACH for start in starts)
        near = [other[start:end] for other, start, end in zip(others, starts, ends, strict=True)]
        if all(value in values for values in near):
            positions = [start + values.index(value) for start, values in zip(starts, near, strict=True)]
            common.append((position, *positions))
            starts = [place + 1 for place in positions]
    return common
