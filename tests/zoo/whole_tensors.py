"""Optimizers that look at a tensor as a whole: of each, one rank has all."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import ALL_DTYPES, backward, case, draw, filled, finish, no_sync, real_loss, whole_loss


class Pair(torch.optim.Optimizer):
    """Several optimizers that step one after the other. Sharded as the list of them."""

    def __init__(self, *members):
        super().__init__([group for member in members for group in member.param_groups], {})
        self.members = list(members)
        for member in members:
            member.state = self.state

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for member in self.members:
            type(member).step(member)


def given(optimizer):
    """What is sharded."""
    return optimizer.members if isinstance(optimizer, Pair) else optimizer


class Apart(nn.Module):
    """Matrices and vectors of which none is in another's gradient: whole numbers stay whole while the weights do not."""

    def __init__(self):
        super().__init__()
        self.tall, self.wide, self.other = nn.Linear(4, 6), nn.Linear(4, 2), nn.Linear(4, 6)
        self.turned = nn.Parameter(torch.empty(3, 4).t())
        self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return torch.cat([self.tall(x), self.wide(x), self.other(x), x @ self.turned], -1)


def apart():
    return filled(Apart())


def matrices_and_others(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def muon_and_adamw(model):
    matrices, others = matrices_and_others(model)
    return Pair(torch.optim.Muon(matrices, lr=0.02, momentum=0.5), torch.optim.AdamW(others, lr=0.02, eps=1e-2))


@case(apart, muon_and_adamw, tags="whole groups", steps=4, exact=ALL_DTYPES, still=("frozen.*", "unused.*"))
def muon_for_matrices_and_adamw_for_the_rest(model, optimizer, rank, world, step):
    optimizer.param_groups[step % 2]["lr"] *= 0.5
    for micro in range(2):
        with no_sync(optimizer, micro == 0 and step % 2 == 0):
            loss = whole_loss(model(draw(model, (3, 4), rank, step, micro)), world, rank, step, micro)
            backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class Orthogonal(torch.optim.Optimizer):
    """Makes the rows of a momentum alike in length and apart in direction, roughly; with the norm of a whole vector. Where a
    group does not say that it is whole it is plain descent."""

    def __init__(self, params, lr=0.05, momentum=0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self._update(p, group), alpha=group["lr"])

    def _update(self, p, group):
        if not group.get("whole", True):
            return p.grad
        state = self.state[p]
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(group["momentum"]).add_(p.grad)
        state["norm"] = momentum.norm()
        update = momentum / (state["norm"] + 1.0)
        if update.dim() == 2:
            for _ in range(3):
                update = 1.5 * update - 0.5 * update @ update.T @ update
        return update


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.empty(()))

    def forward(self, x):
        return self.layers(x) * self.scale


def deep():
    return filled(Deep(), real=True)


def clipped_step(model, optimizer, rank, world, step):
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
    backward(optimizer, loss)
    yield "settle"
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    finish(optimizer)
    return loss


@case(deep, lambda model: Orthogonal(model.parameters()), tags="whole", steps=4)
def whole_tensors_of_an_unknown_optimizer_clipped(*args):
    return (yield from clipped_step(*args))


def in_two_groups(model):
    matrices, others = matrices_and_others(model)
    return Orthogonal([{"params": matrices, "whole": True}, {"params": others, "whole": False, "lr": 0.1}])


@case(deep, in_two_groups, tags="whole groups", steps=4)
def one_group_of_whole_tensors_and_one_that_is_not(*args):
    return (yield from clipped_step(*args))


@case(deep, lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05, eps=(1e-2, 1e-3)), tags="whole adaptive", steps=4)
def adafactor(*args):
    return (yield from clipped_step(*args))
