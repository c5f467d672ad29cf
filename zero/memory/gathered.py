"""Whole weights for as long as an operator runs: a cache of gathered chunks within a budget of bytes.

    with cache.using([chunk]):  # `acquire` notes the use, frees chunks to make room, fetches this one and begins the next
        chunk.memory            # whole, on the current stream
    # `release` frees nothing: the chunk stays until another one needs the room, or `end_window`, as a step changes weights

[Note: an example] Chunks 0, 1 and 2 of three layers, a budget for two of them, and a window whose uses are known from the one
before. Forward uses 0, 1, 2, and backward 1, 0. The chunk whose next use is farthest is freed to make room:

    used     0    1    2    1    0
    fetched  0 1  2    -    0    -     the second one of 0 1, then 2 and 0, are fetched ahead, while the operator runs
    whole    0 1  1 2  1 2  0 1  0 1

Whose the memory of a chunk is, and whether its values are there, is its `ChunkState`. Memory is *lasting* if it stays until the
window ends: what is lent, and all if the budget holds all chunks. Threads take it without a lock.

The cache, `GatheredWeights`, decides when a chunk is fetched and freed, by the uses of the last window, which `UseOrder`
knows. The owner of a chunk decides how: a `GatheredChunk` that is `visible` needs no memory, and any other one fills what it is
given by `fetch`. The owner at stage 3 is `ShardedChunk` in zero/runtime/unshard/exchange.py.

Tests that are named beside a wait or an order are those of tests/zero/memory/test_gathered.py that fail without it.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

import accelerators
from accelerators.streams import Stream
from zero.memory.stream_order import ByStreams, InOrder, StreamOrder
from zero.plan.layout import Span

_Memory = tuple[torch.Tensor, StreamOrder]
_IN_ORDER = InOrder()
# One chunk is fetched before it is used, or _AHEAD of them if the budget holds _MANY chunks of that size.
_AHEAD, _MANY = 3, 8


class ChunkState(enum.Enum):
    """The states of a chunk, by the memory that it has:

        ABSENT ──► LENT ──────────────► OWN     an operator writes to it (`make_own`)
           └─────► ARRIVING ──► WHOLE ──┘       an operator keeps tensors in it (`leave`)

    Each of them becomes ABSENT when the chunk is freed.
    """

    ABSENT = enum.auto()  # no memory
    ARRIVING = enum.auto()  # memory that a fetch writes to, until `arrival` is waited for
    WHOLE = enum.auto()  # gathered memory, which another chunk gets when this one is freed
    LENT = enum.auto()  # the owner's memory, which may only be read
    OWN = enum.auto()  # memory that no other chunk gets
    DROPPED = enum.auto()  # no memory, as the weights are gone: nothing may read them again


class Arrival(Protocol):
    """A gather on its way."""

    def wait(self) -> object:
        """Waits until the values are there: on a device, for whatever is issued to the current stream next."""


class Lasting(NamedTuple):
    """The memory of a chunk that stays until the window ends, and the views of it."""

    memory: torch.Tensor
    views: dict[Hashable, torch.Tensor]
    filled_in: Stream | None  # the only stream that may use it without waiting, as it filled it; None if any may


class GatheredChunk(ABC):
    """A chunk is in one state, which the cache changes with its lock held; it has memory in all but ABSENT and DROPPED.

    [Note: threads] Threads take `lasting` without a lock, memory and the views of it in one, and may use both until the window
    ends: that memory is the owner's, or is freed at the end of a window only. Others are counted while they use a chunk. What
    is OWN is freed with its last reference, and no other chunk gets it: threads that are not counted may be using it.
    """

    def __init__(self, cache: GatheredWeights, numel: int, dtype: torch.dtype) -> None:
        self.cache = cache
        self.numel = numel
        self.dtype = dtype
        self.state = ChunkState.ABSENT
        self.memory: torch.Tensor | None = None
        self.arrival: Arrival | None = None  # the fetch of a chunk that is ARRIVING
        self.num_users = 0  # the operators that use it now
        self.unwritten: dict[str, Span] = {}  # the parameters in this chunk that have no values yet
        self.views: dict[Hashable, torch.Tensor] = {}  # kept for lent memory, which is the same each time
        self.lasting: Lasting | None = None
        cache.total_bytes += self.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def lasting_here(self) -> Lasting | None:
        """Returns the memory that an operator of this thread may use without a lock; None if it has to acquire the chunk."""
        lasting = self.lasting
        if lasting is not None and lasting.filled_in is not None and not self.cache.is_current(lasting.filled_in):
            return None
        return lasting

    @abstractmethod
    def visible(self) -> torch.Tensor | None:
        """Returns memory of the owner with the whole chunk, to be read only and the same each time; None if the chunk has to be
        gathered."""

    @abstractmethod
    def fetch(self, memory: torch.Tensor) -> Arrival:
        """Begins to fill memory with the values of the chunk."""

    @abstractmethod
    def edited(self, written: Span) -> None:
        """Takes over what an operator of the user wrote to its memory."""


class GatheredWeights:
    """All gathered chunks take at most the budget, or else the chunks of the operators that run and of one ahead.

    A chunk is gathered before an operator uses it, and others are freed to stay within the budget. The one whose next use is
    farthest, in the order learned from the last window, is freed first; the next ones of that order are fetched ahead. A budget
    of 0 is the least that a model can be trained with, and `math.inf` keeps all until the window ends.
    """

    poison = False  # tests fill what is freed with NaN, so that a stale read shows

    def __init__(self, device: torch.device, budget_bytes: float = 0.0) -> None:
        self.budget_bytes = budget_bytes
        self.total_bytes = 0  # the bytes of all chunks, gathered or not
        self.num_bytes = 0  # the bytes that are gathered now
        self.peak_bytes = 0
        self.num_fetches = self._last_num_fetches = 0  # so far, and when the last window ended
        self._has_fetched = False  # the last window fetched something
        self.num_plain = 0  # parameters that have memory of their own for now
        self.order = UseOrder[GatheredChunk]()
        self.device = device
        accelerator = accelerators.of(device)
        current_stream = partial(accelerator.current_stream, device.index)
        self._current_stream: Callable[[], Stream] | None = current_stream if accelerator.has_streams else None
        self._sources = self._new_order()  # the order in which streams use the memory that chunks are fetched from
        # The chunks that have memory, each with the order in which streams use it.
        self._gathered: dict[GatheredChunk, StreamOrder] = {}
        self._spare: dict[tuple[int, torch.dtype], list[_Memory]] = {}  # kept, as making pages takes time
        self._lock = threading.RLock()  # forward and backward run in threads of their own

    @property
    def fits_all(self) -> bool:
        """True if the budget holds all chunks, so that none is ever freed to make room."""
        return self.total_bytes <= self.budget_bytes

    def is_current(self, stream: Stream) -> bool:
        """Returns True if this thread issues its work to that stream."""
        return self._current_stream is not None and stream == self._current_stream()

    @contextlib.contextmanager
    def using(self, chunks: Iterable[GatheredChunk]) -> Iterator[None]:
        """Keeps these chunks whole inside, while an operator runs."""
        chunks = self.acquire(chunks)
        try:
            yield
        finally:
            self.release(chunks)

    def acquire(self, chunks: Iterable[GatheredChunk]) -> Sequence[GatheredChunk]:
        """Gathers these chunks; they stay until they are released."""
        chunks = list(dict.fromkeys(chunks))
        with self._lock:
            for chunk in chunks:
                # Counted for all before any is fetched, as a fetch frees chunks that nobody uses: else they come twice. Fails
                # without it: test_a_chunk_of_an_operator_is_not_freed_for_another_one_of_it.
                chunk.num_users += 1
            try:
                for chunk in chunks:
                    self.order.use(chunk)
                    if chunk.state is ChunkState.OWN and chunk.num_users == 1 and chunk.visible() is not None:
                        self._free(chunk)  # by now, the memory that all read has what was written to the copy
                    if chunk.memory is None:
                        self._begin(chunk)
                for chunk in chunks:
                    self._arrive(chunk)
                    self._gathered[chunk].use()
                self._fetch_ahead()
            except BaseException:
                self.release(chunks)
                raise
        return chunks

    def release(self, chunks: Sequence[GatheredChunk]) -> None:
        """Ends a use of these chunks, which may be freed from now on when room is needed."""
        with self._lock:
            for chunk in chunks:
                chunk.num_users -= 1

    def free_all(self) -> None:
        """Waits for what is on its way, and frees everything. No operator may be running."""
        with self._lock:
            for chunk in list(self._gathered):
                if chunk.num_users:
                    raise RuntimeError(
                        "Cannot step, load or move weights: another thread is reading some. Take a lock around that and around "
                        "what other threads read."
                    )
                self._free(chunk)

    def wait(self) -> None:
        """Waits for what is on its way."""
        with self._lock:
            for chunk in list(self._gathered):
                self._arrive(chunk)

    def abandon(self) -> None:
        """Frees everything, and waits for nothing that was on its way over lost connections, which may still be written to."""
        with self._lock:
            for chunk in list(self._gathered):
                self._drop(chunk)

    def release_memory(self) -> None:
        """Frees everything, as `free_all` does, and the memory that was kept for the next chunk too."""
        self.free_all()
        self._drop_spare()

    def forget(self, chunks: Iterable[GatheredChunk]) -> None:
        """Drops these chunks."""
        with self._lock:
            for chunk in chunks:
                self.total_bytes -= chunk.num_bytes
                try:
                    if chunk.memory is not None:
                        self._free(chunk)
                finally:  # also a chunk whose fetch fails is read no more
                    chunk.state, chunk.views = ChunkState.DROPPED, {}
            self.order = UseOrder()
            self._drop_spare()

    def end_window(self) -> None:
        """Drops all chunks: the weights will have other values."""
        if self.num_plain:
            raise RuntimeError("Cannot step or load within gathered(): parameters have memory of their own. Do it after.")
        self.free_all()
        has_fetched = self.num_fetches > self._last_num_fetches
        if not (has_fetched and self._has_fetched):
            self._drop_spare()  # a single window may have fetched only what was edited, which the next one need not
        self._last_num_fetches, self._has_fetched = self.num_fetches, has_fetched
        self.order.end_window()

    def begin_write(self) -> None:
        """Makes the current stream wait until it may write to the memory that chunks are fetched from. It takes no lock of this
        cache: a thread that fetches holds that while it takes those of the owner."""
        self._sources.fill()

    def make_own(self, chunk: GatheredChunk) -> None:
        """Gives a chunk memory of its own before an operator writes to it, if it shows the owner's."""
        with self._lock:
            if chunk.state is ChunkState.LENT:
                lent = chunk.memory
                assert lent is not None
                # Other threads may edit other parts of it now. Fails without it:
                # test_a_copy_for_an_edit_waits_for_what_another_thread_writes_to_its_source.
                self._sources.use()
                chunk.lasting = None
                # The memory is new and made in this stream, so threads that are not counted may use it without waiting. Fails
                # with memory that was kept:
                # test_a_thread_may_use_an_edited_copy_without_waiting_after_the_cache_has_let_it_go.
                chunk.memory, chunk.views = self._allocate(chunk, anew=True).copy_(lent), {}
                chunk.state = ChunkState.OWN
                self._note_lasting(chunk)

    def leave(self, chunk: GatheredChunk) -> None:
        """Leaves the memory of a chunk to those who keep tensors in it: no other chunk gets it."""
        with self._lock:
            if chunk.state is ChunkState.WHOLE:
                chunk.state = ChunkState.OWN

    def _begin(self, chunk: GatheredChunk) -> None:
        """Shows what the owner has of a chunk, or begins to fetch it."""
        if chunk.state is ChunkState.DROPPED:
            raise RuntimeError("Cannot read a weight: its optimizer was closed. Take a view of the parameter anew.")
        visible = chunk.visible()
        if visible is not None:
            self._make_room(0)  # copies that were written to before are not needed any more
            chunk.memory, chunk.state = visible, ChunkState.LENT
            self._gathered[chunk] = _IN_ORDER
            self._note_lasting(chunk)
        else:
            memory = self._allocate(chunk)
            try:
                self._sources.use()
                chunk.arrival = chunk.fetch(memory)
            except BaseException:
                self._drop(chunk)
                raise
            chunk.memory, chunk.views, chunk.state = memory, {}, ChunkState.ARRIVING
            self.num_fetches += 1

    def _allocate(self, chunk: GatheredChunk, anew: bool = False) -> torch.Tensor:
        """Returns memory that is counted as the chunk's. The caller makes it the chunk's once its fetch has begun."""
        self._make_room(chunk.num_bytes)
        memory, self._gathered[chunk] = self._memory_for(chunk, anew)
        self._gathered[chunk].fill()
        self.num_bytes += chunk.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return memory

    def _memory_for(self, chunk: GatheredChunk, anew: bool) -> _Memory:
        """Returns memory that was kept, or new memory; what was kept goes if both together would make a new peak."""
        spare = None if anew else self._spare.get((chunk.numel, chunk.dtype))
        if spare:
            return spare.pop()
        kept_bytes = sum(each.nbytes for kept in self._spare.values() for each, _ in kept)
        if self.num_bytes + chunk.num_bytes + kept_bytes > max(self.peak_bytes, self.num_bytes + chunk.num_bytes):
            self._drop_spare()
        with torch.inference_mode(False):
            return torch.empty(chunk.numel, dtype=chunk.dtype, device=self.device), self._new_order()

    def _drop_spare(self) -> None:
        with self._lock:
            for _, order in (each for kept in self._spare.values() for each in kept):
                order.free()
            self._spare.clear()

    def _new_order(self) -> StreamOrder:
        return _IN_ORDER if self._current_stream is None else ByStreams(self._current_stream)

    def _note_lasting(self, chunk: GatheredChunk) -> None:
        """Notes that the memory of a chunk stays until the window ends, if it does, for threads that take no lock."""
        if chunk.memory is not None and (chunk.state is ChunkState.LENT or self.fits_all):
            chunk.lasting = Lasting(chunk.memory, chunk.views, self._gathered[chunk].filled_in)

    def _arrive(self, chunk: GatheredChunk) -> None:
        """Waits for a fetch that was begun, after which the chunk is whole."""
        if chunk.arrival is not None:
            # The values arrive in this stream, whichever stream fetched them. Fails without it:
            # test_streams_read_what_has_come_and_fill_or_free_what_no_other_reads.
            self._gathered[chunk].fill()
            self._sources.use()
            try:
                chunk.arrival.wait()
            except BaseException:
                # The chunk is incomplete, and transfers on their way may still write to it. Fails without it:
                # test_a_fetch_that_fails_leaves_nothing_behind_and_may_be_tried_again.
                self._drop(chunk)
                raise
            chunk.arrival, chunk.state = None, ChunkState.WHOLE
            self._note_lasting(chunk)

    def _fetch_ahead(self) -> None:
        """Begins to fetch what is used next, while the operator runs."""
        for number, following in enumerate(self.order.upcoming(_AHEAD)):
            if following.memory is None and (number == 0 or self._has_room_for(following)):
                self._begin(following)

    def _has_room_for(self, chunk: GatheredChunk) -> bool:
        """Returns whether a chunk fits the budget without freeing any that is used before it. A budget of few such chunks has
        no room."""
        if _MANY * chunk.num_bytes > self.budget_bytes:
            return False  # chunks that are freed for this one would have to be fetched again
        if self.num_bytes + chunk.num_bytes <= self.budget_bytes:
            return True  # nearly always, so the chunks are not looked at
        uses = self.order.distance(chunk)
        later = [each.num_bytes for each in self._idle() if self.order.distance(each) > uses]
        return self.num_bytes - sum(later) + chunk.num_bytes <= self.budget_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Frees chunks that no operator uses until what comes fits the budget, or nothing is left to free."""
        if self.num_bytes + num_bytes <= self.budget_bytes or math.isinf(self.budget_bytes):
            return
        for chunk in sorted(self._idle(), key=lambda chunk: -self.order.distance(chunk)):
            self._free(chunk)
            if self.num_bytes + num_bytes <= self.budget_bytes:
                return

    def _idle(self) -> list[GatheredChunk]:
        """Returns the chunks that may be freed."""
        return [chunk for chunk in self._gathered if not (chunk.state is ChunkState.LENT or chunk.num_users or chunk.lasting)]

    def _free(self, chunk: GatheredChunk) -> None:
        """Takes the memory of a chunk, and keeps it for another one of that size if it was gathered."""
        # Waited for, as memory that a gather still writes to must not become another chunk's. Fails without it:
        # test_memory_that_a_gather_still_writes_to_is_no_other_chunks.
        self._arrive(chunk)
        if chunk.memory is not None and chunk.state is ChunkState.WHOLE:
            order = self._gathered[chunk]
            if self.poison:
                order.fill()
                chunk.memory.fill_(float("nan"))
            self._spare.setdefault((chunk.numel, chunk.dtype), []).append((chunk.memory, order))
        self._drop(chunk)

    def _drop(self, chunk: GatheredChunk) -> None:
        """Takes the memory of a chunk, and leaves it to Python, or to its owner if it was lent."""
        order = self._gathered.pop(chunk)
        if chunk.state is ChunkState.OWN:
            order.free()
        chunk.lasting = None
        if chunk.state is not ChunkState.LENT:
            self.num_bytes -= chunk.num_bytes
            chunk.views = {}
        chunk.memory, chunk.arrival, chunk.state = None, None, ChunkState.ABSENT


# the order of uses ------------------------------------------------------------------------------------------------------


Chunk = TypeVar("Chunk", bound=Hashable)

_NOT_IN_THIS_WINDOW = 1 << 40  # a number of positions beyond any use that is left in a window
_NEVER = 1 << 60


class UseOrder(Generic[Chunk]):
    """The uses of chunks in the last window, and the position of this window in them. Uses of one chunk in a row count as one.

    A window repeats the last one as a rule. If it does not, the position is found again at the next use that is known.
    """

    def __init__(self) -> None:
        self._learned: list[Chunk] = []  # the uses of the last window
        self._places: dict[Chunk, list[int]] = {}  # by chunk: its positions in the last window
        self._so_far: list[Chunk] = []  # the uses of this window
        self._position = -1  # the position, in the last window, of the latest use that it had too
        self._is_known = False  # the last window had the latest use

    def use(self, chunk: Chunk) -> None:
        """Notes that a chunk is used now."""
        if self._so_far and self._so_far[-1] == chunk:
            return
        self._so_far.append(chunk)
        places = self._places.get(chunk, ())
        index = bisect_right(places, self._position)
        self._is_known = index < len(places)
        if self._is_known:
            self._position = places[index]

    def upcoming(self, number: int) -> list[Chunk]:
        """Returns the chunks that are used next, as far as is known: none after a use that the last window did not have."""
        if not self._is_known:
            return []
        return self._learned[self._position + 1 : self._position + 1 + number]

    def distance(self, chunk: Chunk) -> int:
        """Returns how far away the next use of a chunk is. A chunk that is not used again in this window is farther than all
        that are."""
        places = self._places.get(chunk)
        if places is None:
            return _NEVER
        index = bisect_right(places, self._position)
        return places[index] if index < len(places) else _NOT_IN_THIS_WINDOW + places[0]

    def end_window(self) -> None:
        """Ends the window: the next one is expected to use what this one did. A window without any use teaches nothing."""
        if self._so_far:
            self._learned, self._places = self._so_far, {}
            for place, chunk in enumerate(self._learned):
                self._places.setdefault(chunk, []).append(place)
        self._so_far, self._position, self._is_known = [], -1, False
