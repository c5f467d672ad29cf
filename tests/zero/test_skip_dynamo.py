"""An engine loads torch's compiler, 70 MiB and a second or two of every process, only where something is compiled."""

import functools
import inspect
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests import programs
from tests.loopback import solo
from zero import shard
from zero.optim.several import skip_dynamo_import

TRAINED = """
    import inspect, sys
    import torch
    import zero

    def is_loaded():
        return "torch._dynamo" in sys.modules

    given = {given}
    method, model = inspect.unwrap(torch.optim.Optimizer.add_param_group), torch.nn.Linear(3, 3)
    config = {{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": True}}, "zero_optimization": {{"stage": 2}}}}
    engine, *_ = zero.initialize(model=model, config=config | given.pop("config", {{}}), **given)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
        engine.step()
    print(is_loaded(), vars(method))
    """
THEN_COMPILED = """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    print(is_loaded(), vars(method).keys() == {"__dynamo_disable"}, method not in vars(method).values())
    """
WITHOUT = {
    "its own fused AdamW": '{"config": {"optimizer": {"type": "AdamW"}}}',
    "its own Lion": '{"config": {"optimizer": {"type": "Lion"}}}',
    "made by a function": '{"optimizer": lambda params: torch.optim.AdamW(params, fused=True)}',
}


def said(program):
    done = programs.with_torch(program, {**os.environ, "ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("given", [
    WITHOUT["its own fused AdamW"], *(pytest.param(given, marks=pytest.mark.full) for given in [*WITHOUT.values()][1:]),
], ids=WITHOUT.keys())  # fmt: skip
def test_an_engine_trains_without_loading_the_compiler_and_leaves_torch_as_it_was(given):
    assert said(TRAINED.format(given=given)) == ["False {}"]


@pytest.mark.full
def test_whoever_makes_a_plain_optimizer_later_has_torch_tell_its_compiler_as_ever():
    assert said(TRAINED.format(given=WITHOUT["its own Lion"]) + THEN_COMPILED) == ["False {}", "True True True"]


def test_where_the_compiler_is_loaded_already_it_stays_told():
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    told = dict(vars(method))
    with skip_dynamo_import():
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
        assert vars(method) == told != {}
    assert vars(method) == told


@pytest.fixture
def untold(monkeypatch):
    """The method as it is in a process that has not loaded the compiler."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    monkeypatch.delattr(method, "__dynamo_disable")
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    return method


def test_two_threads_that_make_optimizers_at_once_leave_nothing_and_raise_nothing(untold, monkeypatch):
    inside = threading.Barrier(2)

    def make(_):
        with skip_dynamo_import():
            inside.wait(10.0)

    monkeypatch.setattr("zero.optim.several.hasattr", lambda *_: False, raising=False)  # neither sees the other's mark
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, range(2)))
    assert not vars(untold)


def test_a_method_that_takes_no_marks_is_left_alone(untold, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", [].append)
    with skip_dynamo_import():
        pass


def with_more(step):
    @functools.wraps(step)
    def given(self, closure=None):
        return step(self, closure, 1)

    return given


class GivenMore(torch.optim.AdamW):
    @with_more
    def step(self, closure, more):
        return super().step(closure)


class Refusing(torch.optim.AdamW):
    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure=None):
        raise NotImplementedError("not in one kernel")


def test_a_step_of_somebodys_own_is_tried_as_it_will_be_called():
    model = nn.Linear(3, 3)
    optimizer = shard(model, GivenMore(model.parameters()), stage=2, kernels="fused", elementwise=True, group=solo())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.close()
    with pytest.raises(ValueError, match="fused kernel of Refusing does not run on cpu: not in one kernel"):
        shard(model, Refusing(model.parameters()), stage=2, kernels="fused", elementwise=True, group=solo())
