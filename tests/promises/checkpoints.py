"""Trainings that are saved and go on, in rank processes and in threads."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero
from tests import inside
from tests.traces import copied
from zero import Engine, ShardedOptimizer

GLOBAL_BATCH = 12  # divides among 1, 2, 3 and 4 ranks
FEATURES = 5


class Net(nn.Module):
    """Frozen, tied and odd-shaped parameters, buffers of both kinds, a scalar, and a weight in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.second = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.shared = self.second
        self.conv = nn.Conv2d(2, 2, (2, 3)).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        hidden = self.shared(torch.tanh(self.second(torch.tanh(self.first(x)))))
        hidden = self.drop(self.frozen(hidden)) * self.scale
        image = self.conv(hidden.reshape(-1, 1, 1, 7).expand(-1, 2, 2, 7))
        return image.flatten(1)


_building = threading.Lock()  # ranks that are threads share torch's random numbers


def build() -> Net:
    with _building:
        torch.manual_seed(7)
        return Net()


def batch(step: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of the batch that all ranks together have."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator)
    part = GLOBAL_BATCH // size
    return whole[rank * part : (rank + 1) * part].to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    example = next(model.parameters())
    return model(batch(step, rank, size, example.dtype).to(example.device)).float().square().mean()


def train(
    optimizer: ShardedOptimizer | Engine, steps: Iterable[int], rank: int, size: int, scheduler: Any = None
) -> list[float]:
    """The losses."""
    losses = []
    for step in steps:
        if isinstance(optimizer, Engine):
            loss = loss_of(optimizer.module, step, rank, size)
        else:
            loss = loss_of(optimizer.model, step, rank, size)
        optimizer.backward(loss)
        optimizer.step()
        if not isinstance(optimizer, Engine):
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        losses.append(loss.item())
    return losses


def everything(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """All that a training consists of, whole, on the host."""
    state = optimizer.state_dict()
    model = {name: tensor.detach().cpu().clone() for name, tensor in optimizer.model.state_dict().items()}
    masters = {name: tensor.cpu() for name, tensor in state.pop("masters").items()}
    exact = {name: masters.get(name, model[name]) for name in inside.names(optimizer)}
    state["state"] = {name: dict(sorted(entries.items())) for name, entries in state["state"].items()}
    return copied({"model": model, "exact": exact, **state})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    wide = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    flat = [param for param in model.parameters() if param.requires_grad and param.dim() <= 1]
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 0.02}], lr=0.01, eps=1e-3)


def without_dropout(model: nn.Module) -> torch.optim.Optimizer:
    """The same; what is dropped differs with the number of ranks."""
    model.drop.p = 0.0  # type: ignore[union-attr]
    return adamw(model)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def sharded(group: Any = None, make: Make = adamw, **options: Any) -> ShardedOptimizer:
    model = build()
    return zero.shard(model, make(model), group=group, **{"stage": 2, "bucket_bytes": 64, "timeout_s": 20.0, **options})


def go_on(
    rank: int, world: int, folder: str, first: int, last: int, options: dict[str, Any], saves: bool = True
) -> dict[str, Any]:
    """In a rank process: takes in what is in the folder, trains from step to step, saves, and tells everything."""
    accelerate = options.pop("device", None)
    place = torch.device(accelerate) if accelerate else torch.device("cpu")
    scheduler_of = options.pop("scheduler", None)
    make = options.pop("make", adamw)
    compiled = options.pop("compiled", False)
    torch.manual_seed(100 + rank)
    model = build().to(place)
    inner = make(model)
    optimizer = zero.shard(model, inner, **{"stage": 2, "bucket_bytes": 64, "timeout_s": 20.0, **options})
    if compiled:
        zero.compile(model, backend="aot_eager")
    scheduler = None if scheduler_of is None else scheduler_of(inner)
    torch.manual_seed(200 + rank)
    random.seed(rank)
    extra = None
    try:
        if first:
            extra = zero.load(folder, optimizer, scheduler=scheduler)
        losses = train(optimizer, range(first, last), rank, world, scheduler)
        rates = [group["lr"] for group in optimizer.param_groups]
        if saves:
            zero.save(folder, optimizer, extra={"last": last}, scheduler=scheduler)
        drawn = (torch.rand(()).item(), random.random())  # last of all: whoever goes on draws the same
        return {**everything(optimizer), "losses": losses, "rates": rates, "drawn": drawn, "extra": extra}
    finally:
        optimizer.close()


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Bit for bit; None where there is none."""
    return inside.first_difference(one, other, path)


def manifest_of(folder: Path, tag: str) -> dict[str, Any]:
    return json.loads((folder / tag / "manifest.json").read_text())
