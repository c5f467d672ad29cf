"""A generator and a discriminator, each with its optimizer."""

import torch
import torch.distributed as dist
from torch import nn

import zero


def train(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = zero.shard(generator, optimizer_g, stage=stage)
    optimizer_d = zero.shard(discriminator, optimizer_d, stage=stage)
    criterion = nn.BCEWithLogitsLoss()
    real_label, fake_label = torch.ones(4, 1), torch.zeros(4, 1)
    losses = []
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + rank)
        real, noise = torch.randn(4, 2, generator=draw) + 2.0, torch.randn(4, 4, generator=draw)

        optimizer_d.zero_grad()
        loss_real = criterion(discriminator(real), real_label)
        loss_real.backward()
        fake = generator(noise)
        loss_fake = criterion(discriminator(fake.detach()), fake_label)
        loss_fake.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), real_label)
        loss_g.backward()
        optimizer_g.step()
        losses += [loss_real.item(), loss_fake.item(), loss_g.item()]
    return losses
