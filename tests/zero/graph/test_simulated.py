"""Compiled backwards on a device with streams, whose copies are late and whose races are found."""

from __future__ import annotations

import itertools

import pytest
import torch

import zero
from tests import ranks
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from tests.traces import copied
from tests.zero.graph.models import adamw, batch, build
from zero import shard
from zero.comm.connect import connect
from zero.comm.group import TimeLimits


def train(rank: int, world: int, name: str, stage: int, offload: str | None) -> list[dict[str, torch.Tensor]]:
    import accelerators

    place, found = place_of(rank, "sim"), []
    accelerator = accelerators.get("sim")
    group = connect(accelerator, None, TimeLimits(20.0, 20.0))
    for compile_it in (False, True):
        model = build(name).to(place)
        optimizer = shard(model, adamw(model), stage=stage, offload=offload, bucket_bytes=256, clip=0.5, group=group)
        if compile_it:
            zero.compile(model, "aot_eager")
        side = accelerator.new_stream()
        for step in range(4):
            side.wait_stream(accelerator.current_stream())
            with accelerator.in_stream(side):  # a backward runs where its forward ran
                loss = model(batch(name, rank, step).to(place)).square().mean()
            loss.backward()
            accelerator.current_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        found.append(copied({name: param.detach() for name, param in model.named_parameters()}))
        optimizer.close()
    return found


@needs_sim
@pytest.mark.promise("P07")
@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        ("mlp", 2, "cpu"),
        *(pytest.param("gpt", *one, marks=pytest.mark.full) for one in itertools.product((0, 1, 2), ("cpu", None))),
    ],
)
def test_gradients_of_a_compiled_backward_on_a_stream_of_its_own_are_waited_for(name, stage, offload):
    for eager, compiled in ranks.run(2, train, name, stage, offload, apart="sim", timeout=60.0):
        found = [{name: weight.tolist() for name, weight in weights.items()} for weights in (eager, compiled)]
        assert found[0] == found[1]
