"""Ranks that branch apart at stage 3 read the weights of plain PyTorch; `python -m tests.divergence` runs more of them."""

import pytest
import torch

from tests import divergence, ranks

SEEDS = range(20)


def test_ranks_do_differ_and_weights_change_by_more_than_the_tolerance():
    for seed in SEEDS:
        windows = [[divergence.window_of(seed, rank, step) for step in range(divergence.STEPS)] for rank in range(2)]
        assert windows[0] != windows[1]
        before, after = divergence.expected_weights(seed, 2)[:2]
        change = max((before[name] - after[name]).abs().max() for name in before)
        assert change > 100 * divergence.TOLERANCE and torch.isfinite(change)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("world", "seed"),
    [(2, 0), (3, 1), *(pytest.param(world, seed, marks=pytest.mark.full) for seed in SEEDS[2:] for world in (2, 3))],
)
def test_each_read_of_a_weight_is_that_of_plain_pytorch(world, seed, shared_memory):
    found = ranks.run(world, divergence.run_rank, seed, shared_memory)
    assert all(num_reads > divergence.STEPS for num_reads, _ in found)
