"""The state that a frozen parameter had before sharding is there when it is trained again, and in every state_dict."""

import pytest
import torch
from torch import nn

from tests.loopback import run_ranks
from zero import shard


def trained(sharded, rank=0, group=None, reload=False):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view_as(param) * 0.01 + index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps = iter(range(3))

    def step():
        x = torch.full((3, 4), 1.0 + next(steps))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    model[0].requires_grad_(False)
    if sharded:
        optimizer = shard(model, optimizer, stage=2, group=group)
    step()
    if reload:
        optimizer.load_state_dict(optimizer.state_dict())
    names = sorted(optimizer.state_dict()["state"]) if sharded else None
    model[0].requires_grad_(True)
    step()
    return [param.detach().clone() for param in model.parameters()], names


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_state_of_a_parameter_that_was_frozen_while_sharding(world, reload):
    expected, _ = trained(sharded=False)
    for weights, names in run_ranks(world, lambda group: trained(True, group.rank, group, reload)):
        assert names == ["0.bias", "0.weight", "1.bias", "1.weight"]
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
