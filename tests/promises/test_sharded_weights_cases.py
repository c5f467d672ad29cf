"""S01: what models and programs of tests/weight_cases.py give at stage 3 is, bit by bit, what they give at stage 2.

Ranks, of any number, have inputs of their own. Whole weights may take anything or nothing; what is freed is filled with NaN.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import zero
from tests import faults, inside, ranks, weight_cases
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from tests.traces import copied
from tests.weight_cases import INPUTS, MODELS, PROGRAMS, mlp, model_of, same, train

BUCKET_BYTES = 768  # a matrix of most of these models, or a few parameters
BUDGETS = (0, 2 * BUCKET_BYTES, "all")  # no more than must be, two chunks, everything
RUNS = {**dict.fromkeys(MODELS), **{program.__name__: program for program in PROGRAMS}}


class Sharded:
    """The state of a training of these cases, by a sharded optimizer."""

    def __init__(self, model, **options):
        self.params = list(model.parameters())
        trained = [param for param in self.params if param.requires_grad]
        inner = torch.optim.SGD(trained, lr=0.1)
        self.optimizer = zero.shard(model, inner, bucket_bytes=BUCKET_BYTES, align_bytes=16, elementwise=True, **options)

    def grads(self):
        found = [self.optimizer.whole_grad(param) if param.requires_grad else None for param in self.params]
        return copied(found)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clear(self):
        self.optimizer.discard()


def given_by(name, device, **options):
    """What a run yields."""
    torch.manual_seed(5)
    with torch.device(device) if device != "cpu" else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = (model_of(name) if RUNS[name] is None else mlp()).to(device)
        state = Sharded(model, **options)
        x = INPUTS.get(name, lambda: weight_cases.inputs(4, 8))().to(device)
        program = RUNS[name] or (lambda model, state: train(model, state, x))
        found = [copied(each) for each in program(model, state)]
        state.optimizer.close()
        return [found, copied(list(model.parameters())), copied(list(model.buffers()))]


def run(rank, world, names, device, budgets, shared=True):
    faults.poison_freed_weights()
    weight_cases.SEED = 7 + rank
    place = place_of(rank, device, "random:1") if device == "sim" else device
    wrong, options = {}, {"shared_memory": shared}
    for name in names:
        expected = given_by(name, place, stage=2, **options)
        for budget in budgets:
            try:
                same(given_by(name, place, stage=3, gathered_bytes=budget, **options), expected)
            except AssertionError as error:
                wrong[name, budget] = str(error)[:500]
    return wrong


@pytest.mark.promise("S01")
@pytest.mark.parametrize(
    "world, budgets, shared, every",
    [
        (2, (0,), False, 12),
        *(
            pytest.param(world, BUDGETS, shared, 1, marks=pytest.mark.full)
            for world in (1, 2, 3)
            for shared in (True, False)
            if world > 1 or shared
        ),
    ],
)
def test_every_case_gives_what_stage_2_gives(world, budgets, shared, every):
    assert ranks.run(world, run, list(RUNS)[::every], "cpu", budgets, shared) == [{}] * world


@pytest.mark.promise("S01")
def test_threads_that_read_the_same_weights_at_one_time_never_see_them_half_there():
    """What one of them fetches others find when it is there."""
    assert ranks.run(2, run, ["threads"] * 4, "cpu", ("all",), False) == [{}, {}]


# torch gives these to one kernel on any device that is not the host, and the simulated one has it not; or memory is looked at.
NOT_ON_SIM = {"lstm", "gru", "read_outside"}


@needs_sim
@pytest.mark.promise("S01")
@pytest.mark.parametrize(
    "world, budgets, every", [(2, (0,), 48), *(pytest.param(world, BUDGETS, 1, marks=pytest.mark.full) for world in (1, 2))]
)
def test_every_case_does_so_on_a_device_whose_copies_are_late(world, budgets, every):
    names = [name for name in RUNS if name not in NOT_ON_SIM][::every]
    assert ranks.run(world, run, names, "sim", budgets, apart="sim") == [{}] * world


def use_many(state, model, found):
    """A training and operators of all weights at one time."""
    model(torch.ones(2, 16)).square().mean().backward()
    yield
    found.append(torch.stack(torch._foreach_norm(list(model.parameters()))).detach())
    yield
    torch._foreach_mul_([param.detach() for param in model.parameters()], 0.5)
    yield
    torch._foreach_lerp_([param.data for param in model.parameters()], [torch.ones(16, 16)] * 8, 0.25)
    ones, numbers = [torch.ones(16, 16)] * 8, torch.arange(8.0) / 64
    torch._foreach_addcmul_([param.data for param in model.parameters()], ones, ones, numbers)
    torch._foreach_add_([param.data for param in model.parameters()], list(numbers.tolist()))
    found.append([each.clone() for each in torch._foreach_maximum(list(model.parameters()), 0.1)])
    halves = [param.data for param in model.parameters()]
    torch._foreach_lerp_(halves[:4], halves[4:], 0.5)  # a target that follows
    torch._foreach_copy_(halves[4:], torch._foreach_sub(halves[:4], halves[4:]))
    torch._foreach_mul_(halves[:1], halves[1:2])
    with pytest.raises(RuntimeError, match=r"same (number|length)|length"):
        torch._foreach_add_(halves[:3], halves[3:5])
    found.append(copied(state.params))
    yield


def foreach_peaks(rank, world, shared):
    """Bytes of whole weights at most after each of them, at stage 3."""
    peaks, found = [], []
    for options in ({"stage": 3, "gathered_bytes": 0}, {"stage": 2}):
        torch.manual_seed(5)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(8)))
        state = Sharded(model, shared_memory=shared, **options)
        for _ in use_many(state, model, found):
            if options["stage"] == 3:
                peaks.append(inside.peak_of_whole_chunks(state.optimizer))
        state.optimizer.discard()
        state.optimizer.close()
    same(found[:3], found[3:])
    return peaks


@pytest.mark.promise("S04")
@pytest.mark.parametrize("world, shared", [(1, True), (2, False)])
def test_operators_of_many_weights_take_them_one_by_one(world, shared):
    for trained, *others in ranks.run(world, foreach_peaks, shared):
        assert all(peak <= max(trained, 3 * 16 * 16 * 4) for peak in others), (trained, others)
