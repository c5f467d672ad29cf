"""The phases of a window: which may follow which. Sequences of operations in tests/test_walk.py reach all of them."""

import pytest
import torch
from torch import nn

from tests import faults
from tests.zoo.case import filled
from zero import shard
from zero.errors import RankFailed
from zero.window.records import NEEDS_SYNC, TRANSITIONS, Phase


def test_every_phase_ends_in_a_new_window_but_a_running_update():
    for phase, following in TRANSITIONS.items():
        assert (Phase.EMPTY in following) == (phase not in (Phase.AHEAD, Phase.STEPPING))


def test_what_other_ranks_must_hear_of_is_not_settled_without_them():
    assert Phase.SETTLED not in TRANSITIONS[Phase.FAILED] | TRANSITIONS[Phase.TORN] | TRANSITIONS[Phase.STEPPING]
    assert {Phase.FAILED, Phase.TORN} <= NEEDS_SYNC


def test_a_transition_that_is_not_in_the_table_is_refused():
    model = filled(nn.Linear(2, 2))
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    with pytest.raises(AssertionError, match=r"from Phase\.EMPTY to Phase\.TORN"):
        optimizer.sharding.window.move_to(Phase.TORN)


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_gradient_that_is_refused_fails_the_window_unless_an_update_has_torn_it(is_torn):
    model = filled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), real=True)
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    window = optimizer.sharding.window
    model(torch.ones(3, 2)).sum().backward()
    if is_torn:
        with faults.update_fails(optimizer, LookupError), pytest.raises(LookupError):
            optimizer.step()
    model[0].weight.grad = model[1].weight.grad
    with pytest.raises(ValueError, match="belongs to its parameter"):
        model(torch.ones(3, 2)).sum().backward()
    assert window.phase is (Phase.TORN if is_torn else Phase.FAILED)
    model[0].weight.grad = None
    with pytest.raises(RankFailed):
        optimizer.settle()
    assert window.phase is Phase.ABORTED
