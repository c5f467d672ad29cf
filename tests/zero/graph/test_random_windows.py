"""Windows drawn by chance of a compiled model are those of the eager one, however many gradients are handed over together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests import faults, ranks

WIDTH, SOME = 6, 10  # trainings a test
KINDS = ("backward", "backward", "skip", "twice", "no_sync", "set", "remove", "clip", "forget", "zeros", "clear", "step",
         "step", "read", "hook", "freeze", "edit", "settle")  # fmt: skip


class Model(nn.Module):
    """A model with parameters of many sizes, one part that a forward may skip, and one that is never used."""

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        self.first, self.norm, self.branch = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.last, self.scale, self.unused = nn.Linear(8, WIDTH), nn.Parameter(torch.ones(WIDTH)), nn.Linear(2, 2)
        self.is_broken = is_broken

    def forward(self, x: torch.Tensor, skips: bool = False, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = self.norm(torch.tanh(self.first(x)))
            if self.is_broken:
                torch._dynamo.graph_break()
            x = self.last(x if skips else torch.tanh(self.branch(x))) * self.scale
        return x


def trained(rank: int, seed: int, compile_it: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns the weights, and what was read or refused on the way."""
    draw = random.Random(seed)
    options = {
        "stage": draw.choice((0, 1, 2)), "bucket_bytes": draw.choice((64, 256, 4096)), "accumulation": draw.choice((None, 2)),
        "reduce": draw.choice(("mean", "sum")), "offload": draw.choice((None, None, "cpu")),
    }  # fmt: skip
    held = faults.hands_over_at_most(draw.choice((0, 8, 60, 2**18)))
    torch.manual_seed(seed)
    model, told, hooks, number = Model(draw.random() < 0.3).double(), list[Any](), list[Any](), 0
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)
    if compile_it:
        zero.compile(model, "aot_eager")
    params = list(model.parameters())

    def backward(context: Any = contextlib.nullcontext, **how: Any) -> None:
        nonlocal number
        number += 1
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64)
        with context():
            model(x, **how).square().mean().backward()

    def hook(param: nn.Parameter) -> None:
        if hooks:
            hooks.pop().remove()
        else:
            hooks.append(param.register_hook(lambda grad: 2 * grad))

    def read(param: nn.Parameter) -> None:
        grad = optimizer.whole_grad(param)
        told.append("none" if grad is None else float(grad.sum()))

    @torch.no_grad()
    def edit(param: nn.Parameter) -> None:
        param.mul_(0.5)

    with held, contextlib.closing(optimizer):
        for kind in (*draw.choices(KINDS, k=draw.randint(4, 9)), "backward", "step", "forget"):
            param, is_here = draw.choice(params), rank == 0 or draw.random() < 0.5
            acts: dict[str, Callable[[], object]] = {
                "backward": backward, "twice": lambda: backward(times=2), "no_sync": lambda: backward(optimizer.no_sync),
                "skip": lambda is_here=is_here: backward(skips=is_here), "step": optimizer.step, "settle": optimizer.settle,
                "set": lambda param=param: setattr(param, "grad", torch.ones_like(param)),
                "remove": lambda param=param: setattr(param, "grad", None), "forget": optimizer.zero_grad,
                "zeros": lambda: optimizer.zero_grad(set_to_none=False), "clear": model.zero_grad,
                "clip": lambda: told.append(float(torch.nn.utils.clip_grad_norm_(params, 0.5))),
                "read": lambda param=param: read(param), "hook": lambda param=param: hook(param),
                "freeze": lambda param=param: param.requires_grad_(not param.requires_grad),
                "edit": lambda param=param: edit(param),
            }  # fmt: skip
            try:
                if is_here or kind not in ("set", "remove"):
                    acts[kind]()
            except (RuntimeError, ValueError) as error:  # the eager model is refused the same
                told.append(f"{kind}: {str(error).splitlines()[0]}")
        weights = [param.detach().clone() for param in params]
    torch.compiler.reset()
    return weights, told


def differences(rank: int, world: int, seeds: range) -> list[str]:
    wrong = []
    for seed in seeds:
        (weights, told), (expected, expected_told) = (trained(rank, seed, compile_it) for compile_it in (True, False))
        are_close = all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(weights, expected, strict=True))
        texts, expected_texts = ([each for each in all_ if isinstance(each, str)] for all_ in (told, expected_told))
        numbers, expected_numbers = ([each for each in all_ if isinstance(each, float)] for all_ in (told, expected_told))
        if not are_close or texts != expected_texts or numbers != pytest.approx(expected_numbers, rel=1e-9, abs=1e-12):
            wrong.append(f"seed {seed}: {told} and {expected_told}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 100, SOME))
@pytest.mark.parametrize("world", [1, 2])
def test_windows_drawn_by_chance_are_those_of_the_eager_model(world: int, first: int) -> None:
    for wrong in ranks.run(world, differences, range(first, first + SOME), timeout=240.0):
        assert not wrong
