"""The loss scale follows the rule that the oracle has, and says when it is stuck."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import DynamicScale
from zero.config.deepspeed.reader import read_deepspeed
from zero.plan.scaling import LossScale, Scaling
from zero.plan.stages import STAGES, stage_of
from zero.sharding.loss_scaler import LossScaler

unhurried = settings(deadline=None)  # other work may have the core
steps = st.lists(st.booleans(), max_size=60)


@unhurried
@given(steps, st.integers(1, 5), st.integers(1, 3), st.integers(0, 6))
def test_it_moves_as_the_oracle_says(outcomes, window, hysteresis, start):
    ours = LossScale(2.0**start, window, hysteresis=hysteresis)
    oracle = DynamicScale(2.0**start, window, hysteresis)
    for finite in outcomes:
        ours = ours.after(finite)
        oracle.update(finite)
        assert ours.value == oracle.scale


# The scale of DeepSpeed 0.19.8's dynamic scaler after each step, from 1024 on; "x" is an overflow.
DEEPSPEED = [
    (2, 1, False, ".........", "10 10 11 11 12 12 13 13 14"),
    (2, 1, False, "x.....x..x...", "9 9 9 10 10 11 10 10 10 9 9 9 10"),
    (3, 2, False, "x....x.x....x....xx....", "10 10 10 10 11 11 11 10 10 10 10 11 11 11 11 11 12 12 11 11 11 11 12"),
    (3, 2, True, "x....x.x....x....xx....", "10 10 10 10 11 11 11 11 11 11 11 12 12 12 12 12 13 13 12 12 12 12 13"),
    (1, 3, False, "xxxx..x...xx..", "10 10 9 8 8 9 9 9 10 11 11 11 11 12"),
    (
        4,
        2,
        False,
        ".xx..x.x.x...x...xx.....x....x.....x...x",
        "10 10 9 9 9 8 8 7 7 6 6 6 6 5 5 5 5 4 3 3 3 3 3 4 4 4 4 4 4 3 3 3 3 3 4 4 4 4 4 3",
    ),
]


@pytest.mark.parametrize(("window", "hysteresis", "consecutive", "outcomes", "powers"), DEEPSPEED)
def test_a_deepspeed_file_gives_deepspeeds_scales_step_by_step(window, hysteresis, consecutive, outcomes, powers):
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": window, "hysteresis": hysteresis}
    config = read_deepspeed({"fp16": {**fp16, "consecutive_hysteresis": consecutive}})
    scaler, found = LossScaler(config, Scaling()), []
    for outcome in outcomes:
        scaler.update(outcome == ".")
        scaler.scale = scaler.scale.at(scaler.scale.progress)  # a load does the same
        found.append(math.log2(scaler.scale.value))
    assert found == [int(power) for power in powers.split()]


@unhurried
@given(steps)
def test_a_fixed_scale_stays(outcomes):
    scale = LossScale(8.0, None)
    for finite in outcomes:
        scale = scale.after(finite)
    assert scale.value == 8.0


def test_it_does_not_fall_below_its_minimum_and_counts_that():
    scale = LossScale(4.0, 10, hysteresis=1, minimum=2.0)
    values = []
    for _ in range(4):
        scale = scale.after(False)
        values.append(scale.value)
    assert values == [2.0] * 4
    assert scale.at_minimum
    assert scale.stuck == 3
    assert scale.after(True).stuck == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": 0.0},
        {"value": float("inf")},
        {"window": 0},
        {"factor": 1.0},
        {"hysteresis": 0},
        {"minimum": 0.0},
        {"cooldown": -1},
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"Cannot make a loss scale with {next(iter(wrong))}="):
        LossScale(**wrong)


@unhurried
@given(st.floats(1e-3, 1e3), st.sampled_from([1.0, 8.0, 3.0]), st.one_of(st.none(), st.floats(0.1, 100.0)))
def test_what_is_multiplied_while_keeping_and_at_settling_is_the_whole_factor(reduce, loss_scale, total_weight):
    scaling = Scaling(reduce=reduce, loss_scale=loss_scale)
    expected = reduce / loss_scale if total_weight is None else 1.0 / (total_weight * loss_scale)
    assert scaling.accumulate_factor * scaling.sync_factor(total_weight) == pytest.approx(expected, rel=1e-12)
    scaling.has_final_sums = True
    assert scaling.accumulate_factor == pytest.approx(reduce / loss_scale, rel=1e-12)


@unhurried
@given(st.floats(1e-3, 1e3))
def test_what_is_multiplied_while_keeping_rounds_nothing(reduce):
    factor = Scaling(reduce=reduce).accumulate_factor
    assert factor.hex().split("p")[0] == "0x1.0000000000000"


def test_weights_of_nothing_give_nothing():
    assert Scaling().sync_factor(0.0) == 0.0


def test_gradients_are_multiplied_only_where_they_must_be():
    assert Scaling().multiplier is None
    assert Scaling(loss_scale=8.0).multiplier == 8.0
    assert Scaling(loss_scale=8.0, is_scaled=True).multiplier is None
    assert Scaling(weight=3.0, loss_scale=2.0).multiplier == 6.0
    assert Scaling(divisor=4.0, loss_scale=2.0).multiplier == 0.5
    assert Scaling(divisor=4.0, is_divided=True).multiplier is None
    assert Scaling(divisor=4.0, weight=3.0).multiplier == 3.0
    assert Scaling(weight=0.0).multiplier == 0.0


def test_a_scale_goes_on_from_where_another_one_was_and_a_fixed_one_stays():
    come = LossScale(value=2.0**10, window=3, hysteresis=2).after(True).after(False)
    again = LossScale(value=2.0**16, window=3, hysteresis=2).at(come.progress)
    assert again == come != LossScale(value=2.0**10, window=3, hysteresis=2)
    fixed = LossScale(value=8.0, window=None)
    assert fixed.at(come.progress) == fixed
    with pytest.raises(ValueError, match="value=-1"):
        come.at({"value": -1.0})


def test_the_table_of_stages():
    rows = ((stage.shards_optimizer, stage.shards_weights, stage.accumulates_locally) for stage in STAGES.values())
    table = dict(zip(STAGES, rows, strict=True))
    assert table == {0: (False, False, True), 1: (True, False, True), 2: (True, False, False), 3: (True, True, False)}
    for wrong in (4, -1, True, "2"):
        with pytest.raises(ValueError, match="the stages are 0, 1, 2, 3"):
            stage_of(wrong)
