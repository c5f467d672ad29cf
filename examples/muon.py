"""Muon for the matrices of a small GPT and AdamW for the rest, as one sharded optimizer: each matrix is stepped by one rank.

    torchrun --nproc-per-node 2 examples/muon.py
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import accelerators
import zero

BATCH, CONTEXT, WIDTH = 8, 32, 64


class Gpt(nn.Module):
    """A small GPT over bytes. Called with samples, it returns their mean loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        x = self.bytes(samples[:, :-1]) + self.places.weight
        later = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), samples[:, 1:].flatten())


def make_model() -> nn.Module:
    """Makes the model, with the same weights every time."""
    torch.manual_seed(0)
    return Gpt(layers=2)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Makes Muon for the matrices of the blocks, and AdamW for embeddings, the head and vectors."""
    matrices = [param for name, param in model.named_parameters() if name.startswith("blocks.") and param.dim() == 2]
    chosen = set(matrices)
    rest = [param for param in model.parameters() if param not in chosen]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def batch_of(step: int) -> torch.Tensor:
    """The samples of a step, of all ranks together."""
    text = torch.tensor(list(Path(__file__).read_bytes()))  # its own source
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)]


def train(num_steps: int = 20, kernels: str = "auto") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, and returns this rank's losses and the weights at the end."""
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
