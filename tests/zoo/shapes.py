"""Parameters of every shape, layout and dtype, in groups of every kind."""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.case import Mlp, backward, case, draw, filled, finish, mlp, real_loss, sgd, whole_loss, whole_numbers
from tests.zoo.steps import real_step, whole_step


@contextlib.contextmanager
def quietly():
    """Torch warns where there is nothing to initialise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.empty(()))
        self.one = nn.Parameter(torch.empty(1))
        self.one_by_one = nn.Parameter(torch.empty(1, 1))
        self.matrix = nn.Parameter(torch.empty(3, 5))

    def forward(self, x):
        return (x @ self.matrix) * self.scalar + self.one * self.one_by_one


@case(lambda: filled(OddShapes()), sgd(0.125), tags="shapes", exact=("fp32", "bf16", "fp16"), steps=2)
def parameters_of_one_element_and_odd_sizes(*args):
    return (yield from whole_step(*args, shape=(2, 3)))


@case(
    lambda: filled(OddShapes(), real=True),
    lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    tags="shapes decay",
    steps=20,
    dtypes=("fp32", "bf16"),
)
def twenty_steps_of_adamw_on_odd_sizes(*args):
    return (yield from real_step(*args, shape=(4, 3)))


class WithEmpty(nn.Module):
    """Parameters without elements first, in the middle and last, reached or not."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.first = nn.Linear(4, 4)
        with quietly():
            self.to_none, self.from_none = nn.Linear(4, 0), nn.Linear(0, 4)
        self.no_rows = nn.Embedding(0, 4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.empty(0, 8))

    def forward(self, x):
        h = self.first(x)
        return self.last(h + self.from_none(self.to_none(h))) + self.nothing.sum() + self.no_rows.weight.sum()


@case(
    lambda: filled(WithEmpty()),
    sgd(0.0625, momentum=0.5),
    tags="empty shapes",
    exact=("fp32",),
    still=("nothing", "to_none.*", "from_none.weight", "no_rows.weight", "unused"),
    steps=2,
)
def parameters_without_elements(model, optimizer, rank, world, step):
    loss = yield from whole_step(model, optimizer, rank, world, step)
    return loss, [list(p.shape) for p in model.parameters()]


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with quietly():
            self.layer = nn.Linear(3, 0)

    def forward(self, x):
        return self.layer(x)


@case(lambda: OnlyEmpty(), sgd(0.5), tags="empty shapes", exact=("fp32", "bf16", "fp16"), still=("*",), steps=2)
def model_of_nothing_but_empty_parameters(model, optimizer, rank, world, step):
    loss = model(draw(model, (2, 3), rank, step)).sum()
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.temperature = nn.Parameter(torch.empty(()))

    def forward(self, x):
        return self.body(x) * self.temperature.exp()


@case(
    lambda: filled(Temperature(), real=True),
    lambda model: torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-2),
    tags="shapes scalar clip",
    steps=3,
)
def learnable_temperature(model, optimizer, rank, world, step):
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
    backward(optimizer, loss)
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    finish(optimizer)
    return loss, norm


@case(lambda: filled(nn.Linear(1, 1)), sgd(0.5), tags="shapes tiny clip", dtypes=("fp32", "bf16"), steps=3)
def fewer_elements_than_ranks(model, optimizer, rank, world, step):
    loss = real_loss(model(draw(model, (3, 1), rank, step, real=True)))
    backward(optimizer, loss)
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    finish(optimizer)
    return norm


class Strided(nn.Module):
    """Weights stored transposed, and a slice of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(5, 4).t())
        self.sliced = nn.Parameter(torch.empty(5, 6)[:, ::2])

    def forward(self, x):
        return x @ self.transposed @ self.sliced


@case(lambda: filled(Strided()), sgd(0.0625), tags="strided", exact=("fp32",), steps=3)
def weights_that_are_not_contiguous(*args):
    return (yield from whole_step(*args))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, bias=True)
        self.point = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.point(self.conv(x))


def channels_last():
    return filled(Convolution().to(memory_format=torch.channels_last), high=1)


@case(channels_last, sgd(0.0625), tags="strided layout", exact=("fp32",), steps=2)
def convolution_in_channels_last(model, optimizer, rank, world, step):
    x = draw(model, (1, 2, 4, 4), rank, step).to(memory_format=torch.channels_last)
    loss = whole_loss(model(x), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


def three_shuffled_groups(model):
    parameters = list(model.parameters())
    order = [4, 1, 5, 0, 3, 2]
    groups = [
        {"params": [parameters[order[0]], parameters[order[1]]], "lr": 0.125},
        {"params": [parameters[order[2]], parameters[order[3]]], "lr": 0.25, "momentum": 0.5},
        {"params": [parameters[order[4]], parameters[order[5]]], "lr": 0.5, "weight_decay": 0.25, "maximize": True},
    ]
    return torch.optim.SGD(groups, lr=1.0)


class Three(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


@case(lambda: filled(Three(), real=True), three_shuffled_groups, tags="groups order momentum decay", steps=3)
def shuffled_parameters_in_three_groups(*args):
    return (yield from real_step(*args, shape=(2, 3)))


def groups_with_an_empty_one(model):
    groups = [{"params": list(model[0].parameters())}, {"params": []}, {"params": list(model[2].parameters()), "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.125)
    # Made from the user's own optimizer, before anybody wraps it.
    halving = [lambda step, base=base: base * 0.5**step for base in (1.0, 1.0, 2.0)]
    model.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
    return optimizer


@case(mlp, groups_with_an_empty_one, tags="groups empty scheduler", exact=("fp32",), steps=3)
def empty_group_and_a_rate_of_its_own_for_each(model, optimizer, rank, world, step):
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    optimizer.step()
    model.scheduler.step()
    optimizer.zero_grad()
    return [group["lr"] for group in optimizer.param_groups]


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.single = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 2).double()

    def forward(self, x):
        h = self.low(x.to(torch.bfloat16)).float()
        return self.wide(torch.tanh(self.single(h)).double())


@case(
    lambda: filled(MixedDtypes(), real=True),
    sgd(0.1, momentum=0.5),
    tags="dtypes groups",
    dtypes=("fp32",),
    needs=("fp64", "bf16"),
)
def three_dtypes_in_one_group(*args):
    return (yield from real_step(*args))


class Islands(nn.Module):
    """Low precision with a norm that stays in fp32, and tables and counters that nobody may cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.register_buffer("table", torch.linspace(0, 1, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([True, False]), persistent=False)

    def forward(self, x):
        self.count += 1
        h = self.norm(self.first(x).to(self.norm.weight.dtype)) + self.table.to(self.norm.weight.dtype)
        return self.second(h.to(x.dtype))


@case(lambda: filled(Islands(), real=True), sgd(0.1), tags="dtypes buffers", keep_fp32=("norm.*",), steps=3)
def norm_in_fp32_beside_low_precision(model, optimizer, rank, world, step):
    loss = yield from real_step(model, optimizer, rank, world, step)
    return loss, str(model.table.dtype), str(model.count.dtype)


class WithIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.index = nn.Parameter(torch.tensor([2, 0, 1, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x[:, self.index]) * self.mask


@case(lambda: filled(WithIntegers()), sgd(0.125), tags="dtypes frozen", still=("index", "mask"), exact=("fp32", "bf16", "fp16"))
def parameters_that_are_integers(*args):
    return (yield from whole_step(*args))


def weight_normed():
    model = filled(Mlp(), real=True)
    parametrizations.weight_norm(model[0])
    return model


@case(weight_normed, sgd(0.05), tags="parametrized", steps=3)
def weight_normalised_by_parametrization(*args):
    return (yield from real_step(*args))


class Delegating(nn.Module):
    """Forwards every attribute it does not know, as adapter wrappers do, and has slots and properties."""

    __slots__ = ("note",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.note = "kept"

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    @property
    def first_weight(self):
        return self.inner[0].weight

    def forward(self, x):
        return self.inner(x)


@case(lambda: filled(Delegating()), sgd(0.125), tags="wrappers", exact=("fp32",), steps=3)
def module_that_forwards_unknown_attributes(model, optimizer, rank, world, step):
    loss = yield from whole_step(model, optimizer, rank, world, step)
    return loss, model.note, model.first_weight.detach()


class OneLarge(nn.Module):
    """One parameter far larger than a small bucket, between two small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.large = nn.Linear(3, 401, bias=False)
        self.after = nn.Parameter(torch.empty(401))

    def forward(self, x):
        return self.large(self.before(x)) * self.after


@case(lambda: filled(OneLarge(), high=1), sgd(0.0625), tags="large buckets", exact=("fp32",), steps=2)
def parameter_larger_than_a_bucket(model, optimizer, rank, world, step):
    x = draw(model, (1, 3), rank, step)
    loss = whole_loss(model(x), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class Everything(nn.Module):
    """A little of all: tied, unused, odd, strided, empty and frozen, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.empty(()))
        self.embedding = nn.Embedding(5, 3)
        self.transposed = nn.Parameter(torch.empty(3, 3).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(3, 7)
        self.optional = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, with_optional):
        h = self.frozen(self.embedding(tokens) @ self.transposed) * self.scalar
        if with_optional:
            h = h + self.optional(h)
        return self.head(torch.tanh(h))


def everything_in_two_groups(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.SGD([{"params": rest, "lr": 0.05}, {"params": decayed, "weight_decay": 0.1}], lr=0.1, momentum=0.5)


@case(
    lambda: filled(Everything(), real=True),
    everything_in_two_groups,
    tags="tied unused shapes strided empty frozen groups divergent clip backwards",
    still=("nothing", "frozen.*", "unused.*"),
    steps=4,
)
def a_little_of_everything(model, optimizer, rank, world, step):
    for micro in range(2):
        tokens = whole_numbers((4,), "tokens", rank, step, micro, low=0, high=4).long()
        out = model(tokens.to(model.scalar.device), (rank + step + micro) % 3 == 0)
        backward(optimizer, real_loss(out))
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    finish(optimizer)
    return norm
