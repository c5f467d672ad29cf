"""Random lives: a few by day, the others at night; and what they are, as nobody would notice a life without events."""

from collections import Counter

import pytest

import zero
from tests import random_lives
from tests.random_lives import EVENTS, STAGES, Plan, difference

BY_DAY, AT_NIGHT = range(16), range(16, 300)


@pytest.mark.parametrize("seed", BY_DAY)
def test_a_random_life_is_that_of_plain_torch(seed, tmp_path):
    assert difference(seed, tmp_path) is None


@pytest.mark.full
@pytest.mark.parametrize("seed", AT_NIGHT)
def test_random_lives_are_those_of_plain_torch(seed, tmp_path):
    assert difference(seed, tmp_path) is None


def test_lives_by_day_have_every_event_stage_and_number_of_ranks():
    plans = [Plan.draw(seed) for seed in BY_DAY]
    events = Counter(kind for plan in plans for kind, _ in plan.events)
    assert events.keys() == EVENTS.keys() and min(events.values()) >= 2
    assert {plan.stage for plan in plans} == set(STAGES) and {plan.world for plan in plans} == {1, 2, 3}
    assert {plan.homes for plan in plans} == {"device", "cpu", "disk"}


FAULTS = {
    "an edit is lost": (random_lives.ShardedLife, "edit", lambda *_: None),
    "a load brings nothing back": (zero, "load", lambda *_: None),
    "a hook is not called": (random_lives.ShardedLife, "hook", lambda *_: None),
    "a gradient is that of one rank": (
        random_lives.ShardedLife,
        "loss",
        lambda life, rank, uses_branch: random_lives.Life.loss(life, 0, uses_branch),
    ),
}


@pytest.mark.of_tests
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault][:2], FAULTS[fault][2])
    assert any(difference(seed, tmp_path / str(seed)) for seed in BY_DAY)
