"""TRL's DPOTrainer and GRPOTrainer, made sharded by the mixin, beside the same trainers in plain data parallelism."""

from importlib.util import find_spec

import pytest
import torch

from tests import inside
from tests.zero.integrations.on_ranks import both_ranks
from tests.zero.integrations.test_pretrained import tiny

HERE = "tests.zero.integrations.test_trl_preferences"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed (pip install zero-accelerators[trl])"),
]
COMMON = {
    "max_steps": 3, "logging_steps": 1, "learning_rate": 0.01, "seed": 3, "report_to": [], "disable_tqdm": True,
    "use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False,
}  # fmt: skip


def words():
    """A tokenizer for which a text is numbers between spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    known.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="0", eos_token="1", unk_token="0")


def texts(**columns):
    """Rows of numbers as texts, of so many words in each column."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    torch.manual_seed(1)
    rows = {
        name: [" " + " ".join(map(str, torch.randint(2, 64, (count,)).tolist())) for _ in range(16)]
        for name, count in columns.items()
    }
    return Dataset(InMemoryTable.from_pydict(rows), fingerprint="texts")


def preferred(folder, out, sharded):
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(out, per_device_train_batch_size=2, **COMMON)
    return trained(DPOTrainer, folder, arguments, sharded, texts(prompt=3, chosen=4, rejected=5))


def rewarded(folder, out, sharded):
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        out, per_device_train_batch_size=2, num_generations=2, max_completion_length=4, beta=0.1, use_vllm=False, **COMMON
    )
    return trained(GRPOTrainer, folder, arguments, sharded, texts(prompt=3), reward_funcs=even)


def even(completions, **_):
    """The reward: the part of the words that are even."""
    return [sum(int(word) % 2 == 0 for word in text.split()) / 4 for text in completions]


def trained(trainer_class, folder, arguments, sharded, data, **options):
    """What was logged, and the weights."""
    from transformers import AutoModelForCausalLM

    from zero.integrations.transformers import ShardedTrainerMixin, loading

    options = {"args": arguments, "train_dataset": data, "processing_class": words(), **options}
    if sharded:
        trainer_class = type("Sharded", (ShardedTrainerMixin, trainer_class), {})
        with loading(stage=3):  # the reference too, which the trainer loads itself
            model = AutoModelForCausalLM.from_pretrained(folder)
            trainer = trainer_class(model, zero={"stage": 3, "gathered_bytes": 0}, **options)
        in_files = [all(inside.is_unread(param) for param in each.parameters()) for each in (model, trainer.ref_model)]
        assert in_files == [True, True]
    else:
        trainer = trainer_class(AutoModelForCausalLM.from_pretrained(folder), **options)
    trainer.train()
    trainer.save_model(arguments.output_dir)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [{key: value for key, value in entry.items() if "time" not in key} for entry in logged]
    assert not sharded or all(inside.is_unread(param) for param in trainer.ref_model.parameters())  # read when it is used
    return losses, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("kind", ["preferred", "rewarded"])
def test_a_tuning_by_preferences_or_rewards_is_that_of_plain_data_parallelism_and_is_saved_whole(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, plain, sharded = (str(tmp_path / name) for name in ("model", "plain", "sharded"))
    tiny("llama").save_pretrained(folder)
    words().save_pretrained(folder)
    expected = both_ranks(f"{HERE}:{kind}", folder, plain, False)
    found = both_ranks(f"{HERE}:{kind}", folder, sharded, True)
    torch.testing.assert_close(found[0][0], expected[0][0])
    saved = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    for name, weight in expected[0][1].items():
        assert torch.equal(found[0][1][name], found[1][1][name]) and torch.equal(saved[name], found[0][1][name]), name
        torch.testing.assert_close(found[0][1][name], weight, msg=lambda text, name=name: f"{name}: {text}")
