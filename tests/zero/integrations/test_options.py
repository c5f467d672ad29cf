"""What `zero=` may be under a framework: options, or a DeepSpeed configuration whose "auto" the framework answers."""

import json

import pytest

from zero.config.deepspeed.mapping import Implied
from zero.config.schema import ZeroConfig
from zero.integrations.options import Framework, read_options

ACCELERATE = Framework(
    "accelerate",
    Implied(world_size=2, accumulation=4, dtype="float32"),
    {"accumulation": "gradient_accumulation_steps", "dtype": "mixed_precision"},
)
TREE = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000},
}


def test_options_are_taken_as_they_are():
    given = {"stage": 2, "clip": 1.0}
    options = read_options(given, ACCELERATE)
    assert options.shard == given and options.shard is not given and options.config is None


@pytest.mark.parametrize("form", ["dict", "path"])
def test_a_configuration_becomes_options_and_what_the_loop_does_is_left_to_it(form, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TREE))
    shard = read_options(TREE if form == "dict" else path, ACCELERATE).shard
    assert (shard["stage"], shard["bucket_bytes"], shard["offload"].home, shard["clip"]) == (1, 4000, "host", None)
    assert "dtype" not in shard and "accumulation" not in shard
    assert TREE["gradient_clipping"] == "auto"


def test_sixteen_bits_are_weights_in_bfloat16_and_the_frameworks_own_in_fp16():
    half = Framework("accelerate", Implied(dtype="float16"))
    assert read_options({"bf16": {"enabled": True}}, ACCELERATE).shard["dtype"] == "bfloat16"
    assert "dtype" not in read_options({"fp16": {"enabled": "auto"}}, half).shard


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, but gradient_accumulation_steps makes it 4"),
        ({"fp16": {"enabled": True}}, "set mixed_precision to fp16"),
        ({"torch_autocast": {"enabled": True}}, "set mixed_precision instead"),
        ({"optimizer": {"type": "SGD"}}, "it has the block 'optimizer', but the loop makes its own"),
        ({"scheduler": {"type": "WarmupLR"}}, "it has the block 'scheduler'"),
        ({"zero_optimization": {"stage": 4}}, "from 0 to 3"),
        ({"tensor_parallel": {"autotp_size": 2}}, "or autoep_size cuts a model, but the loop makes its own"),
    ],
)
def test_what_the_framework_says_otherwise_is_refused(tree, words):
    with pytest.raises(ValueError, match=words):
        read_options(tree, ACCELERATE)


def test_what_is_written_alone_clips_where_the_framework_says_nothing():
    assert read_options({"gradient_clipping": 0.5}, ACCELERATE).shard["clip"] == 0.5
    clips = Framework("Lightning", Implied(clip=0.5))
    assert "clip" not in read_options({"gradient_clipping": 0.5}, clips).shard
    for tree in ({}, {"gradient_clipping": None}):  # DeepSpeed's default is not the loop's
        assert read_options(tree, ACCELERATE).shard["clip"] is None and read_options(tree, clips).config.clip == 0.5


def test_every_setting_arrives_that_is_not_the_frameworks_and_the_others_are_told(caplog):
    tree = {
        "zero_optimization": {"stage": 3},
        "zero_accelerators": {"gathered_bytes": "all", "keep_whole_numel": 100, "masters": "rounded"},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 5,
        "dataloader_drop_last": True,
    }
    with caplog.at_level("INFO", logger="zero"):
        shard = read_options(tree, ACCELERATE).shard
    assert (shard["gathered_bytes"], shard["keep_whole_numel"], shard["masters"]) == ("all", 100, "rounded")
    assert ZeroConfig(**shard).keep_whole_numel == 100
    assert "dataloader_drop_last has no effect in a configuration file: accelerate does this itself" in caplog.text
    assert "steps_per_print" in caplog.text
