"""Buffers that a forward changes, as running statistics are: each rank's own, or rank 0's as under DDP."""

import pytest
import torch
from torch import nn

from tests import ranks
from tests.promises.loops import on_ranks, same
from zero import shard
from zero.errors import RanksDiffer


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.BatchNorm1d(2, affine=False))


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def as_ddp(rank, world, stage):
    """Buffers after each of some steps, and those of DDP, which sends rank 0's before the next forward."""
    model, plain = normed(), normed()
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, buffers="broadcast", kernels="torch")
    ddp = nn.parallel.DistributedDataParallel(plain)
    beside = torch.optim.SGD(plain.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        seen.append([statistics(model), statistics(plain)])
        for run, opt in ((model, optimizer), (ddp, beside)):
            run(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name] if rank == 0 else weight, weight, rtol=1e-5, atol=1e-6)
    optimizer.close()
    return seen, statistics(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buffers_are_rank_0s_from_each_step_on_as_those_of_ddp_are(stage):
    (first, end), (other, other_end) = ranks.run(2, as_ddp, stage)
    assert same(end, other_end), "what rank 0 saves is what rank 1 evaluates"
    for (ours, ddps), (others, _) in zip(first, other, strict=True):
        assert same(ours, ddps) and same(ours, others)


def test_buffers_are_each_ranks_own_unless_asked():
    def program(model, optimizer, group):
        model(torch.full((3, 4), float(group.rank)) + torch.arange(12.0).view(3, 4)).square().sum().backward()
        optimizer.step()
        return statistics(model)

    one, other = on_ranks(2, program, normed)
    assert not same(one, other)


def test_ranks_that_skip_forward_or_call_it_alone_end_a_step_with_rank_0s_buffers():
    def program(model, optimizer, group):
        for step in range(3):
            calls = (2, 0, 1)[step] if group.rank == 0 else (0, 3, 1)[step]
            for _ in range(calls):
                model(torch.randn(3, 4)).square().sum().backward()
            if not calls:
                optimizer.no_contribution()
            optimizer.step()
            optimizer.zero_grad()
            found.append(statistics(model))
        return found

    found = []
    on_ranks(2, program, normed, buffers="broadcast", accumulation=None)
    assert len(found) == 6 and all(sum(same(one, other) for other in found) >= 2 for one in found)


def test_a_buffer_that_one_rank_has_in_another_shape_is_named_before_any_is_sent():
    def program(model, optimizer, group):
        if group.rank:
            model[1].running_mean = torch.zeros(7)
        model.eval()
        model[3](model[2](torch.ones(3, 6, requires_grad=True))).square().sum().backward()
        with pytest.raises(RanksDiffer, match=r"rank 1 has buffer 1\.running_mean \(7,\) torch.float32, "):
            optimizer.step()

    on_ranks(2, program, normed, buffers="broadcast")
