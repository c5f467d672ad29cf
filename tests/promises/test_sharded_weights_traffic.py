"""Stage 3: bytes that a rank moves in a step, where ranks share no memory."""

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.instruments import Ledger
from tests.promises.trainings import gloo_group

SIZE, LAYERS = 24, 6  # 2 and 3 ranks have equal shares of this


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def moved(rank, world, dtype, gathered):
    """Bytes that this rank sends of gradients and receives of weights in each of five steps, by those of all weights."""
    model = layers()
    ledger = Ledger(gloo_group())
    layer_bytes = SIZE * SIZE * (2 if dtype else 4)
    options = {"stage": 3, "dtype": dtype, "bucket_bytes": layer_bytes, "gathered_bytes": gathered, "group": ledger}
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)
    whole = sum(param.nbytes for param in model.parameters())
    records, found = zero.MetricsWriter(None, optimizer), []
    for step in range(5):
        ledger.section = f"step {step}"
        # Requires a gradient, so that backward needs every layer.
        x = torch.randn(4, SIZE, dtype=next(model.parameters()).dtype, requires_grad=True)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not ledger.of(ledger.section, "all_gather", "all_reduce", "broadcast")
        reduced = sum(entry.num_bytes for entry in ledger.of(ledger.section, "reduce_scatter")) * (world - 1)
        record = records.write()["moved_bytes"]
        assert record["published"] == 0
        fetched = record["fetched"] * world
        found.append((reduced / whole / (world - 1), fetched / whole / (world - 1)))
    optimizer.close()
    return found


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_moves_the_weights_three_times_with_the_least_memory_and_twice_with_enough(world, dtype):
    for steps in ranks.run(world, moved, dtype, 0):
        # Once in forward, once in backward but for the last layer or two, which are still there, and once as gradients.
        assert all(reduced == 1.0 and 2 - 2 / LAYERS <= fetched <= 2.0 for reduced, fetched in steps), steps
    for steps in ranks.run(world, moved, dtype, "all"):
        assert all(reduced == 1.0 and fetched == 1.0 for reduced, fetched in steps), steps
