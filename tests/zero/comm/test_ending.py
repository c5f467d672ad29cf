"""What consists of waiting is done at once, and by whoever is there where no thread can be had."""

import threading
import time

import pytest

from zero.comm.health.shutdown import at_once


def test_each_has_begun_before_any_is_waited_for():
    all_there = threading.Barrier(3)
    met = []
    at_once([lambda: met.append(all_there.wait(10.0))] * 3, limit_s=20.0)
    assert sorted(met) == [0, 1, 2]


def test_one_that_takes_longer_than_the_limit_is_not_waited_for():
    forever, done = threading.Event(), []
    at_once([forever.wait, lambda: done.append(1)], limit_s=0.5)
    assert done == [1] and not forever.is_set()
    forever.set()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_where_no_thread_can_be_had_they_are_done_one_after_the_other(number, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    at_once([lambda: done.append(time.monotonic())] * number, limit_s=0.0)
    assert len(done) == number
