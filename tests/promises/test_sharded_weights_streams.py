"""S01: a model that computes on several streams of its device reads weights that have come, and that stay while it reads.

Its streams wait for each other where plain torch needs it: for what they compute. What they do not wait for is that weights are
gathered by one of them and freed by another. What is freed is filled with NaN, and the device raises where two streams race.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelerators
import zero
from tests import faults, ranks
from tests.devices import needs_cuda, needs_sim
from tests.promises.offloads import place_of

WIDTH = 8
CHUNK_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4  # two layers


def both_evaluate(model, x, side, current):
    """Each reads all weights, one after the other or the other way round, and neither waits for the other."""
    found = []
    for first, second in ((current, side), (side, current)):
        side.wait_stream(current)
        for stream in (first, second):
            with accelerators.get(x.device.type).in_stream(stream), torch.no_grad():
                found.append(model(x))
        current.wait_stream(side)
    return found


def train_apart(model, x, side, current):
    """Every second layer is on the other stream, in forward and so in backward."""
    for number, layer in enumerate(model):
        stream, before = (side, current) if number % 2 else (current, side)
        stream.wait_stream(before)
        with accelerators.get(x.device.type).in_stream(stream):
            x = layer(x)
    current.wait_stream(side)
    x.square().mean().backward()
    return [x]


def edit_beside(model, x, side, current):
    """One stream edits every second bias, and the other reads those that lie beside them."""
    found, in_stream = [], accelerators.get(x.device.type).in_stream
    side.wait_stream(current)
    for step in range(2):
        for number, layer in enumerate(model):
            with in_stream((current, side)[number % 2]), torch.no_grad():
                if number % 2:
                    found.append(layer.bias + layer.bias.sum())
                else:
                    layer.bias.mul_(0.5).add_(step)
        with torch.no_grad():
            found.append(model[0].bias + model[2].bias)
    current.wait_stream(side)
    return found


def edit_apart(model, x, side, current):
    """Each stream edits the biases of its own layers, some of them twice, and reads only those."""
    found, in_stream = [], accelerators.get(x.device.type).in_stream
    side.wait_stream(current)
    for step in range(2):
        for number, layer in enumerate(model):
            with in_stream((current, side)[number % 2]), torch.no_grad():
                layer.bias.mul_(0.5)
                layer.bias.add_(step)
                found.append(layer.bias + layer.bias)
    current.wait_stream(side)
    side.wait_stream(current)
    with in_stream(side), torch.no_grad():
        model[0].bias.add_(1.0)  # the other stream had edited it
    with torch.no_grad():
        found.append(model[2].bias + model[2].bias)
    current.wait_stream(side)
    return found


PROGRAMS = {each.__name__: each for each in (both_evaluate, train_apart, edit_beside, edit_apart)}


def trained(place, rank, program, stage, budget, offload, shared):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(place)
    optimizer = zero.shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        stage=stage,
        bucket_bytes=CHUNK_BYTES,
        align_bytes=16,
        shared_memory=shared,
        **({"gathered_bytes": budget} if stage == 3 else {}),
        **({"offload": "cpu"} if offload else {}),
    )
    accelerator = accelerators.get(place.type)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank), device="cpu").to(place)
    side, current, found = accelerator.new_stream(place.index), accelerator.current_stream(place.index), []
    for _ in range(2):
        found += [each.detach().cpu() for each in PROGRAMS[program](model, x, side, current)]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [param.detach().cpu().clone() for param in model.parameters()]
    optimizer.close()
    return found


def differing(rank, world, device, order, budgets, offloads, shareds, index=0):
    """The runs of stage 3, on a device of this index, that do not give what stage 2 gives on the current one."""
    faults.poison_freed_weights()
    place, wrong = place_of(rank, device, order), []
    there = torch.device(place.type, index)
    for program in PROGRAMS:
        for offload in offloads:
            expected = trained(place, rank, program, 2, None, offload, True)
            for run in ((budget, shared) for budget in budgets for shared in shareds):
                try:
                    found = trained(there, rank, program, 3, run[0], offload, run[1])
                except RuntimeError as error:  # on all ranks, as they do the same
                    wrong.append((program, offload, *run, str(error)[:300]))
                    continue
                if not all(map(torch.equal, found, expected)):
                    wrong.append((program, offload, *run))
    return wrong


BUDGETS = (0, CHUNK_BYTES, "all")


@needs_sim
@pytest.mark.promise("S01")
@pytest.mark.parametrize(
    "world, order, budgets, offloads, shareds",
    [
        (2, "late", BUDGETS[1:2], (False,), (True,)),
        *(
            pytest.param(world, order, BUDGETS, (False, True), (True, False)[: world], marks=pytest.mark.full)
            for world in (1, 2)
            for order in ("late", "random:1")
        ),
    ],
)
def test_streams_of_a_model_find_weights_that_have_come_and_stay(world, order, budgets, offloads, shareds):
    assert ranks.run(world, differing, "sim", order, budgets, offloads, shareds, apart="sim") == [[]] * world


@pytest.mark.full
@needs_sim
@pytest.mark.promise("S01")
@pytest.mark.parametrize("world", [1, 2])
def test_they_do_so_on_a_device_that_is_not_the_current_one(world):
    assert ranks.run(world, differing, "sim", "late", BUDGETS, (False, True), (False,), 1, apart="sim") == [[]] * world


def on_another(rank, world, order):
    """Whether stages give what plain torch gives on a device that is not the current one, with states on the host."""
    found = []
    place_of(rank, "sim", order)
    for options in (None, {"stage": 2}, {"stage": 3, "gathered_bytes": 0}):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to("sim:1")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if options is not None:
            optimizer = zero.shard(model, optimizer, bucket_bytes=CHUNK_BYTES, align_bytes=16, offload="cpu", **options)
        for _ in range(3):
            model(torch.ones(2, WIDTH, device="sim:1")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().cpu().clone() for param in model.parameters()])
    return [all(map(torch.equal, each, found[0])) for each in found[1:]]


@needs_sim
@pytest.mark.promise("H06")
@pytest.mark.parametrize("order", ["late", "random:1"])
def test_states_on_the_host_are_waited_for_on_a_device_that_is_not_the_current_one(order):
    assert ranks.run(1, on_another, order, apart="sim") == [[True, True]]


@pytest.mark.promise("S01")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_they_do_so_on_a_gpu(device):
    assert ranks.run(1, differing, device, "", BUDGETS, (False, True), (True,), fresh=True) == [[]]
