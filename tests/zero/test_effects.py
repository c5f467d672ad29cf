"""Every setting, at every stage: it has an effect, asks for what holds anyway, is refused, or one warning names it."""

import itertools
import logging

import pytest
import torch
from torch import nn

from tests.promises.loops import alone, on_ranks
from tests.zoo.case import real_mlp
from zero.config.schema import (
    Batch,
    LossScale,
    OptimizerSpec,
    Report,
    ScheduleSpec,
    ZeroConfig,
    check_plain_loop,
    check_supported,
)
from zero.setup.checks import Situation, without_effect

STAGES, NEVER, ALWAYS = range(4), (), range(4)
HALF = {"dtype": "bfloat16"}
# For each setting: what is given, and at which stages it has no effect on one rank and on two that share. What asks for what
# holds anyway, such as a time limit where there is one rank, counts as an effect.
CASES = {
    "stage": ({}, NEVER, NEVER),
    "dtype": (HALF, NEVER, NEVER),
    "keep_fp32": ({"keep_fp32": ["0"]}, ALWAYS, ALWAYS),
    "masters": ({"masters": "rounded"}, ALWAYS, ALWAYS),
    "buffer_dtype": ({"buffer_dtype": "bfloat16"}, NEVER, NEVER),
    "keep_fp32_buffers": ({"keep_fp32_buffers": ["1"]}, ALWAYS, ALWAYS),
    "buffers": ({"buffers": "broadcast"}, NEVER, NEVER),
    "autocast": ({"autocast": "bfloat16"}, "plain", "plain"),
    "cast_inputs": ({"cast_inputs": True}, ALWAYS, ALWAYS),
    "offload": ({"offload": "cpu"}, ALWAYS, ALWAYS),
    "homes": ({"homes": {"masters": "cpu"}}, ALWAYS, ALWAYS),
    "bucket_bytes": ({"bucket_bytes": 64}, NEVER, NEVER),
    "gathered_bytes": ({"gathered_bytes": 4}, (0, 1, 2), (0, 1, 2)),
    "keep_whole_numel": ({"keep_whole_numel": 9}, (0, 1, 2), (0, 1, 2)),
    "shard_ranks": ({"shard_ranks": "host"}, (0,), (0,)),
    "shared_memory": ({"shared_memory": False}, NEVER, NEVER),
    "align_bytes": ({"align_bytes": 16}, NEVER, NEVER),
    "reduce": ({"reduce": "sum"}, NEVER, NEVER),
    "reduce_dtype": ({"reduce_dtype": "int8"}, ALWAYS, (0,)),
    "accumulation_dtype": ({"accumulation_dtype": "bfloat16"}, ALWAYS, ALWAYS),
    "predivide": ({"predivide": 2.0}, ALWAYS, ALWAYS),
    "clip": ({"clip": 1.0}, NEVER, NEVER),
    "accumulation": ({"accumulation": 2}, NEVER, NEVER),
    "count_micro_steps": ({"count_micro_steps": False}, "plain", "plain"),
    "on_nonfinite": ({"on_nonfinite": "skip"}, NEVER, NEVER),
    "check_weights_every": ({"check_weights_every": 1}, NEVER, NEVER),
    "on_unused": ({"on_unused": "raise"}, NEVER, NEVER),
    "kernels": ({"kernels": "fused"}, NEVER, NEVER),
    "elementwise": ({"elementwise": True}, NEVER, NEVER),
    "whole_tensors": ({"whole_tensors": True}, ALWAYS, ALWAYS),
    "start": ({"start": "verify"}, NEVER, NEVER),
    "timeout_s": ({"timeout_s": 5.0}, NEVER, NEVER),
    "first_step_timeout_s": ({"first_step_timeout_s": 70.0}, NEVER, NEVER),
    "tensor_ranks": ({"tensor_ranks": 2}, "plain", "plain"),
    "expert_ranks": ({"expert_ranks": 2}, "plain", "plain"),
    "sequence_ranks": ({"sequence_ranks": 2}, "plain", "plain"),
    "drop_last": ({"drop_last": True}, "plain", "plain"),
    "batch": ({"batch": Batch.of(micro_samples=2)}, "plain", "plain"),
    "loss_scale": ({"loss_scale": LossScale()}, NEVER, NEVER),
    "optimizer": ({"optimizer": OptimizerSpec.of("SGD")}, "plain", "plain"),
    "schedule": ({"schedule": ScheduleSpec.of("WarmupLR")}, "plain", "plain"),
    "report": ({"report": Report(memory=True)}, "plain", "plain"),
}


def told(given, stage, num_sharing, in_a_plain_loop):
    """The settings that are refused, or that a warning names."""
    try:
        config = ZeroConfig(stage=stage, **given)
        check_supported(config)
        if in_a_plain_loop:
            check_plain_loop(config)
    except ValueError as error:
        return {name for name in CASES if f"Cannot use {name}" in str(error)}
    here = Situation(num_sharing, is_host=True, halves=config.dtype == "bfloat16", is_elementwise=True)
    return set(without_effect(config, here))


@pytest.mark.promise("T04")
def test_no_setting_is_without_effect_in_silence_at_any_stage():
    assert set(CASES) == set(ZeroConfig.model_fields), "say here where a new setting has no effect"
    for (name, (given, *where)), stage, num_sharing in itertools.product(CASES.items(), STAGES, (1, 2)):
        stages = where[num_sharing - 1]
        of_engines = stages == "plain"
        found = told(given, stage, num_sharing, in_a_plain_loop=of_engines)
        assert (name in found) == (of_engines or stage in stages), (name, stage, num_sharing, found)
        if of_engines:
            assert name not in told(given, stage, num_sharing, in_a_plain_loop=False), name


def warnings_of(caplog, build=real_mlp, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zero"):
        _, optimizer = alone(build, **options)
    optimizer.close()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gathered_bytes": 4}, "gathered_bytes"), ({"keep_whole_numel": 100}, "keep_whole_numel"),
        ({"keep_fp32": ["0"]}, "keep_fp32"), ({"keep_fp32": ["0", "no_such"], **HALF}, "keep_fp32"),
        ({"homes": {"threads": 2}}, "homes"),
        ({"buffer_dtype": "bfloat16", "keep_fp32_buffers": ["no_such"]}, "keep_fp32_buffers"),
        ({"dtype": "float16", "loss_scale": {"dynamic": False, "window": 7}}, "loss_scale"),
    ],
)  # fmt: skip
def test_one_warning_names_it(options, name, caplog):
    (said,) = warnings_of(caplog, **options)
    assert said.startswith(f"{name} has no effect here: ") and said.endswith(".")
    assert "0, " not in said and ("no_such" in said) == ("no_such" in str(options)), "what matches is not named"


def test_what_has_an_effect_gives_no_warning(caplog):
    fixed = {"dtype": "float16", "loss_scale": {"dynamic": False, "initial": 8.0, "max_skips": 3}}
    shares = {"stage": 3, "gathered_bytes": 4, "keep_whole_numel": 3}
    for options in ({}, fixed, shares, {"keep_fp32": ["0", "*.bias"], **HALF}):
        assert warnings_of(caplog, **options) == [], options
    assert warnings_of(caplog, lambda: nn.Sequential(nn.Linear(4, 4)), make=lambda m: torch.optim.SGD(m.parameters())) == []


def test_of_two_ranks_one_says_it(caplog):
    with caplog.at_level(logging.WARNING, logger="zero"):
        on_ranks(2, lambda *_: None, gathered_bytes=4)
    assert len(caplog.records) == 1
