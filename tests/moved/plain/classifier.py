"""An image classifier with BatchNorm, evaluated and saved on rank 0."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    images, labels = torch.randn(48, 1, 6, 6), torch.randint(3, (48,))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    losses = []
    for step in range(6):
        mine = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if rank == 0:
        model.eval()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model.module(images), labels).item())
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
    dist.barrier()
    return losses
