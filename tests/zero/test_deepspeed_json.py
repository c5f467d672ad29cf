"""DeepSpeed's configuration files: which keys count, what they come to mean, and how mistakes are told.

`python -m tests.zero.test_deepspeed_json` writes the golden texts anew.
"""

import base64
import copy
import json
import logging
import math
import pathlib
import string
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, reject, settings

from zero.__main__ import main
from zero.config.deepspeed.keys import (
    ALIASES,
    AUTO,
    BLOCKS,
    CHOICES,
    HARMLESS,
    KNOWN,
    OFF,
    OWN,
    REFUSED,
    SWITCHES,
    USED,
)
from zero.config.deepspeed.mapping import Implied
from zero.config.deepspeed.reader import read_deepspeed, read_tree, translate
from zero.config.schema import check_supported
from zero.plan.layout import ITEM_BYTES

DATA = pathlib.Path(__file__).parent.parent / "data" / "deepspeed"
FILES = sorted(DATA.glob("*.json"))

# The values that a Hugging Face trainer implies for files that leave them to the call.
TRAINER = Implied(world_size=4, micro_samples=8, accumulation=2, dtype="bfloat16", clip=1.0, bucket_numel=768 * 768, lr=5e-5,
                  weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8, warmup_steps=500, total_steps=10_000)


def nested(path: str, value: object) -> dict:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(*blocks: dict) -> dict:
    result: dict = {}
    for block in blocks:
        for key, value in block.items():
            result[key] = merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
    return result


def golden(path: pathlib.Path) -> str:
    try:
        config, notices = translate(path, TRAINER)
    except (TypeError, ValueError) as error:
        return f"refused: {error}\n"
    check_supported(config)
    return config.text() + "".join(f"without effect: {notice}\n" for notice in notices)


def fate(path: str) -> list[str]:
    """The tables that decide about a key: those that list it, or else the nearest block around it."""
    first, _, rest = path.partition(".")
    path = ALIASES.get(first, first) + ("." + rest if rest else "")
    while path and path not in KNOWN:
        path = path.rpartition(".")[0]
    return [name for name, table in (("used", USED), ("harmless", HARMLESS), ("refused", REFUSED)) if path in table]


def test_there_are_twelve_files_and_three_of_them_leave_values_to_the_call():
    assert len(FILES) == 12
    assert len([path for path in FILES if '"auto"' in path.read_text()]) == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_file_means_what_its_golden_text_says(path):
    assert golden(path) == path.with_suffix(".txt").read_text()


@pytest.mark.promise("E06")
def test_every_documented_key_is_used_or_harmless_or_refused_and_never_two_of_them():
    documented = (DATA / "documented_keys.txt").read_text().split()
    assert len(documented) > 300
    assert {path: fate(path) for path in documented if len(fate(path)) != 1} == {}
    assert not set(OWN) & set(documented)
    assert len(KNOWN) == len(USED) + len(HARMLESS) + len(REFUSED)
    assert all(why and why[0] != " " for why in [*HARMLESS.values(), *REFUSED.values()])


def test_the_tables_speak_only_of_keys_that_exist():
    assert set(OFF) <= set(REFUSED)
    assert set(SWITCHES) <= BLOCKS | set(REFUSED)
    assert {path for path in AUTO if ".params." not in path} <= set(USED)
    assert set(AUTO.values()) <= set(Implied.__dataclass_fields__)


# For each used key: a configuration around it, and a value that differs from the one that holds without the key.
ADAM = {"optimizer": {"type": "Adam"}}
HALF = {"fp16": {"enabled": True}}
CHANGES = {
    "train_batch_size": ({}, 8),
    "train_micro_batch_size_per_gpu": ({}, 8),
    "gradient_accumulation_steps": ({}, 8),
    "managed_gradient_accumulation": ({}, False),
    "dataloader_drop_last": ({}, True),
    "tensor_parallel.autotp_size": ({}, 2),
    "sequence_parallel_size": ({}, 2),
    "expert_parallel.enabled": (nested("expert_parallel.autoep_size", 2), True),
    "expert_parallel.autoep_size": (nested("expert_parallel.enabled", True), 2),
    "optimizer.type": ({}, "SGD"),
    "optimizer.params": (ADAM, {"lr": 0.5}),
    "scheduler.type": ({}, "WarmupLR"),
    "scheduler.params": ({"scheduler": {"type": "WarmupLR"}}, {"warmup_num_steps": 7}),
    "communication_data_type": ({}, "bf16"),
    "zero_optimization.zero_quantized_gradients": ({"zero_optimization": {"stage": 2}}, True),
    "zero_optimization.zero_hpz_partition_size": ({"zero_optimization": {"stage": 3}}, 4),
    "zero_optimization.mics_shard_size": ({"zero_optimization": {"stage": 3}}, 4),
    "gradient_allreduce_op": ({}, "sum"),
    "gradient_clipping": ({}, 0.5),
    "zero_accelerators.kernels": ({}, "torch"),
    "fp16.enabled": ({}, True),
    "fp16.auto_cast": (HALF, True),
    "fp16.loss_scale": (HALF, 128),
    "fp16.initial_scale_power": (HALF, 3),
    "fp16.loss_scale_window": (HALF, 3),
    "fp16.hysteresis": (HALF, 3),
    "fp16.consecutive_hysteresis": (HALF, True),
    "fp16.min_loss_scale": (HALF, 3),
    "bf16.enabled": ({}, True),
    "bf16.check_grad_overflow": ({"bf16": {"enabled": True}}, False),
    "bf16.bf16_optimizer_states": ({"optimizer": {"type": "Adam"}}, True),
    "torch_autocast.enabled": ({}, True),
    "torch_autocast.dtype": ({"torch_autocast": {"enabled": True}}, "float16"),
    "data_types.buffer_dtype": ({}, "bf16"),
    "data_types.keep_in_fp32_modules": ({}, ["norm"]),
    "data_types.param_dtype": ({}, "bf16"),
    "zero_optimization.stage": ({}, 2),
    "zero_optimization.reduce_bucket_size": ({}, 1000),
    "zero_optimization.ignore_unused_parameters": ({}, False),
    "zero_optimization.offload_optimizer.device": ({}, "cpu"),
    "zero_optimization.offload_optimizer.pin_memory": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, True),
    "zero_optimization.offload_optimizer.ratio": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 0.5),
    "zero_optimization.offload_optimizer.nvme_path": (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/slow"}}}, "/fast",
    ),
    "zero_optimization.cpu_offload": ({}, True),
    "zero_optimization.offload_param.device": ({"zero_optimization": {"stage": 3}}, "cpu"),
    "zero_optimization.offload_param.nvme_path": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/slow"}}}, "/fast",
    ),
    "zero_optimization.cpu_offload_param": ({"zero_optimization": {"stage": 3}}, True),
    "zero_allow_untested_optimizer": ({}, True),
    "steps_per_print": ({}, 10),
    "wall_clock_breakdown": ({}, True),
    "memory_breakdown": ({}, True),
    "tensorboard.enabled": ({}, True),
    "tensorboard.output_path": ({"tensorboard": {"enabled": True}}, "logs"),
    "tensorboard.job_name": ({"tensorboard": {"enabled": True}}, "tuned"),
    "zero_accelerators.masters": ({}, "rounded"),
    "zero_accelerators.gathered_bytes": ({}, "4GiB"),
    "zero_accelerators.keep_whole_numel": ({}, 1000),
    "zero_accelerators.shard_ranks": ({}, "host"),
    "zero_accelerators.on_nonfinite": ({}, "raise"),
}


@pytest.mark.promise("E06")
def test_each_used_key_changes_the_effective_configuration():
    assert set(CHANGES) == set(USED)
    for path, (around, value) in CHANGES.items():
        without = translate(around).config
        if path == "data_types.param_dtype":
            # It can only repeat what the precision blocks say; what can be observed is the contradiction.
            with pytest.raises(ValueError, match="param_dtype bfloat16: "):
                translate(nested(path, value))
            continue
        assert translate(merged(around, nested(path, value))).config.digest != without.digest, path


@pytest.mark.promise("E06")
def test_each_harmless_key_changes_nothing_and_is_named():
    for path in HARMLESS:
        around = {}
        for block, (switch, _) in SWITCHES.items():
            if path.startswith(block + ".") and path != f"{block}.{switch}" and f"{block}.{switch}" in HARMLESS:
                around = nested(f"{block}.{switch}", True)
        if path.startswith("zero_optimization.offload_param."):
            continue  # named only beside a device
        if path.startswith(("tensor_parallel.", "expert_parallel.")):  # named only where a model is cut
            around = {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True}}
        reading = translate(merged(around, nested(path, CHOICES.get(path, (True,))[-1])))
        assert reading.config == translate(around if "parallel" in str(around) else {}).config, path
        assert any(notice.startswith(path + ": ") for notice in reading.notices), path


@pytest.mark.promise("E06")
def test_each_refused_key_says_its_path_and_why():
    for path, why in REFUSED.items():
        block = path.rpartition(".")[0]
        on = nested(f"{block}.{SWITCHES[block][0]}", "on") if block in SWITCHES else {}
        with pytest.raises(ValueError) as caught:
            translate(merged(on, nested(path, "on")))
        message = str(caught.value)
        # A block is refused at the first of its keys that is found, and all of them have one reason.
        assert why in message and (path in message or block in message) and "Take it out." in message, path


def test_a_refused_key_that_asks_for_nothing_is_accepted():
    for path in REFUSED:
        for off in (None, False, *OFF.get(path, ())):
            assert translate(nested(path, off)).config == translate({}).config, (path, off)
    for block, (switch, offs) in SWITCHES.items():
        for off in (None, *offs):
            reading = translate(nested(f"{block}.{switch}", off))
            assert reading.config == translate({}).config and len(reading.notices) == 1, (block, off)


def test_one_load_gives_one_warning_with_every_key_that_has_no_effect(caplog):
    with caplog.at_level(logging.WARNING, logger="zero"):
        read_deepspeed({"zero_optimization": {"overlap_comm": True, "reduce_scatter": False}, "dump_state": True})
    assert [record.name for record in caplog.records] == ["zero"]
    text = caplog.records[0].getMessage()
    for key in ("zero_optimization.overlap_comm", "zero_optimization.reduce_scatter", "dump_state", "gradient_clipping"):
        assert f"\n  {key}: " in text


def test_of_the_ranks_of_a_launcher_the_first_one_warns(caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, logger="zero"):
        for rank, warnings in {"1": 0, "0": 1}.items():
            monkeypatch.setenv("RANK", rank)
            assert read_deepspeed({"dump_state": True}).clip == 1.0 and len(caplog.records) == warnings


def test_a_configuration_in_which_every_key_counts_gives_no_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="zero"):
        read_deepspeed({"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}})
    assert caplog.records == []


@pytest.mark.promise("N10", "T03")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_file_without_gradient_clipping_clips_as_deepspeed_does_and_the_log_says_so(stage):
    for block in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {"gradient_clipping": None}):
        reading = translate({"zero_optimization": {"stage": stage}, **block})
        assert reading.config.clip == 1.0, "GRADIENT_CLIPPING_DEFAULT of deepspeed/runtime/constants.py"
        assert "gradient_clipping: not given, so clipped at 1.0" in reading.notices[0]
    assert translate({"gradient_clipping": 0}).config.clip is None and translate({"gradient_clipping": 0}).notices == ()


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"zero_optimization": {"stge": 2}}, r"'zero_optimization.stge'.*Did you mean 'stage'\?"),
        ({"zero_optimisation": {"stage": 2}}, r"Did you mean 'zero_optimization'\?"),
        ({"stage": 2}, r"Did you mean 'zero_optimization.stage'\?"),
        ({"bf16": {"enable": True}}, r"'bf16.enable'.*Did you mean 'enabled'\?"),
        ({"bfloat16": {"enable": True}}, r"'bf16.enable'"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, r"Did you mean 'device'\?"),
        ({"optimizer": {"typ": "Adam"}}, r"Did you mean 'type'\?"),
        ({"optimizer": {"type": "Adam", "params": {"betta": [0, 0]}}}, r"Did you mean 'betas'\?"),
        ({"tensorboard": {"enabled": False, "outputpath": "x"}}, r"Did you mean 'output_path'\?"),
        ({"quite_something_else": 1}, r"Take it out, or correct it"),
        ({"train_batch_size": 8, "Train_batch_size": 8}, r"Did you mean 'train_batch_size'\?"),
    ],
)
@pytest.mark.promise("E06")
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known_one(tree, words):
    with pytest.raises(ValueError, match=words):
        translate(tree)


@pytest.mark.promise("E06")
def test_every_used_key_with_one_letter_missing_is_refused():
    for path in USED:
        for cut in (path[:-1], path + "x"):
            if cut not in KNOWN and cut not in BLOCKS:
                with pytest.raises(ValueError, match="has no such key"):
                    translate(nested(cut, 1))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled with bf16.enabled"),
        ({"bf16": {}, "bfloat16": {}}, "two spellings"),
        ({"zero_optimization": {"stage": 4}}, "from 0 to 3"),
        ({"zero_optimization": {"stage": 1.5}}, "whole number"),
        ({"zero_optimization": {"stage": "2"}}, "has to be a number"),
        ({"zero_optimization": {"stage": True}}, "has to be a number"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "at least 1"),
        ({"zero_optimization": {"reduce_bucket_size": -5e8}}, "at least 1"),
        ({"zero_optimization": 2}, "is not a block of keys"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "has to be one of none, cpu, nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "without nvme_path"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}, "Keep zero_optimization"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "at least 0"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "has to be a number"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window 0: it has to be at least 1"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "hysteresis 0: it has to be at least 1"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "min_loss_scale 0.0: it has to be above 0"),
        ({"fp16": {"enabled": True, "initial_scale_power": 128}}, "from 0 to 127"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "fp16.min_loss_scale is 8. Raise fp16."),
        ({"fp16": {"enabled": "yes"}}, "has to be true or false"),
        ({"gradient_clipping": -1.0}, "at least 0"),
        ({"gradient_clipping": "1.0"}, "has to be a number"),
        ({"communication_data_type": "int8"}, "has to be one of fp32, fp16, bf16"),
        ({"gradient_allreduce_op": "avg"}, "has to be one of mean, sum"),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, "has to be a list of names"),
        ({"zero_accelerators": {"masters": "wide"}}, "has to be one of exact, rounded"),
        ({"zero_accelerators": {"gathered_bytes": "much"}}, "Cannot use zero_accelerators.gathered_bytes='much'"),
        ({"zero_accelerators": {"gathered_bytes": -1}}, "Write bytes, 4GiB or auto or all"),
        ({"zero_accelerators": {"keep_whole_numel": -1}}, "has to be at least 0"),
        ({"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}}, r"torch_autocast.dtype is bfloat16. Write float16"),
        ({"checkpoint": {"tag_validation": "foo"}}, "has to be one of ignore, warn, fail"),
        ({"optimizer": {"params": {"lr": 1}}}, "Give optimizer.type too"),
        ({"scheduler": {"params": {"lr": 1}}}, "Give scheduler.type too"),
        ({"optimizer": {"type": "Lamb"}}, "pass it as optimizer="),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "Write gradient_clipping instead"),
        ({"optimizer": {"type": "SGD", "params": {"bias_correction": False}}}, "bias_correction"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": 2}}}, "has to be true or false"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "has to be a block of settings"),
        ({"optimizer": ["AdamW"]}, "is not a block of keys"),
        ({"scheduler": {"type": "CosineAnnealingLR"}}, "none has that name"),
        ({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}}, "load the scheduler's state_dict"),
        ({"steps_per_print": 0}, "at least 1"),
        ({"steps_per_print": -math.inf}, "not finite"),
        ({"gradient_clipping": math.inf}, "not finite"),
        ({"gradient_clipping": math.nan}, "not finite"),
    ],
)
@pytest.mark.promise("E06")
def test_a_value_out_of_range_or_a_pair_that_cannot_be_is_refused_before_anything_is_built(tree, words):
    with pytest.raises(ValueError, match=words) as caught:
        translate(tree)
    check_words(caught.value)


def test_autocast_of_16_bit_weights_is_taken_in_their_dtype():
    """What is not on autocast's lists runs in the weights' dtype, and the rest as the lists say."""
    config = translate({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}).config
    assert config.dtype == config.autocast == "bfloat16"
    assert translate({"checkpoint": {"tag_validation": "Warn"}}).notices[0].startswith("checkpoint.tag_validation: ")


@pytest.mark.parametrize("key", [{"offload_param": {"device": "cpu"}}, {"cpu_offload_param": True}])
def test_offloaded_weights_are_asked_for_at_stage_3_only(key):
    for stage in (0, 1, 2):
        [notice, _] = translate({"zero_optimization": {"stage": stage, **key}}).notices
        assert "below stage 3" in notice
    assert "below stage 3" in translate({"zero_optimization": key}).notices[0]
    assert translate({"zero_optimization": {"stage": 3, **key}}).config.homes.weights.home == "host"
    for optimizer in ({}, {"offload_optimizer": {"device": "none"}}):  # masters are stepped where their weights are
        config, notices = translate({"zero_optimization": {"stage": 3, **key, **optimizer}})
        assert config.offload is not None and any("masters and moments are on the host too" in notice for notice in notices)
    half = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    assert translate({"zero_optimization": {"stage": 3, **key, **half}}).config.homes.weights.ratio == 0.5


def test_a_disk_of_deepspeed_has_weights_too():
    disk, beside = {"device": "nvme", "nvme_path": "/fast"}, {"buffer_count": 5, "buffer_size": 1e8}
    zero = {"stage": 3, "offload_optimizer": {**disk, "ratio": 0.5}, "offload_param": {**disk, "nvme_path": "/other", **beside}}
    config = translate({"zero_optimization": zero}).config
    assert (config.homes.weights.place, config.homes.masters.place) == ("disk:/other", "disk:/fast") and config.offload is None
    assert config.homes.weights.ratio == 0.5
    config, notices = translate({"zero_optimization": {"stage": 3, "offload_param": {**disk, **beside}}})
    assert config.homes.weights.place == "disk:/fast" and config.homes.masters is None and config.offload is not None
    assert any("masters and moments are on the host too" in notice for notice in notices)
    with pytest.raises(ValueError, match=r"offload_param.device 'nvme' without nvme_path"):
        translate({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})


def test_a_disk_of_deepspeed_has_masters_and_moments():
    """With all that DeepSpeed's own file says of it."""
    offload = {"device": "nvme", "nvme_path": "/fast", "ratio": 0.5, "pin_memory": True, "buffer_count": 4, "fast_init": False}
    config = translate({"zero_optimization": {"stage": 2, "offload_optimizer": offload}, "aio": {"block_size": 2**20}}).config
    assert config.offload is None and config.homes.masters == config.homes.moments
    assert (config.homes.masters.place, config.homes.masters.ratio) == ("disk:/fast", 0.5)


@pytest.mark.promise("N14")
def test_numbers_of_a_loss_scale_that_is_off_or_fixed_are_not_judged():
    """As in DeepSpeed: files carry them along."""
    assert translate({"fp16": {"enabled": False, "loss_scale_window": 0}}).config.loss_scale is None
    fixed = translate({"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}}).config.loss_scale
    assert (fixed.dynamic, fixed.initial) == (False, 128.0)


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "expected"),
    [
        (32, 4, 2, (32, 4, 2)),
        (None, None, 3, (None, None, 3)),
        (None, None, None, (None, None, None)),
        (32, 4, "auto", (32, 4, 2)),
        (32, "auto", 2, (32, 4, 2)),
        ("auto", 4, 2, (32, 4, 2)),
        ("auto", 4, None, (16, 4, 1)),
        (32.0, 4.0, None, (32, 4, 2)),
        (32, 4, 3, "make 48"),
        (33, 4, None, "train_batch_size=33: it is not a multiple of train_micro_batch_size_per_gpu=4"),
        (32, "auto", None, 'train_micro_batch_size_per_gpu is "auto"'),
        ("auto", "auto", 2, 'train_micro_batch_size_per_gpu is "auto"'),
        (None, 4, "auto", 'gradient_accumulation_steps is "auto"'),
        ("auto", 4, "auto", 'gradient_accumulation_steps is "auto"'),
        (0, 4, None, "at least 1"),
        ("32", 4, None, "has to be a number"),
        (1.5, None, None, "whole number"),
    ],
)
@pytest.mark.promise("E07")
def test_the_batch_sizes_of_a_file_obey_the_identity(train, micro, accumulation, expected):
    tree = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    implied = Implied(world_size=4)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            translate(tree, implied)
        return
    config = translate(tree, implied).config
    sizes = (config.batch.global_samples, config.batch.micro_samples) if config.batch else (None, None)
    assert (*sizes, config.accumulation) == expected


def test_auto_takes_what_the_call_implies_or_names_the_key():
    needed = {"optimizer": {"optimizer": {"type": "AdamW"}}, "scheduler": {"scheduler": {"type": "WarmupDecayLR"}}}
    some = {"lr": 0.25, "weight_decay": 0.25, "betas": (0.25, 0.5), "eps": 0.25, "warmup_min_lr": 0.25, "warmup_steps": 25,
            "total_steps": 2500, "clip": 0.25, "dtype": "float16", "bucket_numel": 25, "global_samples": 25,
            "micro_samples": 25, "accumulation": 25}
    nothing = Implied(bucket_numel=None, warmup_min_lr=None)
    for path, field in AUTO.items():
        around = needed.get(path.split(".")[0], {})
        if "scheduler" in around and not path.endswith("total_num_steps"):
            around = merged(around, {"scheduler": {"params": {"total_num_steps": 9}}})
        tree = merged(around, nested(path, "auto"))
        with pytest.raises(ValueError, match=f'{path} is "auto"'):
            translate(tree, nothing)
        value = "bfloat16" if path == "bf16.enabled" else some[field]
        config = translate(tree, Implied(**{field: value})).config
        shown = str(list(value) if isinstance(value, tuple) else value)
        expected = {"bucket_numel": "100"}.get(field, shown.strip("[]"))
        assert f" = {expected}" in config.text(), path


def test_a_precision_left_to_the_call_follows_the_models_dtype():
    tree = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    assert translate(tree, Implied(dtype="float32")).config.dtype is None
    assert translate(tree, Implied(dtype="float16")).config.dtype == "float16"
    assert translate(tree, Implied(dtype="bfloat16")).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("params", "kind", "decay", "kernels"),
    [
        (("Adam", {}), "AdamW", 0.0, "auto"),
        (("adam", {"adam_w_mode": False}), "Adam", 0.0, "auto"),
        (("AdamW", {"adam_w_mode": False}), "AdamW", 0.0, "auto"),
        (("AdamW", {"torch_adam": True}), "AdamW", 0.01, "torch"),
        (("Adam", {"torch_adam": True, "adam_w_mode": False}), "Adam", 0.0, "torch"),
        (("Adam", {"torch_adam": True, "weight_decay": 0.5, "foreach": True}), "AdamW", 0.5, "torch"),
        (("Adam", {"bias_correction": False, "weight_decay": 0.5}), "PlainAdam", 0.5, "auto"),
        (("Lion", {}), "Lion", 0.0, "auto"),
        (("SGD", {"momentum": 0.9}), "SGD", 0.0, "auto"),
        (("SGD", {"foreach": True}), "SGD", 0.0, "torch"),
        (("RMSprop", {}), "RMSprop", 0.0, "auto"),
    ],
)
def test_an_optimizer_by_name_is_what_deepspeed_would_build(params, kind, decay, kernels):
    config = translate({"optimizer": {"type": params[0], "params": params[1]}}).config
    assert (config.optimizer.kind, config.optimizer.kwargs["weight_decay"], config.kernels) == (kind, decay, kernels)


def test_a_bucket_is_counted_in_elements_of_the_weights_dtype():
    bucket = {"zero_optimization": {"reduce_bucket_size": 1000}}
    for key, dtype in ({}, "float32"), ({"fp16": {"enabled": True}}, "float16"), ({"bf16": {"enabled": True}}, "bfloat16"):
        assert translate({**bucket, **key}).config.bucket_bytes == 1000 * ITEM_BYTES[dtype]
    assert translate({}).config.bucket_bytes == "auto"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_that_are_not_finite_do_in_fp32_what_they_do_in_plain_torch(stage):
    blocks = {"skip": ({"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}),
              "propagate": ({}, {"bf16": {"enabled": True, "check_grad_overflow": False}})}
    for policy, written in blocks.items():
        for block in written:
            assert translate({"zero_optimization": {"stage": stage}, **block}).config.on_nonfinite == policy


def test_infinity_as_steps_per_print_in_a_dict_means_never():
    assert translate({"steps_per_print": math.inf}).config.report.every_steps is None


def test_null_counts_as_not_written():
    tree = dict.fromkeys(["train_batch_size", "optimizer", "scheduler", "zero_optimization", "fp16", "steps_per_print"])
    assert translate(tree).config == translate({}).config


@pytest.mark.promise("E04")
def test_the_callers_dict_is_not_changed_and_a_second_load_reads_the_same():
    for path in FILES:
        tree = json.loads(path.read_text())
        before = copy.deepcopy(tree)
        results = []
        for _ in range(2):
            try:
                results.append(translate(tree, TRAINER))
            except ValueError as error:
                results.append(str(error))
        assert tree == before and results[0] == results[1], path.stem


def test_later_changes_of_the_callers_dict_do_not_reach_the_configuration():
    tree = {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}
    config = translate(tree).config
    tree["optimizer"]["params"]["betas"][0] = 0.0
    assert config.optimizer.kwargs["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"train_batch_size": 8, "train_batch_size": 8}', "'train_batch_size': it is written 2 times"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "'stage': it is written 2 times"),
        ('{"gradient_clipping": NaN}', "number NaN"),
        ('{"steps_per_print": Infinity}', "number Infinity"),
        ('{"gradient_clipping": -Infinity}', "number -Infinity"),
        ('{"gradient_clipping": 1e999}', "not finite"),
        ('{"gradient_clipping": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        (" \n", "it is empty"),
        ("[1]", "is not a block of keys"),
        ("null", "None is not a block of keys"),
        ('{"steps_per_print": 1', r"JSON \(line 1, column 22: .* nor Hjson"),
        ('{"steps_per_print": 1 "dump_state": true}', r"JSON \(line 1, column 23: .* nor Hjson"),
        ('{"steps_per_print": 1}}', "nor Hjson .*: Extra data"),
        ('{"dump_state: true}', "nor Hjson .*: Unterminated string"),
        ("{steps_per_print: }", "nor Hjson .*: Found a punctuator"),
        ("/* without end", r"nor Hjson \(it breaks off: string index"),
        ("steps_per_print: 1e999", r"nor Hjson \(.*: cannot convert float infinity"),
        ("steps_per_print: " + "9" * 5000, "a number of 5000 digits"),
        ("stage: 1\nstage: 2", "'stage': it is written 2 times"),
        ("[" * 100_000, "nested without end"),
        ("#\n" + "[" * 100_000, "nested without end"),
        ('{"a":' * 50 + "1" + "}" * 50, "blocks deep"),
    ],
)
def test_a_file_that_is_no_plain_json_object_is_refused_where_it_breaks(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        translate(path)
    check_words(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ds.hjson", "{a: 1}", r" it is Hjson, .* not installed\. Install zero-accelerators\[hjson\]\.$"),
        ("ds.json", '{\n "stage": 1 // of 3\n}', r"line 2, column 13 is not JSON: .* If .*zero-accelerators\[hjson\]\.$"),
        ("ds.json", "", r"line 1, column 1 is not JSON: "),
    ],
)
def test_without_the_package_what_is_no_json_is_refused_with_its_name(name, text, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        translate(tmp_path / name)
    check_words(caught.value)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    for path, words in ((tmp_path / "none.json", "there is no such file"), (tmp_path, "cannot be opened"),
                        (tmp_path / "bytes.json", "not UTF-8"), ("a\0b", "null")):
        with pytest.raises(ValueError, match=words):
            translate(path)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"steps_per_print": 5}')
    assert translate(str(path)).config.report.every_steps == 5


@pytest.mark.parametrize("source", [None, 3, ["a"], b"{}", {1: 2}, {"optimizer": {3: 4}}, {"gradient_clipping": object()}])
def test_what_is_no_configuration_at_all_is_a_type_error(source):
    with pytest.raises(TypeError, match=r"\. (Give|Write)"):
        translate(source)


def test_a_dict_that_contains_itself_is_refused():
    tree: dict = {}
    tree["optimizer"] = tree
    with pytest.raises(ValueError, match="blocks deep"):
        translate(tree)


# Keys that mean something beside keys that nearly do, and values that fit beside values that do not.
NAMES = sorted({part for path in KNOWN for part in path.split(".")} | set(ALIASES))
WORDS = ["auto", "cpu", "nvme", "none", "fp16", "bf16", "AdamW", "Adam", "SGD", "WarmupLR", "OneCycle", "sum", "mean", "\ud800"]
NUMBERS = [10**400, -(10**400), 2**63, 5e8, 1e-8]
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.floats(), st.sampled_from(WORDS),
                   st.text(max_size=5), st.lists(st.floats(0, 1), max_size=3), st.sampled_from(NUMBERS))
PARAMS = ["lr", "betas", "eps", "weight_decay", "torch_adam", "warmup_num_steps", "cycle_min_lr", "cycle_max_lr"]
PATHS = st.one_of(
    st.sampled_from(sorted(KNOWN | BLOCKS)),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(".".join),
    st.sampled_from(PARAMS).map("optimizer.params.{}".format),
    st.sampled_from(PARAMS).map("scheduler.params.{}".format),
    st.text(string.ascii_letters + "._", min_size=1, max_size=12),
)
# Half of the trees are made of items that fit, so that accepted configurations are tried as often as refused ones.
FITTING = [(path, value) for path, (_, value) in CHANGES.items()] + [(path, True) for path in HARMLESS]
ITEM = st.sampled_from(FITTING)
ITEMS = st.lists(ITEM, max_size=5) | st.lists(st.tuples(PATHS, LEAVES) | ITEM, max_size=7)
TREES = ITEMS.map(lambda items: merged(*(nested(path, value) for path, value in items)))
IMPLIED = st.builds(
    Implied, world_size=st.integers(-1, 9), micro_samples=st.none() | st.integers(-1, 9),
    accumulation=st.none() | st.integers(0, 4), dtype=st.sampled_from([None, "float32", "bfloat16", "float16", "x"]),
    lr=st.none() | st.floats(), total_steps=st.none() | st.integers(),
)


HJSON_LIKE = st.text("ab1{}[],:#/*'\"\\\n -.eE", max_size=40)


def check_words(error: Exception) -> None:
    """What was asked or found, and what to do about it: two sentences at least, none of them pydantic's."""
    message = str(error)
    assert message.endswith((".", "?")) and ". " in message and "pydantic" not in message, message


@settings(max_examples=250, deadline=None)
@given(TREES, IMPLIED)
@pytest.mark.promise("E06")
def test_any_dict_is_accepted_or_refused_with_a_value_or_type_error(tree, implied):
    before = copy.deepcopy(tree)
    try:
        config = translate(tree, implied).config
    except (ValueError, TypeError) as error:
        check_words(error)
    else:
        assert config.digest in config.text()
    assert repr(tree) == repr(before)


@settings(max_examples=200, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=4), LEAVES)
@pytest.mark.promise("E06")
def test_a_dict_with_one_key_broken_is_refused_with_a_value_or_type_error_and_repaired_it_is_accepted(items, value):
    tree = merged(*(nested(*item) for item in items))
    try:
        whole = translate(tree).config
    except (ValueError, TypeError):
        reject()
    broken = merged(tree, nested(items[0][0], value))
    try:
        translate(broken)
    except (ValueError, TypeError) as error:
        check_words(error)
    assert translate(merged(broken, tree)).config == whole


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), HJSON_LIKE.map(str.encode), TREES.map(lambda tree: json.dumps(tree).encode()),
                 TREES.flatmap(lambda tree: st.integers(0, 80).map(lambda cut: json.dumps(tree).encode()[:cut]))))
@pytest.mark.promise("E06")
def test_any_file_is_accepted_or_refused_with_a_value_or_type_error(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    try:
        translate(path)
    except (ValueError, TypeError) as error:
        check_words(error)


@settings(max_examples=200, deadline=None)
@given(st.recursive(LEAVES | st.binary(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.one_of(st.text(max_size=4), st.integers(), st.sampled_from(NAMES)), inner, max_size=4)))
def test_any_object_is_accepted_or_refused_with_a_value_or_type_error(source):
    try:
        translate(source if not isinstance(source, str) else {"optimizer": source})
    except (ValueError, TypeError) as error:
        check_words(error)


def test_the_command_prints_the_effective_configuration(capsys):
    assert main(["config", str(DATA / "image_classifier.json"), "--world-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "micro_samples = 4" in out and "digest = " in out and "without effect:" in out


def test_the_command_prints_json_that_holds_the_same(capsys):
    assert main(["config", str(DATA / "zero2_overlap.json"), "--json", "--world-size", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    config, notices = translate(DATA / "zero2_overlap.json", Implied(world_size=2))
    assert said == {**config.as_dict(), "digest": config.digest, "notices": list(notices)}


def test_the_command_takes_what_the_call_would_imply(capsys):
    file = str(DATA / "hugging_face_fine_tune.json")
    assert main(["config", file]) == 1
    said = capsys.readouterr().err
    assert "train_micro_batch_size_per_gpu (micro_samples), gradient_accumulation_steps (accumulation)" in said
    line = f"python -m zero config {file} --implied dtype=... --implied micro_samples=... --implied accumulation=... "
    assert line in said
    implied = ["micro_samples=8", "accumulation=2", "clip=1.0", "dtype=bfloat16"]
    assert main(["config", file, *(word for item in implied for word in ("--implied", item))]) == 0
    assert "dtype = bfloat16" in capsys.readouterr().out
    for wrong in ("learning=3", "dtype=fp8", "lr=abc", "betas=0.9,x"):
        assert main(["config", file, "--implied", wrong]) == 2
    assert "takes NAME=VALUE" in capsys.readouterr().err


def test_the_command_takes_two_numbers_for_betas(capsys, tmp_path):
    file = tmp_path / "betas.json"
    file.write_text('{"optimizer": {"type": "Adam", "params": {"betas": "auto"}}}')
    for betas in ("0.8,0.99", "[0.8, 0.99]"):
        assert main(["config", str(file), "--implied", f"betas={betas}"]) == 0
        assert "betas = 0.8, 0.99" in capsys.readouterr().out


def test_all_problems_of_a_file_are_told_in_one_answer_the_stage_first():
    tree = {"gradient_clip": 1.0, "optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": "auto", "lrr": 1}},
            "zero_optimization": {"stage": 4, "zeropp_loco_param": {"err_beta": 0.8}}, "gradient_clipping": -1,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "cubic"}}}
    with pytest.raises(ValueError) as caught:
        translate(tree)
    lines = str(caught.value).splitlines()
    assert lines[0] == "Cannot use the DeepSpeed configuration: it has 7 problems."
    found = ["from 0 to 3", "'gradient_clip'", "zeropp_loco_param", "'lrr'", "gradient_clipping -1.0", "warmup_type",
             "optimizer.params.lr (lr), optimizer.params.eps (eps), scheduler.params.warmup_num_steps (warmup_steps)"]
    assert all(words in line for words, line in zip(found, lines[1:], strict=True)), lines


HJSON = """
# as people write it
{
  train_micro_batch_size_per_gpu: 4  // no quotes
  'gradient_accumulation_steps': 2,
  /* over
     lines */
  optimizer: {
    type: AdamW
    params: {lr: 1e-3, betas: [0.9, 0.95,], "eps": 1e-8,}
  }
  "tensorboard": {enabled: true, output_path: "a # b"
    job_name: it's this one, all of it
  }
}
"""


@pytest.mark.parametrize("text", [HJSON, HJSON[HJSON.index("{") + 1 : HJSON.rindex("}")]], ids=["braces", "no braces"])
def test_a_file_may_be_hjson(text, tmp_path):
    path = tmp_path / "config.hjson"
    path.write_text(text)
    config = translate(path).config
    assert (config.batch.micro_samples, config.accumulation) == (4, 2)
    assert config.optimizer.kwargs["betas"] == (0.9, 0.95) and config.optimizer.kwargs["lr"] == 1e-3
    assert config.report.tensorboard == str(pathlib.Path("a # b", "it's this one, all of it"))


def test_a_text_that_is_no_path_may_be_a_configuration_in_base64():
    text = base64.urlsafe_b64encode(json.dumps({"steps_per_print": 11}).encode()).decode()
    assert translate(text).config.report.every_steps == 11
    for wrong in ("no_such_file", base64.urlsafe_b64encode(b"something else").decode()):
        with pytest.raises(ValueError, match=r"there is no such file\. Give the path"):
            translate(wrong)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from([None, 2]), st.sampled_from(["json", "hjson"]))
def test_whatever_is_json_is_read_as_json_and_needs_no_package(tmp_path, monkeypatch, tree, indent, suffix):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / f"config.{suffix}"
    path.write_text(json.dumps(tree, indent=indent))
    assert read_tree(path) == tree


@pytest.mark.parametrize("on", [True, 1])
def test_one_and_zero_stand_for_true_and_false(on):
    assert translate({"zero_allow_untested_optimizer": on}).config.elementwise is True
    assert translate({"zero_allow_untested_optimizer": 1 - on}).config.elementwise is None


@pytest.mark.parametrize(
    "tree",
    [
        {"gradient_allreduce_op": "sum", "prescale_gradients": True},
        {"gradient_allreduce_op": "sum", "gradient_predivide_factor": 2.0},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    ],
)
def test_what_asks_for_narrower_sums_or_states_is_served_in_float32_and_told(tree):
    reading = translate(tree)
    check_supported(reading.config)
    told = "\n".join(reading.notices)
    assert "float32" in told and "predivide" not in told.replace("gradient_predivide_factor", "")
    assert reading.config.reduce == tree.get("gradient_allreduce_op", "mean")
    assert len(translate({"data_types": {"grad_accum_dtype": "fp32"}, "prescale_gradients": False}).notices) == 1


def test_a_file_may_ask_for_narrow_moments_by_both_names():
    adam = {"type": "Adam", "params": {"lr": 0.1, "fp32_optimizer_states": False}}
    reading = translate({"bf16": {"bf16_optimizer_states": True}, "optimizer": adam})
    assert reading.config.optimizer.kwargs["moments"] == "bfloat16"
    with pytest.raises(ValueError, match=r"optimizer\.params\.fp32_optimizer_states=false: only true"):
        translate({"optimizer": adam})


ON_DISK = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}


@pytest.mark.parametrize(
    "more", [{}, {"optimizer": {"type": "SGD"}}, {"optimizer": {"type": "Adam"}, "zero_optimization": ON_DISK}]
)
def test_moments_in_bf16_are_told_of_where_they_are_not_so(more):
    reading = translate({"bf16": {"bf16_optimizer_states": True}, **more})
    assert any(notice.startswith("bf16.bf16_optimizer_states: moments are float32") for notice in reading.notices)
    assert reading.config.optimizer is None or reading.config.optimizer.kind != "PlainAdam"


def test_the_command_refuses_a_file_with_the_reason_on_stderr(capsys):
    assert main(["config", str(DATA / "mistyped.json")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "Did you mean 'loss_scale_window'?" in said.err


def test_within_one_block_all_problems_are_told_too():
    tree = {
        "fp16": {"enabled": True, "initial_scale_power": 900, "loss_scale_window": 0, "hysteresis": 0, "min_loss_scale": -1},
        "optimizer": {
            "type": "Adam",
            "params": {"lr": "abc", "foo": 1, "weight_decay": -1, "torch_adam": 7, "max_grad_norm": 1},
        },
        "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 3, "warmup_type": "cubic", "warmup_max_lr": "x"}},
        "steps_per_print": 0,
        "wall_clock_breakdown": "x",
        "tensorboard": {"enabled": True, "job_name": 3},
        "torch_autocast": {"enabled": 5, "dtype": "fp8"},
        "train_batch_size": 0,
        "train_micro_batch_size_per_gpu": 1.5,
        "data_types": {"grad_accum_dtype": "fp12"},
    }
    with pytest.raises(ValueError) as caught:
        translate(tree)
    told = str(caught.value)
    for path in (
        "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale",
        "optimizer.params.lr 'abc'", "'foo' for AdamW", "optimizer.params.weight_decay -1",
        "optimizer.params.torch_adam", "optimizer.params.max_grad_norm",
        "scheduler.params.last_batch_iteration", "scheduler.params.warmup_type", "scheduler.params.warmup_max_lr 'x'",
        "steps_per_print", "wall_clock_breakdown", "tensorboard.job_name", "torch_autocast.enabled", "torch_autocast.dtype",
        "train_batch_size 0", "train_micro_batch_size_per_gpu 1.5", "data_types.grad_accum_dtype",
    ):  # fmt: skip
        assert f"Cannot use {path}" in told, (path, told)
    assert "it has 20 problems" in told
