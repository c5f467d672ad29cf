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
"""

from __future__ import annotations

import struct
import threading
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


class _Fetch(NamedTuple):
    """A fetch of a chunk by this rank."""

    chunk: Scheduled
    number: int  # how often this rank had fetched the chunk in this window


@dataclass
class _Window:
    """The gathers that are scheduled between two steps, and the fetches that were made."""

    number: int
    order: Sequence[_Fetch] = ()
    num_issued: int = 0  # the gathers of `order` that were issued
    fetched: list[Scheduled] = field(default_factory=list)  # the chunks that were fetched, by collectives and otherwise
    num_fetched: Counter[int] = field(default_factory=Counter)  # by the number of a chunk: how often it was fetched

    def __post_init__(self) -> None:
        self.places = {(fetch.chunk.number, fetch.number): place for place, fetch in enumerate(self.order)}


class Schedule:
    """All ranks issue the same gathers of a window in one order, and every other fetch is pulled; see [Note: schedule].

    `tell` sends all other ranks the arguments of their `issue_told`.
    """

    def __init__(
        self, group: Group, beside: GroupBeside, device: torch.device, host: MemoryHome, tell: Callable[[int, int], None]
    ) -> None:
        self._group = group
        self._tell = tell
        self._window = _Window(0)
        self._next: Sequence[_Fetch] = ()  # the order of the next window, once this one is settled
        self._before: Sequence[Sequence[int]] = ()  # by rank: the chunks that it fetched in the last window
        self._now: Sequence[Sequence[int]] = ()  # the same of this window, once it is settled
        self._requested = 0, 0  # the most that another rank has requested: a window, and a number of gathers
        self._lock = threading.Lock()
        self._gathers = Gathers(beside, device, host, self._lock, self._tell_late)

    @property
    def num_bytes(self) -> int:
        """Bytes that other ranks sent to this one."""
        return self._gathers.num_bytes

    def fetch(self, chunk: Scheduled, memory: torch.Tensor, is_edited: bool) -> Gather | None:
        """Begins to fill memory with a chunk, or returns None if it is to be pulled. Every fetch of a chunk comes here."""
        with self._lock:
            window, key = self._window, (chunk.number, self._window.num_fetched[chunk.number])
            window.fetched.append(chunk)
            window.num_fetched[chunk.number] += 1
            place = window.places.get(key)
            if is_edited or place is None or place < window.num_issued:
                return None
            self._issue_before(place)
            gather = self._gathers.issue(Turn(window.number, place), chunk, memory)
            window.num_issued += 1
            return gather

    def forget(self, number: int) -> None:
        """Forgets a chunk that is gone. All ranks have settled since they read it."""
        with self._lock:
            self._window.fetched = [chunk for chunk in self._window.fetched if chunk.number != number]
            self._next = [fetch for fetch in self._next if fetch.chunk.number != number]

    def issue_told(self, window: int, num_issued: int) -> None:
        """Issues so many gathers of a window, as another rank waits for them. Called by the thread that answers requests."""
        with self._lock:
            self._requested = max(self._requested, (window, num_issued))
            if window == self._window.number:
                self._issue_before(num_issued, self._gathers.issue_in_thread)

    def _issue_before(self, place: int, issue: Callable[[Turn, Scheduled], None] | None = None) -> None:
        window = self._window
        for chunk, _ in window.order[window.num_issued : place]:
            (issue or self._gathers.issue_for_others)(Turn(window.number, window.num_issued), chunk)
            window.num_issued += 1

    def _tell_late(self, turn: Turn) -> None:
        window = self._window
        if turn.window == window.number:  # a gather of an earlier window was issued by all ranks when that window was settled
            self._tell(window.number, min(turn.place + _MORE, window.num_issued))

    def even(self) -> None:
        """Issues the gathers that any rank has issued. A collective.

        It comes before other collectives of tensors, for which the device waits. A rank that were told of a gather after that
        would begin it in a stream of its own, and that may share a queue of the device with such a wait: each would wait for
        the other. Fails without it:
        tests/zero/runtime/test_schedule.py::test_what_one_rank_has_on_its_way_is_begun_by_all_before_states_are_gathered.
        """
        messages = exchange_about(self._group, "gathers of weights", str(self._window.num_issued).encode())
        with self._lock:
            self._issue_before(max(map(int, messages)))

    # a step ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for all gathers that any rank has issued, and learns the order of the next window. Until that begins nothing is
        scheduled. A collective."""
        window = self._window
        numbers = [window.num_issued, *(chunk.number for chunk in window.fetched)]
        messages = exchange_about(self._group, "weights in shares", struct.pack(f"<{len(numbers)}I", *numbers))
        everyones = [struct.unpack(f"<{len(message) // _NUMBER_BYTES}I", message) for message in messages]
        with self._lock:
            self._issue_before(max(num_issued for num_issued, *_ in everyones))
            window.order, window.places = (), {}
            self._now = [fetched for _, *fetched in everyones]
            self._next = self._common()
        self._gathers.wait_for_all()

    def _common(self) -> list[_Fetch]:
        """Returns this rank's fetches that all ranks made, in one order, in this window and in the one before."""
        fetches, seen = [], Counter[int]()
        common = in_common([*self._now, *self._before]) if self._before else []
        stable = {places[self._group.rank] for places in common}
        for position, chunk in enumerate(self._window.fetched):
            if position in stable:
                fetches.append(_Fetch(chunk, seen[chunk.number]))
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

    def end(self) -> None:
        """Tells other ranks to issue all that this one has issued. Nothing is fetched any more."""
        with self._lock:
            self._tell(self._window.number, self._window.num_issued)

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
