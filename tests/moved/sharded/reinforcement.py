"""An actor, a critic and a temperature with an optimizer each, and a target network."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import zero


def train(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = nn.Parameter(torch.zeros(1))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-3)
    actor_optimizer = zero.shard(actor, actor_optimizer, stage=stage)
    critic_optimizer = zero.shard(critic, critic_optimizer, stage=stage)
    alpha_optimizer = zero.shard(nn.ParameterList([log_alpha]), alpha_optimizer, stage=stage)
    losses = []
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + rank)
        state, action, reward, after = (torch.randn(4, size, generator=draw) for size in (6, 2, 1, 6))
        with torch.no_grad():
            expected = reward + 0.9 * target(torch.cat([after, actor(after)], 1))
        critic_loss = (critic(torch.cat([state, action], 1)) - expected).square().mean()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        chosen = actor(state)
        actor_loss = (log_alpha.exp().detach() * chosen.square().sum(1) - critic(torch.cat([state, chosen], 1))[:, 0]).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        alpha_loss = (log_alpha.exp() * (chosen.detach().square().sum(1) - 0.5)).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()

        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        losses += [critic_loss.item(), actor_loss.item(), alpha_loss.item()]
    return losses
