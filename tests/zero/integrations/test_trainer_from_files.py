"""transformers' Trainer on a model that is read into shares: it evaluates, saves, resumes and goes back to the best as ever."""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.devices import needs_accelerate, needs_transformers
from tests.zero.integrations.on_ranks import both_ranks, one_process
from tests.zero.integrations.test_pretrained import tiny

HERE = "tests.zero.integrations.test_trainer_from_files"
pytestmark = [needs_transformers, needs_accelerate]


def trained(folder, out, sharded, resume_from=None):
    """What was logged, the best checkpoint's name, and the weights at the end."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from examples.transformers_trainer import Tokens
    from zero.integrations.transformers import ShardedTrainer, from_pretrained

    arguments = TrainingArguments(
        out, per_device_train_batch_size=2 if sharded else 4, per_device_eval_batch_size=4, max_steps=4, eval_strategy="steps",
        eval_steps=1, save_steps=1, logging_steps=1, load_best_model_at_end=True, learning_rate=0.01, seed=3, report_to=[],
        disable_tqdm=True, use_cpu=True, greater_is_better=True,  # otherwise the last checkpoint would be the best
    )  # fmt: skip
    data = {"train_dataset": Tokens(64), "eval_dataset": Tokens(72)}
    if sharded:
        model = from_pretrained(AutoModelForCausalLM, folder, stage=3)
        trainer = ShardedTrainer(model, arguments, zero={"stage": 3, "gathered_bytes": 0}, **data)
    else:
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, **data)
    first = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resume_from)
    trainer.save_model(f"{out}/final")
    keys, entries = ("loss", "grad_norm", "eval_loss"), trainer.state.log_history
    history = [{key: entry[key] for key in keys if key in entry} for entry in entries]
    best = re.search(r"checkpoint-\d+", trainer.state.best_model_checkpoint).group()
    return [first, *history], best, {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.full
def test_it_evaluates_resumes_and_loads_the_best_model_as_a_plain_trainer_does(tmp_path):
    folder, *outs = (str(tmp_path / name) for name in ("model", "plain", "sharded", "again"))
    tiny("llama").save_pretrained(folder)
    logged, best, weights = one_process(f"{HERE}:trained", folder, outs[0], False)
    assert best == "checkpoint-1"
    found = both_ranks(f"{HERE}:trained", folder, outs[1], True)
    resumed = both_ranks(f"{HERE}:trained", folder, outs[2], True, resume_from=f"{outs[1]}/checkpoint-2")
    for run in (found, resumed):
        for rank in run:
            assert rank[1] == best
            assert all(torch.equal(rank[2][name], found[0][2][name]) for name in weights)
    assert resumed[0][0] == found[0][0]
    for here, there in zip(found[0][0][1:], logged[1:], strict=True):
        torch.testing.assert_close(here, there)
    torch.testing.assert_close(found[0][0][0], logged[0])
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][2][name], weight, msg=lambda text, name=name: f"{name}: {text}")
    saved = load_file(tmp_path / "sharded" / "final" / "model.safetensors")
    assert saved.keys() == load_file(tmp_path / "plain" / "final" / "model.safetensors").keys()
    assert all(torch.equal(value, found[0][2][name]) for name, value in saved.items())
