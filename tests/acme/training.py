"""One rank of a training on the device "acme", as a user starts it with torchrun: no accelerator is named anywhere.

Each stage and home gives the bits of plain PyTorch on the host and goes on from its checkpoint. The device is the one that
torch names. Rank 0 prints what it used.
"""

import copy
import os
import sys

import torch

import accelerators
import zero
from tests import acme

STEPS = 3
WORLD = 2


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def adam(made):
    return torch.optim.AdamW(made.parameters(), lr=0.1, foreach=False)


def plain():
    """What every rank must end with: the ranks' gradients are added and halved."""
    made = model()
    optimizer = adam(made)
    for step in range(STEPS):
        gradients = []
        for rank in range(WORLD):
            one = copy.deepcopy(made)
            one(batch(step, rank)).square().mean().backward()
            gradients.append([parameter.grad for parameter in one.parameters()])
        for parameter, *parts in zip(made.parameters(), *gradients, strict=True):
            parameter.grad = (parts[0] + parts[1]) / WORLD
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in made.parameters()])


def train(made, optimizer, steps, rank, device):
    for step in steps:
        made(batch(step, rank).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in made.parameters()])


def main(folder):
    acme.bring_up()
    rank, it = int(os.environ["RANK"]), accelerators.current()
    device = it.device()
    assert (it.name, device.index) == ("acme", rank)
    for stage, offload in ((0, None), (1, None), (2, None), (1, "cpu"), (2, "cpu"), (2, {"ratio": 0.5})):
        made = model().to(device)
        optimizer = zero.shard(made, adam(made), stage=stage, offload=offload, bucket_bytes=256)
        train(made, optimizer, range(STEPS - 1), rank, device)
        zero.save(f"{folder}/{stage}-{offload}", optimizer)
        found = train(made, optimizer, range(STEPS - 1, STEPS), rank, device)
        optimizer.close()
        assert torch.equal(found, plain()), (stage, offload)
        again = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
        optimizer = zero.shard(again, adam(again), stage=stage, offload=offload, bucket_bytes=256)
        zero.load(f"{folder}/{stage}-{offload}", optimizer)
        assert torch.equal(train(again, optimizer, range(STEPS - 1, STEPS), rank, device), found), (stage, offload)
        optimizer.close()
    if rank == 0:
        print(it.name, it.communication_backend, torch.distributed.get_backend())


if __name__ == "__main__":
    main(sys.argv[1])
