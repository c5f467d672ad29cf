"""Learning rate schedules by name: their numbers, their groups, and going on from a saved state."""

import math
import warnings

import pytest
import torch

from zero.config.schema import ScheduleSpec
from zero.optim.schedules import build_schedule


def optimizer_of(*rates: float | torch.Tensor, kind: type = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=1.0)


def rates_of(kind: str, settings: dict, num_steps: int, *bases: float) -> list[list[float]]:
    """The rate of each group before step 0, 1, 2, ..."""
    optimizer = optimizer_of(*(bases or (1.0,)))
    schedule = build_schedule(ScheduleSpec.of(kind, settings), optimizer)
    seen = []
    for _ in range(num_steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def first_group(rates: list[list[float]]) -> list[float]:
    return [groups[0] for groups in rates]


def test_a_linear_warmup_rises_in_a_line_and_stays():
    rates = first_group(rates_of("WarmupLR", {"warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"}, 8))
    assert rates == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_logarithmic_warmup_rises_with_the_logarithm():
    rates = first_group(rates_of("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.9, "warmup_num_steps": 8}, 10))
    expected = [0.1 + 0.8 * math.log(i + 1) / math.log(8) for i in range(8)]
    assert rates == pytest.approx([0.1, *expected, 0.9])


def test_a_warmup_without_an_upper_rate_ends_at_each_groups_own():
    rates = rates_of("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, 5, 0.5, 0.25)
    assert rates[2] == pytest.approx([0.25, 0.125]) and rates[4] == [0.5, 0.25]


def test_a_warmup_of_one_step_counts_as_two():
    rates = first_group(rates_of("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 1, "warmup_type": "linear"}, 4))
    assert rates == pytest.approx([0.0, 0.0, 0.5, 1.0])


def test_a_decay_falls_in_a_line_to_the_lower_rate():
    settings = {"total_num_steps": 10, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "warmup_type": "linear"}
    rates = first_group(rates_of("WarmupDecayLR", settings, 13))
    assert rates == pytest.approx([0.0, 0.0, 0.5, *[(10 - i) / 8 for i in range(2, 10)], 0.0, 0.0])


def test_a_decay_shorter_than_its_warmup_ends_at_the_lower_rate():
    settings = {"total_num_steps": 2, "warmup_min_lr": 0.1, "warmup_max_lr": 1.0, "warmup_num_steps": 4}
    assert first_group(rates_of("WarmupDecayLR", settings, 7))[5:] == [0.1, 0.1]


def test_a_cosine_scales_each_groups_own_rate():
    settings = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1}
    rates = rates_of("WarmupCosineLR", {**settings, "warmup_type": "linear"}, 9, 2.0, 1.0)
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, i / 4))) / 2 for i in range(1, 7)]
    assert first_group(rates) == pytest.approx([0.0, 1.0, 1.5, *[2.0 * ratio for ratio in falling]])
    assert [groups[1] for groups in rates] == pytest.approx([groups[0] / 2 for groups in rates])


def test_a_range_test_rises_in_a_line_or_in_stairs():
    settings = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    assert first_group(rates_of("LRRangeTest", settings, 5)) == pytest.approx([0.1 * (1 + 3 * i / 2) for i in range(5)])
    stairs = first_group(rates_of("LRRangeTest", {**settings, "lr_range_test_staircase": True}, 5))
    assert stairs == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4}


def test_a_cycle_rises_falls_and_decays():
    rates = first_group(rates_of("OneCycle", {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5}, 10))
    assert rates == pytest.approx([1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1 / 1.25, 1 / 1.5, 1 / 1.75])


def test_a_cycle_without_decay_stays_at_its_lower_rate():
    assert first_group(rates_of("OneCycle", CYCLE, 10))[6:] == [1.0] * 4
    assert first_group(rates_of("OneCycle", {**CYCLE, "decay_step_size": 2}, 10))[6:] == [1.0] * 4


def test_a_cycle_in_stairs_stands_still_between_them():
    settings = {**CYCLE, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    assert first_group(rates_of("OneCycle", settings, 8)) == pytest.approx([1, 1, 2, 2, 3, 2, 2, 1])
    whole_way_down = {**settings, "cycle_second_stair_count": 0}
    assert first_group(rates_of("OneCycle", whole_way_down, 8)) == pytest.approx([1, 1, 2, 2, 3, 2.5, 2, 1.5])


def test_a_cycle_moves_the_momentum_the_other_way():
    optimizer = optimizer_of(1.0)
    schedule = build_schedule(ScheduleSpec.of("OneCycle", {**CYCLE, "decay_step_size": 1, "decay_mom_rate": 0.1}), optimizer)
    seen = []
    for _ in range(9):
        seen.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    assert [first for first, _ in seen] == pytest.approx([0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.99, 1.08])
    assert {second for _, second in seen} == {0.99}


def test_a_cycle_leaves_alone_the_momentum_of_an_optimizer_without_betas():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.7)
    build_schedule(ScheduleSpec.of("OneCycle", CYCLE), optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_a_list_gives_each_group_its_own_number():
    settings = {"warmup_min_lr": [0.0, 0.5], "warmup_max_lr": [1.0, 1.5], "warmup_num_steps": 2, "warmup_type": "linear"}
    assert rates_of("WarmupLR", settings, 4, 1.0, 1.0)[2] == pytest.approx([0.5, 1.0])
    with pytest.raises(ValueError, match=r"Cannot use 2 values for .*: the optimizer has 3 parameter groups"):
        rates_of("WarmupLR", settings, 1, 1.0, 1.0, 1.0)


def test_a_rate_that_is_a_tensor_is_filled_in_place():
    rate = torch.tensor(1.0)
    optimizer = optimizer_of(rate)
    schedule = build_schedule(ScheduleSpec.of("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}), optimizer)
    held = optimizer.param_groups[0]["lr"]
    for expected in (0.0, 0.0, 0.5, 1.0):
        assert optimizer.param_groups[0]["lr"] is held and held.item() == expected
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("WarmupLR", {"warmup_num_steps": 6}),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
        ("OneCycle", CYCLE),
        ("LRRangeTest", {}),
    ],
)
def test_a_schedule_goes_on_from_its_saved_state(kind, settings):
    straight = first_group(rates_of(kind, settings, 10))
    optimizer = optimizer_of(1.0)
    schedule = build_schedule(ScheduleSpec.of(kind, settings), optimizer)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    resumed = optimizer_of(1.0)
    other = build_schedule(ScheduleSpec.of(kind, settings), resumed)
    other.load_state_dict(schedule.state_dict())
    assert other.get_last_lr() == schedule.get_last_lr()
    seen = []
    for _ in range(6):
        seen.append(resumed.param_groups[0]["lr"])
        resumed.step()
        other.step()
    assert seen == straight[4:]


def test_a_schedule_draws_no_warning_from_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates_of("WarmupLR", {}, 3)


def test_deepspeeds_names_of_what_a_schedule_was_given():
    settings = {"total_num_steps": 20, "warmup_num_steps": 10}
    optimizer = optimizer_of(0.5, 2.0)
    cosine = build_schedule(ScheduleSpec.of("WarmupCosineLR", settings), optimizer)
    optimizer.step()
    assert cosine.get_lr_ratio() == 0.0 and cosine.warmup_type == "log" and cosine.cos_min_ratio == 0.0001
    cosine.step(9)
    assert cosine.get_lr_ratio() == 1.0 and cosine.get_lr() == [0.5, 2.0]
    warmup = build_schedule(ScheduleSpec.of("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}), optimizer_of(0.5, 2.0))
    assert warmup.min_lrs == [0.1, 0.2] and warmup.max_lrs == [0.5, 2.0]
    with pytest.raises(ValueError, match=r"Cannot return get_lr_ratio\(\) of a WarmupLR"):
        warmup.get_lr_ratio()
    for schedule, name in ((cosine, "max_lrs"), (warmup, "warmup_min_lr"), (warmup, "no_such_name")):
        assert not hasattr(schedule, name)
