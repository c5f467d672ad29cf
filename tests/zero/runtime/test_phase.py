"""The phases of a window: which may follow which, and that no training reaches another order."""

import contextlib
import random
from unittest import mock

import pytest
import torch
from torch import nn

from tests.loopback import run_ranks
from tests.zoo.case import filled
from zero import shard
from zero.errors import ZeroError
from zero.window.window import NEEDS_SYNC, TRANSITIONS, Phase, Window


class Failure(Exception):
    """What a test raises."""


def test_every_phase_ends_in_a_new_window_but_a_running_update():
    for phase, following in TRANSITIONS.items():
        assert (Phase.EMPTY in following) == (phase is not Phase.STEPPING)


def test_what_other_ranks_must_hear_of_is_not_settled_without_them():
    assert Phase.SETTLED not in TRANSITIONS[Phase.FAILED] | TRANSITIONS[Phase.TORN] | TRANSITIONS[Phase.STEPPING]
    assert {Phase.FAILED, Phase.TORN} <= NEEDS_SYNC


def test_a_transition_that_is_not_in_the_table_is_refused():
    model = filled(nn.Linear(2, 2))
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    with pytest.raises(AssertionError, match=r"from Phase\.EMPTY to Phase\.TORN"):
        optimizer.sharding.window.move_to(Phase.TORN)


def fail_in_backward(model, optimizer):
    hook = model[0].weight.register_hook(mock.Mock(side_effect=Failure))
    try:
        backward(model, optimizer)
    finally:
        hook.remove()


def fail_in_update(model, optimizer):
    with mock.patch.object(optimizer.sharding.updater, "step", side_effect=Failure):
        optimizer.step()


def fail_to_publish(model, optimizer):
    with mock.patch.object(optimizer.sharding.publisher, "end", side_effect=Failure):
        optimizer.step()


def wrong_grad(model, optimizer):
    if model[1].weight.grad is not None:
        model[0].weight.grad = model[1].weight.grad
    backward(model, optimizer)


def backward(model, optimizer):
    model(torch.ones(3, 2)).square().sum().backward()


def backward_apart(model, optimizer):
    with optimizer.no_sync():
        backward(model, optimizer)


def own_grad(model, optimizer):
    model[1].bias.grad = torch.ones(2)


def remove_grad(model, optimizer):
    model[0].bias.grad = None


ACTIONS = (
    backward, backward, backward_apart, fail_in_backward, fail_in_update, fail_to_publish, wrong_grad, own_grad, remove_grad,
    lambda model, optimizer: optimizer.step(),
    lambda model, optimizer: optimizer.settle(),
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: optimizer.no_contribution(),
    lambda model, optimizer: optimizer.weight(2.0),
    lambda model, optimizer: optimizer.flush(),
    lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
)  # fmt: skip


def act(seed, world, seen):
    """Does forty things in a random order, on all ranks the same, and goes on after every error that a user may see."""

    def program(group):
        model = filled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), real=True)
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=seed % 4, group=group)
        chance = random.Random(seed)
        for _ in range(40):
            with contextlib.suppress(Failure, ValueError, NotImplementedError, ZeroError):
                chance.choice(ACTIONS)(model, optimizer)
        optimizer.close()

    move = Window.move_to

    def moving(window, phase):
        seen.add((window.phase, phase))
        move(window, phase)

    with mock.patch.object(Window, "move_to", moving):
        run_ranks(world, program)


@pytest.mark.parametrize("world", [1, 2])
def test_no_training_reaches_a_transition_that_is_not_in_the_table(world):
    seen = set()
    for seed in range(30):
        act(seed, world, seen)
    assert {after for _, after in seen} == set(Phase)
    assert all(after in TRANSITIONS[before] for before, after in seen)
