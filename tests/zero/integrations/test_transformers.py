"""Hugging Face models, in a plain loop and under transformers' Trainer, on two ranks as in one process on the joint batch."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.devices import needs_accelerate, needs_muon, needs_transformers
from tests.zero.integrations.on_ranks import (
    assert_runs_as_a_program,
    assert_same_training,
    both_ranks,
    one_process,
    plain_training,
)

HERE = "tests.zero.integrations.test_transformers"
pytestmark = [needs_transformers, needs_accelerate]


def plain_loop():
    from examples import transformers_loop as example

    def losses(model):
        for step in range(4):
            tokens = torch.cat([example.tokens_of(step, rank) for rank in range(2)])
            yield model(input_ids=tokens, labels=tokens).loss

    return plain_training(example.make_model(), losses, clip=example.CLIP)


def test_a_plain_loop_trains_as_one_process_does():
    assert_same_training(both_ranks("examples.transformers_loop:train"), *one_process(f"{HERE}:plain_loop"))


def trained(folder, options, resume_from=None):
    """What the Trainer logged at each step, and the weights at the end."""
    from examples.transformers_trainer import make_trainer

    trainer = make_trainer(folder, use_cpu=True, **options)
    trainer.train(resume_from_checkpoint=resume_from)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [logged, {name: value.clone() for name, value in trainer.model.state_dict().items()}]


def assert_same_run(found, logged, weights):
    for name, weight in weights.items():
        assert torch.equal(found[0][1][name], found[1][1][name]), name
        torch.testing.assert_close(found[0][1][name], weight, msg=lambda text, name=name: f"{name}: {text}")
    for key in ("loss", "grad_norm", "learning_rate"):
        here, there = (torch.tensor([entry[key] for entry in entries]) for entries in (found[0][0], logged))
        torch.testing.assert_close(here, there, msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A plain Trainer on the joint batch: where it saved, what it logged, and its weights."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, *one_process(f"{HERE}:trained", str(folder), {"batch": 4})


def test_the_trainer_accumulates_clips_schedules_and_saves_as_it_does_alone_and_resumes_bit_by_bit(alone, tmp_path):
    folder, logged, weights = alone
    assert all(entry["grad_norm"] > 0.5 for entry in logged), "a norm that is not clipped shows nothing"
    assert len({entry["learning_rate"] for entry in logged}) > 2
    found = both_ranks(f"{HERE}:trained", str(tmp_path / "sharded"), {"zero": {"stage": 2}})
    assert_same_run(found, logged, weights)

    halfway = tmp_path / "sharded" / "checkpoint-2"
    exported, expected = (load_file(path / "checkpoint-2" / "model.safetensors") for path in (tmp_path / "sharded", folder))
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(exported[name], weight, msg=lambda text, name=name: f"{name}: {text}")
    assert not (halfway / "optimizer.pt").exists()
    assert {path.name for path in (halfway / "zero" / "state").glob("rank-*")} == {
        "rank-00000.safetensors", "rank-00001.safetensors",
    }  # fmt: skip
    again = both_ranks(f"{HERE}:trained", str(tmp_path / "again"), {"zero": {"stage": 2}}, resume_from=str(halfway))
    for name, weight in found[0][1].items():
        assert torch.equal(again[0][1][name], weight), name
    assert [entry["loss"] for entry in again[0][0]] == [entry["loss"] for entry in found[0][0]]


def test_weights_in_shares_are_saved_whole_and_gone_on_from(alone, tmp_path):
    folder, logged, weights = alone
    found = both_ranks(f"{HERE}:trained", str(tmp_path / "sharded"), {"zero": {"stage": 3}})
    assert_same_run(found, logged, weights)
    halfway = tmp_path / "sharded" / "checkpoint-2"
    exported, expected = (load_file(path / "model.safetensors") for path in (halfway, folder / "checkpoint-2"))
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(exported[name], weight, msg=lambda text, name=name: f"{name}: {text}")
    again = both_ranks(f"{HERE}:trained", str(tmp_path / "again"), {"zero": {"stage": 3}}, resume_from=str(halfway))
    assert_same_run(again, logged, weights)


# A file as people write it for the Trainer: most of it is left to the Trainer's arguments.
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}


def test_a_deepspeed_file_shards_as_the_options_do_with_the_trainers_arguments_for_its_auto(alone, tmp_path):
    _, logged, weights = alone
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    found = both_ranks(f"{HERE}:trained", str(tmp_path / "out"), {"zero": str(tmp_path / "ds.json")})
    assert_same_run(found, logged, weights)


def of_another_class(folder, zero):
    """A sharded Trainer of another class than Trainer, and what it made."""
    from transformers import LlamaForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from examples.transformers_trainer import CONFIG, Tokens
    from zero.integrations.transformers import ShardedTrainer

    class MyTrainer(ShardedTrainer, Seq2SeqTrainer):
        """As docs/integrations.md says."""

    arguments = Seq2SeqTrainingArguments(
        folder, use_cpu=True, report_to=[], max_steps=4, warmup_steps=2, learning_rate=0.01, max_grad_norm=0.5,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = MyTrainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=Tokens(64), zero=zero)
    trainer.train()
    schedule = trainer.lr_scheduler
    made = type(getattr(schedule, "scheduler", schedule)).__name__, type(trainer.accelerator.sharded.inner).__name__
    return *made, trainer.accelerator.sharded.config.as_dict()


def test_any_trainer_becomes_a_sharded_one_and_builds_what_the_file_describes(tmp_path):
    params = dict.fromkeys(("total_num_steps", "warmup_num_steps", "warmup_max_lr"), "auto")
    schedule = {"type": "WarmupDecayLR", "params": params}
    zero = {**DEEPSPEED, "optimizer": {"type": "SGD", "params": {"lr": "auto"}}, "scheduler": schedule}
    made, inner, config = one_process(f"{HERE}:of_another_class", str(tmp_path), zero)
    assert (made, inner) == ("Schedule", "SGD")
    assert (config["stage"], config["kernels"], config["dtype"]) == (2, "torch", None)  # auto has nothing faster for SGD


def test_a_checkpoint_of_a_trainer_that_did_not_shard_goes_on_at_any_stage(alone, tmp_path):
    folder, logged, weights = alone
    checkpoint = str(folder / "checkpoint-2")
    assert_same_run(
        both_ranks(f"{HERE}:trained", str(tmp_path), {"zero": {"stage": 1}}, resume_from=checkpoint), logged, weights
    )


def plainly_resumed(folder, checkpoint):
    """What a plain Trainer goes on with."""
    from transformers import Trainer, TrainerCallback

    from examples.transformers_trainer import make_trainer

    trainer = make_trainer(folder, use_cpu=True, zero={"stage": 2})
    plain = Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset)
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **_):
            weights = {name: value.clone() for name, value in plain.model.state_dict().items()}
            seen.append((state.global_step, len(optimizer.state), weights))

    plain.add_callback(Look())
    plain.train(resume_from_checkpoint=checkpoint)
    return seen[0]


@pytest.mark.full
def test_a_plain_trainer_goes_on_from_ours_with_a_new_optimizer(tmp_path):
    both_ranks(f"{HERE}:trained", str(tmp_path / "sharded"), {"zero": {"stage": 2}})
    checkpoint = tmp_path / "sharded" / "checkpoint-2"
    step, num_states, weights = one_process(f"{HERE}:plainly_resumed", str(tmp_path / "plain"), str(checkpoint))
    assert (step, num_states) == (2, 0)
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


def evaluated_and_trained_again(folder, options):
    from examples.transformers_trainer import Tokens, make_trainer

    trainer, losses = make_trainer(folder, use_cpu=True, eval_dataset=Tokens(8), **options), []
    for _ in range(2):
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
    losses.append(trainer.evaluate()["eval_loss"])
    return losses, trainer.model.state_dict()


def test_a_trainer_that_evaluates_and_trains_again_is_the_plain_one_bit_by_bit_on_one_rank(tmp_path):
    call = f"{HERE}:evaluated_and_trained_again"
    sharded = one_process(call, str(tmp_path / "sharded"), {"zero": {"stage": 2}})
    plain = one_process(call, str(tmp_path / "plain"), {})
    assert sharded[0] == plain[0] and len(set(plain[0])) == 3
    for name, weight in plain[1].items():
        assert torch.equal(sharded[1][name], weight), name


@pytest.mark.parametrize("name", ["transformers_loop", "transformers_trainer"])
def test_the_example_runs_as_a_program(name, tmp_path):
    assert_runs_as_a_program(name, tmp_path)


def refused(folder):
    from transformers import LlamaForCausalLM, TrainingArguments

    from examples.transformers_trainer import CONFIG
    from zero.integrations.transformers import ShardedTrainer

    said = []
    clips = {"gradient_clipping": 0.25, "zero_optimization": {"stage": 2}}
    for options, zero in (({"auto_find_batch_size": True}, {"stage": 2}), ({}, {"stage": 2, "dtype": "float16"}), ({}, clips)):
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], **options)
        with pytest.raises(ValueError) as error:
            ShardedTrainer(LlamaForCausalLM(CONFIG), arguments, zero=zero)
        said.append(str(error.value))
    return said


def test_what_the_trainer_cannot_have_is_refused(tmp_path):
    batch, dtype, clip = one_process(f"{HERE}:refused", str(tmp_path))
    assert re.fullmatch(r"Cannot use auto_find_batch_size: .* Set per_device_train_batch_size\.", batch)
    assert re.fullmatch(r"Cannot shard under accelerate with dtype='float16': accelerate would not know .* Use .*", dtype)
    assert "gradient_clipping is 0.25, but max_grad_norm makes it 1.0" in clip
    assert not list(tmp_path.iterdir())


@needs_muon
def test_muon_of_a_configuration_is_not_for_the_trainers_embedding_and_head():
    from zero.config.schema import OptimizerSpec, ZeroConfig
    from zero.integrations.transformers import ShardedTrainerMixin

    class Trainer:
        def create_optimizer(self):
            return self.optimizer

    class Sharded(ShardedTrainerMixin, Trainer):
        def _options(self, num_training_steps=None):
            return SimpleNamespace(config=ZeroConfig(stage=2, optimizer=OptimizerSpec.of("Muon", {"lr": 0.02})))

    trainer = Sharded(zero={})
    trainer.model, trainer.optimizer = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layer": nn.Linear(4, 4, bias=False)}), None
    trainer.model["lm_head"] = nn.Linear(4, 5, bias=False)
    muon, adam = trainer.create_optimizer().members
    assert muon.param_groups[0]["params"] == [trainer.model["layer"].weight]
    assert len(adam.param_groups[0]["params"]) == 2
