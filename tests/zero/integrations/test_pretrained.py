"""Hugging Face models from files into shares: as plain from_pretrained gives them, and no rank reads more than its shares."""

import contextlib
import io
import json
import re
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import faults, inside
from tests.devices import needs_transformers
from tests.weight_reads import counted_reads
from tests.zero.integrations.on_ranks import both_ranks, one_process
from zero.errors import CheckpointFailed

HERE = "tests.zero.integrations.test_pretrained"
pytestmark = needs_transformers
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(kind):
    """A model with random weights."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1))
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    if kind == "qwen3_moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **moe, num_key_value_heads=1))
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))
    if kind == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, max_position_embeddings=32))
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


AT_NIGHT = [pytest.param(kind, marks=pytest.mark.full) for kind in ("t5", "bert", "gpt2", "resnet")]


def inputs(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "resnet":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(1, 64, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": torch.tensor([0, 1]) if kind == "bert" else tokens}


def state(model):
    """All that a model computes with: non-persistent buffers too."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return {name: value.detach().clone() for name, value in named.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def loaded_as_plain(folder, kind, options, as_context=False, model_class=None):
    """Loads a model in both ways, compares, and trains both."""
    import zero
    from zero.integrations.transformers import from_pretrained, loading

    model_class = model_class or type(tiny(kind))
    torch.manual_seed(7)
    plain = model_class.from_pretrained(folder, **options)
    torch.manual_seed(7)
    with counted_reads() as counted:
        if as_context:
            with loading(stage=3):
                model = model_class.from_pretrained(folder, **options)
        else:
            model = from_pretrained(model_class, folder, stage=3, **options)
        at_load = sum(counted)
        assert any(inside.is_unread(param) for param in model.parameters())
        ties = [list(each.state_dict(keep_vars=True).values()) for each in (model, plain)]
        assert [[a is b for b in ties[0]] for a in ties[0]] == [[a is b for b in ties[1]] for a in ties[1]]
        model.train()
        plain.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = zero.shard(model, optimizer, stage=3, bucket_bytes=2048, gathered_bytes=0)
    assert_same(state(model), state(plain))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert model.config.to_dict() == plain.config.to_dict()
    beside = zero.shard(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), stage=2, bucket_bytes=2048)
    for step in range(2):
        for each, its in ((model, optimizer), (plain, beside)):
            torch.manual_seed(step)
            each(**inputs(kind, 10 * step + optimizer.group.rank)).loss.backward()
            its.step()
            its.zero_grad()
    assert_same(state(model), state(plain))
    optimizer.close()
    beside.close()
    return at_load, sum(counted)


@pytest.mark.promise("I02")
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", *AT_NIGHT])
def test_a_model_is_that_of_plain_from_pretrained_bit_by_bit(kind, tmp_path):
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    found = both_ranks(f"{HERE}:loaded_as_plain", str(tmp_path), kind, {"dtype": torch.bfloat16} if kind == "llama" else {})
    file = tmp_path / "model.safetensors"
    tensors, size = load_file(file), file.stat().st_size
    # Other programs save it so, not fused.
    assert (kind == "qwen3_moe") is any(".experts.3.gate_proj." in name for name in tensors)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    buffers = sum(tensor.nbytes for name, tensor in tensors.items() if name in dict(model.named_buffers()))
    for at_load, read in found:  # the header, and the buffers
        assert at_load == size - whole + buffers
        assert read - at_load < 0.7 * whole
    assert sum(read - at_load for at_load, read in found) == whole - buffers


def tensors_in(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def shared(folder, kind, stage=3, **options):
    """A model from files, and its optimizer."""
    import zero
    from zero.integrations.transformers import from_pretrained

    model = from_pretrained(type(tiny(kind)), folder, stage=stage)
    make = partial(torch.optim.AdamW, lr=0.01)
    return model, zero.shard(model, make, stage=stage, bucket_bytes=2048, gathered_bytes=0, **options)


def saved(folder, out, kind, stage, dtype, max_shard_size):
    """Saves what was loaded, trained or not; what it is, and how much was whole at a time."""
    from zero.integrations.transformers import save_pretrained

    model, optimizer = shared(folder, kind, stage, dtype=dtype)
    model(**inputs(kind, optimizer.group.rank)).loss.backward()
    optimizer.step()
    with torch.no_grad():
        plain = type(model).from_pretrained(folder).to(next(model.parameters()).dtype)
        plain.load_state_dict(model.state_dict())
        plain.config = model.config  # a forward writes to it
    if optimizer.group.rank == 0:
        plain.save_pretrained(f"{out}-plain", max_shard_size=max_shard_size)
    save_pretrained(model, out, max_shard_size=max_shard_size)
    optimizer.close()
    again = type(model).from_pretrained(out)
    assert_same(state(again), state(model))


@pytest.mark.parametrize(("kind", "stage", "dtype", "max_shard_size"), [
    ("llama", 3, "bfloat16", "4KB"), ("gpt2", 3, None, "1GB"), ("qwen3_moe", 3, None, "4KB"),
    pytest.param("t5", 3, None, "1GB", marks=pytest.mark.full), pytest.param("bert", 2, None, "1GB", marks=pytest.mark.full),
    pytest.param("resnet", 3, None, "2KB", marks=pytest.mark.full),
])  # fmt: skip
def test_what_is_saved_from_shares_is_what_plain_save_pretrained_writes(kind, stage, dtype, max_shard_size, tmp_path):
    tiny(kind).save_pretrained(tmp_path / "before")
    both_ranks(f"{HERE}:saved", str(tmp_path / "before"), str(tmp_path / "out"), kind, stage, dtype, max_shard_size)
    found, expected = tmp_path / "out", tmp_path / "out-plain"
    assert_same(tensors_in(found), tensors_in(expected))
    for path in expected.glob("*config.json"):
        assert json.loads((found / path.name).read_text()) == json.loads(path.read_text())
    index = found / "model.safetensors.index.json"
    assert index.exists() is max_shard_size.endswith("KB") and len(list(found.iterdir())) > 1
    if kind != "qwen3_moe":  # plain transformers counts what the experts of a layer share once for each expert
        assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
        assert not index.exists() or json.loads(index.read_text()) == json.loads((expected / index.name).read_text())


def loaded_in_many_ways(folder):
    """In files of other kinds, in other dtypes, in the context, with a head that is in no file."""
    import transformers as hf

    loaded_as_plain(f"{folder}/sharded", "llama", {"dtype": "auto"}, True)
    loaded_as_plain(f"{folder}/both", "gpt2", {}, True)
    loaded_as_plain(f"{folder}/t5", "t5", {"dtype": torch.bfloat16})
    loaded_as_plain(f"{folder}/base", "bert", {"num_labels": 3}, model_class=hf.BertForSequenceClassification)
    loaded_as_plain(f"{folder}/sharded", "llama", {}, model_class=hf.AutoModelForCausalLM)


def test_files_of_all_kinds_dtypes_and_missing_heads_are_as_in_plain_from_pretrained(tmp_path):
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    tiny("t5").save_pretrained(tmp_path / "t5")
    tiny("bert").bert.save_pretrained(tmp_path / "base")
    gpt2 = tiny("gpt2")
    gpt2.config.save_pretrained(tmp_path / "both")
    torch.save(gpt2.state_dict(), tmp_path / "both" / "pytorch_model.bin")  # under both names of what is tied
    both_ranks(f"{HERE}:loaded_in_many_ways", str(tmp_path))


def resized(folder):
    """Embeddings that get more rows before sharding, and may not after it."""
    import zero
    from zero.integrations.transformers import from_pretrained

    found = []
    for kind in ("llama", "gpt2"):
        model_class = type(tiny(kind))
        plain = model_class.from_pretrained(f"{folder}/{kind}")
        model = from_pretrained(model_class, f"{folder}/{kind}", stage=3)
        for each in (plain, model):
            torch.manual_seed(3)
            each.resize_token_embeddings(70, mean_resizing=kind == "llama")
        assert sum(inside.is_unread(param) for param in model.parameters()) > 5
        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        assert_same(state(model), state(plain))
        before = model.get_input_embeddings().weight
        with pytest.raises(RuntimeError, match=r"Cannot assign .* to \.data of .* weights are in shares.* Call close") as error:
            model.resize_token_embeddings(80)
        assert model.get_input_embeddings().weight is before and before.shape == (70, 16)
        assert_same(state(model), state(plain))
        optimizer.close()
        model.resize_token_embeddings(80)
        assert model.get_input_embeddings().weight.shape == (80, 16)
        found.append(str(error.value))
    return found


@pytest.mark.promise("I05")
def test_embeddings_are_resized_before_sharding_and_an_error_says_so_afterwards(tmp_path):
    for kind in ("llama", "gpt2"):
        tiny(kind).save_pretrained(tmp_path / kind)
    here, there = both_ranks(f"{HERE}:resized", str(tmp_path))
    assert here == there and len(here) == 2


def generated(folder, kind):
    """Ranks generate so many tokens as each likes, from its own prompt; in turn with steps."""
    from transformers import set_seed

    model, optimizer = shared(folder, kind)
    plain = type(model).from_pretrained(folder)
    rank = optimizer.group.rank
    prompt = torch.arange(1, 4 + 2 * rank).view(1, -1)
    for step in range(2):
        with torch.no_grad():
            plain.load_state_dict(model.state_dict())
        for number in range(1 + rank):
            for sample in (False, True):
                options = {"max_new_tokens": 3 + 5 * rank + number, "do_sample": sample, "pad_token_id": 0}
                model.eval()
                plain.eval()
                set_seed(number)
                expected = plain.generate(prompt, **options)
                set_seed(number)
                assert torch.equal(model.generate(prompt, **options), expected)
        model.train()
        model(**inputs(kind, step + rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.full),
                                  pytest.param("t5", marks=pytest.mark.full)])  # fmt: skip
def test_ranks_generate_unequal_numbers_of_tokens_as_a_plain_model_does(kind, tmp_path):
    tiny(kind).save_pretrained(tmp_path)
    both_ranks(f"{HERE}:generated", str(tmp_path), kind)


def refused(folder):
    """What each rank says of a folder that is wrong, on both ranks or on the second."""
    import transformers as hf

    from zero.integrations.transformers import from_pretrained

    said = {}
    rank = torch.distributed.get_rank()
    llama = hf.LlamaForCausalLM
    for name, model_class, path, options in (
        ("truncated", llama, f"{folder}/truncated", {}),
        ("index", llama, f"{folder}/index", {}),
        ("files", llama, f"{folder}/files", {}),
        ("missing on one", llama, folder + ("/good" if rank == 0 else "/nowhere"), {"local_files_only": True}),
        ("other on one", llama, folder + ("/good" if rank == 0 else "/other"), {}),
        ("architecture", hf.ResNetForImageClassification, f"{folder}/good", {}),
        ("device map", llama, f"{folder}/good", {"device_map": {"": "meta"}}),
    ):
        if name == "architecture":
            options = {"config": tiny("resnet").config}
        with pytest.raises(Exception) as error:
            from_pretrained(model_class, path, stage=3, **options)
        said[name] = f"{type(error.value).__name__}: {error.value}"
    assert hf.LlamaForCausalLM.from_pretrained(f"{folder}/good").lm_head.weight.numel()  # plain again
    return said


def test_bad_folders_are_named_on_all_ranks(tmp_path):
    for name in ("good", "truncated", "index", "files", "other"):
        tiny("llama").save_pretrained(tmp_path / name, max_shard_size="8KB")
    files = sorted((tmp_path / "truncated").glob("*.safetensors"))
    files[-1].write_bytes(files[-1].read_bytes()[:-10])
    index = tmp_path / "index" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.layers.9.weight"] = files[0].name
    index.write_text(json.dumps(listed))
    index = tmp_path / "files" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    where = listed["weight_map"]
    where["lm_head.weight"], where["model.embed_tokens.weight"] = where["model.embed_tokens.weight"], where["lm_head.weight"]
    index.write_text(json.dumps(listed))
    state = load_file(tmp_path / "other" / files[0].name)
    save_file({name: value.double() for name, value in state.items()}, tmp_path / "other" / files[0].name, {"format": "pt"})
    here, there = both_ranks(f"{HERE}:refused", str(tmp_path))
    for said in (here, there):
        assert re.search(rf"BadCheckpoint: Cannot read .*{files[-1].name}: it has \d+ bytes and should have", said["truncated"])
        assert re.search(r"BadCheckpoint: Cannot load model\.layers\.9\.weight: the index says .* in no file", said["index"])
        assert re.search(r"Cannot load \S+\.weight: the index says that it is in \S+, and it is in model-.*saf", said["files"])
        assert re.search(r"RanksDiffer: .* rank 1 of 2 has other files than rank 0", said["other on one"])
        assert re.search(r"Cannot load ResNet.*nothing in .* is a parameter of it.*another architecture", said["architecture"])
        assert re.search(r"Cannot load .* device_map=.*Leave device_map out, and move the model", said["device map"])
    assert re.search(r"(?s)RankFailed: Cannot load the model: rank 1 of 2 could not\. \w+: .*nowhere", here["missing on one"])
    assert "nowhere" in there["missing on one"]


def made_in_shares(folder):
    """The example, which begins with random weights, and again with what it wrote."""
    from transformers import AutoModelForCausalLM

    from examples.llama_stage3 import main

    printed = []
    for begin in ([], ["--model", f"{folder}/first"]):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            main([*begin, "--out", f"{folder}/{'second' if begin else 'first'}"])
        printed.append([float(loss) for loss in re.findall(r"loss (\S+)", text.getvalue())])
        AutoModelForCausalLM.from_pretrained(f"{folder}/first")
    return printed


def test_the_example_trains_from_the_meta_device_and_goes_on_from_what_it_saved(tmp_path):
    (first, second), nothing = both_ranks(f"{HERE}:made_in_shares", str(tmp_path))
    assert nothing == [[], []]
    assert first[0] > first[-1] > second[0] > second[-1]


def saved_to_a_full_disk(folder):
    """Returns the errors of the two ways to write a model of transformers: within `saving`, as a Trainer does, and of ours."""
    from zero.integrations.transformers import save_pretrained, saving

    def full(*_):
        raise OSError(28, "No space left on device")

    model, said = tiny("llama"), []
    with mock.patch.object(*faults.WRITING_A_FILE, full):
        with pytest.raises(CheckpointFailed) as told, saving(model) as weights:
            model.save_pretrained(folder, state_dict=weights)
        said.append(str(told.value))
        with pytest.raises(CheckpointFailed) as told:
            save_pretrained(model, folder)
        said.append(str(told.value))
    return said


def test_a_full_disk_is_named_with_the_file_that_has_no_room(tmp_path):
    file = tmp_path / "model.safetensors"
    expected = f"Cannot write to {file}: No space left on device. Make room there, or name a place on another disk."
    assert one_process(f"{HERE}:saved_to_a_full_disk", str(tmp_path)) == [expected] * 2
