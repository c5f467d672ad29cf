"""Weights that are gathered for each operator give what weights in memory give, to the bit, whatever is done with them.

Each case builds a model and a program from the same seed twice: plain, and with its parameters absent, in chunks of one
parameter or of several, with the smallest budget, a budget of two chunks, and none. What is freed is filled with NaN.
"""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.weight_cases import INPUTS, MODELS, PROGRAMS, Plain, inputs, mlp, model_of, same, train
from zero.memory.gathered import GatheredChunk, GatheredWeights
from zero.runtime.params.absent import AbsentParameter, make_absent_param
from zero.runtime.params.swap import become_plain, can_swap, swap

BUDGETS = {"least": 0, "two chunks": None, "all": math.inf}


class Arrived:
    def wait(self):
        pass


class OwnedChunk(GatheredChunk):
    """A chunk of a rank that has all of it."""

    def __init__(self, cache, line):
        super().__init__(cache, line.numel(), line.dtype)
        self.line = line

    def visible(self):
        return None

    def fetch(self, memory):
        memory.copy_(self.line)
        return Arrived()

    def edited(self, written):
        self.line[written.start : written.stop] = self.memory[written.start : written.stop]


class OneRank(Plain):
    """Absent parameters whose shares are whole: the state of one rank of one."""

    def __init__(self, model, budget, in_chunk=2):
        self.chunks = []
        named = list(model.named_parameters())
        super().__init__(model)
        self.weights = GatheredWeights(torch.device("cpu"))
        self.weights.poison = True
        by_dtype = {}
        for name, param in named:
            by_dtype.setdefault(param.dtype, []).append((name, param))
        for dtype, members in by_dtype.items():
            for first in range(0, len(members), in_chunk):
                self.lay(dtype, members[first : first + in_chunk])
        sizes = sorted((chunk.num_bytes for chunk in self.chunks), reverse=True)
        self.weights.budget_bytes = sum(sizes[:2]) if budget is None else budget

    def lay(self, dtype, members):
        line, start = torch.full((sum(max(1, param.numel()) for *_, param in members),), 99.0, dtype=dtype), 0
        chunk = OwnedChunk(self.weights, line)
        self.chunks.append(chunk)
        for name, param in members:
            order = sorted(range(param.dim()), key=lambda dim: -param.stride(dim))  # the order of its memory before
            strides, step = [0] * param.dim(), 1
            for dim in reversed(order):
                strides[dim], step = step, step * max(1, param.shape[dim])
            line.as_strided(param.shape, strides, start).copy_(param.detach())
            shadow = torch.empty_strided(param.shape, strides, dtype=dtype, device="meta")
            absent = make_absent_param(chunk, name, start, shadow, param.device, param.requires_grad)
            start += max(1, param.numel())
            swap(param, absent)

    def step(self):
        self.weights.end_window()
        super().step()


def compared(build, program, budget, in_chunk=2):
    """What the program gives with absent parameters, once that was found to be what it gives with plain ones."""
    torch.manual_seed(5)
    model = build()
    expected = list(program(model, Plain(model)))
    torch.manual_seed(5)
    model = build()
    state = OneRank(model, budget, in_chunk)
    found = list(program(model, state))
    same(found, expected)
    return model, state


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_that_of_plain_parameters(name, budget):
    x = INPUTS.get(name, lambda: inputs(4, 8))
    _, state = compared(lambda: model_of(name), lambda model, state: train(model, state, x()), BUDGETS[budget])
    sizes = sorted((chunk.num_bytes for chunk in state.chunks), reverse=True)
    if budget == "all":
        assert state.weights.peak_bytes <= sum(sizes)
    elif name not in ("attention", "lstm", "gru", "orthogonal", "small"):  # operators of these are given many weights at once
        assert state.weights.peak_bytes <= max(state.weights.budget_bytes, sum(sizes[:3]))




@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_gives_what_it_gives_with_plain_parameters(program, budget):
    _, state = compared(mlp, program, BUDGETS[budget])
    assert all(chunk.num_users == 0 for chunk in state.chunks)


def test_a_graph_from_before_an_edit_raises_as_in_plain_pytorch():
    for absent in (False, True):
        torch.manual_seed(5)
        model = mlp()
        if absent:
            OneRank(model, 0)
        out = model(inputs(4, 8))
        with torch.no_grad():
            model[3].weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_two_models_in_one_operator_and_one_of_them_frozen():
    torch.manual_seed(5)
    plain = mlp(), mlp()
    absent = copy.deepcopy(plain)
    states = [OneRank(model, 0) for model in absent]
    for student, teacher in (plain, absent):
        teacher.requires_grad_(False)
        loss = sum((one - other).square().sum() for one, other in zip(student.parameters(), teacher.parameters(), strict=True))
        (loss + (student(inputs(4, 8)) - teacher(inputs(4, 8))).square().mean()).backward()
    same([param.grad for param in absent[0].parameters()], [param.grad for param in plain[0].parameters()])
    assert len(states) == 2


def test_the_object_its_hooks_its_attributes_and_references_to_it_survive_both_ways():
    model = mlp()
    param, calls = model[0].weight, []
    param.mark = "kept"
    param.register_hook(lambda grad: calls.append("hook"))
    param.register_post_accumulate_grad_hook(lambda param: calls.append("accumulated"))
    param.grad = torch.ones_like(param)
    identity, before, weak = id(param), param.detach().clone(), weakref.ref(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = OneRank(model, 0)
    assert id(model[0].weight) == identity == id(optimizer.param_groups[0]["params"][0]) and weak() is model[0].weight
    assert isinstance(param, nn.Parameter) and type(param) is AbsentParameter and param.mark == "kept"
    assert torch.equal(param.grad, torch.ones_like(before))
    model(inputs(4, 8)).sum().backward()
    assert calls == ["hook", "accumulated"]
    for number, param in enumerate(state.params):
        become_plain(param, param.whole())
        assert type(param) is nn.Parameter and not set(vars(param)) - {"mark"}, number
    assert torch.equal(model[0].weight, before) and weak() is model[0].weight
    model(inputs(4, 8)).sum().backward()
    assert calls == ["hook", "accumulated"] * 2


POINTERS = {
    "data_ptr": lambda weight: weight.data_ptr(),
    "data_ptr of a view": lambda weight: weight.t().data_ptr(),
    "storage": lambda weight: weight.untyped_storage(),
    "share_memory_": lambda weight: weight.share_memory_(),
    "dlpack": lambda weight: torch.utils.dlpack.to_dlpack(weight.detach()),
    "from_dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "resize_": lambda weight: weight.detach().resize_(2),
    "set_": lambda weight: weight.detach().set_(torch.zeros(2)),
    "another shape to .data": lambda weight: setattr(weight, "data", torch.zeros(2)),
    "another dtype to .data": lambda weight: setattr(weight, "data", weight.whole().double()),
}


@pytest.mark.parametrize("way", POINTERS)
def test_who_asks_for_memory_is_told_by_an_error(way):
    model = mlp()
    OneRank(model, 0)
    with pytest.raises((RuntimeError, BufferError, ValueError)):
        POINTERS[way](model[0].weight)


def test_gathered_memory_is_nobodys_after_the_operator():
    """No result keeps it: neither views, nor what an operator gives back against its schema."""
    model = mlp()
    state = OneRank(model, 0, in_chunk=1)
    weight = model[0].weight
    kept = [
        weight.t(),
        weight.reshape(-1),
        weight.contiguous(),
        weight.to(torch.float32),
        weight + 0,
        weight.float(),
        weight.expand(2, 16, 8),
    ]
    memory = weakref.ref(state.chunks[0].memory) if state.chunks[0].memory is not None else lambda: None
    state.weights.free_all()
    state.weights._spare.clear()  # kept for the next chunk
    gc.collect()
    assert memory() is None and state.weights.num_bytes == 0
    assert all(torch.equal(tensor.clone().reshape(-1)[:3], torch.tensor(tensor.tolist()).reshape(-1)[:3]) for tensor in kept)


def test_this_torch_can_exchange_tensors_in_place():
    assert can_swap()


def test_parametrizations_may_be_added_to_absent_parameters():
    model = mlp()
    OneRank(model, 0)

    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    expected = model[0].weight.whole() * 2
    parametrize.register_parametrization(model[0], "weight", Double())
    assert torch.equal(model[0].weight, expected)


def test_operators_take_what_is_there_without_asking_the_cache():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    state, acquired = OneRank(model, math.inf), []
    acquire = state.weights.acquire
    state.weights.acquire = lambda chunks: acquired.extend(chunks := list(dict.fromkeys(chunks))) or acquire(chunks)
    for _ in range(3):
        model(inputs(4, 8)).square().sum().backward()
    assert sorted(map(id, acquired)) == sorted(map(id, state.chunks))  # each for its first operator
    state.weights.end_window()
    model(inputs(4, 8))
    assert len(acquired) == 2 * len(state.chunks)


def test_views_of_a_weight_lie_where_they_did_and_not_all_of_them_are_kept():
    model = nn.Linear(8, 200)
    expected = model.weight.detach().clone()
    OneRank(model, 0)
    for _ in range(2):
        for start in range(200):
            assert torch.equal(model.weight[start : start + 2].t() + 0, expected[start : start + 2].t())
            assert torch.equal(model.weight.view(100, 16)[start // 2] + 0, expected.view(100, 16)[start // 2])
    assert len(model.weight.shadow.views) <= 64


def test_a_result_against_its_operators_schema_lies_in_memory_of_its_own():
    """The schema of `_unsafe_view` says that its result is new, and it is a view."""
    model = nn.Linear(8, 4)
    expected = model.weight.detach().clone()
    state = OneRank(model, 0)
    with torch.no_grad():
        result = torch.ops.aten._unsafe_view(model.weight, (32,))
    state.weights.free_all()  # what is freed is NaN
    assert torch.equal(result, expected.view(32))


def test_a_weight_may_be_given_a_view_of_itself():
    """As a copy of what it is: elements would be read that were written over."""
    model = nn.Linear(4, 4)
    expected = model.weight.detach().t().clone()
    OneRank(model, 0)
    model.weight.data = model.weight.data.t()
    assert torch.equal(model.weight.whole(), expected)
