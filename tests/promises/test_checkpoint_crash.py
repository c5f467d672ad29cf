"""Whoever is killed at whatever moment of a save leaves a checkpoint that loads: the one before, or the new one, whole.

Rank processes stop before or after one call of the system, say so, and are killed from outside.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import zero
from tests import ranks
from tests.loopback import run_ranks, solo
from tests.promises.checkpoints import everything, first_difference, sharded, train

WORLD = 2
CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
NEVER = -1


class Stopper:
    """Counts the calls of the system that a save makes, and stops for ever at one of them."""

    def __init__(self, folder: str, at: int, after: bool) -> None:
        self.folder = folder
        self.at = at
        self.after = after
        self.calls: list[str] = []
        self._real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> "Stopper":
        for name in CALLS:
            setattr(os, name, self._wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)

    def _wrapped(self, name):
        def call(*arguments, **options):
            here = len(self.calls)
            self.calls.append(name)
            if here == self.at and not self.after:
                self._stop()
            try:
                return self._real[name](*arguments, **options)
            finally:  # also where the call failed
                if here == self.at and self.after:
                    self._stop()

        return call

    def _stop(self) -> None:
        self.__exit__()
        Path(f"{self.folder}.stopped").write_text(str(os.getpid()))
        time.sleep(60)


def save_and_stop(rank, world, folder, stopping_rank, at, after):
    """The calls of a save that takes the place of one with the same tag, and then lets another one go."""
    optimizer = sharded(timeout_s=5.0)
    train(optimizer, [0], rank, world)
    zero.save(folder, optimizer, "older")
    zero.save(folder, optimizer, "a")
    train(optimizer, [1], rank, world)
    with Stopper(folder, at if rank == stopping_rank else NEVER, after) as stopper:
        zero.save(folder, optimizer, "a", keep_last=1)
    return stopper.calls


def kill_who_stops(folder, done):
    path = Path(f"{folder}.stopped")
    while not done.wait(0.005):
        with contextlib.suppress(FileNotFoundError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)
            return


def both_states(rank, world):
    """What the two checkpoints of `save_and_stop` hold."""
    optimizer = sharded()
    found = []
    for step in (0, 1):
        train(optimizer, [step], rank, world)
        found.append(everything(optimizer))
    optimizer.close()
    return found


def which_is_loaded(folder, states):
    """0 for the checkpoint before, 1 for the new one; any mixture fails."""
    optimizer = sharded(solo())
    try:
        zero.load(folder, optimizer)
        found = everything(optimizer)
        matching = [number for number, state in enumerate(states) if first_difference(state, found) is None]
        assert len(matching) == 1, "neither the one nor the other"
        zero.save(folder, optimizer, "next", keep_last=1)
        assert sorted(os.listdir(folder)) == ["latest", "next"], "debris"
        return matching[0]
    finally:
        optimizer.close()


@pytest.mark.promise("C01")
@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_is_killed_before_or_after_any_call_of_a_save_leaves_a_whole_checkpoint(tmp_path, every):
    """After one call is before the next: the system sees nothing of what lies between."""
    expected = ranks.run(WORLD, both_states)[0]
    calls = ranks.run(WORLD, save_and_stop, str(tmp_path / "traced"), 0, NEVER, False)
    assert which_is_loaded(str(tmp_path / "traced"), expected) == 1
    assert {"open", "write", "fsync", "rename", "replace", "unlink", "mkdir"} <= set(calls[0])
    first = [(rank, 0, False) for rank in range(WORLD)]
    points = first + [(rank, at, True) for rank in range(WORLD) for at in range(len(calls[rank]))]
    assert len(points) >= 50
    points, found = points[::every], []
    for number, (rank, at, after) in enumerate(points):
        folder, done = str(tmp_path / str(number)), threading.Event()
        killer = threading.Thread(target=kill_who_stops, args=(folder, done))
        killer.start()
        outcomes = ranks.outcomes(WORLD, save_and_stop, folder, rank, at, after, timeout=20.0, apart="crash")
        done.set()
        killer.join()
        assert outcomes[rank].kind == "died", (rank, at, after, ranks.describe(outcomes))
        found.append(which_is_loaded(folder, expected))
    # the new one from some moment on
    of_rank_0 = [state for (rank, _, _), state in zip(points, found, strict=True) if rank == 0]
    assert of_rank_0 == sorted(of_rank_0)
    assert {0, 1} == set(of_rank_0)


class Books:
    """What was written, made or renamed and not synced since, when each step of a commit was taken."""

    def __init__(self, monkeypatch):
        self.unsynced, self.steps, self._was = set(), [], {}
        self._paths, self._lock = {}, threading.RLock()  # ranks are threads
        for name in ("open", "write", "fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, self._kept(getattr(os, name), getattr(self, name)))
        monkeypatch.setattr(shutil, "rmtree", self._kept(shutil.rmtree, self.rmtree))

    def _kept(self, really, note):
        def call(*arguments, **options):
            with self._lock:
                before = set(self.unsynced)
                result = really(*arguments, **options)
                if "dir_fd" not in options:
                    note(before, result, *arguments)
                return result

        return call

    def open(self, before, result, path, flags, *rest):
        self._paths[result] = Path(path)
        if flags & os.O_CREAT and Path(path).name != ".lock":  # the lock is empty, and goes
            self.unsynced |= {Path(path)}
            if not Path(path).name.startswith("."):  # a hidden file need not last, but what it becomes must
                self.unsynced.add(Path(path).parent)

    def write(self, before, result, descriptor, content):
        self.unsynced.add(self._paths[descriptor])

    def fsync(self, before, result, descriptor):
        self.unsynced.discard(self._paths[descriptor])

    def rename(self, before, result, source, target):
        source, target = Path(source), Path(target)
        self._was[target] = source.name
        if not target.name.startswith("."):
            self.steps.append((target.name, {path for path in before if path == source or source in path.parents}))
        self.unsynced = {path for path in self.unsynced if path != source and source not in path.parents}
        self.unsynced |= {source.parent, target.parent}

    def replace(self, before, result, source, target):
        self.steps.append((Path(target).name, before))
        self.unsynced.add(Path(target).parent)

    def rmtree(self, before, result, path, *rest, **options):
        if path in self._was:
            self.steps.append((f"remove {self._was[path]}", before))


@pytest.mark.promise("C01")
def test_what_takes_its_place_is_on_the_disk_then_the_pointer_and_only_then_the_old_one_goes(tmp_path, monkeypatch):
    def program(group):
        optimizer = sharded(group)
        for tag in ("older", "a"):
            zero.save(tmp_path, optimizer, tag)
        group.all_gather_bytes(b"")
        books = None
        if group.rank == 0:
            books = Books(monkeypatch)
        group.all_gather_bytes(b"")
        zero.save(tmp_path, optimizer, "a", keep_last=1)
        optimizer.close()
        return books

    books = run_ranks(WORLD, program, 30.0)[0]
    commit = [(step, unsynced) for step, unsynced in books.steps if not step.startswith("rank-")]
    assert [step for step, _ in commit] == ["a", "latest", "remove .a.replaced", "remove older"]
    for step, unsynced in commit:
        assert unsynced == set(), step
    assert len(books.steps) == len(commit) + 2 * WORLD  # each rank's file, and what says that it is there
