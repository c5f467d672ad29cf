"""Parameters that do not train, not yet, or no longer."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.branches import Branches
from tests.zoo.case import Mlp, backward, case, draw, filled, finish, mlp, real_loss, sgd, whole_loss
from tests.zoo.steps import real_step, whole_step


def half_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


@case(half_frozen, sgd(0.125, momentum=0.5, weight_decay=0.5), tags="frozen decay", still=("0.*",), exact=("fp32",), steps=3)
def frozen_parameters_in_the_optimizer(*args):
    return (yield from whole_step(*args))


@case(
    half_frozen,
    lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.125),
    tags="frozen",
    still=("0.*",),
    exact=("fp32",),
)
def frozen_parameters_not_in_the_optimizer(*args):
    return (yield from whole_step(*args))


@case(mlp, sgd(0.125, momentum=0.5), tags="frozen toggled momentum", exact=("fp32",), steps=5)
def layer_frozen_and_thawed(model, optimizer, rank, world, step):
    """Frozen it rests; thawed it goes on with its old momentum."""
    model[2].requires_grad_(step not in (1, 2))
    before = model[2].weight.detach().clone()
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    finish(optimizer)
    return bool(torch.equal(before, model[2].weight))


@case(half_frozen, sgd(0.125, momentum=0.5), tags="frozen grow", exact=("fp32",), steps=4)
def layer_frozen_from_the_start_is_thawed_later(model, optimizer, rank, world, step):
    if step == 2:
        model[0].requires_grad_(True)
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    finish(optimizer)


@case(
    half_frozen,
    lambda model: torch.optim.SGD(model[2].parameters(), lr=0.125, momentum=0.5),
    tags="frozen grow groups",
    exact=("fp32",),
    steps=4,
)
def group_added_while_training(model, optimizer, rank, world, step):
    if step == 2:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.0625})
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    finish(optimizer)
    return [group["lr"] for group in optimizer.param_groups]


@case(half_frozen, sgd(0.1, momentum=0.5), tags="frozen clip backwards", still=("0.*",), steps=3)
def clipping_beside_frozen_parameters(model, optimizer, rank, world, step):
    for micro in range(2):
        backward(optimizer, real_loss(model(draw(model, (2, 4), rank, step, micro, real=True))))
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    finish(optimizer)
    return norm


class Adapted(nn.Module):
    """A frozen block with a small trained one beside it, checkpointed, as adapters are trained."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 4, bias=False) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for layers in zip(self.base, self.down, self.up, strict=True):
            x = checkpoint(self.block, *layers, x, use_reentrant=self.reentrant)
        return x

    @staticmethod
    def block(base, down, up, x):
        return torch.tanh(base(x)) + up(down(x))


@case(lambda: filled(Adapted(False), real=True), sgd(0.1), tags="frozen checkpoint", still=("base.*",), steps=3)
def adapters_in_checkpointed_frozen_blocks(*args):
    return (yield from real_step(*args))


@case(lambda: filled(Adapted(True), real=True), sgd(0.1), tags="frozen reentrant checkpoint forwards", still=("base.*",))
def adapters_in_reentrant_frozen_blocks_with_two_forwards(model, optimizer, rank, world, step):
    total = 0.0
    for micro in range(2):
        total = total + real_loss(model(draw(model, (3, 4), rank, step, micro, real=True).requires_grad_()))
    backward(optimizer, total)
    yield "settle"
    finish(optimizer)
    return total


class FrozenTop(nn.Module):
    """A frozen module through which the gradient passes, and one whose input needs gradient but goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top, self.aside = nn.Linear(4, 4), Mlp(4, 4, 2), nn.Linear(4, 2)
        self.top.requires_grad_(False)
        self.aside.requires_grad_(False)

    def forward(self, x):
        h = self.bottom(x)
        return self.top(h), self.aside(h)


@case(lambda: filled(FrozenTop(), high=1), sgd(0.125), tags="frozen outputs", still=("top.*", "aside.*"), exact=("fp32",))
def gradient_passes_through_a_frozen_module(model, optimizer, rank, world, step):
    out, unused = model(draw(model, (2, 4), rank, step))
    assert unused.requires_grad
    loss = whole_loss(out, world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


def frozen_branches():
    model = filled(Branches(3), real=True)
    model.branches[1].requires_grad_(False)
    return model


# In fp32 only: what is frozen has no master, so one that is thawed starts from the rounded weight and not from what it was.
@case(frozen_branches, sgd(0.05), tags="frozen divergent toggled backwards", steps=4, dtypes=("fp32",))
def frozen_branch_changes_while_ranks_diverge(model, optimizer, rank, world, step):
    """Which branch trains is the same on all ranks, which branch runs is not."""
    for index, branch in enumerate(model.branches):
        branch.requires_grad_(index != step % 3)
    for micro in range(2):
        backward(optimizer, real_loss(model(draw(model, (2, 4), rank, step, micro, real=True), ((rank + micro) % 3,))))
    yield "settle"
    finish(optimizer)
