"""The cache of gathered weights: what it holds, what it frees first, and that it never holds more than it says."""

import math
import re
import sys
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.memory.gathered import ChunkState, GatheredChunk, GatheredWeights, UseOrder
from zero.memory.stream_order import ByStreams


class Gather:
    """Arrives when it is waited for, and not before. Until then nothing else may be written to its memory."""

    def __init__(self, memory, value, under_way):
        assert all(other.memory.data_ptr() != memory.data_ptr() for other in under_way), "another gather still writes there"
        self.memory, self.value, self.under_way = memory, value, under_way
        under_way.append(self)

    def wait(self):
        self.under_way.remove(self)
        self.memory.fill_(self.value)


class Numbered(GatheredChunk):
    """Is full of its number. It may lie in memory that is seen."""

    def __init__(self, cache, numel, number, fetched):
        super().__init__(cache, numel, torch.float32)
        self.number, self.fetched, self.seen, self.under_way = number, fetched, None, cache.under_way

    def visible(self):
        return self.seen

    def fetch(self, memory):
        memory.fill_(-1.0)
        self.fetched.append(self.number)
        return Gather(memory, float(self.number), self.under_way)

    def edited(self, written):
        raise AssertionError("nothing is edited here")


def weights_of(sizes, budget=0):
    made, fetched = GatheredWeights(torch.device("cpu"), budget), []
    made.poison, made.under_way = True, []
    made.chunks = [Numbered(made, numel, number, fetched) for number, numel in enumerate(sizes)]
    return made, fetched


def use(weights, *numbers):
    chunks = [weights.chunks[number] for number in numbers]
    with weights.using(chunks):
        assert all(torch.equal(chunk.memory, torch.full((chunk.numel,), float(chunk.number))) for chunk in chunks)


def window(weights, uses):
    for indices in uses:
        use(weights, *indices)
    weights.end_window()


OPERATORS = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=6, max_size=6), st.lists(OPERATORS, min_size=1, max_size=4), st.integers(0, 400))
def test_whatever_is_used_is_whole_and_no_more_is_held_than_the_budget_or_an_operator_and_one_ahead(sizes, windows, budget):
    weights, _ = weights_of(sizes, budget)
    largest, most = 4 * max(sizes), 0
    for uses in windows:
        for indices in uses:
            use(weights, *indices)
            most = max(most, sum(4 * sizes[index] for index in indices))
            held = sum(chunk.num_bytes for chunk in weights.chunks if chunk.memory is not None)
            assert weights.num_bytes == held <= weights.peak_bytes <= max(budget, most + largest)
        weights.end_window()
        assert weights.num_bytes == 0


def test_with_all_in_the_budget_each_chunk_is_fetched_once_a_window():
    weights, fetched = weights_of([4] * 4, math.inf)
    for _ in range(2):
        window(weights, [[0], [1], [2], [3], [2], [1], [0]])
    assert sorted(fetched) == sorted([0, 1, 2, 3] * 2)


def test_the_second_window_fetches_ahead_what_the_first_one_used_next():
    weights, fetched = weights_of([4] * 3, 32)
    window(weights, [[0], [1], [2]])
    del fetched[:]
    use(weights, 0)
    assert fetched == [0, 1]
    use(weights, 1)
    assert fetched == [0, 1, 2]
    use(weights, 2)
    assert fetched == [0, 1, 2]


@pytest.mark.parametrize("budget, ahead", [(math.inf, 3), (36, 3), (31, 1), (0, 1)])
def test_where_the_budget_is_for_many_chunks_more_than_the_next_one_are_fetched_ahead(budget, ahead):
    weights, fetched = weights_of([1] * 12, budget)
    order = list(range(12))
    window(weights, [[number] for number in order])
    del fetched[:]
    for number in order:
        use(weights, number)
        assert fetched == order[: number + 1 + ahead]  # and nothing that is used before is freed for it


def test_of_what_is_held_the_chunk_whose_next_use_is_farthest_goes():
    weights, fetched = weights_of([4] * 3, 32)
    order = [[0], [1], [0], [2], [0], [1]]
    window(weights, order)
    del fetched[:]
    for indices in order:
        use(weights, *indices)
    assert fetched.count(0) == 1  # it is always the next but one


def test_a_wrong_guess_costs_one_fetch_and_the_next_window_knows_better():
    weights, fetched = weights_of([4] * 4, 0)
    window(weights, [[0], [1], [2]])
    del fetched[:]
    window(weights, [[0], [3], [2]])
    assert fetched == [0, 1, 3, 2]
    del fetched[:]
    window(weights, [[0], [3], [2]])
    assert fetched == [0, 3, 2]


def test_a_fetch_that_fails_leaves_nothing_behind_and_may_be_tried_again():
    weights, _ = weights_of([4, 4])
    chunk, fails = weights.chunks[0], [True]
    fetch = chunk.fetch

    class Lost:
        def wait(self):
            raise ConnectionError("lost")

    chunk.fetch = lambda memory: Lost() if fails.pop() else fetch(memory)
    with pytest.raises(ConnectionError):
        use(weights, 0)
    assert weights.num_bytes == 0 and not any(chunk.num_users for chunk in weights.chunks)
    fails += [False]
    use(weights, 0)


def test_memory_that_is_seen_is_lent_never_written_and_counts_for_nothing():
    weights, fetched = weights_of([4] * 3)
    chunk = weights.chunks[1]
    chunk.seen = seen = torch.ones(4)
    with weights.using([weights.chunks[0], chunk]):
        assert chunk.memory is seen and weights.num_bytes == 16
        weights.make_own(chunk)
        assert chunk.memory is not seen and torch.equal(chunk.memory, seen) and weights.num_bytes == 32
    weights.end_window()
    use(weights, 1)
    weights.end_window()
    assert fetched == [0] and weights.num_bytes == 0 and torch.equal(seen, torch.ones(4))


def test_memory_for_an_edit_goes_with_the_next_use_of_what_is_seen_and_serves_no_gather():
    weights, fetched = weights_of([4] * 3)
    for chunk in weights.chunks:
        chunk.seen = torch.ones(4)
        with weights.using([chunk]):
            weights.make_own(chunk)
    assert weights.num_bytes == 16
    with weights.using(weights.chunks[2:]):
        assert weights.chunks[2].memory is weights.chunks[2].seen and weights.num_bytes == 0
    assert not fetched and not any(weights._spare.values())


def test_nothing_is_freed_under_an_operator_that_runs_in_another_thread():
    weights, _ = weights_of([4] * 3)
    chunk = weights.chunks[0]
    with weights.using([chunk]):
        use(weights, 1)
        use(weights, 2)
        assert torch.equal(chunk.memory, torch.zeros(4))
        with pytest.raises(RuntimeError, match="another thread is reading some"):
            weights.free_all()


def test_memory_that_a_gather_still_writes_to_is_no_other_chunks():
    """Chunk 1 is fetched ahead, as it was used next in the last window; in this one chunk 2 is, which needs the room."""
    weights, fetched = weights_of([4] * 3)
    window(weights, [[0], [1]])
    use(weights, 0)
    assert [gather.value for gather in weights.under_way] == [1.0]
    use(weights, 2)
    assert fetched == [0, 1, 0, 1, 2] and not weights.under_way


def test_a_chunk_of_an_operator_is_not_freed_for_another_one_of_it():
    weights, fetched = weights_of([4] * 2, 16)
    use(weights, 1)
    use(weights, 0, 1)
    assert fetched == [1, 0]


def test_the_example_of_the_module_is_what_the_cache_does():
    said = sys.modules[GatheredWeights.__module__].__doc__.partition("[Note: an example]")[2]
    lines = (re.search(rf"^ +{name} +(.*)$", said, re.MULTILINE)[1] for name in ("used", "fetched", "whole"))
    rows = [re.split(" {2,}", line)[:5] for line in lines]
    weights, fetched = weights_of([4] * 3, 2 * 16)
    window(weights, [[0], [1], [2], [1], [0]])
    for used, brought, whole in zip(*rows, strict=True):
        fetched.clear()
        use(weights, int(used))
        assert [str(number) for number in fetched] == brought.replace("-", "").split()
        assert [str(chunk.number) for chunk in weights.chunks if chunk.memory is not None] == whole.split()


def test_what_is_forgotten_is_freed_and_cannot_be_used_again():
    weights, _ = weights_of([4] * 3, math.inf)
    window(weights, [[0], [1], [2]])
    use(weights, 0)
    weights.forget(weights.chunks[1:])
    use(weights, 0)
    assert weights.num_bytes == 16
    with pytest.raises(RuntimeError, match="Cannot read a weight: its optimizer was closed"):
        use(weights, 1)
    assert not any(chunk.num_users for chunk in weights.chunks)


def test_what_is_forgotten_when_its_fetch_fails_cannot_be_used_again_either():
    weights, _ = weights_of([4] * 2, math.inf)
    window(weights, [[0], [1]])
    lost = SimpleNamespace(wait=mock.Mock(side_effect=ConnectionError("lost")))
    weights.chunks[1].fetch = lambda memory: lost
    use(weights, 0)  # fetches the other one ahead
    with pytest.raises(ConnectionError):
        weights.forget(weights.chunks[1:])
    with pytest.raises(RuntimeError, match="Cannot read a weight: its optimizer was closed"):
        use(weights, 1)


def test_uses_in_a_row_are_one_and_a_window_without_any_is_forgotten():
    order = UseOrder()
    for chunk in (0, 0, 1, 1, 0):
        order.use(chunk)
    order.end_window()
    order.end_window()
    order.use(0)
    assert order.upcoming(2) == [1, 0]
    assert order.distance(1) < order.distance(0) < order.distance(7)
    order.use(1)
    assert order.upcoming(2) == [0] and order.distance(0) < order.distance(1)


@pytest.mark.parametrize("budget, stay", [(11 * 4, False), (12 * 4, True), (math.inf, True)])
def test_a_chunk_stays_once_it_has_arrived_where_all_fit(budget, stay):
    weights, _ = weights_of([4] * 3, budget)
    chunk, seen = weights.chunks[0], weights.chunks[1]
    seen.seen = torch.ones(4)
    assert chunk.lasting is None
    use(weights, 0)
    assert (chunk.lasting is not None) is stay
    weights.acquire([seen])
    assert seen.lasting is not None  # it takes no memory
    weights.make_own(seen)
    assert (seen.lasting is not None) is stay
    weights.release([seen])
    weights.end_window()
    assert chunk.lasting is None and seen.lasting is None
    weights.forget(weights.chunks[2:])
    use(weights, 0)
    assert chunk.lasting is not None  # two fit


class Watched(Numbered):
    """Says whether another thread would take it for whole while its memory is filled."""

    stays_unfilled = False

    def fetch(self, memory):
        self.stays_unfilled |= self.lasting is not None
        return super().fetch(memory)


def test_other_threads_find_memory_only_with_its_values_in_it_and_views_of_that_memory_alone():
    weights, _ = weights_of([8], math.inf)
    chunk = weights.chunks[0] = Watched(weights, 8, 0, [])
    views = chunk.views
    with weights.using([chunk]):
        assert not chunk.stays_unfilled and chunk.lasting is not None and chunk.views is not views
    chunk.seen, views = torch.full((8,), 1.0), chunk.views
    weights.end_window()
    assert chunk.views is not views, "as a late thread may add one of the memory that it had found"
    with weights.using([chunk]):
        views = chunk.views
        lent = chunk.memory
        weights.make_own(chunk)
        assert chunk.memory is not lent and torch.equal(chunk.memory, lent) and chunk.views is not views


def test_what_a_thread_found_lasting_is_never_another_chunks_however_the_chunk_is_written_to():
    """Of memory that is shown, of a copy that is written to, and of what is fetched after that one went."""
    weights, _ = weights_of([4] * 6, 0)
    chunk = weights.chunks[0]
    chunk.seen = torch.full((4,), 1.0)
    weights.release(weights.acquire([chunk]))
    memory, views, _ = chunk.lasting
    weights.release(weights.acquire([chunk]))
    with weights.using([chunk]):
        weights.make_own(chunk)
        own = chunk.memory
        assert chunk.lasting is None and chunk.views is not views
    chunk.seen = None
    use(weights, 1)  # this one needs the room of the other
    use(weights, 2, 3)
    assert chunk.memory is None and torch.equal(memory, torch.full((4,), 1.0)) and torch.equal(own, memory)
    assert all(each.data_ptr() != own.data_ptr() for kept in weights._spare.values() for each, _ in kept)


class Stream:
    """A stream that knows what its work comes after: how many calls of each stream."""

    def __init__(self, number):
        self.number, self.after = number, Counter()

    def wait_stream(self, other):
        self.after |= other.after  # the larger of both counts, by stream

    def call(self):
        self.after[self.number] += 1
        return self.number, self.after[self.number]

    def comes_after(self, calls):
        return all(self.after[number] >= count for number, count in calls)


class Uses:
    """The calls that used one memory, since it was made in the current stream."""

    def __init__(self, streams):
        self.streams, self.made_in = streams, streams.current
        self.written, self.read = [], []

    def write(self):
        assert self.streams.current.comes_after([*self.written, *self.read]), "it may still be read"
        self.written, self.read = [self.streams.current.call()], []

    def use(self):
        assert self.streams.current.comes_after(self.written), "it may not be there"
        self.read.append(self.streams.current.call())

    def free(self):
        if not self.made_in.comes_after([*self.written, *self.read]):
            self.streams.freed_early.append(self)


class Streams:
    """Those of a device, and a cache of weights there."""

    def __init__(self, budget):
        self.all = [Stream(number) for number in range(3)]
        self.current, self.freed_early, self.uses = self.all[0], [], {}
        self.weights = GatheredWeights(torch.device("cpu"), budget)
        self.weights._current_stream = lambda: self.current
        self.weights._sources, self.sources = ByStreams(self.weights._current_stream), Uses(self)
        self.chunks = [Fetched(self, number) for number in range(4)]

    def uses_of(self, memory):
        if memory.data_ptr() not in self.uses:
            self.uses[memory.data_ptr()] = Uses(self)
            weakref.finalize(memory, self.free, memory.data_ptr())
        return self.uses[memory.data_ptr()]

    def free(self, place):
        self.uses.pop(place).free()

    def glance(self, chunk):
        lasting = chunk.lasting_here()
        if lasting is not None and chunk.state is not ChunkState.LENT:
            self.uses_of(lasting.memory).use()

    def read(self, chunk):
        if chunk.state is not ChunkState.LENT:
            self.uses_of(chunk.memory).use()

    def edit(self, chunk):
        for other in self.all:
            self.current.wait_stream(other)
        self.weights.make_own(chunk)
        self.uses_of(chunk.memory).write()
        chunk.shown = None
        for other in self.all:
            other.wait_stream(self.current)


class Fetched(GatheredChunk):
    """A fetch reads what all are fetched from and writes, at once and in the stream that waits for it."""

    def __init__(self, streams, number):
        super().__init__(streams.weights, 4, torch.float32)
        self.streams, self.shown, self.number = streams, None, number

    def visible(self):
        return self.shown

    def fetch(self, memory):
        uses = self.streams.uses_of(memory)

        def read():
            self.streams.sources.use()
            uses.write()

        read()
        return SimpleNamespace(wait=read)

    def edited(self, written):
        raise AssertionError("the test does it")


WHICH = st.sets(st.integers(0, 3), min_size=1, max_size=2)
CALL = st.one_of(
    st.tuples(st.sampled_from(["read", "glance", "edit"]), WHICH),
    st.tuples(st.just("step"), st.just(()) | WHICH),
    st.just(("release", ())),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2), CALL), max_size=30), st.sampled_from([0, 16, 160, math.inf]))
def test_streams_read_what_has_come_and_fill_or_free_what_no_other_reads(calls, budget):
    """Streams of a program wait for each other before and after an edit, and for nothing else."""
    streams = Streams(budget)
    weights = streams.weights
    for stream, (kind, which) in calls:
        streams.current = streams.all[stream]
        chunks = [streams.chunks[number] for number in which]
        if kind == "step":  # a step ends with some chunks in memory that all see, until they are edited
            weights.end_window()
            for chunk in streams.chunks:
                chunk.shown = torch.ones(4) if chunk in chunks else None
        elif kind == "release":
            weights.release_memory()
        elif kind == "glance":
            for chunk in chunks:
                streams.glance(chunk)
        else:
            with weights.using(chunks):
                for chunk in chunks:
                    streams.edit(chunk) if kind == "edit" else streams.read(chunk)
        if kind in ("edit", "step"):
            weights.begin_write()
            streams.sources.write()
    weights.forget(streams.chunks)
    assert not streams.freed_early and not streams.uses


def test_a_thread_may_use_an_edited_copy_without_waiting_after_the_cache_has_let_it_go():
    """The allocator lends memory again in the order of the stream that it was made in: that has to be the thread's own."""
    streams = Streams(math.inf)
    weights, read, edited = streams.weights, *streams.chunks[:2]
    for _ in range(2):  # leaves memory that was made in stream 0 for the next chunk
        with weights.using([read]):
            streams.read(read)
        weights.end_window()
    edited.shown, streams.current = torch.ones(4), streams.all[1]
    with weights.using([edited]):
        streams.edit(edited)
    memory = edited.lasting_here().memory
    edited.shown, streams.current = torch.ones(4), streams.all[2]
    with weights.using([edited]):  # all see the edit by now, so the copy goes
        assert edited.state is ChunkState.LENT
    streams.current = streams.all[1]
    streams.uses_of(memory).use()
    del memory
    assert not streams.freed_early


def test_a_copy_for_an_edit_waits_for_what_another_thread_writes_to_its_source():
    streams = Streams(0)
    weights, chunk = streams.weights, streams.chunks[0]
    streams.current = streams.all[1]
    weights.begin_write()
    streams.sources.write()  # an edit of another part, which the program has not ordered before this one
    chunk.shown, streams.current = torch.ones(4), streams.all[2]
    with weights.using([chunk]):
        weights.make_own(chunk)
        streams.sources.use()
