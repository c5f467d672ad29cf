"""At stage 3 one of two ranks fails while the other gathers: the other says so within the time limit, and its process ends.

Both ranks come to the same place before one of them fails there, so that the other gathers, settles or steps after that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.faults import FailingSGD, end_as_the_interpreter_does
from zero.errors import ZeroError

LIMIT_S = 2.0  # the ranks' own
SLACK_S = 8.0  # to find out who it is and to be scheduled, on a machine that does other things too
MEETING_S = 40.0  # which takes part in no measurement
STEP = 2  # the one that it fails in
VICTIM = 1


def shut_connections():
    """Every connection over TCP of this process, as if its host had gone from the network."""
    num_shut = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a socket, or closed since
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # one that listens is left alone
                connection.shutdown(socket.SHUT_RDWR)
                num_shut += 1
            connection.close()
    assert num_shut


def fail(how):
    if how == "raise":
        raise ArithmeticError("too much of it")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "connections":
        shut_connections()


def train(rank, world, how, where, shared_memory, folder):
    """The error that this rank saw, what it was doing, and how long after the failure that was."""
    failed, doing = [], [""]
    (folder / f"process of {rank}").write_text(str(os.getpid()))

    def at(place, step):
        doing[0] = place
        if (place, step) != (where, STEP):
            return
        mark = folder / "fails"
        if rank == VICTIM:
            mark.touch()
            fail(how)
        end = time.monotonic() + MEETING_S
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.01)
        failed.append(time.monotonic())

    error = None
    try:
        _train(at, shared_memory)
    except ArithmeticError as raised:
        end_as_the_interpreter_does(raised)
    except ZeroError as raised:
        error = type(raised).__name__, str(raised)
    took = time.monotonic() - failed[0]
    if how == "stop" and rank != VICTIM:  # it would stay for ever
        os.kill(int((folder / f"process of {VICTIM}").read_text()), signal.SIGKILL)
    return error, doing[0], took


def _train(at, shared_memory):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inner = FailingSGD(model.parameters(), lr=0.1)
    step = 0
    inner.at = lambda: at("update", step)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0}
    # No layer fits the budget, so each is gathered in forward and again in backward.
    options = {"stage": 3, "bucket_bytes": 64, "gathered_bytes": 0, "shared_memory": shared_memory, **limits}
    optimizer = zero.shard(model, inner, **options)
    model[2].register_forward_pre_hook(lambda *_: at("forward", step))
    model[1].register_full_backward_hook(lambda *_: at("backward", step))
    for step in range(1, 5):
        at("begin", step)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.0)  # what is edited is gathered from its owners, also where ranks share memory
        # What is computed of the first layer's weight needs it in backward.
        loss = model(torch.ones(2, 4, requires_grad=True)).square().mean()
        loss.backward()
        at("settling", step)
        optimizer.step()
        at("after the step", step)
        optimizer.zero_grad()


# What the other rank may be doing when it finds out.
MEETS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "settling": ("settling",),
    "update": ("update", "begin"),  # the update itself needs nobody; the next gather does
}
SAID = {
    "raise": "rank 1 .*raised ArithmeticError: too much of it",
    "kill": "rank 1 .*and is gone",
    "stop": "rank 1 .*and did not come",
    "connections": "",
}
PLACES, WAYS = tuple(MEETS), tuple(SAID)
# By day every place and every way twice, and each of them with the shared memory and without.
DAY = {(PLACES[n], WAYS[(n + shift) % 4], bool((n + shift) % 2)) for n in range(4) for shift in (0, 1)}
EVERY = [(where, how, shared) for where in PLACES for how in WAYS for shared in (True, False)]
POINTS = [point if point in DAY else pytest.param(*point, marks=pytest.mark.full) for point in EVERY]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="connections are looked up in /proc, which only Linux has")
@pytest.mark.parametrize(("where", "how", "shared_memory"), POINTS)
def test_a_rank_that_fails_while_another_gathers_is_named_in_time(where, how, shared_memory, tmp_path):
    found = ranks.outcomes(2, train, how, where, shared_memory, tmp_path, timeout=90.0)
    assert found[0].ok, ranks.describe(found)  # so its process ended too, within the limit of the pool
    error, doing, seconds = found[0].value
    assert error is not None and seconds < LIMIT_S + SLACK_S, (error, doing, seconds)
    assert doing in MEETS[where], (error, doing)
    print(where, how, shared_memory, error, doing, seconds)
