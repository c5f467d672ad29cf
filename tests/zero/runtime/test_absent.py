"""Weights that are gathered for each operator give what weights in memory give, to the bit, whatever is done with them.

Each case builds a model and a program from the same seed twice: plain, and with its parameters absent, in chunks of one
parameter or of several, with the smallest budget, a budget of two chunks, and none. What is freed is filled with NaN.
"""

import contextlib
import copy
import gc
import math
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from zero.memory.gathered import GatheredChunk, GatheredWeights
from zero.runtime.params.absent import Absent, AbsentParameter, make_absent_param
from zero.runtime.params.swap import become_plain, can_swap, swap

SEED = 7  # the seed of inputs; each rank has its own
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


class Plain:
    """A training of plain parameters, by plain gradient descent."""

    def __init__(self, model):
        self.params = list(model.parameters())

    def grads(self):
        return [None if param.grad is None else param.grad.detach().clone() for param in self.params]

    def step(self):
        with torch.no_grad():
            for param in self.params:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)
        self.clear()

    def clear(self):
        for param in self.params:
            param.grad = None


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
            shadow = torch.empty(chunk.numel, dtype=dtype, device="meta").as_strided(param.shape, strides, start)
            absent = make_absent_param(chunk, name, shadow, param.device, param.requires_grad)
            start += max(1, param.numel())
            swap(param, absent)

    def step(self):
        self.weights.end_window()
        super().step()


def values(tensors):
    return [tensor.whole() if isinstance(tensor, Absent) else tensor.detach().clone() for tensor in tensors]


# programs: each yields what it computed ---------------------------------------------------------------------------------


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED), device="cpu").to(torch.get_default_device())


def train(model, state, x=None, steps=3):
    x = inputs(4, 8) if x is None else x
    for _ in range(steps):
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().mean().backward()
        yield state.grads()
        state.step()
    yield values(state.params)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding((x * 3).long().abs() % 11))


class Functional(nn.Module):
    """Reads another module's weight by attribute, a parameter of its own, and one module twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x):
        once = nn.functional.linear(self.inner(x), self.inner.weight.t(), self.inner.bias) * self.scale
        return self.inner(once) + sum(param.square().sum() for param in self.parameters())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x.view(2, 2, 8), x.view(2, 2, 8), x.view(2, 2, 8))[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant, inner_reentrant=None):
        super().__init__()
        self.first, self.second, self.reentrant, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), reentrant, inner_reentrant

    def forward(self, x):
        def both(x):
            second = self.second if self.inner is None else lambda y: checkpoint(self.second, y, use_reentrant=self.inner)
            return second(torch.tanh(self.first(x)))

        return checkpoint(both, x.requires_grad_(), use_reentrant=self.reentrant)


class SavesAWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x):
        return SavesAWeight.apply(x, self.weight)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return torch.stack([self.experts[int(self.gate(row).argmax())](row) for row in x])


def lora():
    model = mlp()
    for param in model.parameters():
        param.requires_grad_(False)
    model.append(nn.Linear(8, 2)).append(nn.Linear(2, 8))
    return model


def conv():
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Flatten()).to(
        memory_format=torch.channels_last
    )


def normed(apply):
    model = mlp()
    apply(model[0])
    return model


def fp64():
    return mlp().double()


def small():
    """Without elements, without dimensions, with one element."""
    model = mlp()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    model.register_forward_hook(lambda module, _, out: out * module.scalar + module.empty.sum())
    return model


MODELS = {
    "mlp": mlp, "tied": Tied, "functional": Functional, "attention": Attention, "lstm": lambda: nn.LSTM(8, 8),
    "gru": lambda: nn.GRU(8, 4),
    "checkpoint": lambda: Checkpointed(False), "reentrant": lambda: Checkpointed(True),
    "nested": lambda: Checkpointed(True, False), "nested the other way": lambda: Checkpointed(False, True),
    "custom": Custom, "branches": Branches, "lora": lora, "convolution": conv, "small": small,
    "weight_norm": lambda: normed(parametrizations.weight_norm), "orthogonal": lambda: normed(parametrizations.orthogonal),
    "spectral": lambda: normed(parametrizations.spectral_norm), "old weight_norm": lambda: normed(nn.utils.weight_norm),
    "max_norm": lambda: nn.Sequential(nn.Flatten(0), nn.Embedding(9, 4, max_norm=0.5)),
}  # fmt: skip
INPUTS = {"max_norm": lambda: torch.arange(8) % 9}


def model_of(name):
    torch.manual_seed(3)
    with torch.random.fork_rng(), pytest.warns(FutureWarning) if name == "old weight_norm" else contextlib.nullcontext():
        return MODELS[name]()


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert type(one) is not AbsentParameter and one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, plain in zip(one, other, strict=True):
            same(mine, plain)
    else:
        assert one == other


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


def second_order(model, state):
    x = inputs(4, 8).requires_grad_()
    [slope] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    yield state.grads()


def retained(model, state):
    loss = model(inputs(4, 8)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    yield state.grads()
    yield values(torch.autograd.grad(model(inputs(4, 8)).sum(), state.params[:2]))


def several_forwards(model, state):
    total = sum(model(inputs(4, 8) * number).mean() for number in range(1, 4))
    total.backward()
    yield state.grads()


def evaluation(model, state):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            yield model(inputs(4, 8)).clone()
    yield from train(model, state, steps=1)


def edits(model, state):
    """Of every kind, between steps and in a forward."""
    first, last = model[0], model[3]
    with torch.no_grad():
        first.weight.mul_(0.5)
        first.bias[2:4] = 3.0
        first.weight[0].zero_()
        torch._foreach_add_([first.weight, last.weight], 0.25)
        torch.add(first.bias, 1.0, out=last.bias.new_empty(16))
        nn.init.constant_(last.bias, 0.125)
        last.weight.t()[1].fill_(0.5)
        last.weight.view(-1)[3] = 7.0
    first.bias.data.clamp_(-1.0, 1.0)
    last.weight.data = torch.full_like(last.weight, 0.375)
    yield values(state.params)
    model.load_state_dict({name: value * 2 for name, value in copy.deepcopy(model).state_dict().items()})
    yield values(state.params)

    def edit(module, _):
        with torch.no_grad():
            module.bias.add_(0.5)

    handle = model[0].register_forward_pre_hook(edit)
    yield from train(model, state)
    handle.remove()


def views_over_steps(model, state):
    view = model[0].weight.detach().t()[1:3]
    part = model[0].weight.data.view(-1)[5:9]
    for found in train(model, state):
        yield found, view.clone(), part.clone()


def hooks(model, state):
    """Of modules and parameters, that read weights and change gradients."""
    model[0].weight.register_hook(lambda grad: grad + model[3].weight.detach().sum())
    model[3].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * module.weight.mean(),))
    seen = []
    model[3].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.detach().norm().clone()))
    yield from train(model, state)
    yield seen


def read_outside(model, state):
    yield [param.norm().detach().clone() for param in state.params]
    penalty = sum(param.square().sum() for param in model.parameters())
    penalty.backward()
    yield state.grads()
    yield torch.stack(torch._foreach_norm(list(model.parameters()))).detach()
    yield [model[0].bias.tolist(), model[0].bias[1].item(), float(model[0].bias[2]), model[0].weight.detach().numpy().tolist()]
    yield [(param.shape, param.stride(), param.dtype, param.is_contiguous(), param.requires_grad) for param in state.params]


def casts(model, state):
    for _ in range(2):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = model(inputs(4, 8)).float().square().mean() + model(inputs(4, 8)).float().mean()
        loss.backward()
        yield state.grads()
        state.step()


def by_functions(model, state):
    params = dict(model.named_parameters())
    doubled = {name: param * 2 for name, param in params.items()}
    yield functional_call(model, doubled, (inputs(4, 8),)).detach()
    plain = {name: param.detach().clone() for name, param in params.items()}
    loss = lambda params, x: functional_call(model, params, (x,)).square().mean()  # noqa: E731
    yield values(torch.func.grad(loss)(plain, inputs(4, 8)).values())
    yield torch.func.vmap(lambda x: functional_call(model, plain, (x,)))(inputs(3, 4, 8)).detach()


def copies(model, state):
    other = copy.deepcopy(model)
    assert not any(isinstance(param, Absent) for param in other.parameters())
    yield values(other.parameters())
    yield values(pickle.loads(pickle.dumps(model[0])).parameters())
    yield values(model.state_dict().values())
    yield from train(other, Plain(other), steps=1)


def through_the_host(model, state):
    with torch.autograd.graph.save_on_cpu():
        out = model(inputs(4, 8))
    out.square().mean().backward()
    yield state.grads()


def threads(model, state):
    found = [None] * 4

    def work(number):
        found[number] = model(inputs(4, 8) + number).detach()

    started = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    yield found


def failures(model, state):
    """In a forward, a backward and a hook; then on."""
    for where in ("forward", "backward"):
        if where == "forward":
            handle = model[2].register_forward_hook(lambda *_: 1 / 0)
        else:
            handle = model[2].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs(4, 8)).sum().backward()
        handle.remove()
        state.clear()
    yield from train(model, state)


PROGRAMS = (
    second_order, retained, several_forwards, evaluation, edits, views_over_steps, hooks, read_outside, casts, by_functions,
    copies, through_the_host, threads, failures,
)  # fmt: skip


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
