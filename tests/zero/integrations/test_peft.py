"""Adapters of PEFT on a base in shares, which is frozen: trained as beside a whole base, and saved whole."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from tests import inside
from tests.devices import needs_transformers
from tests.zero.integrations.on_ranks import both_ranks
from tests.zero.integrations.test_pretrained import assert_same, inputs, state, tiny

HERE = "tests.zero.integrations.test_peft"
pytestmark = [needs_transformers, pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")]


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], modules_to_save=["lm_head"], lora_dropout=0.0)
    return get_peft_model(model, config)


def adapted(folder, out):
    from peft import PeftModel

    import zero
    from zero.integrations.transformers import from_pretrained, save_pretrained

    model_class = type(tiny("llama"))
    plain = with_adapters(model_class.from_pretrained(folder))
    model = with_adapters(from_pretrained(model_class, folder, stage=3))
    assert sum(inside.is_unread(param) for param in model.parameters()) > 10
    trainings = []
    for each, stage in ((plain, 2), (model, 3)):
        each.gradient_checkpointing_enable()
        each.enable_input_require_grads()
        trained = [param for param in each.parameters() if param.requires_grad]
        trainings.append((each, zero.shard(each, torch.optim.AdamW(trained, lr=0.05), stage=stage, gathered_bytes=0)))
    optimizer = trainings[1][1]
    weights = inside.weights_of(optimizer)
    assert len(weights.frozen()) == sum(not param.requires_grad for param in model.parameters())
    for step in range(2):
        for each, its in trainings:
            each(**inputs("llama", 10 * step + its.group.rank)).loss.backward()
            its.step()
            its.zero_grad()
    assert_same(state(model), state(plain))
    if optimizer.group.rank == 0:
        plain.save_pretrained(f"{out}-plain")
    save_pretrained(model, out)
    again = PeftModel.from_pretrained(model_class.from_pretrained(folder), out)
    assert_same({name: value for name, value in state(again).items() if "lora" in name},
                {name: value for name, value in state(model).items() if "lora" in name})  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs("llama")).logits
        assert torch.equal(again(**inputs("llama")).logits, expected)
    for _, its in trainings:
        its.close()
    if optimizer.group.rank == 0:
        merged = [each.merge_and_unload()(**inputs("llama")).logits for each in (model, plain)]
        assert torch.equal(*merged)


def test_adapters_train_on_a_base_in_shares_and_are_saved_whole(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    both_ranks(f"{HERE}:adapted", str(tmp_path / "base"), str(tmp_path / "out"))
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "out-plain"))
    assert_same(found, expected)
    assert any("lora_A" in name for name in found) and any("lm_head" in name for name in found)
