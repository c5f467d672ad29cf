"""Q08: models of transformers that its own plans distribute train unedited, as plain ones in one process."""

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

import zero
from tests import ranks
from tests.devices import needs_accelerate, needs_transformers
from tests.zero.integrations.on_ranks import both_ranks, one_process
from zero.checkpoint.export import read_weights

pytestmark = needs_transformers

HERE, APART, NUM_STEPS = "tests.zero.integrations.test_parallel_plans", "frameworks", 3


def make_model(kind):
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
    if "llama" in kind:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=kind == "tied llama"))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **experts))


def loaded(folder, **options):
    import transformers as hf

    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).train()


def loss_of(model, step, place=0):
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step + 100 * place))
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
        # A weight that is cut in pairs lies in another order, and is compared as it was saved.
        if whole.shape == values[name].shape:
            worst = max(worst, float((whole - values[name]).abs().max()))
    saved = dict(loaded(out).named_parameters())
    worst = max(worst, *(float((saved[name] - value).abs().max()) for name, value in values.items()))
    optimizer.close()
    return norms, worst, sum(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.promise("Q08")
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.full), "qwen3_moe"])
def test_a_model_that_a_plan_of_transformers_distributes_trains_and_is_saved_as_a_plain_one(kind, stage, tmp_path):
    given, saved = str(tmp_path / "given"), str(tmp_path / "saved")
    make_model(kind).save_pretrained(given)
    found = ranks.run(2, trained_by_plan, given, saved, kind, stage, fresh=True, apart=APART)
    for norms, worst, num_dtensors in found:
        assert norms == pytest.approx([0.0] * NUM_STEPS, abs=1e-6) and worst < 2e-4 and num_dtensors >= 12


LAYERS, EXPERTS = {"tensor_parallel": {"autotp_size": 2}}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 4}}


def trained_by_keys(rank, world, kind, keys, how, stage, folder):
    """Returns norms of the steps, the largest difference of a weight from one process, and numbers of the engine."""
    plain, model = make_model(kind), make_model(kind)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_optimization": {"stage": stage}, **keys}
    num_groups = world // 2 if "tensor_parallel" in keys else world
    passed = {
        "an optimizer": lambda: {"optimizer": adamw(model)},
        "a function": lambda: {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.01)},
        "groups": lambda: {"model_parameters": [{"params": list(model.parameters()), "lr": 0.01}]},
    }
    if how == "groups":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.01}}
    engine, *_ = zero.initialize(model=model, config=config, **passed[how]())
    plain_optimizer, norms = adamw(plain), []
    for step in range(NUM_STEPS):
        plain_optimizer.zero_grad()
        for place in range(num_groups):
            (loss_of(plain, step, place) / num_groups).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        plain_optimizer.step()
        engine.backward(loss_of(engine, step, engine.get_data_parallel_rank()))
        engine.step()
        norms.append(engine.get_global_grad_norm() / norm - 1)
    engine.save_checkpoint(folder / "checkpoint")
    if "tensor_parallel" in keys:
        with engine.optimizer.gathered():
            model.save_pretrained(folder / "saved")
    num_dtensors, values = sum(isinstance(param, DTensor) for param in model.parameters()), dict(plain.named_parameters())
    engine.destroy()
    saved = [read_weights(folder / "checkpoint")[1]]
    if "tensor_parallel" in keys:
        saved.append(dict(loaded(folder / "saved").named_parameters()))
    differences = [float((found[name] - value).abs().max()) for found in saved for name, value in values.items()]
    return norms, max(differences), (engine.dp_world_size, engine.train_batch_size(), num_dtensors)


@pytest.mark.promise("Q08")
@pytest.mark.parametrize(("kind", "keys", "how", "stage"), [
    ("tied llama", LAYERS, "an optimizer", 3), ("qwen3_moe", EXPERTS, "groups", 3),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("llama", LAYERS, "groups", 2), ("llama", LAYERS, "a function", 1), ("qwen3_moe", EXPERTS, "an optimizer", 2),
        ("qwen3_moe", LAYERS | EXPERTS, "an optimizer", 3), ("qwen3_moe", LAYERS | SPREAD, "an optimizer", 3))),
])  # fmt: skip
def test_keys_of_a_deepspeed_file_cut_a_model_by_its_own_plan(kind, keys, how, stage, tmp_path):
    num_groups = 2 if "tensor_parallel" in keys else 4
    found = ranks.run(4, trained_by_keys, kind, keys, how, stage, tmp_path, apart=APART)
    for norms, worst, (dp_size, batch, num_dtensors) in found:
        assert norms == pytest.approx([0.0] * NUM_STEPS, abs=1e-6) and worst < 2e-4
        assert (dp_size, batch) == (num_groups, 2 * num_groups) and num_dtensors >= 4


def refused_by_keys(rank, world):
    config, said = {"train_micro_batch_size_per_gpu": 2}, []
    group = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))["dp"]
    plain = torch.nn.Linear(4, 4)
    calls = [(plain, LAYERS, {}), (plain, EXPERTS, {}), (make_model("llama"), EXPERTS, {}), (plain, LAYERS, {"group": group}),
             (plain, {"tensor_parallel": {"autotp_size": 3}}, {}), (make_model("llama").to("meta"), LAYERS, {}),
             (plain, {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}, {}),
             (make_model("qwen3_moe"), LAYERS | {"expert_parallel": {"enabled": True, "autoep_size": 1}}, {})]
    for model, keys, options in calls:
        with pytest.raises(ValueError) as caught:
            zero.initialize(model=model, optimizer=adamw(model), config={**config, **keys}, **options)
        said.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        zero.shard(plain, adamw(plain), stage=2, tensor_ranks=2)
    return [*said, str(caught.value)]


@pytest.mark.promise("Q08")
def test_keys_that_no_plan_answers_are_refused_with_what_to_write():
    words = ["autotp_size 2: Linear has no tp_plan in transformers. Load", "autoep_size 2: Linear has no ep_plan",
             "LlamaForCausalLM has no ep_plan", "with group= or mpu=", "2 ranks cannot be divided so", "on the meta device",
             "tensor_parallel.tp_overlap_comm True", "a piece of each of several", "Cannot use tensor_ranks"]  # fmt: skip
    for said in ranks.run(2, refused_by_keys, apart=APART):
        for text, each in zip(words, said, strict=True):
            assert text in each


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def by_trainer(folder, model, resume=None, **options):
    """Returns what the Trainer logged at each step, and itself."""
    from transformers import Trainer, TrainingArguments

    from zero.integrations.transformers import ShardedTrainer

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=2, logging_steps=1,
        learning_rate=0.01, max_grad_norm=0.5, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = (ShardedTrainer if options else Trainer)(model, arguments, train_dataset=Tokens(), **options)
    trainer.train(resume_from_checkpoint=resume)
    return [entry for entry in trainer.state.log_history if "loss" in entry], trainer


def trained_by_trainer(kind, folder, stage, by_keys):
    """Returns logs of a training and of one that went on from its checkpoint, and names of weights that differ in that."""
    from transformers.distributed import DistributedConfig

    from zero.integrations.transformers import save_pretrained

    plan, found = DistributedConfig(tp_size=2, tp_plan="auto", ep_size=1 if kind == "llama" else 2), []
    for resume in (None, folder / "out" / "checkpoint-2"):
        model = loaded(folder / "given", distributed_config=None if by_keys else plan)
        options = {"stage": stage, "keep_whole_numel": 0}
        if by_keys:
            options = {"zero_optimization": {"stage": stage}, **LAYERS}
        logged, trainer = by_trainer(folder / "out", model, resume and str(resume), zero=options)
        found.append(logged)
        save_pretrained(model, folder / ("first" if resume is None else "second"))
        trainer.accelerator.sharded.close()
    return found


def trained_by_plain_trainer(folder):
    logged, trainer = by_trainer(folder / "plain", loaded(folder / "given"))
    return logged, {name: param.detach() for name, param in trainer.model.named_parameters()}


@pytest.mark.promise("Q08")
@needs_accelerate
@pytest.mark.parametrize(("kind", "stage", "by_keys"), [
    ("llama", 3, True), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("llama", 3, False), ("llama", 2, False), ("qwen3_moe", 3, False), ("qwen3_moe", 1, False))),
])  # fmt: skip
def test_a_trainer_trains_saves_and_resumes_a_model_that_a_plan_distributes(kind, stage, by_keys, tmp_path):
    make_model(kind).save_pretrained(tmp_path / "given")
    expected, weights = one_process(f"{HERE}:trained_by_plain_trainer", tmp_path)
    for first, resumed in both_ranks(f"{HERE}:trained_by_trainer", kind, tmp_path, stage, by_keys):
        for logged, steps in ((first, expected), (resumed, expected[2:])):
            logged = logged[-len(steps) :]
            for key in ("loss", "grad_norm"):
                assert [entry[key] for entry in logged] == pytest.approx([entry[key] for entry in steps], rel=1e-4), key
    for name in ("first", "second", "out/checkpoint-4"):
        saved = {name: param.detach() for name, param in loaded(tmp_path / name).named_parameters()}
        assert max(float((saved[name] - value).abs().max()) for name, value in weights.items()) < 2e-4


@needs_accelerate
@pytest.mark.parametrize(("given", "words"), [((), "to a model that is passed with args="), ((make_model,), "experts alone")])
def test_a_trainer_refuses_keys_that_cut_what_it_cannot(given, words, tmp_path):
    from transformers import TrainingArguments

    from zero.integrations.transformers import ShardedTrainer

    models = [make("qwen3_moe") for make in given]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match=words):
        ShardedTrainer(*models, args=arguments, zero=EXPERTS if models else LAYERS)


def under_accelerate(rank, world):
    """Returns the samples that each step of a rank had, the weights, and what was said where nobody shares samples."""
    from zero.integrations.accelerate import ShardedAccelerator

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))

    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    accelerator = ShardedAccelerator(zero={"stage": 2, "group": mesh["dp"]})
    with pytest.raises(ValueError) as caught:
        accelerator.prepare(*made())
    accelerator.share_samples(2)
    data = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=1)
    model, optimizer, loader = accelerator.prepare(*made(), data)
    seen = []
    for x in loader:
        seen.append(x.flatten().tolist())
        accelerator.backward(model(x / 32).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.weight.full_tensor().detach(), str(caught.value)


@pytest.mark.promise("Q08")
@needs_accelerate
def test_ranks_of_a_part_load_the_same_samples_under_accelerate():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(32.0).view(8, 4)
    for step in range(4):
        for x in data[2 * step : 2 * step + 2]:
            (model(x / 32).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (seen, weight, said) in enumerate(ranks.run(4, under_accelerate, fresh=True, apart=APART)):
        assert seen == data[rank // 2 :: 2].tolist()
        assert torch.allclose(weight, model.weight, atol=1e-6) and "Call accelerator.share_samples(size)" in said
