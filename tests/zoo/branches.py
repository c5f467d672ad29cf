"""Graphs that leave parameters out, or that differ between ranks and steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tests.zoo.case import Mlp, backward, case, choice, draw, filled, finish, like, real_loss, real_numbers, sgd, whole_loss
from tests.zoo.steps import real_step


class Branches(nn.Module):
    """A trunk and several branches of equal size, so that mixing them up shows in the numbers only."""

    def __init__(self, num: int = 3, width: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, x, which=()):
        h = self.trunk(x)
        for index in which:
            h = self.branches[index](h)
        return h


def whole_branches(num=3):
    return lambda: filled(Branches(num), high=1)


def real_branches(num=3):
    return lambda: filled(Branches(num), real=True)


def adamw(model):
    # A large eps: small gradients must not turn the last bit of a sum into the sign of an update.
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-2)


@case(real_branches(), adamw, tags="unused decay", steps=6)
def branch_switched_off_after_warm_up(model, optimizer, rank, world, step):
    """Neither momentum nor decay may move what no rank used."""
    which = (0, 1, 2) if step < 3 else (0, 2)
    before = model.branches[1].weight.detach().clone()
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True), which))
    backward(optimizer, loss)
    yield "settle"
    optimizer.settle()  # asking whether something is None is no operation, so it cannot settle by itself
    used = [p.grad is not None for p in model.branches[1].parameters()]
    finish(optimizer)
    return loss, used, bool(torch.equal(before, model.branches[1].weight))


@case(
    whole_branches(),
    sgd(0.25, momentum=0.5, weight_decay=0.5),
    tags="unused decay backwards",
    still=("branches.1.*",),
    exact=("fp32",),
)
def branch_that_nobody_ever_uses(model, optimizer, rank, world, step):
    loss = whole_loss(model(draw(model, (3, 4), rank, step), (2,)), world, step)
    backward(optimizer, loss)
    loss = whole_loss(model(draw(model, (3, 4), rank, step, 1), (0,)), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(whole_branches(), sgd(0.25), tags="unused divergent", exact=("fp32",), steps=3)
def branch_chosen_by_rank_and_step(model, optimizer, rank, world, step):
    which = ((rank + step) % 3,)
    loss = whole_loss(model(draw(model, (3, 4), rank, step), which), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(real_branches(2), sgd(0.1, momentum=0.9, nesterov=True), tags="unused divergent momentum", steps=5)
def branch_used_by_one_rank_only(model, optimizer, rank, world, step):
    which = (0, 1) if rank == step % world else (0,)
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True), which))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(real_branches(2), tags="divergent order", steps=4)
def branches_in_reversed_order_on_odd_ranks(model, optimizer, rank, world, step):
    which = (1, 0) if rank % 2 else (0, 1)
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True), which))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(real_branches(2), sgd(0.05), tags="divergent shared uses", steps=4)
def module_that_runs_never_once_or_thrice_by_rank(model, optimizer, rank, world, step):
    times = (0, 1, 3)[(rank + step) % 3]
    loss = real_loss(model(draw(model, (2, 4), rank, step, real=True), (1, *([0] * times))))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(whole_branches(1), tags="divergent idle", exact=("fp32",), needs_world=2, steps=3)
def rank_with_nothing_to_send_back(model, optimizer, rank, world, step):
    if step == 1 and rank == 1 % world:
        optimizer.no_contribution()
    else:
        backward(optimizer, whole_loss(model(draw(model, (3, 4), rank, step), (0,)), world, step))
    yield "settle"
    finish(optimizer)


@case(real_branches(4), sgd(0.1), tags="divergent unused random", steps=5)
def stochastic_depth(model, optimizer, rank, world, step):
    which = [index for index in range(4) if choice(2, "depth", rank, step, index)]
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True), which))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class Experts(nn.Module):
    """Every row goes to the expert that the router scores highest."""

    def __init__(self, num: int = 5) -> None:
        super().__init__()
        self.router = nn.Linear(4, num)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num))

    def forward(self, x, rows_by_expert):
        scores = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, rows in rows_by_expert.items():
            out = out.index_add(0, rows, self.experts[index](x[rows]) * scores[rows, index : index + 1])
        return out


@case(lambda: filled(Experts(), real=True), sgd(0.1), tags="divergent unused random", steps=4)
def experts_routed_by_data(model, optimizer, rank, world, step):
    """Routed by the data's own draw and not by the scores: where those are equal but for a rounding, routes would differ."""
    x = draw(model, (4, 4), rank, step, real=True)
    chosen = [choice(5, "route", rank, step, row) for row in range(4)]
    rows = {e: torch.tensor([r for r, c in enumerate(chosen) if c == e], device=x.device) for e in sorted(set(chosen))}
    loss = real_loss(model(x, rows))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class ManyParameters(nn.Module):
    """17 parameters for each that is reached, and 12 more. Every fifth is stored transposed."""

    def __init__(self, num_reached: int) -> None:
        super().__init__()
        self.reached = [17 * index + 5 for index in range(num_reached)]
        self.items = nn.ParameterList()
        for index in range(17 * num_reached + 12):
            item = nn.Parameter(torch.empty(2, 3))
            if index % 5 == 0:
                item.data = torch.empty(3, 2).t()
            self.items.append(item)

    def forward(self, x):
        return sum((x * self.items[index]).sum() for index in self.reached)


MANY = ManyParameters(21)
UNREACHED = tuple(f"items.{index}" for index in range(len(MANY.items)) if index not in MANY.reached)


@case(lambda: filled(ManyParameters(21)), tags="unused many strided", exact=("fp32", "bf16", "fp16"), still=UNREACHED, steps=2)
def few_of_many_parameters_are_reached(model, optimizer, rank, world, step):
    loss = model(draw(model, (2, 3), rank, step)) * world
    backward(optimizer, loss)
    yield "settle"
    optimizer.settle()
    used = sum(p.grad is not None for p in model.parameters())
    finish(optimizer)
    return loss, used


@case(real_branches(3), sgd(0.05, momentum=0.5), tags="divergent backwards unused", steps=4)
def several_backwards_through_branches_of_each_rank(model, optimizer, rank, world, step):
    for micro in range(1 + (rank + step) % 3):
        which = [index for index in range(3) if (rank + step + micro + index) % 2]
        backward(optimizer, real_loss(model(draw(model, (2, 4), rank, step, micro, real=True), which)))
    yield "settle"
    finish(optimizer)


@dataclass
class Outputs:
    used: torch.Tensor
    unused: torch.Tensor


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        outputs = Outputs(self.second(h), self.third(h))
        return {"outputs": outputs, "nested": [h.sum(), (None, 3)], "scalar": h.mean()}


@case(lambda: filled(ManyOutputs()), tags="unused outputs", still=("third.*",), exact=("fp32",))
def only_some_outputs_feed_the_loss(model, optimizer, rank, world, step):
    out = model(draw(model, (4, 4), rank, step))
    assert type(out["outputs"]) is Outputs
    assert out["nested"][1] == (None, 3)
    loss = whole_loss(out["outputs"].used, world, step) + out["nested"][0] * world
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class Heads(nn.Module):
    """The head registered first, though its gradient comes first as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.body = Mlp(4, 5, 6)

    def forward(self, x):
        return self.head(self.body(x))


@case(lambda: filled(Heads(), real=True), tags="order", steps=3)
def head_registered_before_the_body(*args):
    return (yield from real_step(*args))


@case(real_branches(2), sgd(0.1), tags="divergent unused clip backwards", steps=4)
def clipping_where_ranks_used_different_branches(model, optimizer, rank, world, step):
    """The list of gradients that torch clips is made from `.grad is not None`, so it must be the same on every rank."""
    for micro in range(2):
        which = (0,) if (rank + step + micro) % 2 else (1,) if step else ()
        backward(optimizer, real_loss(model(like(model, real_numbers((3, 4), "x", rank, step, micro)), which)))
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    finish(optimizer)
    return norm
