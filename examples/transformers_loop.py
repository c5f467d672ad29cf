"""A Hugging Face model in a plain loop needs no integration: shard its optimizer, and train as before.

examples/llama_stage3.py shows stage 3 in bf16, with weights read from files and saved.

    torchrun --nproc-per-node 2 examples/transformers_loop.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accelerators
import zero

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
    tie_word_embeddings=True,
)  # fmt: skip
BATCH, LENGTH, CLIP = 4, 16, 0.5


def make_model() -> LlamaForCausalLM:
    """A tiny model with random weights, the same every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """The batch that a rank trains on at a step."""
    return torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank))


def train(num_steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, and returns this rank's loss at each step and the weights at the end."""
    accelerator = accelerators.current()
    model = make_model().to(accelerator.device())
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=2, clip=CLIP)
    losses = []
    for step in range(num_steps):
        tokens = tokens_of(step, optimizer.group.rank).to(accelerator.device())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses, model.state_dict()


if __name__ == "__main__":
    print("loss " + " ".join(f"{loss:.3f}" for loss in train()[0]))
