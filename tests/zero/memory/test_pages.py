"""Pages that tell what was written to them: all of it and little more, forgotten when it is dropped."""

import ctypes
import mmap
import os

import pytest
import torch

from accelerators.memory_file import closing, memory_file
from tests.devices import needs_linux
from zero.memory import pages
from zero.memory.pages import Pages, lay_out, num_bytes_of
from zero.plan.spans import Span

pytestmark = needs_linux

IN_A_PAGE = mmap.PAGESIZE // 2  # elements of two bytes


def chunks(*numels, dtype=torch.bfloat16):
    sizes = [(numel, dtype) for numel in numels]
    with closing(memory_file(num_bytes_of(sizes))) as descriptor:
        return lay_out(descriptor, sizes, False)


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


def test_where_the_table_cannot_be_read_everything_counts_as_edited_and_is_filled_when_it_is_dropped(monkeypatch):
    def too_many(_):
        raise OSError(24, "Too many open files")

    [chunk] = chunks(3 * IN_A_PAGE)
    chunk.look()
    chunk.seen[1] = 1.0
    monkeypatch.setattr(Pages, "_kinds", too_many)
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


def test_chunks_of_no_elements_have_a_place_and_nothing_to_tell():
    empty, full = chunks(0, 4)
    full.seen[0] = 1.0
    assert looked(empty, Span(0, 0)) is None
    assert empty.seen.numel() == 0
    empty.keep()
    empty.drop()
    assert looked(full) == Span(0, 4)


@pytest.mark.parametrize("kinds", [0b000, 0b101, 0b100, 0b001])
def test_a_table_that_says_the_same_of_all_pages_is_not_relied_on(monkeypatch, kinds):
    monkeypatch.setattr(Pages, "_kinds", lambda self: torch.full((self._num_pages,), kinds, dtype=torch.int64))
    assert not pages.pages_tell.__wrapped__()


def test_a_system_without_a_table_or_without_memory_files_is_no_error(monkeypatch):
    def missing(*_):
        raise FileNotFoundError("/proc/self/pagemap")

    monkeypatch.setattr(Pages, "_kinds", missing)
    assert not pages.pages_tell.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(pages, "memory_file", missing)
    assert not pages.pages_tell.__wrapped__()
