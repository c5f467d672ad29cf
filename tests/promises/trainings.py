"""Training cases of the zoo with the sharded optimizer, on ranks in this process or on processes, compared with the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any
from zlib import crc32

import torch

from tests import inside, ranks
from tests.grid import BUCKET_NUMEL
from tests.loopback import run_ranks
from tests.oracle import DynamicScale, StaticScale, Trace, compare, reference, train
from tests.zoo import CASES
from tests.zoo.case import Case
from tests.zoo.whole_tensors import given
from zero import ShardedOptimizer, shard
from zero.config.schema import LossScale

STAGES, WORLDS, BUCKETS = (0, 1, 2), (1, 2, 3), ("tiny", "huge")
NAMES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
TIME_LIMIT_S = 10.0

Wrap = Callable[[Any], Any]


def sgd(model: torch.nn.Module, lr: float = 0.125, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def with_tag(*tags: str) -> list[str]:
    return [name for name, case in CASES.items() if case.tags >= set(tags)]


def scale_of(name: str, dtype: str) -> DynamicScale | StaticScale | None:
    case = CASES[name]
    if dtype != "fp16" or not case.scaled:
        return None
    return DynamicScale(scale=8.0, window=2, hysteresis=1) if "overflow" in case.tags else StaticScale(8.0)


@cache
def expected(name: str, world: int, dtype: str) -> list[Trace]:
    return reference(CASES[name], world, dtype, loss_scale=scale_of(name, dtype))


def options_of(name: str, stage: int, dtype: str, bucket: str, **options: Any) -> dict[str, Any]:
    case, scale = CASES[name], scale_of(name, dtype)
    options = {"stage": stage, "dtype": NAMES[dtype], "reduce": case.reduce, "keep_fp32": tuple(case.keep_fp32), **options}
    options.setdefault("bucket_bytes", BUCKET_NUMEL[bucket] * ITEM_BYTES[dtype])
    if isinstance(scale, DynamicScale):
        options["loss_scale"] = LossScale(initial=scale.scale, window=scale.window, hysteresis=scale.hysteresis)
    elif scale is not None:
        options["loss_scale"] = LossScale(initial=scale.scale, dynamic=False)
    if "custom" in case.tags:
        options["elementwise"] = True
    if "whole" in case.tags:
        options["whole_tensors"] = True
    return options


def masters_of(optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    """The whole fp32 copies of what is stored in less; a collective."""
    found = {}
    for index, (name, tensor) in enumerate(zip(inside.names(optimizer), inside.tensors(optimizer), strict=True)):
        if not inside.has_narrow_weight(optimizer, index):
            continue
        master = inside.whole_updated(optimizer, index)
        if torch.equal(tensor.detach(), master.to(tensor.dtype)):  # otherwise an edit waits to be adopted by the next step
            found[name] = master
    return found


def on_loopback(world: int, build: Callable[[], Any], program: Callable[[inside.Group, Any], Any]) -> list[Any]:
    """`program(group, model)` on each rank. Models are built before the threads start, which share torch's random numbers."""
    models = [build() for _ in range(world)]
    return run_ranks(world, lambda group: program(group, models[group.rank]), TIME_LIMIT_S)


def train_one(case: Case, model: Any, inner: Any, group: Any, options: dict[str, Any]) -> Trace:
    """One rank's training of a case; with the optimizer's state by name, whole."""
    optimizer = shard(model, given(inner), group=group, **options)

    def look() -> dict[str, Any]:
        return {"masters": masters_of(optimizer)} if options["dtype"] else {}

    trace = train(case, model, optimizer, group.rank, group.size, look)
    trace.state = optimizer.state_dict()["state"]
    optimizer.close()
    return trace


def loopback_traces(case: Case, world: int, wrap: Wrap = lambda group: group, **options: Any) -> list[Trace]:
    models = [case.build() for _ in range(world)]
    inner = [case.optimizer(model) for model in models]

    def program(group: inside.Group) -> Trace:
        return train_one(case, models[group.rank], inner[group.rank], wrap(group), options)

    return run_ranks(world, program, TIME_LIMIT_S)


def what_differs(
    names: str | Iterable[str],
    *,
    stages: Sequence[int] = STAGES,
    worlds: Sequence[int] = WORLDS,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    buckets: Sequence[str] = BUCKETS,
    wrap: Wrap = lambda group: group,
    setting: contextlib.AbstractContextManager[Any] | None = None,
    **more: Any,
) -> list[str]:
    """Every training that does not equal the oracle, with its first difference.

    Of each case each stage and each world size is there; with which of the other, dtypes and buckets depends on the case. All
    meet all at night, in the parity grid.
    """
    found = []
    with setting or contextlib.nullcontext():
        for name in [names] if isinstance(names, str) else names:
            case = CASES[name]
            axes = [
                stages, [world for world in worlds if world >= case.needs_world],
                [dtype for dtype in dtypes if dtype in case.dtypes], buckets,
            ]  # fmt: skip
            for stage, world, dtype, bucket in _in_turn(axes, crc32(name.encode())):
                options = options_of(name, stage, dtype, bucket, **more)
                label = f"{name} stage={stage} world={world} {dtype} {bucket}"
                ours = loopback_traces(case, world, wrap, **options)
                found += _difference(label, name, dtype, expected(name, world, dtype), ours)
    return found


def _in_turn(axes: Sequence[Sequence[Any]], begin: int) -> Iterator[tuple[Any, ...]]:
    """As many points as the longest axis is long, in which every value of every axis occurs."""
    for number in range(max(map(len, axes)) if all(axes) else 0):
        yield tuple(axis[(number + begin // 7**place) % len(axis)] for place, axis in enumerate(axes))


def what_differs_over_gloo(
    names: str | Iterable[str], *, world: int = 2, stages: Sequence[int] = STAGES, dtype: str = "fp32", bucket: str = "tiny"
) -> list[str]:
    """The same with a process a rank, all in one call; each stage and each name is there."""
    names = [name for name in ([names] if isinstance(names, str) else names) if dtype in CASES[name].dtypes]
    wanted = list(_in_turn([names, stages], 0))
    assert wanted, f"no case is trained in {dtype}"
    ours = ranks.run(world, _train_over_gloo, wanted, dtype, bucket, timeout=60.0)
    found = []
    for position, (name, stage) in enumerate(wanted):
        label = f"{name} stage={stage} world={world} {dtype} {bucket} over gloo"
        found += _difference(label, name, dtype, expected(name, world, dtype), [traces[position] for traces in ours])
    return found


def _train_over_gloo(rank: int, world: int, wanted: list[tuple[str, int]], dtype: str, bucket: str) -> list[Trace]:
    group = gloo_group()
    traces = []
    for name, stage in wanted:
        case = CASES[name]
        model = case.build()
        traces.append(train_one(case, model, case.optimizer(model), group, options_of(name, stage, dtype, bucket)))
    return traces


def gloo_group(group: Any = None, time_limit_s: float = 20.0) -> Any:
    """In a rank process: the group of all ranks, or the one given."""
    return inside.connected("cpu", group, time_limit_s)


def _difference(label: str, name: str, dtype: str, theirs: list[Trace], ours: list[Trace]) -> list[str]:
    world = len(theirs)
    for trace in ours:  # nobody steps a parameter without elements, so it has no state
        weights = theirs[0].steps[-1].weights
        trace.state = {**{name: state for name, state in theirs[0].state.items() if not weights[name].numel()}, **trace.state}
    try:
        compare(ours, theirs, exact=CASES[name].is_exact(dtype, world), state=True, name=label)
    except AssertionError as error:
        return [str(error)]
    return []
