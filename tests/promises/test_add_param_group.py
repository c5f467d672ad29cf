"""A group of parameters is added whole, or everything is as it was: also where adding it fails in the middle."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from tests.promises.loops import on_ranks, same, weights
from tests.zoo.case import filled
from zero.memory.formats import ParamFormat
from zero.memory.shard import LayoutRef
from zero.runtime.grads.grad_attribute import GradAttribute
from zero.runtime.params.hooks import GradHooks
from zero.runtime.params.table import Params
from zero.runtime.params.tracking import ParamTracker
from zero.sharding import state


class Injected(Exception):
    """What a test raises."""


# Where adding can fail: the owner of a function, its name, and at which of its calls.
PLACES = {
    "the optimizer": (torch.optim.AdamW, "add_param_group", 1),
    "the memory": (state.MemoryGuard, "reserve", 1),
    "the layout": (LayoutRef, "replace", 1),
    "the table": (Params, "add", 1),
    "the first format": (ParamFormat, "of", 1),
    "the second format": (ParamFormat, "of", 2),
    "the gradients": (GradAttribute, "register", 1),
    "the tracker": (ParamTracker, "register", 1),
    "the first hook": (GradHooks, "attach", 1),
    "the second hook": (GradHooks, "attach", 2),
    "the owner": (state, "manage", 1),
}


def failing(place):
    """The function at this place does its work and then raises."""
    owner, name, at = PLACES[place]
    original, calls = getattr(owner, name), []

    def fail(*given, **options):
        result = original(*given, **options)
        calls.append(name)
        if len(calls) == at:
            raise Injected(place)
        return result

    return mock.patch.object(owner, name, staticmethod(fail) if name == "of" else fail)


def two_layers():
    return filled(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), real=True)


def first_layer(model):
    return torch.optim.AdamW(model[0].parameters(), lr=0.02)


def one_step(model, optimizer, rank, step):
    inputs = torch.linspace(-1.0, 1.0, 8).view(2, 4) + rank + step
    model(inputs.to(model[0].weight.dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def known(optimizer):
    """What a training knows of its parameters."""
    sharding = optimizer.sharding
    groups = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    handles = sum(len(attached.handles) for attached in sharding.hooks._attached.values())
    proxies, formats = len(sharding.window.grads._proxies), len(sharding.window.grad_ops.formats)
    return groups, list(sharding.params.names), dict(sharding.params.index), handles, proxies, formats


def program(model, optimizer, group, place):
    model[1].requires_grad_(False)
    one_step(model, optimizer, group.rank, 0)
    model[1].requires_grad_(True)
    added = {"params": list(model[1].parameters()), "lr": 0.01}
    if place is not None:
        before, layout = known(optimizer), optimizer.sharding.layout_ref.layout
        with failing(place), pytest.raises(Injected):
            optimizer.add_param_group(dict(added))
        assert known(optimizer) == before
        assert optimizer.sharding.layout_ref.layout is layout
        assert not any(param._backward_hooks for param in model[1].parameters())
    optimizer.add_param_group(added)
    for step in range(1, 4):
        one_step(model, optimizer, group.rank, step)
    return weights(model)


@pytest.mark.parametrize("place", PLACES)
def test_a_group_that_fails_to_be_added_leaves_everything_as_it_was_and_can_be_added_again(place):
    expected, found = (
        on_ranks(1, partial(program, place=each), two_layers, first_layer, stage=2, bucket_bytes=64) for each in (None, place)
    )
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
