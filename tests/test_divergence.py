"""Ranks that branch apart at stage 3 read the weights of plain PyTorch; `python -m tests.divergence` runs more of them."""

import itertools

import pytest
import torch

from accelerators.backends.cuda import CudaAccelerator
from tests import divergence, ranks
from tests.devices import needs_sim

SEEDS = range(20)
BY_DAY = 13  # of these the one whose ranks have the least to do


def test_ranks_do_differ_and_weights_change():
    for seed in SEEDS[:5]:
        windows = [[divergence.window_of(seed, rank, step) for step in range(divergence.STEPS)] for rank in range(2)]
        assert windows[0] != windows[1]
        weights = divergence.expected_weights(seed, 2)
        for before, after in itertools.pairwise(weights):
            assert not torch.equal(before["first.weight"], after["first.weight"])
        for name in weights[0]:
            assert torch.isfinite(weights[-1][name]).all() and not torch.equal(weights[0][name], weights[-1][name])


@pytest.mark.promise("S02")
@pytest.mark.parametrize(  # by day programs go by collectives over the NCCL stand-in, in tests/promises/test_over_nccl.py
    "by", [pytest.param(by, marks=[pytest.mark.full] if by == "collectives" else []) for by in divergence.TRANSPORTS]
)
@pytest.mark.parametrize(
    ("world", "seed"),
    [
        pytest.param(world, seed, marks=[] if (world, seed) == (2, BY_DAY) else pytest.mark.full)
        for seed in SEEDS
        for world in (2, 3)
    ],
)
def test_each_read_of_a_weight_is_that_of_plain_pytorch(world, seed, by):
    found = ranks.run(world, divergence.run_rank, seed, by)
    assert all(num_reads > divergence.STEPS for num_reads, _ in found)


@pytest.mark.full
@needs_sim
@pytest.mark.promise("S02")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_read_of_a_weight_on_a_device_is_that_of_plain_pytorch(seed):
    found = ranks.run(2, divergence.run_rank, seed, "collectives", "sim", apart="sim")
    assert all(num_reads > divergence.STEPS for num_reads, _ in found)


@pytest.mark.cuda
@pytest.mark.skipif(CudaAccelerator().device_count() < 2, reason="two ranks need two of cuda")
@pytest.mark.promise("S02")
@pytest.mark.parametrize("seed", SEEDS[:5])
def test_each_read_of_a_weight_that_nccl_gathered_is_that_of_plain_pytorch(seed):
    found = ranks.run(2, divergence.run_rank, seed, "collectives", "cuda", apart="cuda")
    assert all(num_reads > divergence.STEPS for num_reads, _ in found)
