"""Gathers by collectives of what all ranks fetched in the last two windows.

[Note: schedule]
Ranks mostly fetch what they fetched before. So what all of them fetched in the last two windows, in one order, is gathered by
collectives now. Who wants the n-th of these issues all before it too, into memory that nobody reads: so collectives have one
order, whatever each rank does. They carry the weights as the last step left them. A rank that edited a chunk since pulls it,
and takes part with what was there before. It also pulls what is not in the schedule, and what it comes to late.

A rank that branches apart, ends early or sleeps does not come to a collective that others wait for. After a grace time they
tell it how many they have issued, and its thread that answers requests issues the rest. They say in which window that was: what
is of an earlier one was issued when that ended, and what is of the next one is issued when this rank has ended its step.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import accelerators
from zero.comm.exchange import exchange_about
from zero.comm.group import Group, Pending
from zero.errors import GroupLost
from zero.memory.homes.home import MemoryHome
from zero.plan.spans import Span

_GRACE_S = 0.2  # that another rank is waited for before it is told so
_TURN_S = 0.05  # between two looks
_NUMBER_BYTES = 4
_REACH = 16  # that two orders may be apart


class Part(NamedTuple):
    """This rank's share of a bucket."""

    bucket: Span  # in the chunk
    own: Span  # in the chunk
    published: Callable[[bool], torch.Tensor]  # what the last step left there; True: for a thread beside the one that edits


class Scheduled(NamedTuple):
    """A chunk that can be gathered."""

    number: int  # the same on all ranks
    numel: int
    dtype: torch.dtype
    parts: Sequence[Part]


class Gather:
    """A chunk on its way from all ranks."""

    def __init__(self, memory: torch.Tensor, pending: Sequence[Pending]) -> None:
        self.begun = time.monotonic()
        self._memory: torch.Tensor | None = memory  # kept until it has come
        self._pending = pending

    def done(self) -> bool:
        return all(each.done() for each in self._pending)

    def wait(self) -> None:
        for each in self._pending:
            each.wait()
        self._memory, self._pending = None, ()


class _Turn(NamedTuple):
    """One gather of the schedule."""

    chunk: Scheduled
    number: int  # of times that this rank fetched the chunk before, in the window


@dataclass
class _Window:
    """What is gathered between two steps, and what was."""

    number: int
    order: Sequence[_Turn] = ()
    num_issued: int = 0  # of these
    num_told: int = 0  # that other ranks were told of
    fetched: list[Scheduled] = field(default_factory=list)  # by collectives and otherwise
    num_fetched: Counter[int] = field(default_factory=Counter)  # by number of a chunk

    def __post_init__(self) -> None:
        self.places = {(turn.chunk.number, turn.number): place for place, turn in enumerate(self.order)}


class Schedule:
    """The collectives of a window; see [Note: schedule]. `tell` tells all other ranks what they pass to `issue_told`."""

    def __init__(
        self, group: Group, beside: Group, device: torch.device, host: MemoryHome, tell: Callable[[int, int], None]
    ) -> None:
        self.num_bytes = 0  # that other ranks sent to this one
        self._group = group
        self._beside = beside  # whose collectives have an order of their own
        self._device = device
        self._host = host
        self._tell = tell
        self._window = _Window(0)
        self._next: Sequence[_Turn] = ()
        self._before: Sequence[Sequence[int]] = ()  # what each rank fetched in the last window
        self._now: Sequence[Sequence[int]] = ()  # and in this one, once that is settled
        self._told = 0, 0  # the most that another rank has told: a window, and how many it has issued there
        self._outstanding: deque[Gather] = deque()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        beside.all_gather(torch.zeros(beside.size, device=device)).wait()  # or the first one would connect, at any time

    def fetch(self, chunk: Scheduled, memory: torch.Tensor, is_edited: bool) -> Gather | None:
        """Begins to fill memory with a chunk, or returns None where it is to be pulled. All that is fetched comes here."""
        with self._lock:
            window, key = self._window, (chunk.number, self._window.num_fetched[chunk.number])
            window.fetched.append(chunk)
            window.num_fetched[chunk.number] += 1
            place = window.places.get(key, -1)
            if is_edited or place < window.num_issued:
                return None
            self._issue_before(place)
            return self._issue(chunk, memory)

    def forget(self, number: int) -> None:
        """A chunk is there no more. All ranks have settled since they read it."""
        with self._lock:
            self._window.fetched = [chunk for chunk in self._window.fetched if chunk.number != number]
            self._next = [turn for turn in self._next if turn.chunk.number != number]

    def issue_told(self, window: int, num_issued: int) -> None:
        """Another rank waits for what it issued. In the thread that answers."""
        with self._lock:
            self._told = max(self._told, (window, num_issued))
            if window == self._window.number:
                if self._device.index is not None:
                    accelerators.get(self._device.type).set_index(self._device.index)
                self._issue_before(num_issued, in_thread=True)

    def _issue_before(self, place: int, in_thread: bool = False) -> None:
        for chunk, _ in self._window.order[self._window.num_issued : place]:
            with torch.inference_mode(False):
                memory = torch.empty(chunk.numel, dtype=chunk.dtype, device=self._device)
            self._issue(chunk, memory, in_thread)

    def _issue(self, chunk: Scheduled, memory: torch.Tensor, in_thread: bool = False) -> Gather:
        pending = []
        for bucket, own, published in chunk.parts:
            if in_thread:  # whose copies nobody waits for at the step
                memory[own.start : own.stop] = published(True)
            else:
                self._host.read(published(False), memory[own.start : own.stop]).wait()
            pending.append(self._beside.all_gather(memory[bucket.start : bucket.stop]))
            self.num_bytes += (bucket.numel - own.numel) * memory.itemsize
        self._window.num_issued += 1
        self._drop_done()
        self._outstanding.append(Gather(memory, pending))
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="zero-schedule")
            self._watcher.start()
        return self._outstanding[-1]

    def _drop_done(self) -> None:
        while self._outstanding and self._outstanding[0].done():
            self._outstanding.popleft().wait()  # for the device's books: its memory may be in use again from now on

    def _watch(self) -> None:
        """Tells the others what this rank waits for. Ends when nothing is on its way."""
        while True:
            time.sleep(_TURN_S)
            with self._lock:
                self._drop_done()
                if not self._outstanding:
                    self._watcher = None
                    return
                if time.monotonic() - self._outstanding[0].begun > _GRACE_S:
                    self._tell_issued()

    def _tell_issued(self) -> None:
        window = self._window
        if window.num_told < window.num_issued:
            window.num_told = window.num_issued
            self._tell(window.number, window.num_issued)

    # a step ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for all that any rank has issued, and learns the order of the next window. Until that begins nothing is
        scheduled. A collective."""
        window = self._window
        numbers = [window.num_issued, *(chunk.number for chunk in window.fetched)]
        told = exchange_about(self._group, "weights in shares", struct.pack(f"<{len(numbers)}I", *numbers))
        everyones = [struct.unpack(f"<{len(theirs) // _NUMBER_BYTES}I", theirs) for theirs in told]
        with self._lock:
            self._issue_before(max(num_issued for num_issued, *_ in everyones))
            outstanding, window.order, window.places = [*self._outstanding], (), {}
            self._now = [fetched for _, *fetched in everyones]
            self._next = self._turns()
        for gather in outstanding:
            gather.wait()

    def _turns(self) -> list[_Turn]:
        """What all ranks fetched in this window and in the one before."""
        turns, seen = [], Counter[int]()
        common = in_common([*self._now, *self._before]) if self._before else []
        stable = {places[self._group.rank] for places in common}
        for at, chunk in enumerate(self._window.fetched):
            if at in stable:
                turns.append(_Turn(chunk, seen[chunk.number]))
            seen[chunk.number] += 1
        return turns

    def begin_window(self) -> None:
        """The weights are those of the step, and what was learned is gathered from now on."""
        self._beside.end_warmup()
        with self._lock:
            self._window, self._next = _Window(self._window.number + 1, self._next), ()
            self._before, self._now = self._now, ()
            if self._told[0] == self._window.number:
                self._issue_before(self._told[1])

    def end(self) -> None:
        """Has other ranks issue what this one has. Nothing is fetched any more."""
        with self._lock:
            self._tell_issued()

    def close(self) -> None:
        """Waits for what is on its way, when other ranks have been told to end too."""
        with contextlib.suppress(GroupLost):
            for gather in [*self._outstanding]:
                gather.wait()
        self._outstanding.clear()
        self._beside.close()


def in_common(lists: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns the places, in each of these lists, of what all of them have in one order."""
    first, *others = lists
    if all(other == first for other in others):
        return [(at,) * len(lists) for at in range(len(first))]
    starts, common = [0] * len(others), []
    for at, value in enumerate(first):
        ends = (start + _REACH for start in starts)
        near = [other[start:end] for other, start, end in zip(others, starts, ends, strict=True)]
        if all(value in values for values in near):
            found = [start + values.index(value) for start, values in zip(starts, near, strict=True)]
            common.append((at, *found))
            starts = [place + 1 for place in found]
    return common
