"""How far a save, a load or an export is: shown by rank 0, at a terminal, and only where it takes long."""

import io
import itertools
import sys

import pytest

import zero
from tests.loopback import run_ranks
from tests.promises.checkpoints import sharded
from zero.checkpoint import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """So many seconds later every time that somebody looks at it."""

    def __init__(self, seconds):
        self._seconds, self._looks = seconds, itertools.count()

    def monotonic(self):
        return next(self._looks) * self._seconds


@pytest.fixture
def begun(monkeypatch):
    """What bars were shown, in their order."""
    found, really = [], progress.ProgressBar._show
    monkeypatch.setattr(progress.ProgressBar, "_show", lambda self: (found.append(self._what), really(self)))
    return found


def save_load_and_export(folder):
    def program(group):
        optimizer = sharded(group)
        zero.save(folder, optimizer, "a")
        zero.load(folder, optimizer)
        optimizer.close()

    run_ranks(2, program, 30.0)
    zero.export(folder, folder / "out.safetensors")


def test_what_takes_longer_than_two_seconds_has_one_bar_for_all_ranks(tmp_path, monkeypatch, begun):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "time", Clock(2.5))
    save_load_and_export(tmp_path)
    assert begun == ["saving a", "checking a", "loading", "checking a", "writing out.safetensors"]
    for what in begun:
        assert what in stream.getvalue()


@pytest.mark.parametrize(("stream", "seconds"), [(Terminal(), 0.0), (io.StringIO(), 1.5)], ids=["soon done", "no terminal"])
def test_nothing_is_shown_of_what_is_soon_done_or_where_nobody_looks(stream, seconds, tmp_path, monkeypatch, begun):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "time", Clock(seconds))
    save_load_and_export(tmp_path)
    assert begun == []
    assert stream.getvalue() == ""


def test_it_shows_how_much_is_done_and_leaves_the_terminal_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "time", Clock(2.5))
    monkeypatch.setenv("COLUMNS", "100")
    with progress.ProgressBar("saving", 4, unit="files") as shown:
        shown.advance(1)
        shown.advance(2)
        shown._shown.refresh()
        assert "3/4" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\x1b[2K")
