"""A group of parameters is added whole, or everything is as it was: also where adding it fails in the middle."""

import itertools
import os
import sys
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

from tests.promises.loops import on_ranks
from tests.zoo.case import filled
from zero.errors import ZeroError
from zero.memory.homes.file import StateFile
from zero.memory.shard import LayoutRef
from zero.optim.several import Optimizers
from zero.runtime.params.absent import Shadow
from zero.sharding import join
from zero.window import window as windows

ADD_GROUP, ADD_PARAMS = join.add_group.__code__, join.add_params.__code__
ADD_TO_ONE = Optimizers.add_param_group.__code__
WITH_STATE = ("zero.sharding.join", "zero.sharding.state", "zero.runtime.", "zero.memory.", "zero.setup.memory_guard")


class Injected(BaseException):
    """What a test raises. Like Ctrl-C it is only caught to be raised again."""


def lines_of_adding(frame):
    """Before and after each call that adding makes."""
    return frame.f_code in (ADD_GROUP, ADD_PARAMS, ADD_TO_ONE)


def lines_with_state(frame):
    """Also in the middle of the functions that change something."""
    return frame.f_globals["__name__"].startswith(WITH_STATE)


class Failing:
    """Raises at one point of what runs in it: before a line, or where a function has done its work. Points count from 0."""

    def __init__(self, point, watches):
        self._left, self._watches = point, watches
        self.lines = set()  # the lines of `add_params` that were points

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *_):
        sys.settrace(self._before)

    def __call__(self, frame, event, _):
        if event == "call":
            return self if self._watches(frame) else None
        if event == "line" or (event == "return" and frame.f_code is not ADD_GROUP):  # after which the group is added
            if self._left == 0:
                raise Injected
            self._left -= 1
            if frame.f_code is ADD_PARAMS:
                self.lines.add(frame.f_lineno)
        return self


def lines_of(code):
    return {line for *_, line in code.co_lines() if line is not None} - {code.co_firstlineno}


PLAIN = (bool, int, float, str, bytes, type(None))
PARTS = tuple(f"zero.{room}." for room in ("sharding", "runtime", "memory", "setup", "optim"))
CACHES = {(LayoutRef, "_dtypes"), (Shadow, "views")}  # filled again when they are needed


def known(optimizer, params):
    """What a sharded optimizer holds, with all of its parts, and what parameters do: each value by the way to it."""
    found, seen, waiting = {}, {}, [("optimizer", optimizer)]
    for index, param in enumerate(params):
        held = {"param": param, "grad": param.grad, "trains": param.requires_grad, "hooks": param._backward_hooks or {}}
        waiting.append((f"param {index}", {**held, **vars(param), "window": windows._windows.get(id(param))}))
    while waiting:
        way, value = waiting.pop()
        if isinstance(value, PLAIN):
            found[way] = value
        elif id(value) in seen:
            found[way] = f"the same as {seen[id(value)][0]}"
        else:
            seen[id(value)] = way, value  # this keeps the value, so that no other object gets its id
            parts = parts_of(value)
            found[way] = value if parts is None else f"{type(value)} of {list(parts)}"
            waiting += [(f"{way}.{name}", part) for name, part in (parts or {}).items()]
            if isinstance(value, torch.Tensor):
                found[f"{way} version"] = value._version
    return found


def parts_of(value):
    """What a container, an optimizer or an object of the library holds, by name; None for others."""
    if isinstance(value, dict):
        return {key if isinstance(key, PLAIN) else id(key): part for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return dict(enumerate(value))
    if not isinstance(value, torch.optim.Optimizer) and not type(value).__module__.startswith(PARTS):
        return None
    slots = {name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())}
    names = sorted({*slots, *getattr(value, "__dict__", ())})
    parts = {name: getattr(value, name) for name in names if hasattr(value, name) and (type(value), name) not in CACHES}
    return {**parts, "size on disk": os.fstat(value.fileno()).st_size} if isinstance(value, StateFile) else parts


def changes(before, after):
    """The ways to what differs."""

    def same(one, other):
        return one is other or (isinstance(one, PLAIN) and isinstance(other, PLAIN) and one == other)

    return sorted(way for way in before.keys() | after.keys() if not same(before.get(way, PLAIN), after.get(way, PLAIN)))


def two_layers(second):
    """When it is sharded, the second one is in no group, or frozen, or not there yet."""
    model = filled(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), real=True)
    if second == "frozen":
        model[1].requires_grad_(False)
    elif second == "late":
        model[1] = nn.Identity()
    return model


def first_layer(model):
    return torch.optim.AdamW(model[0].parameters(), lr=0.02)


def first_layer_by_two(model):
    return [torch.optim.SGD([model[0].weight], lr=0.1), torch.optim.AdamW([model[0].bias], lr=0.02)]


def second_layer(model, second):
    """The group that is to be added."""
    if second == "late":
        model[1] = two_layers("left out")[1]
    return {"params": list(model[1].requires_grad_(True).parameters()), "lr": 0.01}


def loss_of(model, rank, step):
    return model(torch.linspace(-1.0, 1.0, 8).view(2, 4) + rank + step % 5).square().mean()


def left(model, grads):
    """What a step leaves: the weights, and the gradients of parameters that are in no group."""
    return [value.detach().clone() for value in (*model.parameters(), *grads)]


STEPS_BEFORE, STEPS_AFTER = 1, 3


def program(model, optimizer, group, second, watches, homes):
    """Adding the second layer fails at each point in turn, with a step after each, until it succeeds."""
    steps = []

    def step(others=()):
        loss_of(model, group.rank, len(steps)).backward()
        optimizer.step()
        steps.append(left(model, [param.grad for param in others]))
        model.zero_grad()

    for _ in range(STEPS_BEFORE):
        step()
    added, params = second_layer(model, second), list(model[1].parameters())
    if homes is not None:
        added["homes"] = homes
    if isinstance(optimizer.inner, Optimizers):
        added["optimizer"] = optimizer.inner.members[-1]
    for point in itertools.count():
        if second == "late":
            model.add_module("2", nn.Identity())  # the model changed since the last step
        before, failing = known(optimizer, params), Failing(point, watches)
        try:
            with failing:
                optimizer.add_param_group(added)
        except Injected:
            assert not changes(before, known(optimizer, params))
            step(params)
        else:
            break
    assert failing.lines == lines_of(ADD_PARAMS)  # it cannot fail in a line that did not run
    for _ in range(STEPS_AFTER):
        step()
    return steps


def plain(second, make, world, num_steps):
    """What each rank is to find, in plain PyTorch, where the layer is added once."""
    model, others = two_layers(second), []
    optimizers, found = make(model), [[] for _ in range(world)]
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for step in range(num_steps):
        if step == STEPS_BEFORE:
            added = second_layer(model, second)
            others = added["params"]
        if step == num_steps - STEPS_AFTER:
            optimizers[-1].add_param_group(added)
            others = []
        grads = []
        for rank in range(world):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            grads.append({param: param.grad for param in model.parameters()})
        for param in model.parameters():
            param.grad = None if param.grad is None else sum(own[param] for own in grads) / world
        for optimizer in optimizers:
            optimizer.step()
        for steps, own in zip(found, grads, strict=True):
            steps.append(left(model, [own[param] for param in others]))
    return found


def check(world, second, stage, watches, make=first_layer, homes=None, homes_of_first=None):
    run, build = partial(program, second=second, watches=watches, homes=homes), partial(two_layers, second)
    found = on_ranks(world, run, build, make, stage=stage, bucket_bytes=64, homes=homes_of_first)
    for steps, expected in zip(found, plain(second, make, world, len(found[0])), strict=True):
        for one, other in zip(steps, expected, strict=True):
            assert len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.full
@pytest.mark.parametrize(("stage", "second"), [(2, "left out"), (3, "frozen")])
def test_a_group_that_fails_to_be_added_leaves_everything_as_it_was_and_can_be_added_again(stage, second):
    check(1, second, stage, lines_with_state)


@pytest.mark.parametrize(
    ("world", "stage", "second"),
    [
        (1, 2, "frozen"), (2, 3, "left out"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, 2, "late"), (1, 3, "late"), (2, 3, "frozen"))),
    ],
)  # fmt: skip
def test_so_it_is_wherever_the_group_comes_from_and_where_it_fails_on_all_ranks(world, stage, second):
    check(world, second, stage, lines_of_adding)


def test_a_group_that_fails_to_be_added_reserves_nothing_on_a_disk(tmp_path):
    disk = f"disk:{tmp_path}"
    homes = {"moments": disk, "gradients": disk}  # a file that is there gets larger, and one is made
    check(1, "left out", 2, lines_of_adding, homes=homes, homes_of_first={"moments": disk})


def test_a_group_that_one_of_several_optimizers_takes_before_adding_it_fails_is_in_none():
    check(1, "left out", 2, lines_of_adding, first_layer_by_two)


class Taking(torch.optim.SGD):
    """Takes a group, and then raises while it `fails`."""

    fails = False

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if self.fails:
            raise Injected


def test_several_optimizers_are_as_they_were_where_one_of_them_takes_a_group_and_then_raises():
    model = two_layers("left out")
    taking, adam = Taking([model[0].weight], lr=0.1), torch.optim.AdamW([model[0].bias])
    several, added = Optimizers([taking, adam]), {**second_layer(model, "left out"), "optimizer": taking}
    before = [list(optimizer.param_groups) for optimizer in (several, taking, adam)]
    taking.fails = True
    with pytest.raises(Injected):
        several.add_param_group(added)
    assert [optimizer.param_groups for optimizer in (several, taking, adam)] == before
    taking.fails = False
    several.add_param_group(added)
    several.check()
    assert several.param_groups[-1] is taking.param_groups[-1] and several.param_groups[-1]["lr"] == 0.01


def test_a_weight_that_was_replaced_before_another_group_was_added_is_found():
    def replaced(model, optimizer, group):
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        optimizer.add_param_group(second_layer(model, "left out"))
        loss_of(model, group.rank, 0).backward()
        with pytest.raises(ZeroError, match=r"0\.weight"):
            optimizer.step()

    on_ranks(2, replaced, partial(two_layers, "left out"), first_layer, stage=2)


@pytest.mark.parametrize("remedy", ["added", "frozen"])
def test_what_was_replaced_and_named_can_be_put_right(remedy):
    def swapped(model, optimizer, group):
        model[1] = filled(nn.Linear(6, 3), real=True)
        for _ in range(2):
            loss_of(model, group.rank, 0).backward()
            with pytest.raises(ZeroError, match=r"Cannot train 1\.weight, 1\.bias"):
                optimizer.step()
            optimizer.zero_grad()
        if remedy == "added":
            optimizer.add_param_group({"params": list(model[1].parameters())})
        else:
            model[1].requires_grad_(False)
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model, group.rank, 0).backward()
        optimizer.step()
        model.append(nn.Linear(3, 3))  # after what is gone was accounted for, this is merely new
        loss_of(model, group.rank, 1).backward()
        optimizer.step()
        return [bool((param != was).any()) for param, was in zip(model.parameters(), before, strict=False)]

    def both_layers(model):
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    trained = on_ranks(2, swapped, partial(two_layers, "both"), both_layers, stage=2)
    assert trained == 2 * [[True, True, remedy == "added", remedy == "added"]]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_that_took_the_place_of_another_is_trained_once_it_was_added(stage):
    def both_layers(model):
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def swapped(model, optimizer, rank):
        for step in range(4):
            if step == 2:
                model[1] = filled(nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3)), real=True)
                model[1][1].bias.requires_grad_(False)
                optimizer.add_param_group({"params": [model[1][0].weight, model[1][1].weight], "lr": 0.01})
                optimizer.add_param_group({"params": [model[1][0].bias], "weight_decay": 0.0})
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    model = two_layers("both")
    expected = swapped(model, both_layers(model), 0)
    (found,) = on_ranks(
        1, lambda model, optimizer, group: swapped(model, optimizer, 0), partial(two_layers, "both"), both_layers, stage=stage
    )
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
