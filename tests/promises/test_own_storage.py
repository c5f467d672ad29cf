"""Each weight has a storage of its own, so that tools which compare storages or write them see separate weights."""

import copy
import io
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zero
from accelerators.backends.cpu import CpuAccelerator
from tests import programs
from tests.devices import needs_accelerate, needs_transformers
from tests.loopback import solo
from tests.promises.loops import alone, weights

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
DTYPES = pytest.mark.parametrize("dtype", [None, "bfloat16"])


def build():
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 4), nn.Conv2d(3, 2, 3)
    tied = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    tied[3].weight = tied[0].weight
    return tied


def sharded(stage, dtype=None):
    return alone(build, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, dtype=dtype)


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.promise("T07")
@STAGES
@DTYPES
def test_safetensors_writes_every_weight_and_tied_ones_once(stage, dtype, tmp_path):
    model, _ = sharded(stage, dtype)
    save_model(model, str(tmp_path / "model.safetensors"))
    names = set(dict(model.named_parameters()))
    assert set(load_file(tmp_path / "model.safetensors")) == names
    assert equal(load_file(tmp_path / "model.safetensors"), {name: model.state_dict()[name] for name in names})


@needs_accelerate
@STAGES
def test_accelerate_writes_every_weight(stage, tmp_path):
    from accelerate import Accelerator

    model, _ = sharded(stage)
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert equal(load_file(tmp_path / "model.safetensors"), weights(model))


@STAGES
@DTYPES
def test_torch_writes_the_bytes_of_one_weight_alone_and_ties_stay(stage, dtype):
    model, _ = sharded(stage, dtype)
    for param in model.parameters():
        file = io.BytesIO()
        torch.save(param, file)
        assert param.untyped_storage().nbytes() == param.nbytes
        file.seek(0)
        loaded = torch.load(file)
        assert torch.equal(loaded, param) and loaded.untyped_storage().nbytes() == param.nbytes
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["0.weight"].data_ptr() == loaded["3.weight"].data_ptr()


@STAGES
def test_storages_tell_weights_apart_and_a_tied_weight_from_another(stage):
    model, optimizer = sharded(stage)
    one_step_of(model, optimizer)
    storages = [param.untyped_storage().data_ptr() for param in model.parameters()]
    assert len(set(storages)) == len(storages)
    assert model[0].weight.untyped_storage().data_ptr() == model[3].weight.untyped_storage().data_ptr()


def one_step_of(model, optimizer):
    optimizer.zero_grad()
    sum(param.float().square().sum() for param in model.parameters()).backward()
    optimizer.step()


@STAGES
def test_a_device_without_a_way_to_storages_gives_copies_in_a_state_dict(stage, monkeypatch):
    monkeypatch.setattr(CpuAccelerator, "has_dlpack", False)
    model, optimizer = sharded(stage)
    one_step_of(model, optimizer)
    state_dict = model.state_dict()
    assert equal({name: state_dict[name] for name in weights(model)}, weights(model))
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state_dict.values())
    assert state_dict["0.weight"].data_ptr() == state_dict["3.weight"].data_ptr() != model[0].weight.data_ptr()
    assert all(value is model.state_dict(keep_vars=True)[name] for name, value in model.named_parameters())
    optimizer.close()
    assert model.state_dict()["2.bias"].data_ptr() == model[2].bias.data_ptr()


@needs_transformers
@STAGES
def test_transformers_and_peft_write_every_weight(stage, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    plain = LlamaForCausalLM(config)
    model = get_peft_model(plain, adapter)
    adapted = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = zero.shard(model, torch.optim.SGD(adapted.values()), stage=stage, group=solo())
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(map(torch.Tensor.sum, saved.values())) == sorted(param.detach().sum() for param in adapted.values())
    assert len(saved) == len(adapted)
    optimizer.close()

    model = LlamaForCausalLM(config)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters()), stage=stage, group=solo())
    model.save_pretrained(tmp_path / "whole")
    assert equal(weights(LlamaForCausalLM.from_pretrained(tmp_path / "whole")), weights(model))
    optimizer.close()


@STAGES
def test_a_copy_of_a_model_and_one_that_outlives_its_optimizer_keep_their_memory(stage):
    model, optimizer = sharded(stage)
    twin, kept, values = copy.deepcopy(model), model[2].weight.detach(), weights(model)
    one_step_of(model, optimizer)
    stepped = model[2].weight.detach().clone()
    optimizer.close()
    del model, optimizer
    assert equal(weights(twin), values)
    assert torch.equal(kept, stepped)  # the step wrote it, and nothing has since


@STAGES
def test_after_an_edit_by_data_an_offload_and_a_load_each_has_its_own_storage_again(stage):
    model, optimizer = sharded(stage)
    saved = copy.deepcopy(optimizer.state_dict())
    model[2].weight.data = model[2].weight.data * 2
    one_step_of(model, optimizer)
    optimizer.offload_states()
    optimizer.reload_states()
    optimizer.load_state_dict(saved)
    one_step_of(model, optimizer)
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in model.parameters())


def _read(model, ready, seen):
    ready.wait()
    seen.put({name: value.tolist() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.filterwarnings("error::UserWarning")  # torch's, for each hook that is not serialised
def test_a_spawned_process_gets_the_weights(stage):
    model, _ = sharded(stage)
    context = programs.start_context()  # like spawn it gives the process nothing but what is pickled, and torch is there
    ready, seen = context.Event(), context.SimpleQueue()
    process = context.Process(target=_read, args=(model, ready, seen))
    process.start()
    ready.set()
    assert seen.get() == {name: value.tolist() for name, value in model.state_dict().items()}
    process.join()


@STAGES
def test_weights_that_leave_shared_memory_are_named(stage, caplog):
    model, optimizer = sharded(stage)
    model.share_memory()
    with caplog.at_level(logging.WARNING, logger="zero"):
        one_step_of(model, optimizer)
        one_step_of(model, optimizer)
    assert [record.getMessage() for record in caplog.records if "processes share" in record.getMessage()] != []
    assert len([record for record in caplog.records if "processes share" in record.getMessage()]) == 1


# stage 3: no storage at all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_at_stage_3_torch_writes_a_tied_weight_once_and_it_stays_tied(dtype):
    model, _ = sharded(3, dtype)
    file, alone = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.save({"weight": model[0].weight}, alone)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["0.weight"].data_ptr() == loaded["3.weight"].data_ptr() != loaded["2.weight"].data_ptr()
    assert equal(loaded, {name: value.clone() for name, value in model.state_dict().items()})


def test_at_stage_3_what_writes_storages_says_what_to_do_and_works_inside_gathered(tmp_path):
    model, optimizer = sharded(3)
    with pytest.raises(dcp.api.CheckpointException, match=r"works inside optimizer.gathered\(\), or with clones"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "refused", no_dist=True)
    with optimizer.gathered():
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    loaded = {"model": {name: torch.zeros_like(value) for name, value in build().state_dict().items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert equal(loaded["model"], {name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("stage", [0, 3])
def test_torch_s_optimizer_state_by_name_is_refused_with_what_to_call(stage):
    model, optimizer = sharded(stage)
    one_step_of(model, optimizer)
    with pytest.raises(ValueError, match=r"Call optimizer.state_dict\(\), or write a checkpoint with zero.save"):
        get_optimizer_state_dict(model, optimizer)


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.empty = nn.Linear(4, 4), nn.Parameter(torch.empty(0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("home", ["cpu", "disk:{}"])
def test_states_of_an_empty_parameter_go_anywhere_and_back(stage, home, tmp_path):
    model, optimizer = alone(WithEmpty, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage)
    one_step_of(model, optimizer)
    before = weights(model)
    optimizer.offload_states(device=home.format(tmp_path))
    optimizer.reload_states()
    assert equal(weights(model), before)
    one_step_of(model, optimizer)


@pytest.mark.parametrize("stage", [0, 3])
@DTYPES
def test_a_model_that_torch_writes_whole_is_read_where_this_package_is_not(stage, dtype, tmp_path):
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    model, _ = alone(lambda: nn.Linear(3, 2), make, stage=stage, dtype=dtype)
    torch.save(model, tmp_path / "model.pt")
    done = programs.with_torch(
        "import sys, torch\nsys.modules.update(zero=None, accelerators=None)\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\nmodel.load_state_dict(model.state_dict())\n"
        "print([round(value, 4) for value in model.bias.tolist()])"
    )
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == [round(value, 4) for value in model.bias.tolist()]
