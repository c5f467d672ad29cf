"""Models and programs whose weights a test gathers for each operator, and compares with the same on weights in memory.

A program takes a model and the state of its training, as `Plain` is one, and yields what it computes.
"""

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests import inside

SEED = 7  # the seed of inputs; each rank has its own


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


def values(tensors):
    return [tensor.whole() if inside.is_absent(tensor) else tensor.detach().clone() for tensor in tensors]


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
        assert not inside.is_absent(one) and one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, plain in zip(one, other, strict=True):
            same(mine, plain)
    else:
        assert one == other


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
    assert not any(inside.is_absent(param) for param in other.parameters())
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
