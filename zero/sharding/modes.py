"""Modes of optimizers whose `train()` and `eval()` set different weights, as schedule-free ones do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zero.errors import RankFailed
from zero.plan.layout import Block
from zero.sharding.publish import by_bucket, publish
from zero.sharding.state import ShardingState

MODES = ("train", "eval")


def give_modes(sharded: Any, inner: torch.optim.Optimizer) -> None:
    """Gives a sharded optimizer `train` and `eval` if the optimizer that it was made from has them; both objects do the same
    until the training is closed. Without modes it gets neither, as libraries look whether an optimizer has them."""
    for mode in MODES:
        method: Callable[..., Any] | None = getattr(type(inner), mode, None)
        if callable(method):
            switch = partial(_switch, weakref.ref(sharded), method, inner, mode)
            setattr(sharded, mode, switch)
            setattr(inner, mode, switch)


def _switch(sharded: weakref.ref[Any], method: Callable[..., Any], inner: torch.optim.Optimizer, mode: str) -> Any:
    """Changes the mode on all ranks, and publishes the weights that the optimizer sets. A collective."""
    optimizer = sharded()
    if optimizer is None or optimizer._sharding.lifetime.is_over:
        return method(inner)
    return switch_mode(optimizer.sharding, mode, partial(method, inner))


def _failed(what: str, error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return error or RankFailed(f"Cannot complete {what}(): it failed on {where}. Load a checkpoint on all ranks.")


@torch.no_grad()
def switch_mode(state: ShardingState, mode: str, act: Callable[[], Any]) -> Any:
    """Calls `act`, which writes the masters, and publishes them. Edits of the weights are adopted before. A collective."""
    what = f"optimizer.{mode}"
    state.offloader.check(what)
    state.even_rounds(what)
    sync = state.window.sync
    sync.set_phase(f"in {what}")
    sync.tracker.copy_back()
    batches, results = by_bucket(state), list[Any]()

    def written() -> Iterator[Sequence[Block]]:
        with state.updater.all_masters():
            results.append(act())
        for blocks in batches:
            state.masters.publish(blocks)
            yield blocks

    publish(state, batches, state.adopt, written(), f"{what}()", partial(_failed, what))
    sync.set_phase("before a backward")
    return results[0]
