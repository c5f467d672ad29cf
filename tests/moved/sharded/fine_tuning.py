"""Supervised fine-tuning: adapters on frozen layers, and groups with and without decay."""

import torch
import torch.distributed as dist
from torch import nn

import zero


class LoRA(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def train(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(8, 16), 2), nn.LayerNorm(16), nn.GELU(), LoRA(nn.Linear(16, 4), 2))
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = zero.shard(model, torch.optim.AdamW(groups, lr=0.02), stage=stage)
    losses = []
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x[:, :4].sin()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    adapters = {name: value for name, value in model.state_dict().items() if "base" not in name}
    losses.append(sum(value.sum().item() for value in adapters.values()))
    return losses
