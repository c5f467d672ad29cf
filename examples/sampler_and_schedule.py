"""torch's DistributedSampler gives each rank its part of the data, and any of torch's schedules drives the learning rate.

    torchrun --nproc-per-node 2 examples/sampler_and_schedule.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accelerators
import zero

BATCH, EPOCHS = 4, 2


def make_model() -> nn.Module:
    """Makes the model, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def make_data() -> TensorDataset:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.square().mean(1, keepdim=True))


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A warm-up, then a cosine: schedules of schedules work too."""
    lr = torch.optim.lr_scheduler
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=2), lr.CosineAnnealingLR(optimizer, 6)]
    return lr.SequentialLR(optimizer, parts, [2])


def train() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Trains, and returns this rank's losses, the learning rates, and the weights at the end."""
    device = accelerators.current().device()
    model = make_model().to(device)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=2)
    schedule = make_schedule(optimizer)  # one made from the plain optimizer sees the steps as well
    data = make_data()
    sampler = DistributedSampler(data, num_replicas=optimizer.group.size, rank=optimizer.group.rank, seed=5)
    losses, rates = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
    optimizer.close()
    return losses, rates, model.state_dict()


if __name__ == "__main__":
    print("loss " + " ".join(f"{loss:.3f}" for loss in train()[0]))
