"""Trainings drawn by seed: model, sharing, branching, windows, optimizer, groups, edits and clipping. The seed is all there is.

`random_case(seed)` is a case like those of the zoo, so tests.oracle runs and compares it, and its name, which every failure
says, holds the seed. `point_of(seed)` is a point of the parity grid with it.

    python -m tests.random_training SEED...      trains the points of these seeds again and says what is wrong with them
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.grid import AXES, Point
from tests.oracle import reference
from tests.traces import TOLERANCE
from tests.zoo.case import (
    Case,
    backward,
    choice,
    draw,
    filled,
    finish,
    generator,
    no_sync,
    real_loss,
    real_numbers,
)

WIDTH = 4
SEEDED = "random training of seed "  # the beginning of such a case's name, before its number


@dataclass(frozen=True)
class Plan:
    """What a seed decided once. What changes from step to step is drawn in the script."""

    seed: int
    layers: tuple[str, ...]  # their kinds, in the order of forward
    uses: tuple[int, ...]  # the layer of each place in forward; a layer that is used twice comes twice
    branches: int  # the number of layers of equal size from which each rank picks one at each step
    checkpointed: str | None  # the way in which every other place is checkpointed
    tied: bool
    frozen: int | None  # the number of the frozen layer
    unused: bool
    window: str  # lengths on the ranks: "one", "same" or "different"
    local: bool  # micro-steps run inside no_sync
    optimizer: str
    groups: int
    clip: str | None
    edit: str | None
    to_zeros: bool
    retain: bool
    steps: int

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        layers = tuple(chance.choice(tuple(KINDS)) for _ in range(chance.randint(1, 5)))
        uses = list(range(len(layers)))
        for _ in range(chance.randint(0, 3)):
            uses.insert(chance.randrange(len(uses) + 1), chance.randrange(len(layers)))
        return cls(
            seed=seed,
            layers=layers,
            uses=tuple(uses),
            branches=chance.choice((0, 0, 2, 3)),
            checkpointed=chance.choice((None, None, "reentrant", "non-reentrant")),
            tied=chance.random() < 0.3,
            frozen=chance.randrange(len(layers)) if chance.random() < 0.25 else None,
            unused=chance.random() < 0.3,
            window=chance.choice(("one", "one", "same", "different")),
            local=chance.random() < 0.3,
            optimizer=chance.choice(("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad")),
            groups=chance.randint(1, 4),
            clip=chance.choice((None, None, "norm", "inf", "value")),
            edit=chance.choice((None, None, "clamp", "scale", "load", "thaw")),
            to_zeros=chance.random() < 0.2,
            retain=chance.random() < 0.2,
            steps=chance.randint(2, 5),
        )


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))

    def forward(self, x):
        return x * self.scale


class Odd(nn.Module):
    """Through a width that no bucket divides."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH)

    def forward(self, x):
        return self.out(self.into(x))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).t())

    def forward(self, x):
        return x @ self.weight


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scale": Scale,
    "odd": Odd,
    "transposed": Transposed,
}


class Drawn(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(KINDS[kind]() for kind in plan.layers)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(plan.branches))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if plan.tied:
            self.last.weight = self.first.weight
        if plan.unused:
            self.unused = nn.Linear(WIDTH, 3)
        if plan.frozen is not None:
            self.layers[plan.frozen].requires_grad_(False)

    def forward(self, x, branches=()):
        h = self.first(x)
        for place, index in enumerate(self.plan.uses):
            # A sum keeps gradients near one, however many layers there are.
            h = 0.5 * h + torch.tanh(self._through(self.layers[index], h, place))
        for index in branches:
            h = h + 0.5 * self.branches[index](h)
        return self.last(h)

    def _through(self, layer, h, place):
        if self.plan.checkpointed is None or place % 2:
            return layer(h)
        return checkpoint(layer, h, use_reentrant=self.plan.checkpointed == "reentrant")


def build(plan: Plan) -> nn.Module:
    return filled(Drawn(plan), real=True)


def optimizer_of(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    chance = random.Random(f"groups {plan.seed}")
    parameters = list(model.parameters())
    chance.shuffle(parameters)
    rates = [chance.choice((0.02, 0.05, 0.1)) for _ in range(plan.groups)]
    groups = [{"params": parameters[index :: plan.groups], "lr": rate} for index, rate in enumerate(rates)]
    decay = {"weight_decay": chance.choice((0.0, 0.1))}
    # A large eps, so that the last bit of a sum does not become the sign of an update.
    made = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, **decay),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.5, **decay),
        "nesterov": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, **decay),
        "adam": lambda: torch.optim.Adam(groups, lr=0.1, eps=0.05, amsgrad=chance.random() < 0.5),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.1, eps=0.05, **decay),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.1, eps=0.05, **decay),
    }
    return made[plan.optimizer]()


def train_by(plan: Plan, model, optimizer, rank, world, step):
    if plan.edit == "thaw" and plan.frozen is not None:
        model.layers[plan.frozen].requires_grad_(step % 2 == 1)
    length = 1
    if plan.window != "one":
        length += choice(3, "window", plan.seed, step, rank if plan.window == "different" else "all")
    losses = []
    for micro in range(length):
        picked = [index for index in range(plan.branches) if choice(2, "branch", plan.seed, rank, step, micro, index)]
        if choice(2, "order", plan.seed, rank, step):
            picked.reverse()
        # Each seed has its own data.
        x = draw(model, (3, WIDTH), rank, step, micro=(plan.seed, micro), real=True)
        loss = real_loss(model(x, picked)) / length
        with no_sync(optimizer, plan.local and micro + 1 < length):
            backward(optimizer, loss, retain_graph=plan.retain)
            if plan.retain and plan.checkpointed is None:
                backward(optimizer, 0.5 * loss)
        losses.append(loss.detach())
    yield "settle"
    norm = clip(plan, model)
    if plan.to_zeros:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    else:
        finish(optimizer)
    edit(plan, model, step)
    return losses, norm


def clip(plan: Plan, model: nn.Module) -> torch.Tensor | None:
    if plan.clip == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    elif plan.clip is not None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type=float("inf") if plan.clip == "inf" else 2.0)
    return None


def edit(plan: Plan, model: nn.Module, step: int) -> None:
    if plan.edit == "clamp":
        for parameter in model.parameters():
            parameter.data.clamp_(-0.75, 0.75)
    elif plan.edit == "scale" and step % 2:
        with torch.no_grad():
            for parameter in model.first.parameters():
                parameter.mul_(0.5)
    elif plan.edit == "load" and step == 1:
        loaded = {name: 0.5 * real_numbers(p.shape, "loaded", plan.seed, name) for name, p in model.named_parameters()}
        model.load_state_dict({**model.state_dict(), **loaded})


def random_case(seed: int) -> Case:
    plan = Plan.draw(seed)
    return Case(
        name=f"{SEEDED}{seed}",
        build=lambda: build(plan),
        script=lambda *args: train_by(plan, *args),
        optimizer=lambda model: optimizer_of(plan, model),
        steps=plan.steps,
        tags=frozenset({"random"}),
        dtypes=("fp32",),
        notes=repr(plan),
    )


def fresh_seeds(num: int, base: int) -> list[int]:
    """Some tens of seeds for a run, of trainings that can judge; the same base gives the same ones."""
    drawn = torch.randint(0, 2**31, (2 * num,), generator=generator("fresh seeds", base)).tolist()
    return list(itertools.islice((seed for seed in drawn if not amplifies(seed)), num))


def amplifies(seed: int) -> bool:
    """Whether plain torch's own roundings make a good part of the difference that would be held against us: how far its fp32 is
    from fp64. The order of its sums alone would say nothing of two ranks, whose sum has one order."""
    case, world = random_case(seed), point_of(seed).world
    leaves = [
        tree_leaves([[(step.weights, step.observed) for step in trace.steps] + [trace.state] for trace in traces])
        for traces in (reference(case, world), reference(case, world, "fp64"))
    ]
    for one, other in zip(*leaves, strict=True):
        if isinstance(one, (float, torch.Tensor)):
            one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
            if ((one - other).abs() > TOLERANCE / 2 * one.abs().clamp(min=1.0)).any():
                return True
    return False


def point_of(seed: int) -> Point:
    """The case of a seed, trained at a stage, a world size and a bucket size that follow from it too."""
    chance = random.Random(f"point {seed}")
    return Point(
        stage=chance.choice(AXES["stage"]),
        world=chance.choice(AXES["world"]),
        dtype="fp32",
        bucket=chance.choice(AXES["bucket"]),
        entry=chance.choice(AXES["entry"]) if not Plan.draw(seed).to_zeros else "plain",  # an engine clears with its step
        device="cpu",
        case=f"{SEEDED}{seed}",
    )


def main(seeds: Sequence[str]) -> int:
    from tests import parity

    failures = parity.run([point_of(int(seed)) for seed in seeds], loopback=True)
    print(failures)
    for seed in seeds:
        print(Plan.draw(int(seed)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
