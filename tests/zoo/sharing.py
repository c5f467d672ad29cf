"""Modules and parameters that are used more than once."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import backward, case, draw, filled, finish, like, mlp, real_loss, real_mlp, sgd, whole_loss, whole_numbers
from tests.zoo.steps import real_step, whole_step


class Repeated(nn.Module):
    """One square layer that is applied several times between two others."""

    def __init__(self, times: int, wrap: str | None = None) -> None:
        super().__init__()
        self.inward, self.shared, self.outward = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.times, self.wrap = times, wrap

    def forward(self, x):
        h = self.inward(x)
        for _ in range(self.times):
            h = self._once(h)
        return self.outward(h)

    def _once(self, h):
        if self.wrap is None:
            return torch.tanh(self.shared(h))
        return checkpoint(lambda h: torch.tanh(self.shared(h)), h, use_reentrant=self.wrap == "reentrant")


def repeated(times, wrap=None):
    return lambda: filled(Repeated(times, wrap), real=True)


@case(mlp, tags="plain", exact=("fp32", "bf16", "fp16"))
def two_layers(*args):
    return (yield from whole_step(*args, shape=(4, 4)))


@case(repeated(2), tags="shared")
def module_used_twice(*args):
    return (yield from real_step(*args))


@case(repeated(5), tags="shared")
def module_used_five_times(*args):
    return (yield from real_step(*args))


@case(repeated(2, "reentrant"), tags="shared reentrant checkpoint", steps=4)
def shared_module_in_reentrant_checkpoint(*args):
    """The second iteration is where a stale bucket of the first shows."""
    return (yield from real_step(*args))


@case(repeated(3, "non-reentrant"), tags="shared checkpoint")
def shared_module_in_checkpoint(*args):
    return (yield from real_step(*args))


@case(mlp, tags="forwards", exact=("fp32", "bf16", "fp16"))
def two_forwards_one_backward(model, optimizer, rank, world, step):
    first = whole_loss(model(draw(model, (2, 4), rank, step, 0)), world, step)
    second = whole_loss(model(draw(model, (5, 4), rank, step, 1)), world, step)
    loss = first + second
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


def k_backwards(model, optimizer, rank, world, step, *, newest_first):
    losses = [whole_loss(model(draw(model, (2 + k, 4), rank, step, k)), world, step, k) for k in range(3)]
    for loss in reversed(losses) if newest_first else losses:
        backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return losses


@case(mlp, sgd(0.125), tags="forwards backwards", exact=("fp32",))
def three_forwards_then_backwards_oldest_first(*args):
    return (yield from k_backwards(*args, newest_first=False))


@case(mlp, sgd(0.125), tags="forwards backwards", exact=("fp32",))
def three_forwards_then_backwards_newest_first(*args):
    return (yield from k_backwards(*args, newest_first=True))


class Tied(nn.Module):
    """Token embedding whose weight is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))


@case(lambda: filled(Tied(), high=1), sgd(0.0625), tags="tied", exact=("fp32",), steps=2)
def tied_embedding_and_head(model, optimizer, rank, world, step):
    tokens = whole_numbers((3, 2), "tokens", rank, step, low=0, high=6).long()
    loss = whole_loss(model(like(model, tokens)), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    assert model.head.weight is model.embedding.weight
    return loss


@case(lambda: filled(Tied(), real=True), sgd(0.1, momentum=0.5), tags="tied backwards clip")
def tied_weight_with_two_backwards_and_clipping(model, optimizer, rank, world, step):
    for micro in range(2):
        tokens = whole_numbers((4,), "tokens", rank, step, micro, low=0, high=6).long()
        out = model.embedding(like(model, tokens)) if micro else model(like(model, tokens))
        backward(optimizer, real_loss(out))
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    finish(optimizer)
    return norm


class TwiceInOne(nn.Module):
    """One Parameter under two names of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(4, 4))
        self.right = self.left
        self.scale = nn.Parameter(torch.empty(4))

    def forward(self, x):
        return (x @ self.left) @ self.right.t() * self.scale


@case(lambda: filled(TwiceInOne(), high=1), sgd(0.0625), tags="tied", exact=("fp32",), steps=2)
def one_parameter_under_two_names(model, optimizer, rank, world, step):
    loss = whole_loss(model(draw(model, (2, 4), rank, step)), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    assert model.left is model.right
    return loss


@case(real_mlp, tags="reentrant checkpoint forwards", steps=4)
def two_forwards_through_reentrant_checkpoint(model, optimizer, rank, world, step):
    total = 0.0
    for micro in range(2):
        x = draw(model, (3, 4), rank, step, micro, real=True).requires_grad_()
        total = total + real_loss(checkpoint(model, x, use_reentrant=True))
    backward(optimizer, total)
    yield "settle"
    finish(optimizer)
    return total


@case(repeated(2, "reentrant"), tags="shared reentrant checkpoint backwards", steps=3)
def shared_module_in_reentrant_checkpoint_and_two_backwards(model, optimizer, rank, world, step):
    for micro in range(2):
        backward(optimizer, real_loss(model(draw(model, (2, 4), rank, step, micro, real=True))))
    yield "settle"
    finish(optimizer)


class TiedBlocks(nn.Module):
    """Tied weight, checkpointed blocks, and the first input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.block = Mlp4()

    def forward(self, tokens):
        h = self.tied.embedding(tokens)
        for _ in range(2):
            h = h + checkpoint(self.block, h, use_reentrant=True)
        return self.tied.head(h)


class Mlp4(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


@case(
    lambda: filled(TiedBlocks(), real=True),
    tags="tied shared reentrant checkpoint unused",
    still=("tied.middle.weight",),
    steps=3,
)
def tied_weight_around_reentrant_blocks(model, optimizer, rank, world, step):
    tokens = whole_numbers((3, 2), "tokens", rank, step, low=0, high=6).long()
    loss = real_loss(model(like(model, tokens)))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss
