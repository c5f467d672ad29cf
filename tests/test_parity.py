"""Sharded training equals the oracle on a covering part of the parity grid; `ci/test --full` runs the whole product.

Points on the host are trained by threads for ranks, which is cheap, and a part of them, in which every case and every pair
of the other axes occurs, by processes over gloo as well. The simulated device always has processes.
"""

import itertools
from dataclasses import replace

import pytest

from tests import grid, parity
from tests.devices import needs_sim
from tests.zoo import CASES

AXES = ("stage", "world", "dtype", "bucket", "entry")


@pytest.fixture(scope="module")
def points():
    return grid.covering()


@pytest.fixture(scope="module")
def over_gloo(points):
    """Of the points on the host the first with each case, with each pair of settings and each triple with stage and world."""
    seen, chosen = set(), []
    for point in sorted(points, key=lambda point: (point.world != 2, -point.world, point.case)):
        if point.device != "cpu":
            continue
        held = {frozenset((axis, getattr(point, axis)) for axis in pair) for pair in itertools.combinations(AXES, 2)}
        held |= {(point.stage, point.world, axis, getattr(point, axis)) for axis in AXES[2:]}
        held |= {point.case, (point.case, point.stage > 0)}
        if not held <= seen:
            seen |= held
            chosen.append(point)
    return chosen


def test_every_case_is_trained_over_gloo(over_gloo):
    assert {point.case for point in over_gloo} == set(CASES)
    assert {(point.stage, point.world) for point in over_gloo} == set(itertools.product(range(3), range(1, 5)))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_processes_over_gloo_equal_the_oracle(over_gloo, world):
    failures = parity.run(point for point in over_gloo if point.world == world)
    assert not failures, str(failures)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_threads_for_ranks_equal_the_oracle(points, over_gloo, world):
    mine = [p for p in points if (p.device, p.world) == ("cpu", world) and p not in over_gloo]
    failures = parity.run(mine, loopback=True)
    assert not failures, str(failures)


def test_threads_for_ranks_give_the_bits_of_processes(over_gloo):
    failures = parity.differences(over_gloo[::5])
    assert not failures, str(failures)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_that_wait_equal_the_oracle(over_gloo, world):
    points = [replace(point, device=parity.WAITING) for point in over_gloo if point.world == world]
    failures = parity.run(points)
    assert not failures, str(failures)


@needs_sim
@pytest.mark.parametrize("device", grid.DEVICES[1:])
def test_simulated_devices_equal_the_oracle(points, device):
    failures = parity.run(point for point in points if point.device == device)
    assert not failures, str(failures)


@needs_sim
def test_what_nobody_asks_a_device_for_may_be_missing():
    failures = parity.run(grid.spot_checks())
    assert not failures, str(failures)


def test_the_whole_product_has_so_many_points():
    points = parity.everything()
    host = sum(point.device == "cpu" for point in points)
    assert len(points) == len(set(points))
    assert host == len(list(grid.full(("cpu",))))
    assert (len(CASES), host) == (123, 16152), "say here how many there are now, so that none gets lost"
