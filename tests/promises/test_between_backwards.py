"""Collectives between backwards, where ranks have sent unequal numbers of buckets: they pair up, and change no gradient."""

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.loopback import run_ranks
from tests.promises.loops import same, weights
from tests.schedule_free import ScheduleFree
from tests.zoo.case import filled

BETWEEN = {
    "nothing": lambda model, optimizer, folder: None,
    "state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "whole_state": lambda model, optimizer, folder: optimizer.whole_state(model[0].weight),
    "a save": lambda model, optimizer, folder: zero.save(folder, optimizer, mid_window=True),
    "a check": lambda model, optimizer, folder: optimizer.check(),
    "a mode": lambda model, optimizer, folder: (optimizer.eval(), optimizer.train()),
}


def send(model, rank, step):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    model(x).square().mean().backward()


def trained(rank, world, stage, between, folder, group=None):
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = filled(nn.Sequential(*layers), real=True).double()
    inner = ScheduleFree(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, inner, stage=stage, group=group, bucket_bytes=256, elementwise=True)
    optimizer.train()
    for step in range(2):
        send(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:  # rank 1 then uses no bucket in the next window, and sends them at once
        send(model, rank, 2)
    else:
        optimizer.no_contribution()
    BETWEEN[between](model, optimizer, folder)
    optimizer.zero_grad()
    for step in (3, 4):
        send(model, rank, step)
        BETWEEN[between](model, optimizer, folder)
    optimizer.step()
    optimizer.eval()
    optimizer.close()
    return weights(model)


@pytest.mark.parametrize("between", [name for name in BETWEEN if name != "nothing"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_comes_between_backwards_changes_nothing(tmp_path, stage, between):
    def program(group):
        return trained(group.rank, 2, stage, between, str(tmp_path / between), group)

    def alone(group):
        return trained(group.rank, 2, stage, "nothing", "", group)

    for found, expected in zip(run_ranks(2, program, 20.0), run_ranks(2, alone, 20.0), strict=True):
        assert same(found, expected)


@pytest.mark.parametrize("between", ["state_dict", pytest.param("a mode", marks=pytest.mark.full)])
def test_so_it_is_over_gloo(tmp_path, between):
    found = ranks.run(2, trained, 2, between, str(tmp_path))
    assert all(map(same, found, ranks.run(2, trained, 2, "nothing", "")))
