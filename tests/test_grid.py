"""The covering part of the parity grid covers what it says, in the number of points that it says."""

import itertools

import pytest

from accelerators_sim import CAPABILITIES
from tests import grid
from tests.zoo import CASES

pytestmark = pytest.mark.of_tests

FEW_CASES = (
    "two_layers",
    "three_dtypes_in_one_group",
    "overflow_on_one_rank_skips_the_step_on_all",
    "torchs_own_grad_scaler_with_one_overflow",
    "rank_with_nothing_to_send_back",
)
AXES = ("stage", "world", "dtype", "bucket", "entry", "device", "case", "offload")


def holds(points):
    """Pairs and (stage, world) triples, written apart from the code under test."""
    held = set()
    for point in points:
        for one, other in itertools.combinations(AXES, 2):
            held.add(((one, getattr(point, one)), (other, getattr(point, other))))
        for axis in {*AXES[2:]} - {"case"}:
            held.add((("stage", point.stage), ("world", point.world), (axis, getattr(point, axis))))
    return held


@pytest.fixture(scope="module")
def points():
    return grid.covering()


def test_the_number_of_points(points):
    # A case needs one for each device, or for each stage where there are more of those; most take one or two more.
    assert len(points) == len(set(points))
    least = sum(max(3, len({point.device for point in points if point.case == case})) for case in CASES)
    assert least <= len(points) <= 2 * least


def worlds_of(points):
    worlds = {}
    for point in points:
        worlds.setdefault(point.case, set()).add(point.world)
    return worlds


def test_every_case_meets_two_and_three_ranks_and_both_devices_and_some_go_further(points):
    devices = {}
    for point in points:
        devices.setdefault(point.case, set()).add(point.device)
    assert worlds_of(points).keys() == devices.keys() == set(CASES)
    assert all(worlds >= {2, 3} for worlds in worlds_of(points).values())
    assert all(found >= {"cpu"} if CASES[case].host_only else found >= {"cpu", "sim"} for case, found in devices.items())
    assert 30 <= sum(worlds >= {1, 2, 3, 4} for worlds in worlds_of(points).values()) <= 40
    assert 15 <= sum(found >= set(grid.DEVICES) - {"sim-bf16_collectives", "sim-fp64"} for found in devices.values()) <= 20


def test_every_pair_and_every_triple_with_stage_and_world_occurs(points):
    assert holds(points) == grid.wanted()


def test_what_is_wanted_is_what_all_points_of_the_day_hold():
    devices = ("cpu", "sim", "sim-bf16", "sim-fp64")
    assert grid.wanted(devices, FEW_CASES) == holds(filter(grid.by_day, grid.full(devices, FEW_CASES)))


def test_every_point_can_be(points):
    assert all(grid.can_be(point) and grid.by_day(point) for point in points)
    assert not any(point.dtype not in CASES[point.case].dtypes for point in points)
    assert not any(point.device == "sim-bf16" and point.dtype == "bf16" for point in points)
    assert not any(point.world < CASES[point.case].needs_world for point in points)


def test_the_same_seed_gives_the_same_points_and_another_seed_others():
    devices = ("cpu", "sim")
    assert grid.covering(devices, FEW_CASES) == grid.covering(devices, FEW_CASES)
    assert grid.covering(devices, FEW_CASES, seed=1) != grid.covering(devices, FEW_CASES)


def test_every_case_that_can_be_is_offloaded_in_part_and_some_wholly_on_a_device_beside_a_host(points):
    in_part, wholly = ({point.case for point in points if point.offload == share} for share in ("half", "all"))
    assert in_part == {name for name, case in CASES.items() if not case.host_only}
    assert 15 <= len(wholly) <= 20 and wholly < in_part
    assert not any(point.device == "cpu" for point in points if point.offload != "none")


def test_only_fp16_scales_the_loss(points):
    for point in points:
        assert (point.loss_scale() is None) == (point.dtype != "fp16" or not CASES[point.case].scaled)
    assert any(isinstance(point.loss_scale(), grid.DynamicScale) for point in points)
    assert any(isinstance(point.loss_scale(), grid.StaticScale) for point in points)


def test_the_devices_lack_what_the_simulated_device_can_lack():
    assert {"group"} | set(grid.LACKS) | set(grid.UNNOTICED) == set(CAPABILITIES)  # without_group has the first
