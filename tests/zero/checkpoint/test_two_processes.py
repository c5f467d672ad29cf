"""One directory of checkpoints, and several processes that save into it, load from it and die."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import time

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.loopback import solo
from zero.checkpoint.folder import Folder
from zero.checkpoint.locks import alone
from zero.checkpoint.reader import CheckpointReader
from zero.errors import BadCheckpoint, CheckpointFailed


@contextlib.contextmanager
def training():
    torch.manual_seed(0)
    model = nn.Linear(8, 40)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, group=solo())
    try:
        yield model, optimizer
    finally:
        optimizer.close()


def fill(model, number):
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)


def meet(world):
    torch.distributed.barrier()
    return world


def saves_beside_the_other(rank, world, folder):
    with training() as (_, optimizer):
        meet(world)
        for number in range(15):
            zero.save(folder, optimizer, f"{rank}-{number}", keep_last=2)
        meet(world)
    return sorted(os.listdir(folder))


def test_two_processes_save_into_one_directory_and_pruning_counts_what_is_there(tmp_path):
    listed = ranks.run(2, saves_beside_the_other, tmp_path)[0]
    tags = Folder(tmp_path).tags()
    assert len(tags) == 2 and listed == sorted([*tags, "latest"])
    assert Folder(tmp_path).latest() == tags[-1]
    for tag in tags:
        zero.export(tmp_path, tmp_path / "whole.safetensors", tag)


def saves_one_tag(rank, world, folder):
    with training() as (model, optimizer):
        for number in range(15):
            fill(model, 100 * rank + number)
            zero.save(folder, optimizer, "same", {"by": rank, "number": number})
        meet(world)


def test_two_processes_save_one_tag_and_it_is_whole(tmp_path):
    ranks.run(2, saves_one_tag, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "same"]
    with training() as (model, optimizer):
        extra = zero.load(tmp_path, optimizer)
        assert torch.equal(model.weight, torch.full_like(model.weight, 100 * extra["by"] + extra["number"]))


def is_slow_while_the_other_saves(rank, world, folder):
    """Rank 0 has begun a save when rank 1 saves under another tag, and ends it then."""
    with training() as (_, optimizer):
        begun = Folder(folder).begin("slow") if rank == 0 else None
        meet(world)
        if rank == 1:
            zero.save(folder, optimizer, "quick")
        meet(world)
        if rank == 0:
            assert begun.is_dir()
            Folder(folder).give_up(begun)
            zero.save(folder, optimizer, "slow")


def test_a_save_in_progress_of_another_process_is_not_removed(tmp_path):
    ranks.run(2, is_slow_while_the_other_saves, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "quick", "slow"]


def begins_and_waits(folder, begun):
    Folder(folder).begin("dead")
    begun.set()
    time.sleep(600)


def test_what_the_dead_left_is_removed_and_what_the_living_write_is_not(tmp_path):
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=begins_and_waits, args=(tmp_path, begun))
    process.start()
    assert begun.wait(60)
    with training() as (_, optimizer):
        zero.save(tmp_path, optimizer, "beside")
        assert [name for name in os.listdir(tmp_path) if name.startswith(".dead.saving-")]
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        zero.save(tmp_path, optimizer, "after")
    assert sorted(os.listdir(tmp_path)) == ["after", "beside", "latest"]


def begins_and_forks(folder, forked):
    with alone(folder / "held"):
        Folder(folder).begin("dead")
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        forked.send(child)
        time.sleep(600)


def test_a_lock_ends_with_its_process_though_one_that_was_forked_from_it_lives_on(tmp_path, monkeypatch):
    monkeypatch.setattr("zero.checkpoint.locks._LONGEST_WAIT_S", 2.0)
    context = multiprocessing.get_context("spawn")
    told, forked = context.Pipe(duplex=False)
    process = context.Process(target=begins_and_forks, args=(tmp_path, forked))
    process.start()
    assert told.poll(60)
    child = told.recv()
    try:
        with pytest.raises(TimeoutError, match="held locked"), alone(tmp_path / "held"):
            pass  # a forked process has not given it back
        Folder(tmp_path).give_up(Folder(tmp_path).begin("beside"))
        assert [name for name in os.listdir(tmp_path) if name.startswith(".dead.saving-")]
        process.kill()
        process.join()
        os.kill(child, 0)  # it lives
        with alone(tmp_path / "held"):
            Folder(tmp_path).give_up(Folder(tmp_path).begin("after"))
        assert os.listdir(tmp_path) == []
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_saved_to_and_nothing_that_may_be_written_is_removed(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("zero.checkpoint.locks.fcntl.flock", flock)
    begun = Folder(tmp_path).begin("other")
    with training() as (_, optimizer):
        zero.save(tmp_path, optimizer, "a")
    assert sorted(os.listdir(tmp_path)) == [begun.name, "a", "latest"]
    assert f"Cannot find out whether {begun} is written" in caplog.text
    Folder(tmp_path).give_up(begun)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_lock_that_cannot_be_had_leaves_no_open_file(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("zero.checkpoint.locks.fcntl.flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error") as error, alone(tmp_path / "held"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before, error  # while the error still has the frames


def test_who_waits_for_another_to_change_the_directory_is_told_at_last(tmp_path, monkeypatch):
    monkeypatch.setattr("zero.checkpoint.locks._LONGEST_WAIT_S", 0.0)
    with training() as (_, optimizer):
        with alone(tmp_path / ".lock"):
            with pytest.raises(CheckpointFailed, match=r"Cannot change what is in .*: another process has had \.lock locked"):
                zero.save(tmp_path, optimizer, "a")
        zero.save(tmp_path, optimizer, "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


# readers ----------------------------------------------------------------------------------------------------------------


def saves_or_reads(rank, world, folder, same_tag):
    """Rank 0 saves the tag anew, or others and prunes, as long as rank 1 reads; each load has the values of one save."""
    done, number = folder / "done", 0
    with training() as (model, optimizer):
        if rank == 0:
            fill(model, 0)
            zero.save(folder, optimizer, "0", {"number": 0})
        meet(world)
        while rank == 0 and not done.exists():
            number += 1
            fill(model, number)
            zero.save(folder, optimizer, "0" if same_tag else str(number), {"number": number}, keep_last=1)
        for read in range(40 if rank == 1 else 0):
            if read % 2:
                zero.export(folder, folder.parent / "whole.safetensors")
                values = zero.read_export(folder.parent / "whole.safetensors")["weight"]
                assert (values == values.view(-1)[0]).all()
            else:
                extra = zero.load(folder, optimizer)
                assert torch.equal(model.weight, torch.full_like(model.weight, extra["number"]))
        if rank == 1:
            done.touch()
        meet(world)
    return number


@pytest.mark.parametrize("same_tag", [True, False])
def test_what_is_read_while_another_process_replaces_or_prunes_it_is_one_checkpoint(same_tag, tmp_path):
    (tmp_path / "c").mkdir()
    saves = ranks.run(2, saves_or_reads, tmp_path / "c", same_tag)[0]
    assert saves > 1


def test_what_was_opened_is_read_though_it_was_removed(tmp_path):
    with training() as (model, optimizer):
        zero.save(tmp_path, optimizer, "a")
        reader = CheckpointReader(tmp_path, "a")
        shutil.rmtree(tmp_path / "a")
        reader.check_file(0)
        assert torch.equal(reader.whole("weight", "value"), model.weight.detach())
        assert not reader.is_current()
        reader.close()


def test_files_beyond_the_first_are_named_as_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("zero.checkpoint.folder._MOST_AT_ONCE", 0)
    with training() as (_, optimizer):
        zero.save(tmp_path, optimizer, "a")
        reader = CheckpointReader(tmp_path, "a")
        reader.check_file(0)
        reader.close()
        reader = CheckpointReader(tmp_path, "a")
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(BadCheckpoint, match=r"rank-00000\.safetensors: it was removed or saved anew meanwhile"):
            reader.check_file(0)
        reader.close()


def loads_what_changes(rank, world, folder):
    """Rank 1 opens the tag when a save has replaced what rank 0 opened."""
    model = nn.Linear(8, 40)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    zero.save(folder, optimizer, "a", {"number": 0})
    replaced, opened = folder / "replaced", CheckpointReader.__init__

    def open_late(reader, *which):
        while rank == 1 and not replaced.exists():
            time.sleep(0.01)
        opened(reader, *which)
        if rank == 0 and not replaced.exists():
            with training() as (_, beside):
                zero.save(folder, beside, "a", {"number": 1})
            replaced.touch()

    CheckpointReader.__init__ = open_late
    try:
        return zero.load(folder, optimizer, "a")
    finally:
        CheckpointReader.__init__ = opened
        optimizer.close()


def test_ranks_that_opened_another_checkpoint_of_that_tag_begin_again(tmp_path):
    assert ranks.run(2, loads_what_changes, tmp_path) == [{"number": 1}] * 2
