"""Windows drawn by seed: what may happen between two steps, in any order, on ranks that do not all do the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case, filled, no_sync, whole_numbers

# The events that may come next, each with its frequency. The oracle runs each of them on plain torch.
ACTIONS = {
    "backward": 8,
    "backward apart": 3,  # each rank as often, and through the branches, that chance gives it
    "local": 3,  # in no_sync
    "retained": 1,  # one graph twice
    "partial": 1,  # into some parameters
    "settle": 2,
    "clip": 1,
    "halve": 1,
    "remove one": 1,
    "replace one": 1,
    "clear": 1,  # optimizer.zero_grad()
    "clear to zeros": 1,
    "clear by model": 2,  # nothing tells us of it
    "step": 3,  # a step clears nothing
    "failed": 1,  # a forward that raises on one rank, where all clear
}
WIDTH, BRANCHES = 4, 3


class Sums(nn.Module):
    """Weighted sums of its parameters, some of which are always used. Gradients are the data, so whole numbers all the way."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in (WIDTH, 1))
        self.branches = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in (5, WIDTH, WIDTH))

    def forward(self, x, which=()):
        used = [*self.trunk, *(self.branches[index] for index in which)]
        return sum((p * x[: p.numel()]).sum() for p in used)


def build() -> nn.Module:
    return filled(Sums())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2.0**-3, momentum=0.5)


def random_windows(seed: int, *, length: int = 14, steps: int = 3, declared: int | None = None) -> Case:
    """A case of the zoo's kind. Integer weights and data keep its sums exact, so a lost gradient never hides in rounding."""

    def script(model: Any, optimizer: Any, rank: int, world: int, step: int) -> Iterator[str]:
        common = random.Random(f"{seed} {step}")  # the same on all ranks
        own = random.Random(f"{seed} {step} {rank}")
        actions = common.choices(list(ACTIONS), list(ACTIONS.values()), k=length)
        params = list(model.parameters())
        seen = []
        for number, action in enumerate(actions):
            key = (seed, step, number)

            def loss_of(*more: object, which: Any = (), key: Any = key) -> torch.Tensor:
                return model(whole_numbers((8,), "x", rank, *key, *more).to(params[0]), which) * world

            which = common.sample(range(BRANCHES), common.randint(0, BRANCHES))
            index = common.randrange(len(params))
            if action == "backward":
                loss_of(which=which).backward()
            elif action == "backward apart":
                for turn in range(own.randint(1, 2)):
                    loss_of(turn, which=own.sample(range(BRANCHES), own.randint(0, BRANCHES))).backward()
            elif action == "local":
                with no_sync(optimizer):
                    loss_of(which=which).backward()
            elif action == "retained":
                loss = loss_of(which=which)
                loss.backward(retain_graph=True)
                loss.backward()
            elif action == "partial":
                loss_of(which=range(BRANCHES)).backward(inputs=params[index : index + 2])
            elif action in ("settle", "clip", "halve", "remove one", "replace one", "step"):
                yield "settle"
                optimizer.settle()
                seen.append([p.grad is None for p in params])
                if action == "clip":
                    seen.append(torch.nn.utils.clip_grad_norm_(params, 2.0**20))
                elif action == "halve":
                    for p in params:
                        if p.grad is not None:
                            p.grad.mul_(0.5)
                elif action == "remove one":
                    params[index].grad = None
                elif action == "replace one":
                    params[index].grad = whole_numbers(params[index].shape, "g", rank, *key).to(params[index]) * world
                elif action == "step":
                    optimizer.step()
            elif action == "clear":
                optimizer.zero_grad()
            elif action == "clear to zeros":
                optimizer.zero_grad(set_to_none=False)
            elif action == "clear by model":
                model.zero_grad()
            elif action == "failed":
                optimizer.zero_grad()
                if own.random() < 0.5:
                    loss_of(which=which).backward()
                optimizer.zero_grad()
        yield "settle"
        optimizer.step()
        optimizer.zero_grad()
        return seen

    return Case(f"windows of seed {seed}", build, script, optimizer_of, steps=steps)
