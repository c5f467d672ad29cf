"""A loop of a test's own on ranks in this process, and cases of its own against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.loopback import run_ranks, solo
from tests.oracle import StaticScale, Trace, compare, reference, train
from tests.zoo.case import Case, backward, draw, real_loss, real_mlp, sgd
from zero import ShardedOptimizer, shard
from zero.config.schema import LossScale

TIME_LIMIT_S = 20.0
TINY = 28  # bytes: fewer than most parameters have, so that these span buckets

Build = Callable[[], nn.Module]
Make = Callable[[nn.Module], torch.optim.Optimizer]
plain_sgd = sgd()
OWN_BITS: dict[str, Any] = {"stage": 2, "kernels": "torch"}  # the bits are those of the optimizer itself, as tests compare them
Program = Callable[[nn.Module, ShardedOptimizer, Any], Any]


def on_ranks(world: int, program: Program, build: Build = real_mlp, make: Make = plain_sgd, **options: Any) -> list[Any]:
    """What `program(model, optimizer, group)` gives on each rank."""
    models = [build() for _ in range(world)]  # before the threads start: they share torch's random numbers
    inner = [make(model) for model in models]

    def one(group: Any) -> Any:
        optimizer = shard(models[group.rank], inner[group.rank], group=group, **{**OWN_BITS, **options})
        try:
            return program(models[group.rank], optimizer, group)
        finally:
            optimizer.close()

    return run_ranks(world, one, TIME_LIMIT_S)


def alone(build: Build = real_mlp, make: Make = plain_sgd, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    """A model and its sharded optimizer on a single rank."""
    model = build()
    return model, shard(model, make(model), group=solo(), **{**OWN_BITS, **options})


def traces_of(case: Case, world: int, **options: Any) -> list[Trace]:
    """Trains a case on loopback ranks; masters and the optimizer's state as at the end."""

    def program(model: nn.Module, optimizer: ShardedOptimizer, group: Any) -> Trace:
        trace = train(case, model, optimizer, group.rank, group.size)
        saved = optimizer.state_dict()
        trace.steps[-1].masters, trace.state = saved["masters"], saved["state"]
        return trace

    given = {"reduce": case.reduce, "keep_fp32": tuple(case.keep_fp32), **options}
    return on_ranks(world, program, case.build, case.optimizer, **given)


def differs(
    case: Case, world: int, *, dtype: str = "fp32", scale: float | None = None, exact: bool = False, **options: Any
) -> str | None:
    """The first difference between a sharded training and the oracle's; None where there is none."""
    given = {"fp32": {}, "bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}}[dtype]
    if dtype == "fp16":
        given["loss_scale"] = LossScale(dynamic=False, initial=scale or 1.0)
    expected = reference(case, world, dtype, loss_scale=None if scale is None else StaticScale(scale))
    found = traces_of(case, world, **given, **options)
    try:
        compare(found, expected, exact=exact, state=True, name=f"{case.name} world={world} {dtype} {options}")
    except AssertionError as error:
        return str(error)
    return None


def one_step(model: nn.Module, optimizer: Any, rank: int = 0, step: int = 0, *, clear: bool = True) -> Tensor:
    """One window of an ordinary training, as `real_step` of a case."""
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
    backward(optimizer, loss)
    optimizer.step()
    if clear:
        optimizer.zero_grad()
    return loss.detach()


def case_of(script: Any, build: Build = real_mlp, optimizer: Make = plain_sgd, steps: int = 3, **fields: Any) -> Case:
    return Case(script.__name__, build, script, optimizer, steps, **fields)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)
