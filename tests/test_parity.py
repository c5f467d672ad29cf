"""Sharded training equals the oracle on the host, at the points of the day; `ci/test --full` runs the whole product.

Most points are trained by threads for ranks, which is cheap, and a part of them, in which every pair of the axes other than
the case occurs, by processes over gloo. What these gave is kept for all tests that need it.
"""

import itertools
from dataclasses import replace
from zlib import crc32

import pytest

from tests import grid, parity
from tests.zoo import CASES

NUM_PARTS = 32
AXES = ("stage", "world", "dtype", "bucket", "entry")


@pytest.fixture(scope="module")
def points():
    return [point for point in parity.of_the_day() if point.device == "cpu"]


@pytest.fixture(scope="module")
def over_gloo(points):
    """The first with each pair of settings; sharded ones come first."""
    seen, chosen = set(), []
    points = sorted(points, key=lambda point: crc32(repr(point).encode()))
    for point in sorted(points, key=lambda point: (point.world != 2, -point.world, point.stage == 0)):
        held = {frozenset((axis, getattr(point, axis)) for axis in pair) for pair in itertools.combinations(AXES, 2)}
        if not held <= seen:
            seen |= held
            chosen.append(point)
    return chosen


@pytest.fixture(scope="module")
def processes(over_gloo):
    """What processes for ranks gave, by point."""
    return dict(parity.carry(over_gloo))


def test_every_stage_is_trained_over_gloo_by_every_number_of_ranks(over_gloo):
    assert {(point.stage, point.world) for point in over_gloo} == set(itertools.product(range(3), range(1, 5)))


def test_processes_over_gloo_equal_the_oracle(processes):
    failures = parity.judged(processes)
    assert not failures, str(failures)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_threads_for_ranks_equal_the_oracle(points, over_gloo, full):
    """By day, trains the cheapest point of each case that no other way trains by day."""
    rest = [point for point in points if point not in over_gloo]
    elsewhere = {point.case for point in (*over_gloo, *points[::NUM_PARTS], *grid.sharded_weights())}
    by_case = {point.case: point for point in sorted(rest, key=grid.cost, reverse=True) if point.case not in elsewhere}
    assert by_case.keys() | elsewhere == set(CASES)
    failures = parity.run(rest if full else by_case.values(), loopback=True)
    assert not failures, str(failures)


def test_threads_for_ranks_give_the_bits_of_processes(processes):
    threads = dict(parity.carry(list(processes)[::2], loopback=True))
    failures = parity.differences(threads, processes)
    assert not failures, str(failures)


def test_the_long_path_of_gradients_gives_the_bits_of_the_short_one(processes):
    by_the_long_path = dict(parity.carry(processes, is_long=True))
    failures = parity.differences(by_the_long_path, processes)
    assert not failures, str(failures)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, NUM_PARTS))])
def test_deferred_sums_equal_the_oracle(points, part):
    failures = parity.run(replace(point, device=parity.WAITING) for point in points[part::NUM_PARTS])
    assert not failures, str(failures)


@pytest.mark.promise("S01")
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sharded_weights_equal_the_oracle(full):
    points = grid.sharded_weights(full)
    assert full is (len({point.case for point in points}) == len(CASES)) and {point.world for point in points} >= {1, 2}
    failures = parity.run(points)
    assert not failures, str(failures)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_fastest_kernels_equal_the_oracle(full):
    points = grid.of_fastest_kernels(full)
    assert len({point.case for point in points}) > 5 and {point.stage for point in points} == {0, 1, 2, 3}
    failures = parity.run(points, loopback=True)
    assert not failures, str(failures)


@pytest.mark.promise("R15")
@pytest.mark.promise("R02")
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_states_that_are_replicated_across_groups_of_ranks_equal_the_oracle(full):
    """Whether gradients are averaged, summed or divided by a number."""
    points = grid.replicated(full)
    failures = parity.run(points, loopback=True)
    failures.update(parity.run(points[::8]))
    assert not failures, str(failures)


@pytest.mark.of_tests
def test_the_whole_product_has_so_many_points():
    points = parity.everything()
    points = [point for point in points if point.kernels == "torch"]
    in_memory = [point for point in points if "disk" not in point.offload]
    host = sum(point.device == "cpu" and point.stage in grid.AXES["stage"] for point in in_memory)
    assert len(points) == len(set(points))
    assert host == len(list(grid.full(("cpu",))))
    assert len(points) - len(in_memory) == len(grid.on_disk(full=True))
    assert (len(CASES), host) == (127, 16728), "say here how many there are now, so that none gets lost"


@pytest.mark.promise("H07")
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_states_on_disk_equal_the_oracle_and_have_the_bits_of_states_in_memory(full):
    points = grid.on_disk(full)
    apart = dict(parity.carry(points, loopback=True))
    failures = parity.judged(apart)
    in_memory = dict(parity.carry([replace(point, offload="none") for point in points], loopback=True))
    failures.update(parity.differences({point: in_memory[replace(point, offload="none")] for point in points}, apart))
    assert not failures, str(failures)
