"""Random trainings: drawn by their seed alone, fair to whoever is judged by them, and right when they are sharded.

Fixed seeds are the same in every run. Fresh ones follow from a number that the run prints, and RANDOM_TRAININGS=number gives
the same ones again; a failure says the seed of its training, which `python -m tests.random_training SEED` repeats.
"""

import os
import random
from dataclasses import replace

import pytest
import torch

from tests import grid, parity
from tests.devices import needs_sim
from tests.oracle import compare, reference, weights_of
from tests.random_training import Plan, amplifies, fresh_seeds, point_of, random_case
from tests.zoo.case import generator

SEEDS = range(12)


@pytest.mark.of_tests
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_the_same_training_whatever_the_order_of_its_sums(seed):
    case, again = random_case(seed), random_case(seed)
    expected = reference(case, 3)
    compare(reference(again, 3), expected, exact=True, state=True, name=case.name)
    turned = reference(case, 3, backwards_order=True, divide_late=False)
    compare(turned, expected, exact=False, state=True, name=case.name)
    before, after = weights_of(case.build()), expected[0].steps[-1].weights
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(weight.isfinite().all() for weight in after.values())


def test_every_choice_is_drawn_by_some_seed():
    plans = [Plan.draw(seed) for seed in range(200)]
    for field, least in {
        "branches": 3,
        "checkpointed": 3,
        "tied": 2,
        "unused": 2,
        "window": 3,
        "local": 2,
        "optimizer": 6,
        "groups": 4,
        "clip": 4,
        "edit": 5,
        "to_zeros": 2,
        "retain": 2,
        "steps": 4,
    }.items():
        assert len({getattr(plan, field) for plan in plans}) == least, field
    assert any(len(plan.uses) > len(plan.layers) for plan in plans)
    assert any(plan.frozen is not None for plan in plans)


def test_fresh_seeds_follow_from_their_base():
    found = fresh_seeds(3, base=7)
    assert len(set(found)) == 3
    assert found == fresh_seeds(3, base=7) != fresh_seeds(3, base=8)


@pytest.mark.of_tests
def test_a_training_that_amplifies_roundings_judges_nobody():
    assert amplifies(1809212327)  # momentum over five windows, which grows differences of 6e-8 to 1e-6
    assert amplifies(1456464198)  # the same on two ranks, with a norm in between
    drawn = torch.randint(0, 2**31, (20,), generator=generator("fresh seeds", 7)).tolist()
    assert sum(map(amplifies, drawn)) <= 4, "so few that what is left is still everything"


def test_a_failure_says_the_seed():
    case = random_case(4242)
    ours, expected = reference(case, 2), reference(case, 2)
    next(iter(ours[1].steps[0].weights.values())).add_(0.1)
    with pytest.raises(AssertionError, match="random training of seed 4242: step 0, rank 1 of 2"):
        compare(ours, expected, exact=False, name=case.name)


# Sharded ----------------------------------------------------------------------------------------------------------------

FIXED = range(1000, 1040)
NUM_FRESH, NUM_OVER_GLOO = 8, 6


@pytest.fixture(scope="module")
def fresh():
    base = int(os.environ.get("RANDOM_TRAININGS") or random.SystemRandom().randrange(2**31))
    print(f"RANDOM_TRAININGS={base}")
    points = [point_of(seed) for seed in fresh_seeds(NUM_FRESH, base)]
    points[::4] = [replace(point, stage=3, entry="regions") for point in points[::4]]
    return base, points


@pytest.mark.full
def test_fixed_seeds_are_right_when_sharded():
    points = [point_of(seed) for seed in FIXED]
    failures = parity.run([*points, *(replace(point, stage=3, entry="regions") for point in points)], loopback=True)
    assert not failures, str(failures)


def test_fresh_seeds_are_right_when_sharded(fresh):
    base, points = fresh
    failures = parity.run(points, loopback=True)
    assert not failures, f"RANDOM_TRAININGS={base}\n{failures}"


@pytest.mark.full
def test_a_few_fresh_seeds_are_right_over_gloo(fresh):
    base, points = fresh
    failures = parity.run([point for point in points if point.world > 1][:NUM_OVER_GLOO])
    assert not failures, f"RANDOM_TRAININGS={base}\n{failures}"


@pytest.mark.full
@needs_sim
def test_seeds_are_right_over_collectives_that_streams_wait_for():
    """Every third one at stage 3, and of these every other one in regions."""
    points = [replace(point_of(seed), device=f"{grid.NCCL}-8") for seed in range(1000, 1060) if not amplifies(seed)]
    points[::3] = [replace(point, stage=3, entry="plain") for point in points[::3]]
    points[::6] = [replace(point, entry="regions") for point in points[::6]]
    failures = parity.run(points)
    assert not failures, str(failures)


def test_seeds_meet_every_stage_world_and_bucket():
    points = [point_of(seed) for seed in FIXED]
    assert {(point.stage, point.world) for point in points} == {(stage, world) for stage in range(3) for world in (1, 2, 3, 4)}
    assert {(point.bucket, point.entry) for point in points} == {(b, e) for b in ("tiny", "huge") for e in ("plain", "engine")}
