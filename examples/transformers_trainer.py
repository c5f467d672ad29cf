"""transformers' Trainer, sharded: accumulation, clipping, a schedule, checkpoints and resuming are the Trainer's own.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import accelerators
from zero.integrations.transformers import ShardedTrainer

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
)


class Tokens(torch.utils.data.Dataset):
    """Sentences of random tokens, the same every time."""

    def __init__(self, num_samples: int) -> None:
        self.tokens = torch.randint(64, (num_samples, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_trainer(folder: str, batch: int = 2, use_cpu: bool = False, **options: Any) -> Trainer:
    """Makes a Trainer: a sharded one if `zero` is among the options, as `zero={"stage": 2}`, else a plain one."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=2, max_steps=4, save_steps=2, logging_steps=1,
        learning_rate=0.01, max_grad_norm=0.5, warmup_steps=2, report_to=[], disable_tqdm=True, seed=3, use_cpu=use_cpu,
    )  # fmt: skip
    kind = ShardedTrainer if "zero" in options else Trainer
    return kind(LlamaForCausalLM(CONFIG), arguments, train_dataset=Tokens(64), **options)


if __name__ == "__main__":
    on_cpu = accelerators.current().name == "cpu"  # which transformers is told
    trainer = make_trainer("trainer_output", use_cpu=on_cpu, zero={"stage": 2})  # a folder that all ranks see
    trainer.train()
