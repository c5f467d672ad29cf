"""An image model as timm trains it: an averaged copy, a schedule by updates, gradients clipped by value."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import zero


class Averaged:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(self.decay * mine + (1.0 - self.decay) * theirs)


def train(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    averaged = Averaged(model, decay=0.8)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.9)
    optimizer = zero.shard(model, optimizer, stage=stage)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    losses = []
    for step in range(6):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(4, 4, 4, generator=draw), torch.randint(3, (4,), generator=draw)
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update(model)
        schedule.step()
        losses += [loss.item(), criterion(averaged.module(x), y).item()]
    return losses
