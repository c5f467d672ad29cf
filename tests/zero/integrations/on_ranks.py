"""Runs a function on ranks as a launcher would have started them, and compares what was trained with plain training."""

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import accelerators
from tests import ranks

ROOT = Path(__file__).parents[3]


def both_ranks(function: str, *args: Any, **named: Any) -> list[Any]:
    """What `module:function` returns on each of two ranks."""
    return _run(2, function, args, named)


def one_process(function: str, *args: Any, **named: Any) -> Any:
    """What it returns in a process that is alone."""
    return _run(1, function, args, named)[0]


def _run(world: int, function: str, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    # Frameworks take seconds to import and change what they find: they stay in processes that other tests do not use.
    return ranks.run(world, started, function, args, named, group=world > 1, apart="frameworks", timeout=180.0)


def as_program(name: str, folder: str) -> str:
    """What examples/`name`.py prints, run in a folder."""
    printed, before, path = io.StringIO(), Path.cwd(), str(ROOT / "examples" / f"{name}.py")
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", [path]):  # not those of pytest
            runpy.run_path(path, run_name="__main__")
    finally:
        os.chdir(before)
    return printed.getvalue()


def assert_runs_as_a_program(name: str, folder: Path) -> None:
    printed = both_ranks("tests.zero.integrations.on_ranks:as_program", name, str(folder))
    assert re.search(r"loss\W", printed[0]), printed


def started(rank: int, world: int, function: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # frameworks choose a device themselves
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # unused, as there is a group; frameworks look
    module, _, name = function.partition(":")
    try:
        with accelerators.using("cpu"):
            return getattr(import_module(module), name)(*args, **named)
    finally:
        if "accelerate" in sys.modules:  # accelerate keeps the number of ranks for the whole process
            state = import_module("accelerate.state")
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def plain_training(
    model: nn.Module, losses_of: Callable[[nn.Module], Any], clip: float | None = None, schedule: Any = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch on the joint batch: AdamW, one step for each loss that `losses_of` yields. The losses, and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = None if schedule is None else schedule(optimizer)
    losses = []
    for loss in losses_of(model):
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip, "a norm that is not clipped shows nothing"
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_same_training(found: list[Any], losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    """The ranks have one set of weights, bit for bit; theirs and their mean losses are those of plain training, to the
    roundings of fp32 that torch.testing allows."""
    for name, weight in weights.items():
        first, second = (rank[-1][name] for rank in found)
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, weight, msg=lambda text, name=name: f"{name}: {text}")
    means = [sum(step) / len(step) for step in zip(*(rank[0] for rank in found), strict=True)]
    torch.testing.assert_close(torch.tensor(means), torch.tensor(losses))


def means_of_pairs(found: list[Any]) -> list[Any]:
    """With the mean loss over the two micro-steps of each step."""
    return [[[sum(pair) / 2 for pair in zip(losses[::2], losses[1::2], strict=True)], weights] for losses, weights in found]
