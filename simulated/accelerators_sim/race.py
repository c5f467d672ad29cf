"""The race detector: which access touched which bytes last, and whether it comes before the present one.

[Note: clocks] Every stream counts what is issued to it, and knows how much of every other stream's work is done before its own
next work (its clock). Waiting for an event takes over the clock that the event's stream had when it was recorded. The host is
one participant whatever the number of its threads: what one thread waited for holds for all. How threads hand work to each
other (queues, locks, joins) cannot be seen from here, and guessing would report correct programs.

An access is a race when an earlier one to the same bytes, at least one of them a write, is not in the clock of its stream. This
depends on the program's waits alone and not on when anything ran, so a forgotten wait is found in every run.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator

import torch

from accelerators_sim import torch_private
from accelerators_sim.settings import settings
from accelerators_sim.waits import Place, describe


class RaceError(RuntimeError):
    """Two accesses to the same bytes, at least one of them a write, that nothing orders."""


class Access:
    """One operator's use of memory: by the number of its work in the stream, and where the user called it."""

    __slots__ = ("count", "known", "number", "operator", "place", "who")

    def __init__(self, who: str, number: int, count: int, known: dict[int, int], operator: str, place: Place) -> None:
        self.who = who  # a name for people
        self.number = number
        self.count = count
        self.known = known  # the stream's clock, which goes on changing; asked only at the time of the access
        self.operator = operator
        self.place = place

    def comes_after(self, other: Access) -> bool:
        return other.number == self.number or self.known.get(other.number, 0) >= other.count

    def __str__(self) -> str:
        return f"{self.operator} on {self.who} at {describe(self.place)}"


class Span:
    """Bytes of one block with the same past."""

    __slots__ = ("readers", "start", "stop", "writer")

    def __init__(self, start: int, stop: int, writer: Access | None, readers: dict[int, Access]) -> None:
        self.start = start
        self.stop = stop
        self.writer = writer
        self.readers = readers  # by stream: its latest read since that write


class History:
    """The past of one block of memory, by spans of bytes, so that disjoint views of a flat buffer do not meet.

    A view with gaps counts as all bytes from its first to its last: two streams that share a matrix by columns are reported.
    """

    __slots__ = ("_starts", "excused", "num_bytes", "owner", "shared", "spans")

    def __init__(self, num_bytes: int, owner: int) -> None:
        self.num_bytes = num_bytes
        self.owner = owner  # the stream whose memory it is
        self.shared = False  # another stream has touched it
        self.excused: set[int] = set()  # streams that record_stream named, for which the allocator itself waits
        self.spans = [Span(0, num_bytes, None, {})]
        self._starts = [0]

    def use(self, start: int, stop: int, writes: bool, access: Access) -> None:
        """Remembers an access, or raises if an earlier one is not ordered before it."""
        first, last = self._cut(start, stop)
        spans = self.spans
        for index in range(first, last):
            span = spans[index]
            if span.writer is not None and not access.comes_after(span.writer):
                raise self._race(span, access, writes, span.writer, True)
            if writes and span.readers:
                for reader in span.readers.values():
                    if not access.comes_after(reader):
                        raise self._race(span, access, writes, reader, False)
        if access.number != self.owner:
            self.shared = True
        if not writes:
            for index in range(first, last):
                spans[index].readers[access.number] = access
        elif last - first == 1:
            spans[first].writer, spans[first].readers = access, {}
        else:
            spans[first:last] = [Span(start, stop, access, {})]
            self._starts[first:last] = [start]

    def check(self, start: int, stop: int, writes: bool, access: Access) -> None:
        """Raises as `use` would, and remembers nothing: for the host, after which everything issued later comes anyway."""
        for span in self.spans:
            if span.start < stop and start < span.stop:
                if span.writer is not None and not access.comes_after(span.writer):
                    raise self._race(span, access, writes, span.writer, True)
                for reader in span.readers.values():
                    if writes and not access.comes_after(reader):
                        raise self._race(span, access, writes, reader, False)

    @property
    def untouched(self) -> bool:
        return len(self.spans) == 1 and self.spans[0].writer is None and not self.spans[0].readers

    def accesses(self) -> Iterator[tuple[Access, bool]]:
        """Yields every access that is still remembered, and whether it wrote."""
        for span in self.spans:
            if span.writer is not None:
                yield span.writer, True
            for reader in span.readers.values():
                yield reader, False

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Makes spans begin at `start` and end at `stop`, and returns the places of those between."""
        spans = self.spans
        if start == 0 and stop == self.num_bytes:
            return 0, len(spans)
        first = bisect_right(self._starts, start) - 1
        if spans[first].start != start:
            self._split(first, start)
            first += 1
        last = first
        while spans[last].stop < stop:
            last += 1
        if spans[last].stop != stop:
            self._split(last, stop)
        return first, last + 1

    def _split(self, index: int, where: int) -> None:
        span = self.spans[index]
        self.spans.insert(index + 1, Span(where, span.stop, span.writer, dict(span.readers)))
        self._starts.insert(index + 1, where)
        span.stop = where

    def _race(self, span: Span, access: Access, writes: bool, earlier: Access, wrote: bool) -> RaceError:
        return RaceError(
            f"{_verb(writes)} bytes {span.start} to {span.stop} of {self.num_bytes} by {access} is a race: nothing "
            f"orders it after {_verb(wrote)} them by {earlier}. Let {access.who} wait for {earlier.who} in between: "
            "wait_stream, wait_event, or a synchronize of the host."
        )


class Grave:
    """A stretch of memory that was freed while another stream may still use it, which is harmless until it is given out."""

    __slots__ = ("freed_at", "uses")

    def __init__(self, uses: list[tuple[Access, bool]], freed_at: Place) -> None:
        self.uses = uses
        self.freed_at = freed_at

    def settle(self, owner: str, clock: dict[int, int]) -> RaceError | None:
        """Returns the race of giving this memory out again now; None if its owner, whose clock it is, waited for all uses."""
        self.uses = [use for use in self.uses if clock.get(use[0].number, 0) < use[0].count]
        if not self.uses:
            return None
        access, wrote = self.uses[0]
        return RaceError(
            f"New memory on {owner} may be what was freed at {describe(self.freed_at)}, but nothing "
            f"orders that after {_verb(wrote)} it by {access}. Keep the tensor until that is done, call "
            f"record_stream on it, or let {owner} wait."
        )


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of its memory from a tensor's first to its last, as a history takes them."""
    size = tensor.element_size()
    start = torch_private.start_in_block(tensor.untyped_storage()) + int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _verb(writes: bool) -> str:
    return "writing" if writes else "reading"


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """Looks away for the length of a `with`; accesses inside it are not remembered either."""
    before = settings.races
    settings.races = False
    try:
        yield
    finally:
        settings.races = before
