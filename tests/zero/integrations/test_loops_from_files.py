"""zero.initialize and accelerate with models that have no memory yet: in files, or on the meta device."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.devices import needs_accelerate, needs_transformers
from tests.zero.integrations.on_ranks import both_ranks
from tests.zero.integrations.test_pretrained import assert_same, inputs, state, tiny

HERE = "tests.zero.integrations.test_loops_from_files"


def config(stage, **more):
    adamw = {"type": "AdamW", "params": {"lr": 0.01}}
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "optimizer": adamw,
        "zero_optimization": {"stage": stage}, **more,
    }  # fmt: skip


def engine_steps(model, stage, batches, **more):
    """What the model is after an engine has trained it."""
    import zero

    engine, *_ = zero.initialize(model=model, config=config(stage, **more))
    for batch in batches(engine.global_rank):
        engine.backward(engine(**batch).loss)
        engine.step()
    return engine


def of_tokens(rank):
    return [inputs("llama", 10 * step + rank) for step in range(2)]


def engines_from_files(folder):
    from transformers import LlamaForCausalLM

    import zero
    from zero.integrations.transformers import from_pretrained, loading

    for more in ({}, {"bf16": {"enabled": True}}):
        beside = engine_steps(LlamaForCausalLM.from_pretrained(folder), 2, of_tokens, **more)
        for stage in (3, 2):
            engine = engine_steps(from_pretrained(LlamaForCausalLM, folder, stage=stage), stage, of_tokens, **more)
            assert_same(state(engine.module), state(beside.module))
            engine.destroy()
        beside.destroy()
    with loading(stage=3):
        model = LlamaForCausalLM.from_pretrained(folder)
    forward_only = config(3)
    del forward_only["optimizer"]
    engine, *_ = zero.initialize(model=model, config=forward_only)
    assert_same(state(engine.module), state(LlamaForCausalLM.from_pretrained(folder)))
    assert engine(**inputs("llama")).loss.isfinite()
    engine.destroy()


@pytest.mark.full
@needs_transformers
def test_an_engine_trains_a_model_in_files_as_the_plain_one(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    both_ranks(f"{HERE}:engines_from_files", str(tmp_path))


class Loss(nn.Module):
    """Layers and their loss, as models of transformers have it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x):
        self.loss = (self.layers(x) * self.scale).square().mean()
        return self


def of_numbers(rank):
    return [{"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))} for step in range(2)]


def made_on_meta():
    with torch.device("meta"):
        return Loss()


def plain():
    torch.manual_seed(3)
    return Loss()


def engines_on_meta(path):
    import zero

    beside = engine_steps(plain(), 2, of_numbers)
    engine, *_ = zero.initialize(model=made_on_meta(), config=config(3))
    engine.backward(engine(**of_numbers(0)[0]).loss)
    with pytest.raises(RuntimeError, match=r"Cannot step: nobody has written to layers\.0\.weight, .*\(9 such"):
        engine.step()
    engine.destroy()
    model = made_on_meta()
    engine, *_ = zero.initialize(model=model, config=config(3))
    zero.load_weights(model, path)
    for batch in of_numbers(engine.global_rank):
        engine.backward(engine(**batch).loss)
        engine.step()
    found = state(model), state(beside.module)
    engine.destroy()
    beside.destroy()
    with pytest.raises(ValueError, match=r"Cannot shard: parameter layers\.0\.weight is on the meta device"):
        zero.initialize(model=made_on_meta(), config=config(2))
    forward_only = config(3)
    del forward_only["optimizer"]
    with pytest.raises(ValueError, match=r"for forward only: layers\.0\.weight is on the meta device .*\(10 such"):
        zero.initialize(model=made_on_meta(), config=forward_only)
    return found


@pytest.mark.promise("I02")
def test_an_engine_trains_a_model_that_begins_on_the_meta_device(tmp_path):
    save_file(plain().state_dict(), tmp_path / "model.safetensors")
    for found, expected in both_ranks(f"{HERE}:engines_on_meta", str(tmp_path)):
        assert_same(found, expected)


def accelerated(model, stage, batches, load=None):
    """What the model is after accelerate's loop."""
    import zero
    from zero.integrations.accelerate import ShardedAccelerator

    accelerator = ShardedAccelerator(zero={"stage": stage})
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if load is not None:
        zero.load_weights(model, load)
    for batch in batches(accelerator.process_index):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, accelerator.sharded


def loops_of_accelerate(folder, path):
    from transformers import LlamaForCausalLM

    from zero.integrations.transformers import from_pretrained

    beside, first = accelerated(LlamaForCausalLM.from_pretrained(folder), 2, of_tokens)
    model, second = accelerated(from_pretrained(LlamaForCausalLM, folder, stage=3), 3, of_tokens)
    assert_same(state(model), state(beside))
    first.close()
    second.close()
    beside, first = accelerated(plain(), 2, of_numbers)
    model, second = accelerated(made_on_meta(), 3, of_numbers, path)
    assert_same(state(model), state(beside))
    first.close()
    second.close()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaForCausalLM.config_class.from_pretrained(folder))
    with pytest.raises(RuntimeError, match=r"Cannot step: nobody has written to model\.rotary_emb\.inv_freq"):
        accelerated(model, 3, of_tokens, folder)  # no file has this object, and a copy of it is not written to any more


@needs_transformers
@needs_accelerate
def test_accelerate_trains_models_in_files_and_on_the_meta_device_as_plain_ones(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "llama")
    save_file(plain().state_dict(), tmp_path / "model.safetensors")
    both_ranks(f"{HERE}:loops_of_accelerate", str(tmp_path / "llama"), str(tmp_path / "model.safetensors"))
