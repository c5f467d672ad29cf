"""One point of the parity grid on one rank, and many of them on many ranks, judged by tests.oracle.

    run(points)                  the failures, by point; real processes over gloo, or over the simulated device's own group
    run(points, loopback=True)   the same with threads for ranks, for points on the host
    python -m tests.parity       the whole product, which takes an hour or more

A point is trained through `zero.shard` alone or through an engine on top of it, and everything that comes out is compared:
weights, masters, the loss scale, what the script saw, buffers and the optimizer's state.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from accelerators.backends.cuda import CudaAccelerator
from tests import faults, grid, inside, nccl_like, oracle, ranks
from tests.devices import CudaThroughHost
from tests.entries import Driven, config_of
from tests.grid import Point
from tests.loopback import loopback, run_ranks
from tests.oracle import LOW, Trace, train
from tests.random_training import SEEDED, random_case
from tests.zoo import CASES, Case
from tests.zoo.whole_tensors import given
from zero import Engine, ShardedOptimizer

# If a rank fails, the others wait for it for this long. A point takes a fraction of a second.
TIME_LIMIT_S = 20.0
LOOPBACK_TIME_LIMIT_S = 10.0
CALL_TIME_LIMIT_S = 60.0
CHUNK = 20  # the points that one call of the pool trains
FEW_PARAMETERS = 100
MOST_FAILURES = 25
PROBLEM_CHARS = 1500
FAILURES_CHARS = 12000  # a few failures are shown at more length, as the text of a killed rank begins with the cause
faults.poison_freed_weights()  # holds in every process that trains points
WORKERS = max(1, min(4, os.cpu_count() or 1))  # the processes that train points over loopback, each on a core

WAITING = "cpu:waiting"  # a device of no axis: the host, with whatever ranks send added up as late as possible

def in_regions(optimizer: ShardedOptimizer) -> ShardedOptimizer:
    """The optimizer, at stage 3 of a model whose parts gather their weights at once; the outermost that are no lists."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    _, *parts = optimizer.model.modules()
    zero.as_regions(optimizer.model, blocks=[part for part in parts if not isinstance(part, lists)])
    return optimizer


# The things that a script is given, made from the sharded optimizer.
ENTRIES: dict[str, Callable[[ShardedOptimizer], Any]] = {
    "plain": lambda optimizer: optimizer,
    "engine": lambda optimizer: Driven(Engine(optimizer)),
    "regions": in_regions,  # used by random trainings
}


# One rank ---------------------------------------------------------------------------------------------------------------


def case_of(point: Point) -> Case:
    seed = point.case.removeprefix(SEEDED)
    return CASES[point.case] if seed == point.case else random_case(int(seed))


def train_point(point: Point, rank: int, group: Any = None) -> Trace:
    case = case_of(point)
    with _device(point.device) as device:
        # Built on the device and not moved there, as moving to a device like this one makes new parameters, without ties and
        # hooks.
        with torch.device(device), _building:
            model = case.build()
        inner = given(case.optimizer(model))
        optimizer = ShardedOptimizer(model, inner, config_of(case, point, TIME_LIMIT_S), group)
        try:
            face = ENTRIES[point.entry](optimizer)
            trace = train(case, model, face, rank, point.world, lambda: _look(point, optimizer))
            trace.state = _state_of(optimizer)
        finally:
            optimizer.close()
    return trace


def _look(point: Point, optimizer: ShardedOptimizer) -> dict[str, Any]:
    weights = dict(zip(inside.names(optimizer), inside.tensors(optimizer), strict=True))
    masters = {name: _adopted(master, weights[name].detach().cpu()) for name, master in _masters_of(optimizer).items()}
    scale = optimizer.loss_scale if point.loss_scale() is not None else None
    return {"masters": masters, "loss_scale": None if scale is None else scale.value}


def _masters_of(optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    """What is stored in less than fp32, whole; in one exchange, as some models have hundreds of parameters."""
    names, params, own = inside.names(optimizer), inside.tensors(optimizer), []
    narrow = [index for index, param in enumerate(params) if param.dtype in LOW]
    laid_out = [index for index in narrow if inside.layout(optimizer).slots[index] is not None]
    for index in laid_out:
        own += [(index, span, line.cpu().numpy()) for span, line in inside.lines_of_masters(optimizer, index)]
    lines = {index: torch.zeros(params[index].numel()) for index in laid_out}
    for message in inside.tell_all(optimizer, pickle.dumps(own)) if laid_out else ():
        for index, span, values in pickle.loads(message):  # pickle does not read the zeros behind it
            lines[index][span.start : span.stop] = torch.from_numpy(values)
    return {names[index]: inside.from_line(optimizer, index, line).contiguous() for index, line in lines.items()}



def _state_of(optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by name: all of it, or a tenth where there are hundreds, each with its collectives."""
    names, params = inside.names(optimizer), inside.tensors(optimizer)
    if len(names) <= FEW_PARAMETERS:
        state: dict[str, dict[str, Any]] = optimizer.state_dict()["state"]
    else:
        states = {name: optimizer.whole_state(params[i]) for i, name in enumerate(names) if i % 10 == 0}
        state = {name: one for name, one in states.items() if one}
    copy: dict[str, dict[str, Any]] = oracle.copied(state)
    return copy


def _adopted(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With the user's edits of the weight in it. When a master learns of them is nobody's business, as long as it does."""
    return torch.where(weight == master.to(weight.dtype), master, weight.float())


_building = threading.Lock()  # ranks that are threads share torch's generators and registries


@contextlib.contextmanager
def _device(name: str) -> Iterator[str]:
    if name in ("cpu", grid.APART):
        yield "cpu"
        return
    if name == WAITING:
        with faults.all_sums_deferred():
            yield "cpu"
        return
    if name in (grid.CUDA, grid.CUDA_THROUGH_HOST):
        with pytest.MonkeyPatch.context() as patched:
            if name == grid.CUDA_THROUGH_HOST:
                patched.setattr(CudaAccelerator, "communication_backend", CudaThroughHost.communication_backend)
            yield "cuda:0"
        return
    import accelerators_sim as simulated

    if name.startswith(grid.NCCL):
        with nccl_like.installed(num_queues=int(name.removeprefix(f"{grid.NCCL}-") or 8)):
            yield "sim:0"
        return
    simulated.bring_up()
    simulated.configure(order="random:1" if name == "sim:random" else "late")
    lacking = name.removeprefix("sim-").split(",") if name.startswith("sim-") else []
    with simulated.without(*lacking):
        yield "sim:0"
        torch.accelerator.synchronize() if "synchronize" not in lacking else None


# Many points on many ranks ----------------------------------------------------------------------------------------------

Carried = list[Trace] | str  # the traces of all ranks, or what went wrong
Tell = Callable[[Point, "str | None"], None]


def run(
    points: Iterable[Point], *, loopback: bool = False, most_failures: int = MOST_FAILURES, tell: Tell | None = None
) -> Failures:
    """Trains all points and says what was wrong with those that failed. `tell` hears of every point as it is done."""
    failures = Failures()
    with contextlib.closing(carry(points, loopback=loopback)) as carried:
        for point, outcome in carried:
            problem = judge(point, outcome)
            if tell is not None:
                tell(point, problem)
            if problem is not None:
                failures[point] = problem
            if len(failures) >= most_failures:
                break
    return failures


class Failures(dict[Point, str]):
    """What was wrong, by point."""

    def __repr__(self) -> str:
        lines = [f"{len(self)} points failed."]
        chars = max(PROBLEM_CHARS, FAILURES_CHARS // max(1, len(self)))
        lines += [f"--- {point}\n{problem[-chars:]}" for point, problem in self.items()]
        return "\n".join(lines)


def carry(points: Iterable[Point], *, loopback: bool = False, is_long: bool = False) -> Iterator[tuple[Point, Carried]]:
    """Returns what each point gave, in an order that suits the carrier and the oracle. `is_long`: over loopback, and by the
    long path of gradients alone."""
    loopback |= is_long
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((_pool_of(point), 0 if loopback else point.world), []).append(point)
    chunks = []
    for _, members in sorted(groups.items()):
        members.sort(key=lambda point: (point.case, point.world, point.dtype, point.entry, str(point)))
        chunks += [members[start : start + CHUNK] for start in range(0, len(members), CHUNK)]
    carrier = partial(_over_loopback, is_long) if loopback else _over_processes
    with ThreadPoolExecutor(1) as pool:
        # Ranks train the next chunk while this one is judged.
        ahead: deque[tuple[list[Point], Future[list[Carried]]]] = deque()
        try:
            for chunk in chunks:
                ahead.append((chunk, pool.submit(carrier, chunk)))
                if len(ahead) > 1:
                    done, future = ahead.popleft()
                    yield from zip(done, future.result(), strict=True)
            for done, future in ahead:
                yield from zip(done, future.result(), strict=True)
        finally:
            for _, future in ahead:
                future.cancel()


def _pool_of(point: Point) -> str:
    """A device has processes of its own: torch counts devices at the first backward, so one that comes up later has none."""
    name = point.device.partition(":")[0].partition("-")[0]
    return "" if name == "cpu" else name


def _over_processes(chunk: list[Point]) -> list[Carried]:
    found: list[Carried] = []
    pool = _pool_of(chunk[0])
    while len(found) < len(chunk):
        rest = chunk[len(found) :]
        limit = CALL_TIME_LIMIT_S + sum(max(5.0, grid.cost(point) / 10) for point in rest)
        outcomes = ranks.outcomes(rest[0].world, train_points, rest, timeout=limit, apart=pool)
        if not all(outcome.ok for outcome in outcomes):
            raised = [one for outcome in outcomes if outcome.ok for one in outcome.value if isinstance(one, str)]
            # A rank that raised has returned, and left the others waiting.
            found.append("\n".join([ranks.describe(outcomes), *raised]))
            continue
        for each in zip(*(outcome.value for outcome in outcomes), strict=False):
            wrong = [f"rank {rank}: {one}" for rank, one in enumerate(each) if isinstance(one, str)]
            found.append("\n".join(wrong) if wrong else list(each))
        if pool and isinstance(found[-1], str):
            ranks.close(pool)  # otherwise what a failed point left undone on its device would meet the next one
    return found


def train_points(rank: int, world: int, points: Sequence[Point]) -> list[Trace | str]:
    """On every rank of the pool. It ends after the first point that failed, as the others may wait for this rank there."""
    found: list[Trace | str] = []
    for point in points:
        try:
            found.append(train_point(point, rank))
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to this point
            found.append(traceback.format_exc())
            break
    return found


def _over_loopback(is_long: bool, chunk: list[Point]) -> list[Carried]:
    limit = CALL_TIME_LIMIT_S + LOOPBACK_TIME_LIMIT_S * len(chunk)
    halves = ranks.run(WORKERS, train_over_loopback, chunk, is_long, timeout=limit, group=False)
    return [halves[index % WORKERS][index // WORKERS] for index in range(len(chunk))]


def train_over_loopback(worker: int, workers: int, points: Sequence[Point], is_long: bool) -> list[Carried]:
    """On every worker: its part of the points, each with threads for ranks."""
    found: list[Carried] = []
    for point in points[worker::workers]:
        try:
            with faults.only_the_long_path() if is_long else contextlib.nullcontext():
                found.append(run_ranks(point.world, partial(_train_on, point), LOOPBACK_TIME_LIMIT_S))
        except Exception:  # noqa: BLE001 - whatever it is, it belongs to this point
            found.append(traceback.format_exc())
        torch.autograd.set_detect_anomaly(False)  # threads that set it and put it back may leave it on
    return found


def _train_on(point: Point, group: inside.Group) -> Trace:
    return train_point(point, group.rank, group if point.shard_ranks is None else hybrid(group, int(point.shard_ranks)))


def part_of(group: inside.Group, parts: Sequence[Sequence[int]]) -> inside.Group:
    """Makes groups of parts of the ranks of a group of threads; that of this rank."""
    numbers = next(each for each in parts if group.rank in each)
    made: Any = loopback(len(numbers), LOOPBACK_TIME_LIMIT_S)
    found: Any = group.all_gather_bytes(made)[numbers[0]]
    return found[numbers.index(group.rank)]  # type: ignore[no-any-return]


def hybrid(group: inside.Group, shard_ranks: int) -> inside.Group:
    """A group of threads with an inner and an outer one."""
    return inside.replicated_by(group, shard_ranks, partial(part_of, group))


def by_host(group: inside.Group, num_local: int, shares_memory: bool = True) -> inside.Group:
    """A group of threads as if there were hosts with so many of them each, whose ranks share memory."""

    def part(parts: Sequence[Sequence[int]]) -> inside.Group:
        return inside.through_shared_memory(part_of(group, parts), shares_memory)

    return inside.by_hosts(group, num_local, part)


# Judgement --------------------------------------------------------------------------------------------------------------


def judge(point: Point, carried: Carried) -> str | None:
    """What is wrong with what a point gave; None for nothing."""
    if isinstance(carried, str):
        return carried
    try:
        case = case_of(point)
        # A GPU rounds a step differently from its host.
        exact = case.is_exact(point.dtype, point.world) and (_pool_of(point) != "cuda" or point.offload == "none")
        oracle.compare(carried, expected(point), exact=exact, state=True)
    except AssertionError as error:
        return str(error)
    return None


_expected: dict[str, list[Trace]] = {}


def expected(point: Point) -> list[Trace]:
    """What the oracle says; the last few answers are remembered, since many points that follow each other share one."""
    device = "cuda" if _pool_of(point) == "cuda" else "cpu"  # the simulated device computes as the host does
    key = f"{point.case} {point.world} {point.dtype} {point.loss_scale()} {device}"
    if key not in _expected:
        traces = oracle.reference(case_of(point), point.world, point.dtype, loss_scale=point.loss_scale(), device=device)
        for trace in traces:
            for step in trace.steps:
                step.masters = {name: _adopted(master, step.weights[name]) for name, master in step.masters.items()}
            if trace.state is not None:
                # Torch keeps state of a parameter without elements. No share has a piece of it, so ours has nothing to keep.
                weights = trace.steps[-1].weights
                names = list(weights) if len(weights) <= FEW_PARAMETERS else list(weights)[::10]
                trace.state = {name: trace.state[name] for name in names if name in trace.state and weights[name].numel()}
        while len(_expected) > 8:
            del _expected[next(iter(_expected))]
        _expected[key] = traces
    return _expected[key]


def judged(carried: Mapping[Point, Carried]) -> Failures:
    return Failures({point: problem for point, one in carried.items() if (problem := judge(point, one)) is not None})


def differences(threads: Mapping[Point, Carried], processes: Mapping[Point, Carried]) -> Failures:
    """Where threads for ranks do not give the bits of processes."""
    failures = Failures()
    for point, carried in threads.items():
        if isinstance(carried, str) or isinstance(processes[point], str):
            failures[point] = f"{carried}\n{processes[point]}"
            continue
        try:
            oracle.compare(carried, processes[point], exact=has_one_order(point), state=True)
        except AssertionError as error:
            failures[point] = str(error)
    return failures


def has_one_order(point: Point) -> bool:
    """Whether gloo adds in our order. Its all-reduce, which stage 0 uses, goes round a ring: from three ranks on in another."""
    return point.stage > 0 or point.world < 3 or case_of(point).is_exact(point.dtype, point.world)


@cache
def of_the_day() -> Sequence[Point]:
    return tuple(grid.covering())


# The whole product ------------------------------------------------------------------------------------------------------


def everything() -> list[Point]:
    """The product of all axes on the host and, of it, what says something new on the simulated device: two ranks and one,
    as more differ in nothing that a device has to do with, and what is missing with small buckets in the plain loop. Each
    device has one kind of offload beside none. And all points at stage 3, which is no value of an axis."""
    points = list(grid.full(("cpu",)))
    points += [point for point in grid.full(("sim",)) if point.world <= 2 and point.offload != "half"]
    points += [point for point in grid.full(("sim:random",)) if point.world <= 2 and point.offload != "all"]
    lacking = [p for p in grid.full([f"sim-{lack}" for lack in grid.LACKS]) if p.world == 2 and p.offload != "half"]
    points += [p for p in lacking if p.bucket == "tiny" and p.entry == "plain"]
    points += grid.spot_checks() + grid.on_disk(full=True)
    points += grid.of_fastest_kernels(full=True)
    return points + grid.sharded_weights(full=True) + grid.simulated_sharded_weights(every=1)


class Record:
    """Points that are done, a line each, so that a run that was cut off goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: dict[str, str | None] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line may be half written
                    name, problem = json.loads(line)
                    self.problems[name] = problem

    def add(self, point: Point, problem: str | None) -> None:
        self.problems[str(point)] = problem
        with self.path.open("a") as file:
            file.write(json.dumps([str(point), problem]) + "\n")


def tree_digest() -> str:
    """Of everything that can change a result: a record of another tree says nothing about this one."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256(torch.__version__.encode())
    folders = ("accelerators", "simulated", "zero", "tests")
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description="The whole parity grid, point by point.")
    parser.add_argument("--part", default="1/1", help="run the K-th of N parts, as in 2/3, beside the others")
    parser.add_argument("--device", help="only points of this device, such as cpu or sim")
    parser.add_argument("--case", default="*", help="only cases whose name matches")
    parser.add_argument("--record", type=Path, help="where finished points are written; the same file again goes on from there")
    given = parser.parse_args(arguments)
    part, parts = map(int, given.part.split("/"))
    points = [p for p in everything() if fnmatch.fnmatch(p.case, given.case) and given.device in (None, p.device)]
    mine = points[part - 1 :: parts]
    record = Record(given.record or Path(tempfile.gettempdir()) / f"parity-{tree_digest()}-{part}-of-{parts}.jsonl")
    todo = [point for point in mine if str(point) not in record.problems]
    print(f"{len(mine)} points expected, {len(mine) - len(todo)} of them done before: {record.path}", flush=True)
    started = time.monotonic()

    def tell(point: Point, problem: str | None) -> None:
        record.add(point, problem)
        if problem is not None:
            print(f"--- {point}\n{problem[-PROBLEM_CHARS:]}", flush=True)
        count = sum(str(one) in record.problems for one in mine) if len(record.problems) % 500 == 0 else 0
        if count:
            print(f"{count} of {len(mine)} points, {time.monotonic() - started:.0f} s", flush=True)

    run(todo, most_failures=len(mine) + 1, tell=tell)
    failed = [point for point in mine if record.problems.get(str(point)) is not None]
    done = sum(str(point) in record.problems for point in mine)
    devices = Counter(point.device for point in mine)
    print(f"{len(mine)} points expected, {done} run, {len(failed)} failed, {time.monotonic() - started:.0f} s")
    print("  ".join(f"{device} {count}" for device, count in devices.items()))
    for point in failed:
        print(f"failed: {point}")
    return 1 if failed or done != len(mine) else 0


if __name__ == "__main__":
    from tests.parity import main as imported_main  # ranks import what they run, and this file by its name

    sys.exit(imported_main())
