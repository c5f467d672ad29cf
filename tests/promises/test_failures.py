"""One rank fails, by every way there is, in every phase of a step: the others say which and where, within the time limit.

The victim's process really ends, as the interpreter would end it, or stops where it is; the others are processes that must
come back by themselves.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import time
import traceback

import pytest
import torch
from torch import nn

import accelerators_sim as simulated
import zero
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.faults import FailingSGD, end_as_the_interpreter_does
from tests.zoo.case import filled
from zero.errors import ZeroError

LIMIT_S = 2.0  # the ranks' own
SLACK_S = 6.0  # the seconds in which ranks find out which rank failed, on a machine that does other things too
STEP = 3  # the one that it fails in


def fail(how, folder, world):
    if how == "raise":
        raise ArithmeticError("too much of it")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stall":
        while len(list(folder.glob("rank * knows"))) < world - 1:
            time.sleep(0.05)
        os._exit(0)
    if how == "end":
        atexit._run_exitfuncs()
        os._exit(0)


def train(rank, world, victim, how, where, folder, shared_memory=True):
    """The error that this rank saw, and how long after the failure."""
    failed = [0.0]

    def at(phase, step):
        if (phase, step) == (where, STEP):
            failed[0] = time.monotonic()
            if rank == victim:
                fail(how, folder, world)

    try:
        _train(at, folder, shared_memory)
    except ArithmeticError as error:
        end_as_the_interpreter_does(error)
    except ZeroError as error:
        (folder / f"rank {rank} knows").touch()
        return str(error), time.monotonic() - failed[0]
    return None


def _train(at, folder, shared_memory):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inner = FailingSGD(model.parameters(), lr=0.1)
    step = 0
    inner.at = lambda: at("update", step)
    options = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0, "elementwise": True, "stage": 2, "bucket_bytes": 64}
    optimizer = zero.shard(model, inner, shared_memory=shared_memory, **options)
    model[2].weight.register_hook(lambda _: at("backward", step))
    for step in range(1, 7):
        at("data", step)
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        at("after the backward", step)
        optimizer.step()
        at("after the step", step)
        optimizer.zero_grad()
        if step % 3 == 0:
            at("before a save", step)
            zero.save(folder / "checkpoints", optimizer)


# By place of the failure: the text that the other ranks read of that rank.
SEEN = {
    "data": "before a backward of step 3",
    "backward": "in a backward of step 3",
    "after the backward": "after a backward of step 3",
    "update": "in the update of step 3",
    "after the step": "before a backward of step 4",
    "before a save": "before a backward of step 4",
}


# The text that the other ranks have of it.
SAID = {
    "raise": "raised ArithmeticError: too much of it",
    "kill": "and is gone",
    "stall": "and did not come",
    "end": "and is gone",
}
EVERY = [(world, where, how) for world in (3, 2) for where in SEEN for how in SAID]
# A selection for the day, with every phase, every way to fail, and both numbers of ranks.
BY_DAY = [
    (3, "data", "raise"), (3, "backward", "kill"), (3, "after the backward", "stall"), (3, "update", "end"),
    (2, "after the backward", "end"), (2, "after the step", "raise"), (2, "before a save", "kill"),
]  # fmt: skip
POINTS = [*BY_DAY, *(pytest.param(*point, marks=pytest.mark.full) for point in EVERY if point not in BY_DAY)]


def told_by_others(world, victim, how, where, folder, shared_memory=True):
    found = ranks.outcomes(world, train, victim, how, where, folder, shared_memory, timeout=60.0)
    others = [outcome for outcome in found if outcome.rank != victim]
    assert all(outcome.ok for outcome in others), ranks.describe(found)
    for outcome in others:
        text, seconds = outcome.value
        assert seconds < LIMIT_S + SLACK_S, text
    if how == "raise":
        assert "ArithmeticError: too much of it" in found[victim].output
    return [outcome.value[0] for outcome in others]


@pytest.mark.promise("L01", "L02", "L03", "L07")
@pytest.mark.parametrize(("world", "where", "how"), POINTS)
def test_a_rank_that_fails_is_named_on_all_others_with_its_phase_and_step(world, where, how, tmp_path):
    for text in told_by_others(world, 1, how, where, tmp_path):
        assert "rank 1 " in text and SEEN[where] in text and SAID[how] in text, text
        if (where, how) == ("backward", "raise"):
            assert f"{SEEN[where]}, at parameter '2.weight'" in text, text


@pytest.mark.promise("L02")
@pytest.mark.parametrize(
    ("shared_memory", "place"), [(True, SEEN["backward"]), (False, "at a place that is not known, as the store")]
)
def test_the_rank_that_holds_the_store_is_named_and_what_it_did_if_ranks_share_memory(shared_memory, place, tmp_path):
    for text in told_by_others(3, 0, "kill", "backward", tmp_path, shared_memory):
        assert f"rank 0 was last seen {place}" in text and "and is gone" in text, text


def lose_before_the_first_step(rank, world, rebuilds):
    """The error of rank 0 when rank 1 is killed before its first backward, or its first one after a rebuild."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    options = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0, "stage": 2, "bucket_bytes": 64}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def train():
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    if rebuilds:
        hook = model[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train()
        hook.remove()
        optimizer.rebuild()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ZeroError) as caught:
        train()
    return str(caught.value)


@pytest.mark.promise("L02")
@pytest.mark.parametrize("rebuilds", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_rank_that_has_done_nothing_yet_was_last_seen_before_its_first_step(rebuilds):
    first, _ = ranks.outcomes(2, lose_before_the_first_step, rebuilds, timeout=60.0)
    assert first.ok, first
    assert "rank 1 was last seen before its first step, and is gone" in first.value


# Uneven batches ---------------------------------------------------------------------------------------------------------


def train_unevenly(rank, world, lengths, stage, then, folder):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0}
    optimizer = zero.shard(model, inner, stage=stage, bucket_bytes=64, **limits)
    try:
        for batch in torch.ones(lengths[rank], 2, 4):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        begun = time.monotonic()
        if then == "saves":
            zero.save(folder / "checkpoints", optimizer)
        if then == "goes on alone":
            time.sleep((LIMIT_S + SLACK_S) * (lengths[rank] < max(lengths)))
        if then == "ends" and lengths[rank] < max(lengths):
            fail("end", folder, world)
    except ZeroError as error:
        return str(error)
    return f"nothing was said in {time.monotonic() - begun:.1f} s"


@pytest.mark.promise("L03")
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("then", ["saves", "goes on alone", pytest.param("ends", marks=pytest.mark.full)])
def test_a_rank_that_runs_out_of_batches_is_named_with_the_step_that_it_did_not_take(then, stage, tmp_path):
    found = ranks.outcomes(3, train_unevenly, (10, 9, 10), stage, then, tmp_path, timeout=60.0)
    for outcome in (found[0], found[2]):
        assert outcome.ok, ranks.describe(found)
        if then == "saves":
            came = r"rank 1 of 3 came to a save, .* \(in a save, .*\), rank 0 to step, .* \(after a backward of step 10\)\."
            assert re.search(came, outcome.value), outcome.value
            assert found[1].value == outcome.value
        else:
            assert "rank 1 was last seen before a backward of step 10, and " in outcome.value, outcome.value


# Which parameter --------------------------------------------------------------------------------------------------------

PHASES = {
    "a hook on a gradient": ("at", "0.weight"),
    "a hook on a gradient that was there before": ("after", "0.bias"),
    "a hook after a gradient": ("at", "0.weight"),
    "a module": ("after", "2.weight"),
    "our own hook": ("at", "0.weight"),
}


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return explode()


def explode(*_):
    raise ArithmeticError("too much of it")


def break_off(rank, world, device, phase, how):
    """What is said on this rank, with the functions on the way to where it began."""
    if device == "sim":
        simulated.bring_up()
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))).to(device)
    if rank == 1 and phase == "a hook on a gradient that was there before":
        model[0].weight.register_hook(explode)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=64)
    if rank == 1 and phase == "a hook on a gradient":
        model[0].weight.register_hook(explode)
    if rank == 1 and phase == "a hook after a gradient":
        model[0].weight.register_post_accumulate_grad_hook(explode)
    if rank == 1 and phase == "our own hook":
        number = inside.number_of(optimizer, model[0].weight)  # a reference to the model would be a cycle
        collecting = faults.collecting_of(optimizer)
        collect = collecting.now
        collecting.put(lambda index, *rest, **named: explode() if index == number else collect(index, *rest, **named))
    if rank == 1 and phase == "a module":
        model[1].register_forward_hook(lambda *called: Broken.apply(called[-1]))
    loss = model(torch.ones(2, 4, device=device)).square().mean()
    try:
        optimizer.backward(loss) if how == "ours" else loss.backward()
        optimizer.step()
    except (ArithmeticError, ZeroError) as error:
        notes, way = getattr(error, "__notes__", []), [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        said = type(error).__name__, str(error), notes, way
    optimizer.zero_grad()
    return said


@pytest.mark.promise("L07")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=needs_sim)])
def test_an_error_in_a_backward_keeps_its_traceback_and_the_others_name_the_parameter(phase, device):
    how = "ours" if device == "cpu" else "plain"
    other, own = ranks.run(2, break_off, device, phase, how, apart="sim" if device == "sim" else "")
    place = " parameter ".join(PHASES[phase]).replace("parameter ", "parameter '") + "'"
    assert (own[0], own[1]) == ("ArithmeticError", "too much of it")
    assert own[3][-1] == "explode"
    if how == "ours" and sys.version_info >= (3, 11):
        assert own[2] == [f"This was in a backward of step 1, {place}."]
    assert other[0] == "RankFailed" and f"rank 1 failed or cleared its gradients at step 1, {place}, where" in other[1]
