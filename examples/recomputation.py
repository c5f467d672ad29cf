"""torch.utils.checkpoint, of both kinds: activations are computed again in backward, and gradients are what they were.

    torchrun --nproc-per-node 2 examples/recomputation.py
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accelerators
import zero


class Blocks(nn.Module):
    """A model of three blocks, recomputed in backward or not, with the same weights every time."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        self.use_reentrant = use_reentrant  # None: everything is kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # the reentrant kind sends nothing backward where no input asks for it
        for block in self.blocks:
            x = x + (block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant))
        return x


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(use_reentrant: bool | None, num_steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, and returns this rank's losses and the weights at the end."""
    device = accelerators.current().device()
    model = Blocks(use_reentrant).to(device)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=2)
    losses = []
    for step in range(num_steps):
        loss = model(batch_of(step, optimizer.group.rank).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses, model.state_dict()


if __name__ == "__main__":
    for kind in (None, True, False):
        print(f"use_reentrant={kind}: loss " + " ".join(f"{loss:.3f}" for loss in train(kind)[0]))
