"""An engine loads torch's compiler, 70 MiB and a second or two of every process, only where something is compiled."""

import inspect
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests import ranks
from zero.without_compiler import without_compiler

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
    environment = {**os.environ, **ranks.DEFAULT_ENV, "ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("given", WITHOUT.values(), ids=WITHOUT.keys())
def test_an_engine_trains_without_loading_the_compiler_and_leaves_torch_as_it_was(given):
    assert said(TRAINED.format(given=given)) == ["False {}"]


def test_whoever_makes_a_plain_optimizer_later_has_torch_tell_its_compiler_as_ever():
    assert said(TRAINED.format(given=WITHOUT["its own Lion"]) + THEN_COMPILED) == ["False {}", "True True True"]


def test_where_the_compiler_is_loaded_already_it_stays_told():
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    told = dict(vars(method))
    with without_compiler():
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
        assert vars(method) == told != {}
    assert vars(method) == told
