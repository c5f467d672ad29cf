"""Pages that tell what was written to them: all of it and little more, forgotten when it is dropped."""

import ctypes
import mmap
import os

import pytest
import torch

from accelerators import own_pages
from accelerators.memory_file import closing, memory_file
from accelerators.own_pages import Notes, Table
from tests.devices import needs_linux
from zero.memory import pages
from zero.memory.pages import lay_out, num_bytes_of
from zero.plan.spans import Span

pytestmark = [needs_linux, pytest.mark.usefixtures("way")]

WAYS = {"notes": Notes, "table": Table}
IN_A_PAGE = mmap.PAGESIZE // 2  # elements of two bytes


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """By which it is found out what was written."""
    if request.param == "notes":
        try:
            own_pages._note_taker(os.getpid())
        except OSError as error:
            pytest.skip(f"this system takes no notes of what a process writes, or lets it have none: {error}")
    monkeypatch.setattr(pages, "_takes_notes", lambda: request.param == "notes")
    return WAYS[request.param]


def chunks(*numels, dtype=torch.bfloat16):
    sizes = [(numel, dtype) for numel in numels]
    with closing(memory_file(num_bytes_of(sizes))) as descriptor:
        made = lay_out(descriptor, sizes, False)
    assert all(isinstance(chunk._finder, Notes) == pages._takes_notes() for chunk in made)
    return made


def looked(chunk, part=None):
    chunk.look()
    return chunk.edited(part or Span(0, chunk.seen.numel()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_written_behind_is_seen_and_is_no_edit(dtype):
    [chunk] = chunks(5 * IN_A_PAGE + 3, dtype=dtype)
    values = torch.arange(chunk.seen.numel()).to(dtype)
    chunk.written.copy_(values)
    assert torch.equal(chunk.seen, values)
    assert looked(chunk) is None


def test_an_edit_is_told_by_its_pages_within_the_part_that_is_asked_for():
    [chunk] = chunks(5 * IN_A_PAGE + 3)
    chunk.seen[2 * IN_A_PAGE + 7] = 1.0
    assert looked(chunk) == Span(2 * IN_A_PAGE, 3 * IN_A_PAGE)
    assert looked(chunk, Span(2 * IN_A_PAGE + 5, 2 * IN_A_PAGE + 9)) == Span(2 * IN_A_PAGE + 5, 2 * IN_A_PAGE + 9)
    assert looked(chunk, Span(0, 2 * IN_A_PAGE)) is None
    assert looked(chunk, Span(3 * IN_A_PAGE, chunk.seen.numel())) is None
    chunk.seen[-1] = 2.0
    assert looked(chunk) == Span(2 * IN_A_PAGE, chunk.seen.numel())
    assert chunk.written.count_nonzero() == 0


def test_every_edit_lies_in_what_is_told():
    torch.manual_seed(0)
    for _ in range(50):
        [chunk] = chunks(int(torch.randint(1, 9 * IN_A_PAGE, ())))
        numel = chunk.seen.numel()
        at = torch.randint(0, numel, (int(torch.randint(1, 4, ())),)).tolist()
        chunk.seen[at] = 1.0
        start, stop = sorted(torch.randint(0, numel + 1, (2,)).tolist())
        told = looked(chunk, Span(start, stop))
        there = [place for place in at if start <= place < stop]
        assert not there if told is None else all(told.start <= place < told.stop for place in there)
        assert told is None or (start <= told.start and told.stop <= stop)


def test_what_is_dropped_shows_what_was_written_last():
    first, second = chunks(3 * IN_A_PAGE, 10)
    second.seen[4] = 5.0
    first.seen[IN_A_PAGE :].fill_(1.0)
    first.written.fill_(2.0)
    assert first.seen[0] == 2.0
    assert bool((first.seen[IN_A_PAGE:] == 1.0).all())
    first.look()
    first.drop()
    assert bool((first.seen == 2.0).all())
    assert looked(first) is None
    assert second.seen[4] == 5.0
    assert looked(second) == Span(0, 10)


def test_who_did_not_look_is_told_of_everything():
    [chunk] = chunks(3 * IN_A_PAGE)
    part = Span(5, 2 * IN_A_PAGE)
    assert chunk.edited(part) == part
    assert looked(chunk, part) is None
    chunk.drop()
    assert chunk.edited(part) == part
    chunk.seen[0] = 1.0
    chunk.drop()
    assert chunk.seen[0] == 0.0


def test_what_is_kept_counts_as_edited_and_is_not_changed_from_behind():
    [chunk] = chunks(2 * IN_A_PAGE + 1)
    values = torch.tensor([-0.0, float("nan"), 1.5]).bfloat16().repeat(chunk.seen.numel())[: chunk.seen.numel()]
    chunk.written.copy_(values)
    chunk.keep()
    assert chunk.edited(Span(0, 3)) == Span(0, 3)
    assert looked(chunk) == Span(0, chunk.seen.numel())
    chunk.written.fill_(9.0)
    assert torch.equal(chunk.seen.view(torch.int16), values.view(torch.int16))


def test_storage_that_was_exchanged_is_all_edited_and_is_filled_when_it_is_dropped():
    [chunk] = chunks(2 * IN_A_PAGE)
    chunk.written.fill_(3.0)
    chunk.seen.share_memory_()
    chunk.look()
    assert chunk.edited(Span(1, 7)) == Span(1, 7)
    assert bool((chunk.seen == 3.0).all())
    chunk.written.fill_(4.0)
    chunk.drop()
    assert bool((chunk.seen == 4.0).all())


def test_an_edit_after_the_last_look_is_dropped_with_the_others():
    [chunk] = chunks(3 * IN_A_PAGE)
    chunk.look()
    chunk.seen[0] = 1.0
    chunk.drop()
    assert chunk.seen[0] == 0.0


def test_an_edit_that_comes_between_finding_and_dropping_is_found_the_next_time_wherever_it_went(way, monkeypatch):
    [chunk] = chunks(3 * IN_A_PAGE)
    chunk.written.fill_(3.0)
    chunk.seen[0] = 1.0
    find = way.find

    def find_and_be_edited(finder, to_drop=False):
        found = find(finder, to_drop)
        chunk.seen[1] = chunk.seen[-1] = 2.0
        return found

    with monkeypatch.context() as during:
        during.setattr(way, "find", find_and_be_edited)
        chunk.drop()
    assert chunk.seen[1] == 3.0, "of a page that was dropped"
    assert chunk.seen[-1] == 2.0, "and of one that was not"
    assert looked(chunk).stop == chunk.seen.numel()
    chunk.drop()
    chunk.written.fill_(4.0)
    assert bool((chunk.seen == 4.0).all())


def test_every_edit_is_found_again_after_it_was_dropped_many_times():
    [chunk] = chunks(1500 * IN_A_PAGE)  # more stretches than are told at once
    chance = torch.Generator().manual_seed(0)
    for turn in range(6):
        edited = torch.randint(0, 2, (1500,), generator=chance).bool() if turn else torch.arange(1500) % 2 == 0
        chunk.seen.view(1500, -1)[edited, turn] = 1.0
        chunk.look()
        assert torch.equal(chunk._own, edited.nonzero()[:, 0])
        chunk.written.fill_(float(turn))
        chunk.drop()
        assert bool((chunk.seen == float(turn)).all())
        assert looked(chunk) is None


def test_what_cannot_be_found_out_counts_as_edited_and_is_filled_when_it_is_dropped(way, monkeypatch):
    def too_many(*_):
        raise OSError(24, "Too many open files")

    [chunk] = chunks(3 * IN_A_PAGE)
    chunk.look()
    chunk.seen[1] = 1.0
    monkeypatch.setattr(way, "find", too_many)
    chunk.look()
    assert chunk.edited(Span(5, 9)) == Span(5, 9)
    chunk.written.fill_(2.0)
    chunk.drop()
    assert bool((chunk.seen == 2.0).all())


def test_pages_that_are_locked_in_memory_are_filled_when_they_are_dropped():
    [chunk] = chunks(2 * IN_A_PAGE)
    locked = ctypes.CDLL(None).mlock(ctypes.c_void_p(chunk.seen.data_ptr()), ctypes.c_size_t(chunk.seen.nbytes))
    assert locked == 0
    chunk.written.fill_(3.0)
    chunk.seen[0] = 1.0
    for _ in range(2):
        chunk.drop()
        assert bool((chunk.seen == 3.0).all())


def test_a_forked_process_sees_what_was_there_and_writes_nothing_of_its_parents():
    [chunk] = chunks(2 * IN_A_PAGE)
    chunk.written.fill_(3.0)
    (go, told), (answer, found) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(go, 1)  # the parent has written
            saw = bool((chunk.seen == 3.0).all())
            chunk.written[0] = 9.0
            chunk.look()
            all_edited = chunk.edited(Span(0, 3)) == Span(0, 3)
            chunk.drop()
            os.write(found, b"held" if saw and all_edited and chunk.seen[0] == 9.0 and not chunk.common else b"lost")
        finally:
            os._exit(0)
    chunk.written.fill_(4.0)
    os.write(told, b".")
    assert os.read(answer, 4) == b"held"
    os.waitpid(child, 0)
    assert bool((chunk.written == 4.0).all())
    assert looked(chunk) == Span(0, chunk.seen.numel())  # what was seen when the child was made
    assert bool((chunk.seen == 3.0).all())
    chunk.drop()
    assert bool((chunk.seen == 4.0).all())


def test_a_fork_by_another_thread_while_edits_are_looked_up_makes_them_all_edits():
    [chunk] = chunks(2 * IN_A_PAGE)
    chunk.look()
    moved = chunk._moved

    def forks():
        chunk._moved = moved
        chunk.keep()  # as before a fork
        return moved()

    chunk._moved = forks
    assert chunk.edited(Span(0, 3)) is None  # as it was found before
    assert chunk.edited(Span(0, 3)) == Span(0, 3)


def test_chunks_of_no_elements_have_a_place_and_nothing_to_tell():
    empty, full = chunks(0, 4)
    full.seen[0] = 1.0
    assert looked(empty, Span(0, 0)) is None
    assert empty.seen.numel() == 0
    empty.keep()
    empty.drop()
    assert looked(full) == Span(0, 4)


@pytest.mark.parametrize("says", [torch.zeros, torch.ones])
def test_a_system_that_says_the_same_of_all_pages_is_not_relied_on(says, way, monkeypatch):
    monkeypatch.setattr(way, "find", lambda *_: says(2).nonzero()[:, 0])
    assert not pages._works(way is Notes)


def test_where_no_notes_are_taken_the_table_is_read(monkeypatch):
    def refused(_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(own_pages, "_note_taker", refused)
    monkeypatch.setattr(pages, "_takes_notes", lambda: True)  # which it did at first
    with closing(memory_file(4 * mmap.PAGESIZE)) as descriptor:
        [chunk] = lay_out(descriptor, [(4 * IN_A_PAGE, torch.bfloat16)], False)
    assert isinstance(chunk._finder, Table)
    chunk.seen[0] = 1.0
    assert looked(chunk) == Span(0, IN_A_PAGE)


def test_a_system_that_tells_nothing_or_without_memory_files_is_no_error(monkeypatch):
    def missing(*_):
        raise FileNotFoundError("/proc/self/pagemap")

    with monkeypatch.context() as during:
        for way in WAYS.values():
            during.setattr(way, "find", missing)
        assert not pages._works(False) and not pages._works(True)
    monkeypatch.setattr(pages, "memory_file", missing)
    assert not pages._works(False) and not pages._works(True)


def test_pages_that_a_process_has_before_notes_are_taken_of_them_are_found_in_the_table(monkeypatch):
    """As where it locks whatever it maps, with what the file holds then."""
    monkeypatch.setattr(pages, "_takes_notes", lambda: True)
    seen = mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    seen[0] = 1
    address = torch.frombuffer(seen, dtype=torch.uint8).data_ptr()
    assert isinstance(pages._finder_of(address, len(seen), True), Table)


def test_what_was_edited_is_found_whatever_the_device_is_where_tensors_are_made():
    [chunk] = chunks(3 * IN_A_PAGE)
    chunk.seen[0] = 1.0
    with torch.device("meta"):
        chunk.look()
    assert chunk.edited(Span(0, 3 * IN_A_PAGE)) == Span(0, IN_A_PAGE)


def test_what_the_system_offers_is_relied_on(way):
    assert pages._works(way is Notes)
