"""Every short sequence of operations on a window gives what a model of it gives, errors included; and a fault is found."""

import itertools
from unittest import mock

import pytest

from tests import ranks, walk
from tests.devices import needs_sim
from tests.loopback import run_ranks
from tests.promises.offloads import place_of
from zero.window.agreement import GradEdits
from zero.window.records import Phase
from zero.window.rounds import Reducer
from zero.window.window import Window


def test_sequences_of_three_operations_on_one_rank_lead_through_the_phases():
    """The order of phases is asserted where a window passes from one to the next."""
    # Each 17th of 2,744 is walked. As 14 operations and 17 have no common divisor, any two follow each other at either place.
    reached, move, some = set(), Window.move_to, itertools.islice(walk.all_walks(3), 0, None, 17)

    def moving(window, phase):
        reached.add(phase)
        move(window, phase)

    with mock.patch.object(Window, "move_to", moving):
        assert not list(walk.wrong_alone(some, stage=2))
    assert reached == set(Phase) - {Phase.FAILED, Phase.AHEAD}  # the first is of a refused gradient, the other of an option


def walk_on_a_device(rank, world, every):
    return list(walk.wrong_alone(itertools.islice(walk.all_walks(3), 0, None, every), 2, str(place_of(rank, "sim"))))


@needs_sim
@pytest.mark.parametrize("every", [79, pytest.param(1, marks=pytest.mark.full)])
def test_sequences_of_three_operations_where_gradients_are_kept_until_their_bucket_is_full(every):
    assert ranks.run(1, walk_on_a_device, every, apart="sim", timeout=600.0) == [[]]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_sequences_of_three_operations_on_one_rank(stage):
    assert not list(walk.wrong_alone(walk.all_walks(3), stage))


@pytest.mark.full
def test_all_sequences_of_four_operations_on_one_rank():
    assert not list(walk.wrong_alone(walk.all_walks(4), stage=2))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2, 3])
def test_drawn_sequences_of_two_ranks_that_do_different_things(stage):
    assert not list(walk.wrong_together(range(12), 8, stage))


def test_a_backward_that_begins_at_a_parameter_not_used_before_finds_what_was_cleared():
    steps = [("assign",) * 2, ("step",) * 2, ("forget",) * 2, ("backward", "no_contribution")]
    assert run_ranks(2, lambda group: walk.walk(group, 2, steps)) == ["", ""]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_and_longer_sequences_of_two_ranks(stage):
    assert not list(walk.wrong_together(range(1000, 2500), 12, stage))


@pytest.mark.of_tests
@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (Window, "_drop", lambda self, index: None),
        (Window, "_scan_grads", lambda self: GradEdits(0, 0, 0)),
        (Window, "_collect_waiting", lambda self, index, weight: None),
        (Window, "check_cleared", lambda self: None),
        (Window, "_forget_cleared", lambda self: None),
        (Window, "backward_failed", property(lambda self: False)),
    ],
)
def test_a_planted_fault_is_found(owner, name, instead):
    with mock.patch.object(owner, name, instead):
        assert next(walk.wrong_alone(walk.all_walks(3), stage=2))


@pytest.mark.of_tests
def test_a_fault_that_a_rank_alone_cannot_have_is_found():
    with mock.patch.object(Reducer, "drop", lambda self: None):
        assert next(walk.wrong_together(range(60), 8, stage=2))
