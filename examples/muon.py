"""Muon for the matrices of a small GPT and AdamW for the rest, as one sharded optimizer: each matrix is stepped by one rank.

    torchrun --nproc-per-node 2 examples/muon.py
"""

from pathlib import Path

import torch
from torch import nn

import accelerators
import zero
from zero.tools.training.model import Gpt
from zero.tools.training.text import Text

BATCH, CONTEXT = 8, 32


def make_model() -> nn.Module:
    """The same every time: the GPT of `python -m zero train`, only smaller."""
    torch.manual_seed(0)
    return Gpt(layers=2, width=64, heads=4, context=CONTEXT)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon is for the matrices inside, not for embeddings, the head and vectors."""
    matrices = [param for name, param in model.named_parameters() if name.startswith("blocks.") and param.dim() == 2]
    chosen = set(matrices)
    rest = [param for param in model.parameters() if param not in chosen]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def batch_of(step: int) -> torch.Tensor:
    """The samples of a step, of all ranks together."""
    return Text(Path(__file__).read_bytes(), CONTEXT, seed=0).samples(step, BATCH)


def train(num_steps: int = 20, kernels: str = "auto") -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses, and the weights at the end."""
    device = accelerators.current().device()
    model = make_model().to(device)
    optimizer = zero.shard(model, make_optimizers(model), stage=2, kernels=kernels)
    group, losses = optimizer.group, []
    for step in range(num_steps):
        loss = model(batch_of(step).chunk(group.size)[group.rank].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses, model.state_dict()


if __name__ == "__main__":
    found = train()[0]
    print(f"loss {found[0]:.3f}, then {found[-1]:.3f}")
