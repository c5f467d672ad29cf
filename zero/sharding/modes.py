"""Optimizers with modes: `train()` and `eval()` set different weights, as schedule-free optimizers do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zero.comm.exchange import run_on_all
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


@torch.no_grad()
def switch_mode(state: ShardingState, mode: str, act: Callable[[], Any]) -> Any:
    """Calls `act`, which writes the masters, and publishes them. Edits of the weights are adopted before. A collective."""
    what = f"optimizer.{mode}"
    state.offloader.check(what)
    state.even_rounds(what)
    layout, sync = state.layout_ref.layout, state.window.sync
    blocks = [block for bucket in range(len(layout.buckets)) for block in layout.blocks(bucket)]
    sync.set_phase(f"in {what}")
    sync.tracker.copy_back()
    were_whole = state.masters.is_whole
    state.publisher.begin()
    try:
        state.masters.is_whole = False
        state.adopt_on_all()
        with state.updater.all_masters():
            result = run_on_all(state.group, act)
        state.masters.publish(blocks)
        state.publisher.send(blocks)
        state.publisher.wait(sum(1 << param for param, slot in enumerate(layout.slots) if slot is not None))
    finally:
        state.publisher.end()
    state.masters.is_whole = were_whole
    sync.set_phase("before a backward")
    return result
