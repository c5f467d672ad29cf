"""`deepspeed.runtime`: functions of its utils, and schedules from the command line."""

import argparse
import logging
import random

import pytest
import torch
from torch import nn

import zero.compat.deepspeed as deepspeed
from tests.zoo.case import real_mlp, real_numbers
from zero.compat.deepspeed.runtime import lr_schedules, utils
from zero.compat.deepspeed.runtime.tuning_arguments import override_params

# utils ------------------------------------------------------------------------------------------------------------------


def with_grads():
    model = real_mlp()
    model(real_numbers((2, 4))).square().sum().backward()
    return list(model.parameters())


@pytest.mark.parametrize("kind", [1, 2, 3, float("inf")])
def test_gradients_are_clipped_as_torch_does(kind):
    mine, theirs = with_grads(), with_grads()
    norm = utils.clip_grad_norm_(mine, max_norm=0.5, norm_type=kind)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.5, kind)) and norm > 0.5
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(mine, theirs, strict=True))
    with pytest.raises(ValueError, match="Leave mpu out"):
        utils.clip_grad_norm_(mine, 1.0, mpu=object())


def test_the_norm_of_all_is_made_of_norms_of_parts():
    assert utils.get_global_norm([3.0, torch.tensor(4.0)]) == 5.0


def test_seeds_and_folders(tmp_path):
    drawn = []
    for _ in range(2):
        utils.set_random_seed(5)
        drawn.append((random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    utils.ensure_directory_exists(str(tmp_path / "a" / "b" / "file.txt"))
    assert (tmp_path / "a" / "b").is_dir()
    utils.empty_cache()


def test_memory_is_told_where_it_is_forced(caplog):
    caplog.set_level(logging.INFO, logger="zero")
    utils.see_memory_usage("not asked for")
    utils.see_memory_usage("after the step", force=True)
    [line] = caplog.messages
    assert line.startswith("after the step: ") and len(line) > 20
    with pytest.raises(AttributeError, match="no_such_name"):
        utils.no_such_name  # noqa: B018


# schedules from the command line ----------------------------------------------------------------------------------------


def read(*line):
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(line)


def adam():
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("LRRangeTest", "lr_range_test_min_lr"), ("OneCycle", "cycle_max_lr"), ("WarmupLR", "warmup_max_lr"),
     ("WarmupDecayLR", "warmup_max_lr")],
)  # fmt: skip
def test_a_block_of_arguments_makes_that_schedule(kind, name):
    block, wrong = lr_schedules.get_config_from_args(read("--lr_schedule", kind, f"--{name}", "0.25"))
    assert wrong is None and block["type"] == kind and lr_schedules.get_lr_from_config(block) == (0.25, "")
    total = {"total_num_steps": 2000} if kind == "WarmupDecayLR" else {}
    config = {"scheduler": {**block, "params": {**block["params"], **total}}, "optimizer": {"type": "Adam"}}
    engine, _, _, schedule = deepspeed.initialize(model=real_mlp(), config=config)
    assert isinstance(schedule, getattr(lr_schedules, kind))
    engine.destroy()


def test_a_cosine_of_arguments_multiplies_the_optimizers_own_rate():
    block, _ = lr_schedules.get_config_from_args(read("--lr_schedule", "WarmupCosineLR", "--warmup_min_ratio", "0.1"))
    assert block["params"] == {
        "warmup_num_steps": 1000, "warmup_type": "log", "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01,
    }  # fmt: skip
    rate, wrong = lr_schedules.get_lr_from_config(block)
    assert rate is None and "WarmupCosineLR has no rate" in wrong
    optimizer = adam()
    schedule = lr_schedules.WarmupCosineLR(optimizer, total_num_steps=2000, **block["params"])
    optimizer.step()
    schedule.step(0)
    assert schedule.get_lr_ratio() == 0.1 and schedule.get_lr() == [0.05]


def test_what_an_argument_leaves_out_the_schedule_has_by_default():
    line = ("--lr_schedule", "OneCycle", "--cycle_first_step_size", "4", "--cycle_second_stair_count", "-1")
    block, _ = lr_schedules.get_config_from_args(read(*line))
    assert not {"cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count"} & block["params"].keys()
    optimizer = adam()
    schedule = lr_schedules.OneCycle(optimizer, **block["params"])
    rates = []
    optimizer.step()
    for _ in range(8):
        schedule.step()
        rates += schedule.get_lr()
    assert rates[:4] == pytest.approx([0.0325, 0.055, 0.0775, 0.1]) and rates[7] == pytest.approx(0.01)


def test_flags_are_off_unless_given():
    params = {}
    override_params(read("--lr_range_test_staircase"), params)
    assert params["lr_range_test_staircase"] is True and params["warmup_min_ratio"] == 0.01
    lr_schedules.override_lr_range_test_params(read(), params)
    assert params["lr_range_test_staircase"] is False
    lr_schedules.override_1cycle_params(argparse.Namespace(cycle_min_lr=None, cycle_max_lr=0.5), params)
    lr_schedules.override_warmupLR_params(argparse.Namespace(warmup_type="linear"), params)
    lr_schedules.override_warmupCosineLR_params(argparse.Namespace(cos_min_ratio=0.3), params)
    assert params["cycle_min_lr"] == 0.01 and params["cycle_max_lr"] == 0.5
    assert params["warmup_type"] == "linear" and params["cos_min_ratio"] == 0.3


def test_arguments_that_name_no_schedule_say_so():
    assert lr_schedules.get_config_from_args(read()) == (None, "--lr_schedule was not given.")
    block, wrong = lr_schedules.get_config_from_args(read("--lr_schedule", "Cosine"))
    assert block is None and "it is not one of WarmupLR" in wrong
    for block in ({}, {"type": "Cosine", "params": {}}, {"type": "WarmupLR"}):
        rate, wrong = lr_schedules.get_lr_from_config(block)
        assert rate is None and "is needed" in wrong
    assert deepspeed.add_tuning_arguments is lr_schedules.add_tuning_arguments
