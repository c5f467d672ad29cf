"""Lives of a training drawn by seed: what people do around steps, in any order, beside plain PyTorch on the joint batch.

A life is a list of events: steps, accumulations, saves and loads, close and shard again at another stage, hooks that come and
go, casts, freezes, exceptions of one rank, states that go elsewhere and come back, edits of weights. After each event the
weights of all ranks are those of plain torch. The seed is all there is.

    python -m tests.random_lives SEED...       lives these lives again and says what is wrong with them
    python -m tests.random_lives --first 300   those of seeds 0 to 299
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero
from tests.loopback import run_ranks
from tests.zoo.case import filled, real_numbers
from zero.errors import RankFailed

TIME_LIMIT_S = 60.0
STAGES = (0, 1, 2, 3)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
    # A large eps, so that the last bit of a sum does not become the sign of an update.
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, eps=0.1, weight_decay=0.1),
}
# How many of 100 events are of each kind.
EVENTS = {
    "step": 26,
    "accumulate": 10,
    "save": 5,
    "load": 5,
    "shard again": 7,
    "hook": 6,
    "unhook": 4,
    "cast": 5,
    "freeze": 5,
    "thaw": 5,
    "exception": 6,
    "offload": 6,
    "edit": 6,
    "rate": 4,
}


class Trouble(Exception):
    """Raised by one rank's own code."""


@dataclass(frozen=True)
class Plan:
    """The decisions of a seed."""

    seed: int
    world: int
    stage: int
    optimizer: str
    homes: str
    bucket_bytes: int
    events: tuple[tuple[str, random.Random], ...]

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        kinds = chance.choices(list(EVENTS), list(EVENTS.values()), k=chance.randint(6, 14))
        return cls(
            seed=seed,
            world=chance.randint(1, 3),
            stage=chance.choice(STAGES),
            optimizer=chance.choice(list(OPTIMIZERS)),
            homes=chance.choice(("device", "device", "cpu", "disk")),
            bucket_bytes=chance.choice((32, 64, 4096)),
            # Each event draws from numbers of its own, alike on all ranks and in plain torch.
            events=tuple((kind, random.Random(chance.random())) for kind in kinds),
        )

    def __str__(self) -> str:
        life = ", ".join(kind for kind, _ in self.events)
        return f"seed {self.seed}: {self.world} ranks, stage {self.stage}, {self.optimizer}, homes {self.homes}: {life}"


class Net(nn.Module):
    """Layers with a tied weight, a norm with buffers, and a branch that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.branch, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, uses_branch: bool) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.second(torch.tanh(self.first(inputs)))))
        hidden = torch.tanh(self.branch(hidden)) if uses_branch else hidden
        return self.last(hidden)


class Life:
    """The common part of plain torch and a sharded training: a model, an optimizer, hooks, and the events."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model: nn.Module = filled(Net(), real=True)
        self.optimizer: Any = OPTIMIZERS[plan.optimizer](self.model.parameters())
        self.stage = plan.stage
        self.hooks: list[Any] = []
        self.saved: Any = None
        self.number = 0  # the number of batches so far

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def param(self, chance: random.Random) -> nn.Parameter:
        return self.model.get_parameter(chance.choice(self.names))

    def loss(self, rank: int, uses_branch: bool) -> torch.Tensor:
        inputs = real_numbers((3, 4), "life", self.plan.seed, self.number, rank)
        loss: torch.Tensor = self.model(inputs, uses_branch).square().mean()
        return loss

    def live(self, kind: str, chance: random.Random) -> None:
        getattr(self, kind.replace(" ", "_"))(chance)

    def step(self, chance: random.Random) -> None:
        self.accumulate_of(1, chance)

    def accumulate(self, chance: random.Random) -> None:
        self.accumulate_of(chance.randint(2, 3), chance)

    def accumulate_of(self, count: int, chance: random.Random) -> None:
        for last in [False] * (count - 1) + [True]:
            self.backward(chance.random() < 0.7, last or chance.random() < 0.5)
            self.number += 1
        if chance.random() < 0.4:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, uses_branch: bool, synchronises: bool) -> None:
        raise NotImplementedError

    def hook(self, chance: random.Random) -> None:
        param, factor = self.param(chance), chance.choice((0.5, 2.0))
        if param.requires_grad:  # torch registers no hook on others
            self.hooks.append(param.register_hook(lambda grad: grad * factor))

    def unhook(self, chance: random.Random) -> None:
        if self.hooks:
            self.hooks.pop(chance.randrange(len(self.hooks))).remove()

    def cast(self, chance: random.Random) -> None:
        """There and back; what is absent keeps its dtype."""
        dtype = chance.choice((torch.float64, torch.float32))
        if self.stage != 3:
            self.model.to(dtype)
            self.model.to(torch.float32)

    def freeze(self, chance: random.Random) -> None:
        if sum(param.requires_grad for param in self.model.parameters()) > 1:
            self.param(chance).requires_grad_(False)
        if not any(param.requires_grad for param in self.model.parameters()):
            self.model.requires_grad_(True)

    def thaw(self, chance: random.Random) -> None:
        self.param(chance).requires_grad_(True)

    def edit(self, chance: random.Random) -> None:
        param, way = self.param(chance), chance.choice(("in place", "by data", "assigned"))
        with torch.no_grad():
            if way == "in place":
                param.mul_(0.5)
            elif way == "by data":
                param.data.add_(0.125)
            else:
                param.data = param.data * 1.5

    def rate(self, chance: random.Random) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= chance.choice((0.5, 1.5))


class PlainLife(Life):
    """Plain torch on the batches of all ranks."""

    def backward(self, uses_branch: bool, synchronises: bool) -> None:
        for rank in range(self.plan.world):
            (self.loss(rank, uses_branch) / self.plan.world).backward()

    def save(self, chance: random.Random) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, chance: random.Random) -> None:
        if self.saved is not None:
            self.model.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def shard_again(self, chance: random.Random) -> None:
        self.stage = chance.choice(STAGES)

    def exception(self, chance: random.Random) -> None:
        """Throws a window away in which one rank raises."""
        self.number += 1

    def offload(self, chance: random.Random) -> None:
        pass


class ShardedLife(Life):
    """One rank of a sharded training."""

    def __init__(self, plan: Plan, group: Any, folder: Path) -> None:
        super().__init__(plan)
        self.group, self.folder = group, folder
        self.shard(self.optimizer)

    def shard(self, inner: torch.optim.Optimizer) -> None:
        kinds = ("masters", "moments", "gradients")
        home = {"device": None, "cpu": "cpu", "disk": f"disk:{self.folder}"}[self.plan.homes]
        homes = {} if home is None else {"homes": dict.fromkeys(kinds, home)}
        options = {"bucket_bytes": self.plan.bucket_bytes, "timeout_s": TIME_LIMIT_S, "kernels": "torch", **homes}
        self.optimizer = zero.shard(self.model, inner, stage=self.stage, group=self.group, **options)

    def backward(self, uses_branch: bool, synchronises: bool) -> None:
        with contextlib.nullcontext() if synchronises else self.optimizer.no_sync():
            self.loss(self.group.rank, uses_branch).backward()

    def save(self, chance: random.Random) -> None:
        zero.save(self.folder / "saved", self.optimizer, "now")
        self.saved = True

    def load(self, chance: random.Random) -> None:
        if self.saved is not None:
            zero.load(self.folder / "saved", self.optimizer)

    def shard_again(self, chance: random.Random) -> None:
        self.stage = chance.choice(STAGES)
        state = self.optimizer.state_dict()
        self.optimizer.close()
        self.shard(OPTIMIZERS[self.plan.optimizer](self.model.parameters()))
        self.optimizer.load_state_dict(state)

    def exception(self, chance: random.Random) -> None:
        failing, moment = chance.randrange(self.plan.world), chance.choice(("forward", "backward", "after it"))
        fails = failing == self.group.rank
        try:
            if fails and moment == "forward":
                raise Trouble
            loss = self.loss(self.group.rank, True)
            if fails and moment == "backward":
                loss.register_hook(_raise)
            loss.backward()
            if fails:
                raise Trouble
            self.optimizer.step()
        except Trouble:
            assert fails
        except RankFailed:
            assert not fails
        self.optimizer.zero_grad()
        self.number += 1

    def offload(self, chance: random.Random) -> None:
        kinds = chance.sample(["masters", "moments", "weights"], k=chance.randint(1, 3))
        self.optimizer.offload_states(kinds, device=chance.choice(("cpu", f"disk:{self.folder}")))
        self.optimizer.reload_states()

    def weights(self) -> dict[str, torch.Tensor]:
        with self.optimizer.gathered():
            return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def _raise(_: torch.Tensor) -> None:
    raise Trouble


def difference(seed: int, folder: Path) -> str | None:
    """Returns what is wrong with the life of a seed; None where every event leaves the weights of plain torch."""
    folder.mkdir(exist_ok=True)
    plan = Plan.draw(seed)
    plain, expected = PlainLife(plan), []
    for kind, chance in plan.events:
        plain.live(kind, copy.deepcopy(chance))
        expected.append({name: param.detach().clone() for name, param in plain.model.named_parameters()})

    def one(group: Any) -> str | None:
        life = ShardedLife(plan, group, folder)
        wrong = None
        for number, (kind, chance) in enumerate(plan.events):
            life.live(kind, copy.deepcopy(chance))
            for name, value in life.weights().items():
                if wrong is None and not torch.allclose(value, expected[number][name], rtol=1e-4, atol=1e-5):
                    apart = float((value - expected[number][name]).abs().max())
                    wrong = f"rank {group.rank}, after event {number} ({kind}): {name} is {apart:.2g} apart"
        life.optimizer.check()
        life.optimizer.close()
        return wrong

    try:
        found = run_ranks(plan.world, one, TIME_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong with this life
        return f"{plan}\n    {type(error).__name__}: {error}"
    return next((f"{plan}\n    {wrong}" for wrong in found if wrong is not None), None)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Lives random lives of a training again.")
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the seeds 0 to N - 1")
    given = parser.parse_args(arguments)
    num_wrong = 0
    for seed in given.seeds or range(given.first):
        with tempfile.TemporaryDirectory() as folder:
            wrong = difference(seed, Path(folder))
        if wrong is not None:
            num_wrong += 1
            print(wrong, flush=True)
    print(f"{len(given.seeds or range(given.first))} lives, {num_wrong} of them wrong")
    return int(bool(num_wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
