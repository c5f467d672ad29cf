"""Q08: models of transformers that its own plans distribute train unedited, as plain ones in one process."""

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zero
from tests import ranks
from tests.devices import needs_transformers

pytestmark = needs_transformers

NUM_STEPS = 3


def make_model(kind):
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **experts))


def loaded(folder, **options):
    import transformers as hf

    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).train()


def loss_of(model, step):
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained_by_plan(rank, world, folder, out, kind, stage):
    """Returns norms of the steps, the largest difference of a weight, and the number of DTensors."""
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    plan = DistributedConfig(tp_size=world, tp_plan="auto", ep_size=1 if kind == "llama" else world)
    model, plain = loaded(folder, distributed_config=plan), loaded(folder)
    group = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))["dp"]
    optimizer = zero.shard(model, adamw(model), stage=stage, group=group, keep_whole_numel=0, clip=0.5)
    plain_optimizer, norms = adamw(plain), []
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss_of(plain, step).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        plain_optimizer.step()
        norms.append(optimizer.grad_norm / norm - 1)
    with optimizer.gathered():
        model.save_pretrained(out)
    values, worst = dict(plain.named_parameters()), 0.0
    for name, param in model.named_parameters():
        whole = param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()
        if whole.shape == values[name].shape:  # what is cut in pairs lies otherwise, and is compared as it was saved
            worst = max(worst, float((whole - values[name]).abs().max()))
    saved = dict(loaded(out).named_parameters())
    worst = max(worst, *(float((saved[name] - value).abs().max()) for name, value in values.items()))
    optimizer.close()
    return norms, worst, sum(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.promise("Q08")
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_model_that_a_plan_of_transformers_distributes_trains_and_is_saved_as_a_plain_one(kind, stage, tmp_path):
    make_model(kind).save_pretrained(tmp_path / "given")
    found = ranks.run(2, trained_by_plan, str(tmp_path / "given"), str(tmp_path / "saved"), kind, stage, fresh=True)
    for norms, worst, num_dtensors in found:
        assert norms == pytest.approx([0.0] * NUM_STEPS, abs=1e-6) and worst < 2e-4 and num_dtensors >= 12
