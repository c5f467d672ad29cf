"""After a failure, and after letting go of what failed: no hook, thread, file, shared page or pinned byte is left."""

import collections
import contextlib
import gc
import os
import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import accelerators
from accelerators_sim import pinned
from tests import faults, ranks
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from tests.zoo.case import filled
from zero import shard
from zero.errors import GroupLost, ZeroError

LIMIT_S = 0.5
TIMES = 4
WAYS = ("construction", "forward", "backward", "update", "collective")
DAILY = ("construction", "update")


class Trouble(Exception):
    pass


def raise_at(owner, name, at):
    """The `at`-th call of a function raises on this rank."""
    calls, original = [], getattr(owner, name)

    def failing(*args, **options):
        calls.append(None)
        if len(calls) == at:
            raise Trouble
        return original(*args, **options)

    return mock.patch.object(owner, name, failing)


def fails_in(way, model, rank):
    if rank == 1 and way == "construction":
        return raise_at(*faults.ATTACHING_A_HOOK, 3)
    if rank == 1 and way == "update":
        return raise_at(torch.optim.SGD, "step", 2)
    if rank == 1 and way in ("forward", "backward"):
        return raise_at(model[1], "forward", 1) if way == "forward" else raise_at(nn.functional, "gelu", 1)
    return contextlib.nullcontext()


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return nn.functional.gelu(grad)


class Middle(nn.Module):
    def forward(self, x):
        return Late.apply(x)


def train_and_fail(way, model, rank, options, held):
    """As a program would that fails on rank 1, says so, and lets go."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = None
    try:
        optimizer = shard(model, inner, timeout_s=LIMIT_S, first_step_timeout_s=30.0, bucket_bytes=64, **options)
        held.append(left(model[0].weight.device.type))
        for step in range(3):
            if way == "collective" and rank == 1 and step == 1:
                time.sleep(2 * LIMIT_S)  # longer than the others wait
            model(torch.ones(2, 4, device=model[0].weight.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        failed = False
    except (Trouble, ZeroError) as error:
        failed = True
        with contextlib.suppress(GroupLost):
            if optimizer is not None and not isinstance(error, GroupLost):
                optimizer.zero_grad()
    finally:
        if optimizer is not None:
            optimizer.close()
    return failed


def hooks_of(model):
    tables = [vars(module)[name] for module in model.modules() for name in vars(module) if name.endswith("_hooks")]
    for parameter in model.parameters():
        tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
        assert type(parameter.grad) in (torch.Tensor, type(None))
    return sum(len(table or ()) for table in tables)


def num_threads():
    """Without those that have ended, which the system lists for a moment longer."""
    counts = []
    for _ in range(10):
        time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/task")))
    return min(counts)


def left(device):
    """Counts what this process holds, by kind, once its device has done what it was given: until then that holds memory too."""
    accelerators.get(device).synchronize()
    gc.collect()
    shared = re.findall(r"/memfd:zero\S*", Path("/proc/self/maps").read_text())
    found = {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": num_threads(),
        "shared pages": len(shared),
        "pinned": pinned.num_alive(),
    }
    if device == "sim":
        found["device bytes"] = accelerators.get("sim").memory().allocated
    return collections.Counter(found)


def fail_often(rank, world, device, way, options):
    place, found, failures, held = place_of(rank, device), [], [], []
    for _ in range(TIMES):
        with place:
            model = filled(nn.Sequential(nn.Linear(4, 4), Middle(), nn.Linear(4, 2)), real=True)
        with fails_in(way, model, rank):
            failures.append(train_and_fail(way, model, rank, options, held))
        hooks = hooks_of(model)
        del model
        found.append((hooks, left(device)))
    return failures, found, held


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="this system does not list what a process holds")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("sim", marks=needs_sim)])
@pytest.mark.parametrize("way", [way if way in DAILY else pytest.param(way, marks=pytest.mark.full) for way in WAYS])
def test_after_a_failure_in_any_phase_nothing_of_ours_is_left_in_the_process(way, device):
    options = {"stage": 2} if device == "cpu" else {"stage": 2, "offload": {"pinned": True}}
    told = ranks.run(2, fail_often, device, way, options, apart=device, timeout=60.0)
    for rank, (failures, found, held_before) in enumerate(told):
        assert failures == [True] * TIMES, (rank, failures)
        assert len(held_before) == (0 if way == "construction" else TIMES)
        assert all(held["pinned" if device == "sim" else "shared pages"] for held in held_before)
        for hooks, held in found:
            assert hooks == 0
            assert held["shared pages"] == held["pinned"] == 0
        for _, held in found[2:]:  # the first of a process opens some for good
            assert held <= found[1][1], (rank, held - found[1][1])
