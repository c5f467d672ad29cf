"""torchao's float8 training of a converted model, sharded, beside the same in plain torch."""

import copy

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.devices import has_package

pytestmark = pytest.mark.skipif(not has_package("torchao"), reason="torchao is not installed")


def make_model():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))  # a CPU has no such product


def trained(rank, world, stages):
    found = []
    for stage in stages:
        plain = make_model()
        model = copy.deepcopy(plain)
        options = {"keep_whole_numel": 0} if stage == 3 else {}
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **options)
        oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            batches = [torch.randn(16, 16, generator=torch.Generator().manual_seed(2 * step + each)) for each in range(world)]
            model(batches[rank]).square().mean().backward()
            for batch in batches:
                (plain(batch).square().mean() / world).backward()
            optimizer.step(), optimizer.zero_grad(), oracle.step(), oracle.zero_grad()
        optimizer.close()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found.append(max(float((one - other).detach().abs().max()) for one, other in pairs))
    return found


def test_a_model_that_torchao_converted_to_float8_trains_as_in_one_process():
    for worst in ranks.run(2, trained, [0, 1, 2, 3]):
        assert max(worst) < 1e-6, worst
