"""At stage 3 one of two ranks fails while the other gathers: the other says so within the time limit, and its process ends.

Both ranks come to the same place before one of them fails there, so that the other gathers, settles or steps after that.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time

import pytest
import torch
from torch import nn

import zero
from tests import faults, inside, ranks
from tests.devices import needs_linux
from tests.faults import FailingSGD, end_as_the_interpreter_does
from zero.errors import GroupLost, ZeroError

LIMIT_S = 2.0  # the ranks' own
SLACK_S = 6.0  # the seconds in which a rank finds out who failed (2.1 at most, on a machine that does little else)
MEETING_S = 40.0  # the seconds of a meeting, which is part of no measurement
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


def wait_for(file):
    end = time.monotonic() + MEETING_S
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)


def train(rank, world, how, where, shared_memory, folder):
    """The error that this rank saw, what it was doing, and how long after the failure that was."""
    doing = [""]
    mark = folder / "fails"
    (folder / f"process of {rank}").write_text(str(os.getpid()))

    def at(place, step):
        doing[0] = place
        if (place, step) != (where, STEP) or mark.exists():
            return
        (folder / f"{rank} is there").touch()
        if rank == VICTIM:
            wait_for(folder / f"{1 - VICTIM} is there")
            (folder / "time").write_text(str(time.monotonic()))
            (folder / "time").rename(mark)
            fail(how)
        wait_for(mark)

    error = None
    try:
        _train(at, shared_memory)
    except ArithmeticError as raised:
        end_as_the_interpreter_does(raised)
    except ZeroError as raised:
        if rank == VICTIM:  # its connections are gone, and those of the pool with them
            end_as_the_interpreter_does(raised)
        error = type(raised).__name__, str(raised)
    took = time.monotonic() - float(mark.read_text())
    if how == "stop" and rank != VICTIM:  # it would stay for ever
        os.kill(int((folder / f"process of {VICTIM}").read_text()), signal.SIGKILL)
    return error, doing[0], took


def owe(rank, world, folder):
    """What the other rank says where its answer to one that is gone failed, in a thread, before it fetches anything else."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"stage": 3, "bucket_bytes": 64, "gathered_bytes": "all", "shared_memory": False, "timeout_s": LIMIT_S}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    read = model[0].weight.detach().clone
    read()  # the weight is whole then, so that an edit fetches nothing
    (folder / f"{rank} has read").touch()
    wait_for(folder / f"{1 - rank} has read")
    if rank == VICTIM:
        with torch.no_grad():
            model[0].weight.mul_(1.0)
            inside.free_whole_chunks(optimizer)
        threading.Thread(target=read, daemon=True).start()  # stands for an edit that the other rank has not made
        time.sleep(0.5)
        (folder / "fails").touch()
        fail("kill")
    wait_for(folder / "fails")
    time.sleep(0.5)
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    time.sleep(0.5)
    try:
        model[1].weight.detach().clone()
    except ZeroError as raised:
        return type(raised).__name__, str(raised)
    return None


def _train(at, shared_memory):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inner = FailingSGD(model.parameters(), lr=0.1)
    step = 0
    inner.at = lambda: at("update", step)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0}
    # No layer fits the budget, so each is gathered in forward and again in backward; one of them ahead of its use.
    options = {"stage": 3, "bucket_bytes": 64, "gathered_bytes": 0, "shared_memory": shared_memory, **limits}
    optimizer = zero.shard(model, inner, **options)
    model[2].register_forward_pre_hook(lambda *_: at("forward", step))
    model[3].register_full_backward_hook(lambda *_: at("backward", step))
    for step in range(1, 5):
        at("begin", step)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.0)  # an edit gathers the weight from its owners, also if ranks share memory
        # The backward of what was computed with the first layer's weight needs that weight.
        loss = model(torch.ones(2, 4, requires_grad=True)).square().mean()
        loss.backward()
        at("settling", step)
        optimizer.step()
        at("after the step", step)
        optimizer.zero_grad()


# The places where a rank can fail, each with the other rank's text of it.
SEEN = {
    "forward": "before a backward of step 2",
    "backward": "in a backward of step 2",
    "settling": "after a backward of step 2",
    "update": "in the update of step 2",
}
# A rank that raises answers others until its process ends. Of connections that end it cannot be known why.
SAID = {
    "raise": "raised ArithmeticError: too much of it",
    "kill": "and is gone",
    "stop": "and did not come",
    "connections": "and is gone",
}
# The work of the other rank when it finds out: an update needs nobody, the next gather does.
ORDER = (*SEEN, "begin")
END = "before a backward of step 3"
DAY = (("forward", "kill", False), ("backward", "stop", True))
EVERY = [(where, how, shared) for where in SEEN for how in SAID for shared in (True, False)]
POINTS = [point if point in DAY else pytest.param(*point, marks=pytest.mark.full) for point in EVERY]


def texts_of(where, how, shared_memory):
    """Returns the places that the text may name. Without connections, ranks that share memory go on while messages there do."""
    later = [*SEEN.values(), END][list(SEEN).index(where) :]
    return later if how == "connections" and shared_memory else later[:1]


@needs_linux
@pytest.mark.parametrize(("where", "how", "shared_memory"), POINTS)
def test_a_rank_that_fails_while_another_gathers_is_named_in_time(where, how, shared_memory, tmp_path):
    found = ranks.outcomes(2, train, how, where, shared_memory, tmp_path, timeout=90.0)
    assert found[0].ok, ranks.describe(found)  # the rank's process ended too, within the limit of the pool
    assert found[VICTIM].kind == "died", ranks.describe(found)
    error, doing, seconds = found[0].value
    assert error is not None, ranks.describe(found)
    name, text = error
    assert name == "GroupLost" and ": rank 1 " in text and SAID[how] in text, text
    assert any(place in text for place in texts_of(where, how, shared_memory)), text
    assert seconds < LIMIT_S + SLACK_S, (text, seconds)
    assert doing in ORDER[ORDER.index(where) :], (text, doing)
    if how == "raise":
        assert "ArithmeticError: too much of it" in found[VICTIM].output


def test_a_rank_that_is_gone_with_an_answer_owed_to_it_is_named(tmp_path):
    found = ranks.outcomes(2, owe, tmp_path, timeout=60.0)
    assert found[0].ok, ranks.describe(found)
    assert found[VICTIM].kind == "died" and found[0].value is not None, ranks.describe(found)
    name, text = found[0].value
    assert name == "GroupLost" and ": rank 1 was last seen" in text and "and is gone" in text, text


def close_alone(rank, world, shared_memory):
    """What the other rank says in close(), each time, and what becomes of the weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2).requires_grad_(False))
    options = {"stage": 3, "bucket_bytes": 64, "gathered_bytes": 0, "shared_memory": shared_memory, "timeout_s": LIMIT_S}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.any_rank(False)
    if rank == VICTIM:
        fail("kill")
    said = []
    for _ in range(2):
        with contextlib.suppress(ZeroError):
            optimizer.any_rank(False)
        try:
            optimizer.close()
        except ZeroError as raised:
            said.append((type(raised).__name__, str(raised)))
    del optimizer
    gc.collect()
    try:
        model[0].weight.clone()
    except RuntimeError as raised:
        said.append(("after", str(raised)))
    return said


@pytest.mark.parametrize("shared_memory", [True, False])
def test_close_after_a_lost_group_says_what_to_do_each_time_and_deleting_it_ends(shared_memory):
    found = ranks.outcomes(2, close_alone, shared_memory, timeout=60.0)
    assert found[0].ok, ranks.describe(found)
    first, second, (_, after) = found[0].value
    assert first == second and first[0] == "GroupLost", found[0].value
    assert first[1].startswith("Cannot close: the weights are in shares") and "Call rebuild() first" in first[1]
    assert "load the last checkpoint in a new process" in first[1]
    assert "Cannot read a weight: its optimizer was closed" in after
    assert "Traceback" not in found[0].output


def unable_to_answer(rank, world, folder):
    """The error of each rank, where the thread of one of them that answers the other fails."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = {"bucket_bytes": 64, "gathered_bytes": 0, "shared_memory": False, "first_step_timeout_s": 600.0}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **options)
    file = folder / "fails"

    def fail_to_answer():
        file.touch()
        raise ArithmeticError("too much of it")

    if rank == VICTIM:
        faults.cannot_answer(optimizer, fail_to_answer)
        wait_for(file)
    with pytest.raises(GroupLost) as caught:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with contextlib.suppress(ZeroError):
        optimizer.close()
    return str(caught.value)


def test_a_rank_that_cannot_answer_ends_the_group_and_says_why(tmp_path):
    for said in ranks.run(2, unable_to_answer, tmp_path, timeout=60.0):
        assert "Cannot send weights to other ranks: ArithmeticError: too much of it" in said
