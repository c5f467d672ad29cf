"""Weights for vLLM, taken by a receiver that keeps its protocol: what there is first, then each name and whole tensor."""

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from zero.integrations.vllm import WeightSource


class Receiver:
    """A stand-in for the engine of vLLM: it makes memory by the metadata, and loads what comes under the same names."""

    def __init__(self, source):
        self.source, self.weights = source, {}

    def update(self):
        expected = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in self.source.metadata()}
        order = [meta.name for meta in self.source.metadata()]
        came = []
        for name, tensor in self.source:
            assert type(tensor) is torch.Tensor and not tensor.requires_grad
            assert tensor.shape == expected[name].shape and tensor.dtype == expected[name].dtype
            came.append((name, tensor))  # some transports send several at once
        assert [name for name, _ in came] == order
        self.weights = {name: expected[name].copy_(tensor) for name, tensor in came}


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11, bias=False))
    model[3].weight = model[0].weight
    return model


def received(rank, world, stage, dtype):
    model = make_model()
    options = {"keep_whole_numel": 0, "gathered_bytes": 0, "shared_memory": False} if stage == 3 else {}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, dtype=dtype, **options)
    receiver, rounds = Receiver(WeightSource(model, lambda name: f"model.{name}")), []
    for step in range(2):
        tokens = torch.randint(11, (4,), generator=torch.Generator().manual_seed(2 * step + rank))
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:  # the others send nothing, and take no part
            receiver.update()
            rounds.append(receiver.weights)
        torch.distributed.barrier()
    with optimizer.gathered():
        expected = {f"model.{name}": param.detach().clone() for name, param in model.named_parameters()}
    optimizer.close()
    return rounds, expected


@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (2, torch.bfloat16), (3, torch.bfloat16)])
def test_a_receiver_gets_whole_weights_of_each_step_from_one_rank(stage, dtype):
    (rounds, expected), (nothing, _) = ranks.run(2, received, stage, dtype)
    assert not nothing and len(rounds) == 2
    assert rounds[1].keys() == expected.keys() and all(torch.equal(rounds[1][name], expected[name]) for name in expected)
    assert any(not torch.equal(rounds[0][name], rounds[1][name]) for name in expected)
