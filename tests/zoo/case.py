"""What a case of the zoo is, and the few helpers that scripts share.

A case is deterministic: `build` fills its weights from a seed, and a script takes every random number from `draw` or
`choice`, which depend on nothing but its own words for rank, step and micro-batch. So W processes and the oracle see the same.
"""

from __future__ import annotations

import contextlib
import fnmatch
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.traces import Script

CASES: dict[str, Case] = {}
ALL_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    script: Script
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int = 3
    tags: frozenset[str] = frozenset()  # the difficulties that it pairs
    dtypes: Sequence[str] = ALL_DTYPES  # the dtypes in which weights may be stored
    exact: Sequence[str] = ()  # dtypes in which its sums round nowhere, whatever their order: see is_exact
    still: Sequence[str] = ()  # parameters that nothing may move, at any world size
    keep_fp32: Sequence[str] = ()  # patterns of parameters that are not cast
    reduce: str | float = "mean"
    scaled: bool = True  # every backward goes through `backward`, so a loss scale can be applied
    engine: bool = True  # can be trained through an engine, which has its own words for some of what a loop does
    host_only: bool = False  # uses what simulated devices do not have, such as autocast
    needs: Sequence[str] = ()  # capabilities of the device
    needs_world: int = 1
    notes: str = ""

    def is_exact(self, dtype: str, world: int) -> bool:
        """Whether every bit must be right. In low precision a third of a sum is not exact, and a step later it shows."""
        return dtype in self.exact and (dtype == "fp32" or world in (1, 2, 4))

    def moves(self, parameter: str) -> bool:
        return not any(fnmatch.fnmatch(parameter, pattern) for pattern in self.still)


def sgd(lr: float = 0.25, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **options)


def case(build: Callable[[], nn.Module], optimizer: Any = None, *, tags: str, **fields: Any) -> Callable[[Script], Script]:
    """Register the script below as a case of the same name."""

    def register(script: Script) -> Script:
        name = script.__name__
        if name in CASES:
            raise ValueError(f"Two cases are called {name}")
        fields.setdefault("notes", (script.__doc__ or "").strip())
        CASES[name] = Case(name, build, script, optimizer or sgd(), tags=frozenset(tags.split()), **fields)
        return script

    return register


# Numbers ----------------------------------------------------------------------------------------------------------------


def generator(*key: object) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(zlib.crc32(repr(key).encode()))


# On the host, whatever the default device is while a model is built.


def whole_numbers(shape: Sequence[int], *key: object, low: int = -2, high: int = 2) -> Tensor:
    return torch.randint(low, high + 1, tuple(shape), generator=generator(*key), device="cpu").float()


def real_numbers(shape: Sequence[int], *key: object) -> Tensor:
    return torch.randn(tuple(shape), generator=generator(*key), device="cpu")


def like(model: nn.Module, tensor: Tensor) -> Tensor:
    """As the model computes: on its device, and floats in the dtype of its first floating parameter."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    return tensor.to(first.device, first.dtype if tensor.is_floating_point() else tensor.dtype)


def draw(model: nn.Module, shape: Sequence[int], rank: int, step: int, micro: int = 0, *, real: bool = False) -> Tensor:
    """Data of one micro-batch: -1, 0 and 1, whose products and sums are exact, or normal numbers."""
    key = ("data", rank, step, micro)
    return like(model, real_numbers(shape, *key) if real else whole_numbers(shape, *key, low=-1, high=1))


def choice(num: int, *key: object) -> int:
    return int(torch.randint(num, (), generator=generator("choice", *key)))


def filled(model: nn.Module, *, real: bool = False, high: int = 2) -> nn.Module:
    """Weights by name: whole numbers within +-high, or normal numbers that keep activations near one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if real:
                fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
                parameter.copy_(real_numbers(parameter.shape, name) / max(1, fan_in) ** 0.5)
            else:
                # Not zero: such a weight would hide what is done to it.
                signs = whole_numbers(parameter.shape, "sign", name, low=0, high=1) * 2 - 1
                parameter.copy_(signs * whole_numbers(parameter.shape, name, low=1, high=high))
    return model


def whole_loss(out: Tensor, world: int, *key: object) -> Tensor:
    """A linear loss with whole coefficients, times the number of ranks so that their mean is whole too."""
    coefficients = whole_numbers(out.shape, "loss", *key).to(out.device, out.dtype)
    return (out * coefficients).sum() * world


def real_loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


# What scripts do --------------------------------------------------------------------------------------------------------


def backward(optimizer: Any, loss: Tensor, **options: Any) -> None:
    """Through the optimizer's (or engine's) own backward where it has one, since that is who scales the loss."""
    if hasattr(optimizer, "backward"):
        optimizer.backward(loss, **options)
    else:
        loss.backward(**options)


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def no_sync(optimizer: Any, when: bool = True) -> Any:
    return optimizer.no_sync() if when and hasattr(optimizer, "no_sync") else contextlib.nullcontext()


class Mlp(nn.Sequential):
    """Two linear layers, the smallest thing with a hidden dimension."""

    def __init__(self, width: int = 4, hidden: int = 6, out: int = 3) -> None:
        super().__init__(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


def mlp() -> nn.Module:
    return filled(Mlp())


def real_mlp() -> nn.Module:
    return filled(Mlp(), real=True)
