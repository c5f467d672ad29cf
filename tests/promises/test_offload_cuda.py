"""A12, H01, M03: what is promised of offload, on a CUDA device, by the programs that prove it on the simulated one.

Host and device round a step differently, so with offload and without the numbers are near; wherever the same hardware steps,
as when states leave and come back, they are equal.
"""

import itertools
from functools import partial

import pytest

import accelerators
from accelerators.backends.cuda import CudaAccelerator
from tests import ranks
from tests.promises import test_offload, test_offload_bits, test_offload_memory, test_offload_states
from tests.promises.offloads import DTYPES, SHARDED, difference, in_threes, on_device, pairs
from zero.config.schema import LossScale, Offload

DEVICE = "cuda"

if reason := CudaAccelerator().unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.cuda

NEAR = {None: {"rtol": 1e-4, "atol": 1e-6}, "bfloat16": {"rtol": 2e-2, "atol": 1e-3}}  # an ulp of the weights
PROGRAMS = (
    test_offload.several_backwards,
    test_offload.declared_accumulation,
    test_offload.reset_in_every_way,
    test_offload_bits.edited_then_clipped,
)
# Two ranks cannot share a device in its own collectives.
WORLDS = pytest.mark.parametrize(
    "world",
    [
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(accelerators.get(DEVICE).device_count() < 2, reason=f"two ranks need two of {DEVICE}")
        ),
    ],
)


@WORLDS
@SHARDED
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_training_with_offload_is_near_the_one_without(program, stage, world):
    accumulation = {"accumulation": 3} if program is test_offload.declared_accumulation else {}
    for dtype in DTYPES:
        found = on_device(DEVICE, world, program, pairs(stage, (dtype,), **accumulation))
        for none, half, whole in in_threes(found):
            assert difference(half, none, **NEAR[dtype]) is None and difference(whole, none, **NEAR[dtype]) is None


@WORLDS
@SHARDED
def test_any_homes_of_groups_are_near_and_where_they_say(stage, world):
    options = {"stage": stage, "make": test_offload_bits.none_each}
    points = [options, {**options, "offload": "cpu"}, {**options, "make": test_offload_bits.half_each}]
    for (none, _), *others in on_device(DEVICE, world, test_offload_bits.train_and_say_where, points):
        assert [difference(found, none, **NEAR[None]) for found, _ in others] == [None] * 2
        everything, mixed = [homes.count("cpu") / len(homes) for _, homes in others]
        assert everything == 1.0 and 0.0 < mixed < 1.0


@WORLDS
@SHARDED
def test_infinity_in_any_tensor_is_skipped_by_all_with_no_state_touched(stage, world):
    points = [
        {"stage": stage, "offload": "cpu", "dtype": dtype, "on_nonfinite": "skip", "loss_scale": scale}
        for dtype, scale in ((None, None), ("float16", LossScale(initial=64.0, hysteresis=1)))
    ]
    if world == 2:  # the program puts them on each of two ranks
        for of_rank in on_device(DEVICE, world, test_offload_bits.infinities, points, test_offload_bits.items):
            assert [one[:2] for one, _ in of_rank] == [([], 0)] * 2


@WORLDS
@SHARDED
def test_of_1083_parameters_63_arrive_with_the_full_configuration(stage, world):
    for found, moved, identical, homes in ranks.run(
        world, test_offload.with_the_full_configuration, DEVICE, stage, apart=DEVICE, timeout=120.0
    ):
        assert [arrived for arrived, _, _ in found] == [test_offload.REACHED] * 2
        assert moved == test_offload.REACHED and identical and homes == {"cpu"}


@WORLDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_that_leave_and_come_back_have_the_bits_of_never_having_moved(world, dtype):
    for offload in (None, Offload(ratio=0.5)):
        point = {"stage": 2, "dtype": dtype, "offload": offload}
        expected = on_device(DEVICE, world, partial(test_offload_states.train, include=None, move=False), [point])
        for include in test_offload_states.CHOICES:
            found = on_device(DEVICE, world, partial(test_offload_states.train, include=include, move=True), [point])
            assert difference(found, expected) is None, (include, offload)


def test_what_finds_no_memory_comes_back_or_can_be_brought_later():
    points = [{"dtype": dtype} for dtype in DTYPES]
    expected = on_device(DEVICE, 1, partial(test_offload_states.fail_half_way, fails=False), points)
    assert difference(on_device(DEVICE, 1, partial(test_offload_states.fail_half_way, fails=True), points), expected) is None


def test_shares_on_the_host_are_pinned_unless_that_is_not_wanted():
    points = [{"stage": 2, "offload": offload} for offload in ("cpu", {"pinned": True}, {"pinned": False})]
    for one, other, pageable in on_device(DEVICE, 1, test_offload_memory.three_steps, points):
        assert (one[1], other[1], pageable[1]) == (True, True, False)
        assert one[0] == other[0] == pageable[0]


@WORLDS
def test_the_bytes_are_those_predicted(world):
    points = itertools.product((1, 2), DTYPES, (None, "cpu"), (4,), (1, 3))
    test_offload_memory.check_prediction(world, list(points), DEVICE)


def test_a_step_goes_on_with_what_is_computed_meanwhile_and_its_weights_are_there_for_whatever_comes_next():
    """Nothing here waits but what has to: late copies would show as other numbers than those of a device that waits always."""
    points = [{"stage": 2, "dtype": "bfloat16", "offload": "cpu"}] * 2
    for one, other in on_device(DEVICE, 1, many_windows, points):
        assert difference(one, other) is None


def many_windows(model, optimizer, rank):
    return test_offload.train_windows(model, optimizer, rank, (1, 3, 2) * 10)[-4:]
