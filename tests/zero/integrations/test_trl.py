"""TRL's SFTTrainer, made sharded by the mixin, on a model that is read into shares."""

from importlib.util import find_spec

import pytest
import torch

from tests.zero.integrations.on_ranks import both_ranks, one_process
from tests.zero.integrations.test_pretrained import tiny

HERE = "tests.zero.integrations.test_trl"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed (pip install zero-accelerators[trl])"),
]


def tuned(folder, out, sharded):
    """What was logged, and the weights."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from examples.transformers_trainer import Tokens
    from zero.integrations.transformers import ShardedTrainerMixin, from_pretrained

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer):
        """As docs/integrations.md says."""

    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    table = InMemoryTable.from_pydict({"input_ids": [sample["input_ids"].tolist() for sample in Tokens(32)]})
    data = Dataset(table, fingerprint="tokens")  # not every version of datasets can make the fingerprint of a table
    arguments = SFTConfig(
        out, per_device_train_batch_size=2 if sharded else 4, max_steps=3, logging_steps=1, learning_rate=0.01, seed=3,
        report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, save_strategy="no", gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    if sharded:
        model = from_pretrained(AutoModelForCausalLM, folder, stage=3)
        trainer = ShardedSFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, zero={"stage": 3})
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(out)
    losses = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_supervised_tuning_is_that_of_one_process_and_is_saved_whole(tmp_path):
    from transformers import AutoModelForCausalLM

    folder, plain, sharded = (str(tmp_path / name) for name in ("model", "plain", "sharded"))
    tiny("llama").save_pretrained(folder)
    losses, weights = one_process(f"{HERE}:tuned", folder, plain, False)
    found = both_ranks(f"{HERE}:tuned", folder, sharded, True)
    torch.testing.assert_close(found[0][0], losses)
    saved = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    for name, weight in weights.items():
        assert torch.equal(found[0][1][name], found[1][1][name]) and torch.equal(saved[name], found[0][1][name]), name
        torch.testing.assert_close(found[0][1][name], weight, msg=lambda text, name=name: f"{name}: {text}")
