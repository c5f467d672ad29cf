"""Tensors through memory that ranks share: proved or not used, written again only once read, and gone with who shared it."""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import accelerators
from tests import ranks
from tests.loopback import LoopbackGroup, run_ranks
from zero.comm.connect import connect
from zero.comm.group import TimeLimits
from zero.comm.shared_memory import _IDLE_STEPS, SharedArena, SharedMemoryGroup, map_peer, through_shared_memory
from zero.errors import GroupLost

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory files")


def pages(arena):
    """Bytes of an arena that take memory."""
    return os.fstat(arena._descriptor).st_blocks * 512


# The arena --------------------------------------------------------------------------------------------------------------


def test_who_is_introduced_reads_what_is_written_later():
    arena = SharedArena()
    theirs = map_peer(arena.handshake())
    lent = arena.lend(3)
    lent.copy_(torch.tensor([7, 8, 9], dtype=torch.uint8))
    begin = arena.offset(lent)
    assert theirs[begin : begin + 3].tolist() == [7, 8, 9]
    assert arena.offset(torch.zeros(3)) is None


def test_a_stretch_is_lent_again_only_when_nobody_holds_it_and_all_have_read_it():
    arena = SharedArena()
    first = arena.lend(5000)
    place, view = arena.offset(first), first[10:]
    arena.send(first, line=1, collective=4)
    del first
    gc.collect()
    assert arena.offset(arena.lend(5000)) != place  # a view of it is held
    del view
    assert arena.offset(arena.lend(5000)) != place  # and it may still be read
    arena.update_progress(finished=[5, 4])  # each line counts by itself
    assert arena.offset(arena.lend(5000)) != place
    arena.update_progress(finished=[0, 5])
    both = arena.lend(5000), arena.lend(5000)
    assert place in map(arena.offset, both)


def test_a_stretch_also_serves_what_is_nearly_as_large_and_the_addresses_for_it_take_no_memory():
    arena = SharedArena()
    before = pages(arena)
    lent = arena.lend(2**20).fill_(1)
    place = arena.offset(lent)
    assert pages(arena) == before + 2**20
    del lent
    for num_bytes in (2**20 + 2**16, 2**20, 2**20 - 2**16):
        assert arena.offset(arena.lend(num_bytes)) == place
    assert arena.offset(arena.lend(2**21)) != place


def test_pages_that_nobody_asks_for_are_given_back():
    arena = SharedArena()
    before = pages(arena)
    lent = arena.lend(2**20).fill_(1)
    assert pages(arena) >= before + 2**20
    arena.trim()
    assert pages(arena) >= before + 2**20  # held
    for _ in range(2 * _IDLE_STEPS):
        arena.stepped()
    del lent
    for _ in range(_IDLE_STEPS - 1):
        arena.stepped()
    assert pages(arena) >= before + 2**20  # the next one would only make them anew
    arena.stepped()
    assert pages(arena) == before
    assert arena.lend(2**20).sum() == 0


# The proof --------------------------------------------------------------------------------------------------------------


def kinds(group, wanted=True):
    made = through_shared_memory(group, wanted)
    return type(made), made.all_reduce(torch.ones(2), torch.float32).wait().tolist()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda told: told[:-1] + bytes([told[-1] ^ 1]), "another one's"),
        (lambda told: (2**22 + 1).to_bytes(8, "little") + told[8:], "No such file or directory"),
        (lambda told: told[:16] + (4096).to_bytes(8, "little") + told[24:], "told of 4096"),
    ],
    ids=["a wrong word", "no such process", "another size"],
)
def test_where_one_rank_is_not_what_it_says_all_take_the_ordinary_collective(spoil, said, caplog, monkeypatch):
    introduce = SharedArena.handshake
    told = []

    def spoilt(arena):
        told.append(introduce(arena))
        return spoil(told[-1]) if len(told) == 2 else told[-1]

    monkeypatch.setattr(SharedArena, "handshake", spoilt)
    with caplog.at_level(logging.INFO, "zero"):
        assert run_ranks(3, kinds) == [(LoopbackGroup, [3.0, 3.0])] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 ranks travel by ordinary collectives" in line and said in line


def test_a_system_without_memory_files_takes_the_ordinary_collective(monkeypatch, caplog):
    monkeypatch.delattr(os, "memfd_create")
    with caplog.at_level(logging.INFO, "zero"):
        assert run_ranks(2, kinds) == [(LoopbackGroup, [2.0, 2.0])] * 2
    assert len(caplog.records) == 1 and "memfd_create" in caplog.records[0].getMessage()


def test_the_line_says_why_and_not_that_another_rank_has_a_reason(monkeypatch, caplog):
    failing, make = [], os.memfd_create

    def program(group):
        if group.rank == 1:
            failing.append(threading.get_ident())
        return kinds(group)

    def refused(*arguments):
        if threading.get_ident() in failing:
            raise OSError("no more of these")
        return make(*arguments)

    monkeypatch.setattr(os, "memfd_create", refused)
    with caplog.at_level(logging.INFO, "zero"):
        assert run_ranks(3, program) == [(LoopbackGroup, [3.0, 3.0])] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "rank 1: OSError: no more of these" in line


def test_it_is_turned_off_on_all_ranks_by_any_of_them():
    def program(group):
        return kinds(group, wanted=group.rank != 1)

    assert run_ranks(2, program) == [(LoopbackGroup, [2.0, 2.0])] * 2
    assert run_ranks(2, kinds) == [(SharedMemoryGroup, [2.0, 2.0])] * 2


# Who writes when --------------------------------------------------------------------------------------------------------


def test_a_buffer_is_not_written_again_before_all_ranks_have_read_it():
    def program(group):
        group, reads = through_shared_memory(group), []
        for number in range(3):
            buffer = group.staging(4, torch.float32, torch.device("cpu"))
            assert group.is_reusable(buffer)
            pending = group.reduce_scatter(buffer.fill_(1.0 + number), torch.float32)
            if group.rank == 0:
                assert pending.wait().tolist() == [2.0 + 2 * number] * 2
            group.all_gather_bytes(b"rank 0 has read, rank 1 has not")
            reads.append(group.is_reusable(buffer))
            group.all_gather_bytes(b"both have looked")
            if group.rank == 1:
                assert pending.wait().tolist() == [2.0 + 2 * number] * 2
            group.all_gather_bytes(b"both have read")
            reads.append(group.is_reusable(buffer))
        return reads

    assert run_ranks(2, program) == [[False, True] * 3] * 2


def test_once_ranks_are_connected_anew_what_was_counted_before_counts_no_more(monkeypatch):
    monkeypatch.setattr(LoopbackGroup, "reconnect", lambda self, base: self.all_gather_bytes(b"again"))

    def program(group):
        group = through_shared_memory(group)
        device, late = torch.device("cpu"), None
        for number in range(5):
            late = group.reduce_scatter(group.staging(4, torch.float32, device).fill_(number), torch.float32)
            if number < 4:
                late.wait()
        group.reconnect(None)
        late.wait()  # it began before
        buffer = group.staging(4, torch.float32, device)
        pending = group.reduce_scatter(buffer.fill_(1.0), torch.float32)
        read = group.is_reusable(buffer)
        group.all_gather_bytes(b"both have looked")
        pending.wait()
        group.all_gather_bytes(b"both have read")
        return read, group.is_reusable(buffer)

    assert run_ranks(2, program) == [(False, True)] * 2


def test_a_rank_that_is_ahead_takes_more_memory_and_waits_for_nobody():
    def program(group):
        group = through_shared_memory(group)
        if group.rank == 1:
            time.sleep(0.2)
        pending = []
        for number in range(6):
            buffer = group.staging(64, torch.float32, torch.device("cpu")).fill_(float(number + group.rank))
            pending.append(group.reduce_scatter(buffer, torch.float32))
            del buffer
        waited = [one.done() for one in pending] if group.rank == 0 else []
        return waited, [one.wait().tolist() for one in pending]

    (waited, first), (_, second) = run_ranks(2, program)
    assert not any(waited)
    assert first == second == [[2.0 * number + 1.0] * 32 for number in range(6)]


def test_what_is_empty_travels_too():
    def program(group):
        group, nothing = through_shared_memory(group), torch.empty(0)
        kinds = group.all_reduce, group.reduce_scatter
        found = [kind(nothing, torch.float32).wait() for kind in kinds] + [group.all_gather(nothing).wait()]
        return [one.numel() for one in (*found, group.broadcast(nothing).wait())]

    assert run_ranks(2, program) == [[0] * 4] * 2


def test_a_broadcast_arrives_whole_and_in_its_place():
    def program(group):
        tensor = torch.arange(10_001.0) if group.rank == 0 else torch.empty(10_001)
        return through_shared_memory(group).broadcast(tensor).wait()

    assert all(torch.equal(found, torch.arange(10_001.0)) for found in run_ranks(3, program))


def test_what_rank_0_shows_is_seen_where_it_lies_and_not_lent_again_before_all_have_left():
    def program(group):
        shared = through_shared_memory(group)

        def lend():
            return shared.staging(5000, torch.float32, torch.device("cpu"))

        memory = lend().fill_(group.rank + 1.0)
        if group.rank == 1:
            with shared.rank0_view(memory) as seen:
                found = seen.data_ptr() - shared.arenas[0].data_ptr(), seen.unique().tolist()
                shared.all_gather_bytes(b"both look")
                shared.all_gather_bytes(b"rank 0 has left, and looked")
            shared.all_gather_bytes(b"this rank has left")
            return found
        with shared.rank0_view(memory) as seen:
            place = shared._arena.offset(memory)
            shared.all_gather_bytes(b"both look")
        del memory, seen
        assert shared._arena.offset(lend()) != place
        shared.all_gather_bytes(b"rank 0 has left, and looked")
        shared.all_gather_bytes(b"this rank has left")
        assert shared._arena.offset(lend()) == place
        return place, [1.0]

    first, second = run_ranks(2, program)
    assert first == second


def test_what_is_shown_is_lent_again_also_where_reading_it_broke_off():
    def program(group):
        shared, places = through_shared_memory(group), []
        for _ in range(3):
            memory = shared.staging(5000, torch.float32, torch.device("cpu")).fill_(1.0)
            places.append(shared._arena.offset(memory))
            with contextlib.suppress(RuntimeError), shared.rank0_view(memory):
                if group.rank == 1:
                    raise RuntimeError("not today")
            del memory
            shared.all_gather_bytes(b"")
        return len(set(places))

    assert run_ranks(2, program) == [1, 1]


def test_parts_of_a_gather_are_lent_again_also_where_one_rank_could_not_read_them():
    def program(group):
        shared = through_shared_memory(group)
        for _ in range(3):
            pending = shared.all_gather(torch.ones(2 * 5000))
            if group.rank == 0:
                with mock.patch.object(pending._message, "row", side_effect=MemoryError), pytest.raises(MemoryError):
                    pending.wait()
            else:
                pending.wait()
            shared.all_gather_bytes(b"")
        return len(shared._arena._stretches)

    assert run_ranks(2, program) == [1, 1]


def test_a_forked_child_gives_no_pages_back():
    arena = SharedArena()
    lent = arena.lend(3).fill_(7)
    seen = map_peer(arena.handshake())[arena.offset(lent) :][:3]
    del lent
    child = os.fork()
    if not child:
        arena.trim()
        os._exit(0)
    os.waitpid(child, 0)
    assert seen.tolist() == [7, 7, 7]
    arena.trim()
    assert seen.tolist() == [0, 0, 0]


def test_what_rank_0_showed_is_lent_again_or_goes_once_all_have_left():
    def program(group):
        shared, places = through_shared_memory(group), set()
        for _ in range(4):
            memory = shared.staging(5000, torch.float32, torch.device("cpu")).fill_(1.0)
            with shared.rank0_view(memory):
                places.add(shared._arena.offset(memory))
            del memory
            shared.all_gather_bytes(b"")
        whole = sum(not stretch.vacant for stretch in shared._arena._stretches)
        shared.trim()
        return len(places), whole, sum(not stretch.vacant for stretch in shared._arena._stretches)

    assert run_ranks(2, program) == [(1, 1, 0)] * 2


def leave_at_once(rank, world):
    """Rank 1 is gone before rank 0 looks at what it sent."""
    group = connect(accelerators.get("cpu"), None, TimeLimits(20.0, 20.0), shared_memory=True)
    assert isinstance(group, SharedMemoryGroup)
    pending = group.reduce_scatter(torch.full((2**16,), 3.0), torch.float32)
    if rank == 1:
        pending.wait()
        return None
    time.sleep(0.5)
    return pending.wait().unique().tolist()


def test_what_a_rank_sent_can_be_read_after_its_end():
    assert ranks.run(2, leave_at_once, fresh=True)[0] == [6.0]


# Failure ----------------------------------------------------------------------------------------------------------------


def die_in_backward(rank, world):
    group = connect(accelerators.get("cpu"), None, TimeLimits(5.0, 5.0), shared_memory=True)
    said = []
    for number in range(3):
        buffer = group.staging(2**20, torch.float32, torch.device("cpu")).fill_(1.0)
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            group.reduce_scatter(buffer, torch.float32).wait()
        except GroupLost as error:
            said.append((str(error), time.monotonic() - started))
    return said


def test_a_rank_that_is_killed_is_a_lost_group_within_the_limit_and_leaves_nothing_behind():
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    survivor, killed = ranks.outcomes(2, die_in_backward, fresh=True)
    assert killed.kind == "died"
    ((text, took),) = survivor.value
    assert "rank 1 was last seen" in text and "is gone" in text and took < 10.0
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    assert not [path for path in after - before if "zero" in path.name]


def at_work_with_a_child(rank, world):
    """Rank 1 forks a process that says what it does. Returns what this rank reads of the other one."""
    group = connect(accelerators.get("cpu"), None, TimeLimits(20.0, 20.0), shared_memory=True)
    assert isinstance(group, SharedMemoryGroup)
    group.set_phase(f"at work on rank {rank}")
    if rank == 1:
        child = os.fork()
        if not child:
            group.set_phase("in a child")
            os._exit(0)
        os.waitpid(child, 0)
    group.all_gather_bytes(b"")
    read = group.phases.read(1 - rank)
    group.all_gather_bytes(b"")
    group.close()
    return read


def test_ranks_read_what_others_do_and_a_forked_child_is_no_rank():
    assert ranks.run(2, at_work_with_a_child, fresh=True) == ["at work on rank 1", "at work on rank 0"]
