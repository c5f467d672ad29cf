"""Every optimizer that treats elements one by one, with its settings edited as training goes."""

from __future__ import annotations

import torch

from tests.zoo.case import case, real_mlp
from tests.zoo.steps import real_step

# Adaptive optimizers divide by the root of what they saw: with their usual eps a gradient that is nearly zero would turn the
# last bit of somebody's sum into the sign of an update. A larger one keeps the comparison about gradients.
EPS = 1e-2


def adamw_in_three_groups(model):
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.2},
        {"params": [model[2].bias, model[0].bias], "lr": 0.05, "betas": (0.5, 0.9), "role": "biases"},
        {"params": [model[2].weight], "amsgrad": True, "eps": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=0.02, eps=EPS)


@case(real_mlp, adamw_in_three_groups, tags="groups adaptive edited", steps=5)
def adamw_groups_edited_at_every_step(model, optimizer, rank, world, step):
    optimizer.param_groups[step % 3]["lr"] *= 0.5
    optimizer.param_groups[1]["weight_decay"] = 0.1 * step
    yield from real_step(model, optimizer, rank, world, step)
    return [(group["lr"], group["weight_decay"], group.get("role")) for group in optimizer.param_groups]


@case(
    real_mlp,
    lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    tags="momentum decay",
    steps=4,
)
def nesterov_momentum_that_maximises(*args):
    return (yield from real_step(*args))


@case(real_mlp, lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05, eps=EPS, lr_decay=0.1), tags="adaptive", steps=4)
def adagrad(*args):
    return (yield from real_step(*args))


@case(
    real_mlp,
    lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, eps=EPS, momentum=0.5, centered=True),
    tags="adaptive momentum",
    steps=4,
)
def rmsprop_centred_with_momentum(*args):
    return (yield from real_step(*args))


@case(real_mlp, lambda model: torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True, eps=EPS), tags="adaptive", steps=4)
def adam_with_amsgrad(*args):
    return (yield from real_step(*args))


class Lion(torch.optim.Optimizer):
    """The sign of a moving average. Smoothed, as a sign would turn a rounding into a whole step."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                update = torch.tanh(10 * (fast * average + (1 - fast) * p.grad))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.mul_(slow).add_(p.grad, alpha=1 - slow)
        return loss


@case(real_mlp, lambda model: Lion(model.parameters(), weight_decay=0.1), tags="custom decay", steps=4)
def an_optimizer_of_the_users_own(*args):
    return (yield from real_step(*args))


def scheduled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    model.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return optimizer


@case(real_mlp, scheduled, tags="scheduler momentum", steps=5)
def schedule_made_before_anything_was_wrapped(model, optimizer, rank, world, step):
    yield from real_step(model, optimizer, rank, world, step)
    model.scheduler.step()
    return optimizer.param_groups[0]["lr"]


@case(real_mlp, lambda model: torch.optim.Adadelta(model.parameters(), lr=0.5, eps=EPS), tags="adaptive", steps=4)
def adadelta(*args):
    return (yield from real_step(*args))


def rate_as_a_tensor(model):
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02), eps=EPS, foreach=False)


@case(real_mlp, rate_as_a_tensor, tags="adaptive edited", steps=4)
def rate_that_is_a_tensor_edited_in_place(model, optimizer, rank, world, step):
    rate = optimizer.param_groups[0]["lr"]
    rate.mul_(0.5)
    yield from real_step(model, optimizer, rank, world, step)
    assert optimizer.param_groups[0]["lr"] is rate
    return rate
