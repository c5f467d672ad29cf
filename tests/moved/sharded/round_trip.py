"""FSDP2 with a checkpoint of torch.distributed.checkpoint, from which a second model goes on."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn

import zero


def build(seed, stage):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, zero.shard(model, optimizer, stage=stage)


def steps(model, optimizer, numbers):
    losses = []
    for step in numbers:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x[:, :2].abs()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(stage):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = build(0, stage)
    losses = steps(model, optimizer, range(3))
    zero.save(folder[0], optimizer)

    model, optimizer = build(1, stage)
    zero.load(folder[0], optimizer)
    return losses + steps(model, optimizer, range(3, 6))
