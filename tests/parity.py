"""One point of the parity grid on one rank, and many of them on many ranks, judged by tests.oracle.

    run(points)                  the failures, by point; real processes over gloo, or over the simulated device's own group
    run(points, loopback=True)   the same with threads for ranks, for points on the host

A point is trained through `zero.shard` alone or through an engine on top of it, and everything that comes out is compared:
weights, masters, the loss scale, what the script saw, buffers and the optimizer's state.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests import oracle, ranks
from tests.entries import Driven, config_of, masters_of
from tests.grid import Point
from tests.oracle import Trace, train
from tests.zoo import CASES
from zero.comm.loopback import run_ranks
from zero.engine import Engine
from zero.optimizer import ShardedOptimizer

# A rank that failed leaves the others waiting for it, for this long. A point takes a fraction of a second.
TIME_LIMIT_S = 20.0
# A loopback group's ranks run on one core, so a rank that does not come is known to be gone earlier.
LOOPBACK_TIME_LIMIT_S = 10.0
# Points that one call of the pool trains: enough that starting it does not count, few enough that what they gave fits in memory.
CHUNK = 40
MOST_FAILURES = 25

# What a script is given, made from the sharded optimizer.
ENTRIES: dict[str, Callable[[ShardedOptimizer], Any]] = {
    "plain": lambda optimizer: optimizer,
    "engine": lambda optimizer: Driven(Engine(optimizer)),
}


# One rank ---------------------------------------------------------------------------------------------------------------


def train_point(point: Point, rank: int, group: Any = None) -> Trace:
    case = CASES[point.case]
    with _device(point.device) as device:
        # Built there and not moved there: moving to a device like this one makes new parameters, without ties and hooks.
        with torch.device(device), _building:
            model = case.build()
        inner = case.optimizer(model)
        optimizer = ShardedOptimizer(model, inner, config_of(case, point, TIME_LIMIT_S), group)
        try:
            face = ENTRIES[point.entry](optimizer)
            trace = train(case, model, face, rank, point.world, lambda: _look(point, optimizer))
            trace.state = oracle.copied(optimizer.state_dict()["state"])
        finally:
            optimizer.close()
    return trace


def _look(point: Point, optimizer: ShardedOptimizer) -> dict[str, Any]:
    weights = dict(zip(optimizer.parts.params.names, optimizer.parts.params.tensors, strict=True))
    masters = {name: _adopted(master, weights[name].detach().cpu()) for name, master in masters_of(optimizer).items()}
    scale = optimizer.loss_scale if point.loss_scale() is not None else None
    return {"masters": masters, "loss_scale": None if scale is None else scale.value}


def _adopted(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With the user's edits of the weight in it. When a master learns of them is nobody's business, as long as it does."""
    return torch.where(weight == master.to(weight.dtype), master, weight.float())


_building = threading.Lock()  # ranks that are threads share torch's generators and registries


@contextlib.contextmanager
def _device(name: str) -> Iterator[str]:
    if name == "cpu":
        yield name
        return
    import accelerators
    from accelerators import simulated

    simulated.bring_up()
    simulated.configure(order="random:1" if name == "sim:random" else "late")
    lacking = [name.removeprefix("sim-")] if name.startswith("sim-") else []
    with simulated.without(*lacking):
        for answer in ("_dtype_answers", "can_pin"):  # an accelerator asks its device once, and ours changes
            vars(accelerators.get("sim")).pop(answer, None)
        yield "sim:0"
        torch.accelerator.synchronize() if "synchronize" not in lacking else None


# Many points on many ranks ----------------------------------------------------------------------------------------------

Outcome = "Trace | str"  # a trace, or the traceback of what was raised


def train_points(rank: int, world: int, points: Sequence[Point]) -> list[Any]:
    """Runs on every rank of the pool. It ends after the first point that failed, whose group is of no more use."""
    found: list[Any] = []
    for point in points:
        try:
            found.append(train_point(point, rank))
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to this point
            found.append(traceback.format_exc())
            break
    return found


def run(
    points: Iterable[Point],
    *,
    loopback: bool = False,
    most_failures: int = MOST_FAILURES,
    tell: Callable[[Point, str | None], None] = lambda point, problem: None,
) -> dict[Point, str]:
    """Trains all points and returns what was wrong with those that failed. `tell` hears of every point as it is done."""
    failures: dict[Point, str] = {}
    carry = _over_loopback if loopback else _over_processes
    groups: dict[tuple[bool, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.device != "cpu", point.world), []).append(point)
    with ThreadPoolExecutor(1) as carrier:
        # Ranks train the next chunk while this one is judged here.
        waiting: list[tuple[Sequence[Point], Any]] = []
        for (simulated, _), members in sorted(groups.items()):
            members.sort(key=lambda point: (point.case, point.dtype, point.entry))
            for start in range(0, len(members), CHUNK):
                chunk = members[start : start + CHUNK]
                waiting.append((chunk, carrier.submit(carry, chunk, simulated)))
                while len(waiting) > 1:
                    _judge_all(*waiting.pop(0), failures, tell)
                if len(failures) >= most_failures:
                    break
            if len(failures) >= most_failures:
                break
        for one in waiting:
            _judge_all(*one, failures, tell)
    return failures


def _judge_all(chunk: Sequence[Point], future: Any, failures: dict[Point, str], tell: Callable[[Point, str | None], None]) -> None:
    for point, outcome in zip(chunk, future.result(), strict=True):
        problem = judge(point, outcome)
        tell(point, problem)
        if problem is not None:
            failures[point] = problem


def _over_loopback(chunk: Sequence[Point], _: bool) -> list[Any]:
    found: list[Any] = []
    for point in chunk:
        try:
            found.append(run_ranks(point.world, lambda group: train_point(point, group.rank, group), LOOPBACK_TIME_LIMIT_S))
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to this point
            found.append(traceback.format_exc())
        torch.autograd.set_detect_anomaly(False)  # threads that set it and put it back may leave it on
    return found


def _over_processes(chunk: Sequence[Point], simulated: bool) -> list[Any]:
    """What each point gave: the traces of all ranks, or what went wrong."""
    found: list[Any] = []
    while len(found) < len(chunk):
        rest = list(chunk[len(found) :])
        outcomes = ranks.outcomes(rest[0].world, train_points, rest, timeout=30.0 + 5.0 * len(rest), apart="sim" * simulated)
        if not all(outcome.ok for outcome in outcomes):
            found.append(ranks.describe(outcomes))
            continue
        of_ranks = [outcome.value for outcome in outcomes]
        for each in zip(*of_ranks, strict=False):
            wrong = [f"rank {rank}: {one}" for rank, one in enumerate(each) if isinstance(one, str)]
            found.append("\n".join(wrong) if wrong else list(each))
        if simulated and isinstance(found[-1], str):
            ranks.close("sim")  # what it left undone on the device would be the next point's
    return found


def judge(point: Point, outcome: Any) -> str | None:
    """What is wrong with what a point gave; None for nothing."""
    if isinstance(outcome, str):
        return outcome
    try:
        case = CASES[point.case]
        oracle.compare(outcome, expected(point), exact=case.is_exact(point.dtype, point.world), state=True, name=str(point))
    except AssertionError as error:
        return str(error)
    return None


_expected: dict[str, list[Trace]] = {}


def expected(point: Point) -> list[Trace]:
    """What the oracle says; the last few answers are remembered, since many points that follow each other share one."""
    key = f"{point.case} {point.world} {point.dtype} {point.loss_scale()}"
    if key not in _expected:
        case = CASES[point.case]
        traces = oracle.reference(case, point.world, point.dtype, loss_scale=point.loss_scale())
        for trace in traces:
            for step in trace.steps:
                step.masters = {name: _adopted(master, step.weights[name]) for name, master in step.masters.items()}
            if trace.state is not None:
                # Torch keeps state of a parameter without elements; no share of it has a piece, so ours has nothing to keep.
                weights = trace.steps[-1].weights
                trace.state = {name: state for name, state in trace.state.items() if weights[name].numel()}
        while len(_expected) > 8:
            del _expected[next(iter(_expected))]
        _expected[key] = traces
    return _expected[key]
