"""Calls that wait are made at once, in threads, and where a new one cannot be had by those that were kept for that."""

import os
import sys
import threading
import time

import pytest

from zero.comm import health
from zero.comm.health import StoreClient, at_once
from zero.comm.torch_group import exit_all


@pytest.fixture
def no_new_threads(monkeypatch):
    """As when the interpreter ends, from Python 3.12 on; some threads were kept before."""
    monkeypatch.setattr(health, "_reserved", health._Reserve())
    health.reserve(2)

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_each_has_begun_before_any_is_waited_for():
    all_there = threading.Barrier(3)
    met = []
    assert at_once([lambda: met.append(all_there.wait(10.0))] * 3, limit_s=20.0)
    assert sorted(met) == [0, 1, 2]


def test_one_that_takes_longer_than_the_limit_is_not_waited_for():
    forever, done = threading.Event(), []
    assert not at_once([forever.wait, lambda: done.append(1)], limit_s=0.5)
    assert done == [1] and not forever.is_set()
    forever.set()


def test_where_no_new_thread_can_be_had_those_of_the_reserve_make_one_call_each(no_new_threads):
    both_there, made_by = threading.Barrier(2), []
    assert at_once([lambda: both_there.wait(10.0)] * 2, limit_s=20.0)
    at_once([lambda: made_by.append(threading.get_ident())], limit_s=20.0)
    assert made_by == [threading.get_ident()]


def test_a_call_of_the_reserve_is_not_waited_for_after_the_limit(no_new_threads):
    forever = threading.Event()
    assert not at_once([forever.wait], limit_s=0.1)
    forever.set()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_where_no_thread_can_be_had_they_are_done_one_after_the_other(number, no_new_threads, monkeypatch):
    monkeypatch.setattr(health, "_reserved", health._Reserve())
    done = []
    assert at_once([lambda: done.append(time.monotonic())] * number, limit_s=0.0)
    assert len(done) == number


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_was_forked_has_no_threads_of_the_reserve(no_new_threads):
    child = os.fork()
    if child == 0:
        os._exit(0 if at_once([lambda: None], limit_s=0.0) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_of_wires_end_before_their_connections():
    done = []

    class Wire:
        def exit(self):
            done.append("thread")

    exit_all([Wire(), Wire()], lambda: done.append("connections"))
    assert done == ["thread", "thread", "connections"]


class Silent:
    """A store whose process was stopped, when its buffers are full."""

    def __init__(self):
        self.answers = threading.Event()

    def set(self, key, value):
        self.answers.wait()


class Group:
    def __init__(self, closing):
        self.release = lambda: closing


@pytest.mark.parametrize("is_stuck", [False, True])
def test_an_end_that_waits_for_a_store_and_a_rank_has_a_limit_and_what_can_be_closed_is(is_stuck, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("no such batch"), raising=False)
    monkeypatch.setattr(health, "_open", {})
    monkeypatch.setattr(health, "_WORDS_S", 0.2)
    monkeypatch.setattr(health, "_CLOSE_S", 1.0)
    store, done = Silent(), []
    for closing in (lambda: done.append("group"), store.answers.wait if is_stuck else lambda: None):
        health.opened(Group(closing))
    health.end(StoreClient(store), 0, lambda: done.append("world"))
    store.answers.set()
    assert done == (["group"] if is_stuck else ["group", "world"])  # the world would wait for the same rank
