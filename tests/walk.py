"""Walks sequences of operations on a window, beside a model of a window in plain tensors, and names the first difference.

The trained loss is linear in the weights and all numbers are small powers of two, so that every sum is exact, in any order: a
walk has one right result. What an operation raises is part of it.

    python -m tests.walk --length 4              all sequences of so many operations, on one rank
    python -m tests.walk --length 8 --seeds 500  so many drawn ones, on two ranks, which do different things between collectives
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import zero
from tests import faults, inside
from tests.loopback import run_ranks, solo
from zero.errors import RankFailed, RanksDiffer, ZeroError
from zero.window.records import Phase
from zero.window.window import Window

RATE, MOMENTUM = 0.5, 0.5
TIME_LIMIT_S = 30.0
HOOKED, ASSIGNED = "a.weight", "a.bias"

Walk = Sequence[tuple[str, ...]]  # by operation: what each rank does


class Injected(Exception):
    """Raised in a hook, or in the middle of an update."""


class Sums(nn.Module):
    """Two layers side by side, each a bucket or more of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
        for number, param in enumerate(self.parameters()):
            param.data.fill_(number + 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum() + self.b(x).sum()


def batch(rank: int, device: str = "cpu") -> torch.Tensor:
    return torch.full((2, 4), 2.0 * (rank + 1), device=device)


class Model:
    """What a window is: sums that are final, what each rank has added since, and what it has to tell the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.weights = {name: param.detach().clone() for name, param in Sums().named_parameters()}
        self.moments: dict[str, torch.Tensor] = {}
        self.torn = [False] * world
        self.gradients = [self._gradient(rank) for rank in range(world)]
        self.clear()

    def _gradient(self, rank: int) -> dict[str, torch.Tensor]:
        model = Sums()
        model(batch(rank)).backward()
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    def clear(self) -> None:
        self.torn = [False] * self.world
        self.final: dict[str, torch.Tensor] = {}
        self.failed = [False] * self.world
        self.has_final_sums = False
        self._clear_since()

    def _clear_since(self) -> None:
        # Each multiplied by the weight of its micro-batch.
        self.local: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world)]
        self.own: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world)]  # the gradients that the user assigned
        self.amounts: list[list[float]] = [[] for _ in range(self.world)]
        self.is_put = [bool(self.final)] * self.world  # some `.grad` is set, so that its clearing can be seen
        self.is_cleared = [False] * self.world  # the clearing has not been looked at yet
        # The next one who looks at the gradients of a backward sees that they are gone.
        self.was_backward = [False] * self.world

    def look(self, rank: int) -> None:
        """Takes note of a rank's `.grad` that was cleared behind our back."""
        if self.is_cleared[rank]:
            self.is_cleared[rank] = self.is_put[rank] = self.failed[rank] = self.has_final_sums = False
            self.was_backward[rank] = False
            self.amounts[rank] = []

    # what one rank does ------------------------------------------------------------------------------------------

    def backward(self, rank: int, scale: float = 1.0) -> None:
        self.look(rank)
        self.is_put[rank] = self.was_backward[rank] = True
        amount = self.amounts[rank][-1] if self.amounts[rank] else 1.0
        for name, grad in self.gradients[rank].items():
            more = scale * grad * amount
            self.local[rank][name] = self.local[rank][name] + more if name in self.local[rank] else more

    def not_finite(self, rank: int) -> None:
        self.backward(rank, float("nan"))

    def fail(self, rank: int) -> None:
        before = dict(self.local[rank])
        self.backward(rank)
        if HOOKED in before:
            self.local[rank][HOOKED] = before[HOOKED]
        else:
            self.local[rank].pop(HOOKED)
        self.failed[rank] = True
        raise Injected

    def backward_apart(self, rank: int) -> None:
        self.backward(rank)

    def no_contribution(self, rank: int) -> None:
        self.look(rank)
        self.is_put[rank] = True

    def weigh(self, rank: int) -> None:
        self.look(rank)
        if self.has_final_sums or (self.was_backward[rank] and not self.amounts[rank]):
            raise ValueError
        self.amounts[rank].append(2.0)

    def remove_one(self, rank: int) -> None:
        for held in (self.local[rank], self.own[rank], self.final):
            held.pop(HOOKED, None)

    def assign(self, rank: int) -> None:
        for held in (self.local[rank], self.final):
            held.pop(ASSIGNED, None)
        self.is_cleared[rank] = False  # nobody sees any more that all were None
        self.own[rank][ASSIGNED] = torch.ones(2)

    # what all do -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        for rank in range(self.world):
            self.look(rank)
        if any(self.failed) or any(self.torn):
            self.clear()
            raise RankFailed
        unweighted = [rank for rank in range(self.world) if (self.local[rank] or self.own[rank]) and not self.amounts[rank]]
        if any(self.amounts) and unweighted:
            self.clear()
            raise RanksDiffer
        total = sum(map(sum, self.amounts)) if any(self.amounts) else float(self.world)
        for name in self.weights:
            parts = [held[name] / total for held in self.local if name in held]
            parts += [held[name] / self.world for held in self.own if name in held]
            if parts:
                self.final[name] = sum(parts, self.final.get(name, torch.zeros(())))
        self.has_final_sums = bool(self.final)
        self._clear_since()

    def step(self, tears: bool = False) -> None:
        self.settle()
        if not all(grad.isfinite().all() for grad in self.final.values()):
            return
        if tears and self.final:
            self.torn = [True] * self.world
            raise Injected
        for name, grad in self.final.items():
            self.moments[name] = MOMENTUM * self.moments[name] + grad if name in self.moments else grad.clone()
            self.weights[name] -= RATE * self.moments[name]

    def tear(self) -> None:
        self.step(tears=True)

    def zero_grad(self) -> None:
        self.clear()

    def to_zeros(self) -> None:
        used = {*self.final, *(name for held in (*self.local, *self.own) for name in held)}
        self.clear()
        self.final = {name: torch.zeros_like(self.weights[name]) for name in used}

    def forget(self) -> None:
        self.final = {}
        for rank in range(self.world):
            self.local[rank], self.own[rank] = {}, {}
            self.is_cleared[rank] = self.is_put[rank]


class Real:
    """The same operations on a sharded optimizer."""

    def __init__(self, stage: int, group: Any, device: str) -> None:
        self.device = device
        self.model = Sums().to(device)
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        options = {"bucket_bytes": 32, "on_nonfinite": "skip", "timeout_s": TIME_LIMIT_S, "group": group}
        self.optimizer = zero.shard(self.model, inner, stage=stage, **options)
        self.rank = group.rank

    def backward(self) -> None:
        self.model(batch(self.rank, self.device)).backward()

    def not_finite(self) -> None:
        (self.model(batch(self.rank, self.device)) * float("nan")).backward()

    def fail(self) -> None:
        hook = self.model.get_parameter(HOOKED).register_hook(mock.Mock(side_effect=Injected))
        try:
            self.backward()
        finally:
            hook.remove()

    def backward_apart(self) -> None:
        with self.optimizer.no_sync():
            self.backward()

    def no_contribution(self) -> None:
        self.optimizer.no_contribution()

    def weigh(self) -> None:
        self.optimizer.weight(2.0)

    def remove_one(self) -> None:
        self.model.get_parameter(HOOKED).grad = None

    def assign(self) -> None:
        self.model.get_parameter(ASSIGNED).grad = torch.ones(2, device=self.device)

    def settle(self) -> None:
        self.optimizer.settle()

    def step(self) -> None:
        self.optimizer.step()

    def tear(self) -> None:
        with faults.update_fails(self.optimizer, Injected):
            self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def to_zeros(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def forget(self) -> None:
        self.model.zero_grad()


def has_news(window: Window) -> bool:
    """Returns whether anything came that the other ranks have not heard of."""
    since, reducer = window.since_settling, window.reducer
    came = since.has_gradient or window.backward.left or since.weights or since.is_none or since.edited
    return bool(came or window.clears or reducer.sent)


def is_empty(window: Window) -> bool:
    return not (has_news(window) or window.scaling.has_final_sums or window.grad_ops.shard.shares)


# By the phase of the window: what holds between two operations.
INVARIANTS: dict[Phase, Callable[[Window], bool]] = {
    Phase.EMPTY: is_empty,
    Phase.OPEN: lambda window: has_news(window) and not window.scaling.has_final_sums,
    Phase.SETTLED: lambda window: (
        not has_news(window) and window.scaling.has_final_sums and window.since_reset.proxied == window.used
    ),
    Phase.REOPENED: lambda window: has_news(window) and window.scaling.has_final_sums,
    Phase.AHEAD: lambda window: False,  # nothing is offloaded
    Phase.STEPPING: lambda window: False,  # no operation ends in this phase
    Phase.STEPPED: lambda window: not has_news(window) and window.scaling.has_final_sums == bool(window.used),
    Phase.FAILED: lambda window: window.needs_sync,
    Phase.TORN: lambda window: window.needs_sync,
    Phase.ABORTED: is_empty,
}


LOCAL = ("backward", "backward_apart", "not_finite", "fail", "no_contribution", "weigh", "remove_one", "assign")
ALL = ("settle", "step", "tear", "zero_grad", "to_zeros", "forget")
# The operations that one rank may do while others do another one of these. Doing nothing is none of them: `no_contribution` is.
APART = ("backward", "backward", "no_contribution", "not_finite", "fail")


def raised(act: Callable[[], object]) -> str:
    try:
        act()
    except (Injected, ValueError, ZeroError) as error:
        return type(error).__name__
    return ""


def expected(model: Model, operations: tuple[str, ...]) -> list[str]:
    """Does an operation on a model, and returns what each rank raises."""
    if operations[0] in ALL:
        assert len(set(operations)) == 1
        return [raised(getattr(model, operations[0]))] * model.world
    return [raised(lambda rank=rank, name=name: getattr(model, name)(rank)) for rank, name in enumerate(operations)]


def walk(group: Any, stage: int, steps: Walk, device: str = "cpu") -> str:
    """Walks on this rank. Returns what differs from the model, or nothing."""
    real, model, rank = Real(stage, group, device), Model(group.size), group.rank
    try:
        for number, operations in enumerate((*steps, ("settle",) * group.size)):
            wanted, found = expected(model, operations)[rank], raised(getattr(real, operations[rank]))
            if found != wanted:
                return f"operation {number}, {operations[rank]}, raised {found or 'nothing'} and not {wanted or 'nothing'}"
            window = inside.window(real.optimizer)
            if not INVARIANTS[window.phase](window):
                return f"operation {number}, {operations[rank]}, left a window that is not what {window.phase} says"
        for name, param in real.model.named_parameters():
            found_grad, grad = real.optimizer.whole_grad(param), model.final.get(name)
            if not same(found_grad, grad):
                return f"the gradient of {name} is {found_grad} and not {grad}"
        with real.optimizer.gathered():
            for name, param in real.model.named_parameters():
                if not same(param.detach(), model.weights[name]):
                    return f"{name} is {param.detach()} and not {model.weights[name]}"
            real.optimizer.any_rank(False)
    finally:
        real.optimizer.close()
    return ""


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one.cpu().nan_to_num(99.0), other.nan_to_num(99.0))


def all_walks(length: int) -> Iterator[Walk]:
    """All sequences of so many operations of one rank."""
    for names in itertools.product((*LOCAL, *ALL), repeat=length):
        yield [(name,) for name in names]


def drawn(seed: int, length: int) -> Walk:
    """A sequence of operations of two ranks, which do different things between collectives."""
    chance, steps = random.Random(seed), list[tuple[str, ...]]()
    for _ in range(length):
        kind = chance.random()
        if kind < 0.45:
            steps.append((chance.choice(APART), chance.choice(APART)))
        else:
            steps.append((chance.choice((*ALL, *LOCAL) if kind > 0.8 else ALL),) * 2)
    return steps


def wrong_alone(walks: Iterable[Walk], stage: int, device: str = "cpu") -> Iterator[str]:
    """The walks of one rank that go wrong, with what is."""
    found = ((names, walk(solo(), stage, names, device)) for names in walks)
    return (f"{' '.join(name for [name] in names)}: {what}" for names, what in found if what)


def wrong_together(seeds: Iterable[int], length: int, stage: int) -> Iterator[str]:
    """The walks of two ranks that go wrong, with what is."""
    for seed in seeds:
        steps = drawn(seed, length)
        for rank, what in enumerate(run_ranks(2, lambda group, steps=steps: walk(group, stage, steps))):
            if what:
                yield f"seed {seed}, {' '.join('/'.join(dict.fromkeys(names)) for names in steps)}, rank {rank}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--seeds", type=int, help="on two ranks")
    parser.add_argument("--stage", type=int, default=2)
    given = parser.parse_args()
    if given.seeds is None:
        found = wrong_alone(all_walks(given.length), given.stage)
    else:
        found = wrong_together(range(given.seeds), given.length, given.stage)
    wrong = 0
    for what in found:
        print(what, flush=True)
        wrong += 1
    print(f"{wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
