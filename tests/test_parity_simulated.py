"""Sharded training equals the oracle on the simulated device, with all that it has and without one thing."""

from dataclasses import replace

import pytest

from tests import grid, parity
from tests.devices import needs_sim

pytestmark = needs_sim

NUM_PARTS = 48


@pytest.fixture(scope="module")
def points():
    return parity.of_the_day()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, NUM_PARTS))])
@pytest.mark.parametrize("device", grid.DEVICES[1:])
def test_simulated_devices_equal_the_oracle(points, device, part):
    failures = parity.run([point for point in points if point.device == device][part::NUM_PARTS])
    assert not failures, str(failures)


@pytest.mark.full
def test_what_nobody_asks_a_device_for_may_be_missing():
    failures = parity.run(point for point in grid.spot_checks() if point.world == 2)
    assert not failures, str(failures)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)], ids=["day", "night"])
def test_a_device_without_a_group_of_its_own_equals_the_oracle_whatever_else_it_lacks(full):
    failures = parity.run(grid.without_group(full))
    assert not failures, str(failures)


@pytest.mark.parametrize("every", [7979, pytest.param(7, marks=pytest.mark.full)])  # `python -m tests.parity` runs all
def test_sharded_weights_on_the_simulated_device_equal_the_oracle(every):
    failures = parity.run(grid.simulated_sharded_weights(every))
    assert not failures, str(failures)


@pytest.mark.parametrize("every", [5987, pytest.param(61, marks=pytest.mark.full)])
def test_replicated_states_on_the_simulated_device_equal_the_oracle(every):
    failures = parity.run(grid.simulated_replicas(every))
    assert not failures, str(failures)


@pytest.mark.parametrize("queues", [8, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(("below", "every"), [(120, 7979), pytest.param(1, 331, marks=pytest.mark.full)])
def test_over_collectives_that_streams_wait_for_training_equals_the_oracle(points, below, every, queues):
    chosen = [point for point in points if point.device == "sim"][::below]
    chosen += [*grid.simulated_sharded_weights(every), *grid.simulated_replicas(every)]
    chosen = [replace(point, device=f"{grid.NCCL}-{queues}") for point in chosen if point.device == "sim"]
    assert {point.stage for point in chosen} == {0, 1, 2, 3}
    failures = parity.run(chosen)
    assert not failures, str(failures)


@pytest.mark.full
def test_below_stage_3_one_hardware_queue_is_enough(points):
    chosen = [point for point in (*points, *grid.simulated_replicas(331)) if point.device == "sim" and point.stage < 3]
    failures = parity.run(replace(point, device=f"{grid.NCCL}-1") for point in chosen)
    assert not failures, str(failures)
