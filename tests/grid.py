"""The points of the parity grid, and a small set of them in which every pair of settings meets.

A point is one training compared with the oracle: a case at a stage, a world size, a storage dtype, a bucket size, through one
entry, on one device. `full()` is the product of all axes without what cannot be. `covering()` is what runs in the day: of the
points that are `by_day` a part in which every pair of values of any two axes occurs, and every triple of a stage, a world size
and a value of any other axis but the case.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from accelerators_sim.capabilities import CAPABILITIES
from tests.oracle import DynamicScale, StaticScale
from tests.zoo import CASES

# What a simulated device can lack, one at a time, as far as anything below `zero` asks for it: who has no streams or events
# waits otherwise, who does not count its memory flattens without asking, norms are summed in fp64 where there is any, and
# what cannot travel in bf16 travels as bytes.
LACKS = ("streams", "events", "fp64", "memory_figures", "bf16_collectives")
# What it can lack beside that is used nowhere in training (bf16 and fp16 are refused where they are asked for). These devices
# are in no array; a few points each see to it that this stays so.
UNNOTICED = ("pin", "bf16", "fp16", "rng", "synchronize", "record_stream", "avg", "reduce_scatter", "coalesced", "int64_gather")
# The host; the simulated device, whose copies come as late as the rules allow or in a random legal order; and the device
# without some of its capabilities.
DEVICES = ("cpu", "sim", "sim:random", *(f"sim-{lack}" for lack in LACKS))

AXES: dict[str, tuple] = {
    "stage": (0, 1, 2),
    "world": (1, 2, 3, 4),
    "dtype": ("fp32", "bf16", "fp16"),
    "bucket": ("tiny", "huge"),
    "entry": ("plain", "engine"),
    "device": DEVICES,
    "case": tuple(CASES),
    "offload": ("none", "half", "all"),
}
# In the day every case is trained on two and three ranks, on the host and on the simulated device, with half of what is sharded
# offloaded or nothing. Those with one of these tags are trained on one and four ranks as well (they depend on how many there
# are), or on the devices that lack something and with all of it offloaded (they launch or wait for something of their own).
COMMON = {"world": (2, 3), "device": ("cpu", "sim"), "offload": ("none", "half")}
_OWN_WAITS = {"order", "many", "hooks", "dtypes", "buckets", "norms", "overflow", "window"}
FURTHER = {
    "world": {
        *("divergent", "idle", "empty", "tiny", "overflow", "sum", "divisor", "weights"),
        *("scalar", "many", "large", "layout", "norms"),
    },
    "device": _OWN_WAITS,
    "offload": _OWN_WAITS,
}
SEED = 4  # of 60 seeds the one whose points cost least
APART = "cpu:apart"  # a device of no axis: the host, with ranks that share no memory
# Two more: a GPU with collectives of its own, and one with those through the host.
CUDA, CUDA_THROUGH_HOST = "cuda", "cuda:staged"
NCCL = "nccl"  # a number of hardware queues follows: the simulated device over tests/nccl_like.py
TRIES = 60  # the points that are looked at for each one that is chosen

# The elements of a bucket: fewer than most parameters have, and more than any model of the zoo has.
BUCKET_NUMEL = {"tiny": 7, "huge": 1 << 20}
# Subjects of the cases with which weights in shares are trained by day.
IN_SHARES = (
    "hooks", "checkpoint", "function", "edit", "tied", "strided", "parametrized", "divergent", "clip", "whole", "frozen",
    "buffers", "no_sync", "dtypes", "average", "overflow", "shared", "double", "functional",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    stage: int
    world: int
    dtype: str
    bucket: str
    entry: str
    device: str
    case: str
    offload: str = "none"  # the part of what is sharded that lives on the host beside the device
    shard_ranks: int | str | None = field(default=None, repr=False)  # the ranks that states are in shares of; no axis
    kernels: str = field(default="torch", repr=False)  # the kernels of a step; no axis

    def __str__(self) -> str:
        home = "" if self.offload == "none" else f" offload={self.offload}"
        home += "" if self.shard_ranks is None else f" shard_ranks={self.shard_ranks}"
        home += "" if self.kernels == "torch" else f" kernels={self.kernels}"
        return f"{self.case} stage={self.stage} world={self.world} {self.dtype} {self.bucket} {self.entry} {self.device}{home}"

    def loss_scale(self) -> DynamicScale | StaticScale | None:
        """A fresh one: it changes as training goes. Only fp16 has one, and one that moves where something overflows."""
        if self.dtype != "fp16" or not CASES[self.case].scaled:
            return None
        return DynamicScale(scale=8.0, window=2, hysteresis=1) if self._moves_the_scale else StaticScale(8.0)

    @property
    def _moves_the_scale(self) -> bool:
        return "overflow" in CASES[self.case].tags or self.bucket == "tiny"


def can_be(point: Point) -> bool:
    case = CASES[point.case]
    lacking = point.device.removeprefix("sim-").split(",")
    return (
        point.dtype in case.dtypes
        and point.world >= case.needs_world
        and (point.entry == "plain" or case.engine)
        and (point.device.startswith("cpu") or not case.host_only)
        # On the host, states have nowhere to go. tests/promises/test_offload_bits.py proves that it changes no bit there.
        and (not point.device.startswith("cpu") or point.offload == "none")
        and point.dtype not in lacking
        and not set(lacking) & set(case.needs)
    )


def by_day(point: Point) -> bool:
    return all(getattr(point, axis) in usual or CASES[point.case].tags & FURTHER[axis] for axis, usual in COMMON.items())


def full(devices: Sequence[str] = DEVICES, cases: Sequence[str] | None = None) -> Iterator[Point]:
    return _product(_axes(devices, cases))


def covering(devices: Sequence[str] = DEVICES, cases: Sequence[str] | None = None, seed: int = SEED) -> list[Point]:
    """Chooses for every pair or triple that is still missing the point that brings the most of those for what it costs. In the
    end it leaves out the points that no longer bring any."""
    axes, chance = _axes(devices, cases), random.Random(seed)
    missing = wanted(devices, cases)
    points: list[Point] = []
    # Values that few points can bring come first, as they leave the least choice: those of cases come before the rest.
    for need in sorted(missing, key=lambda need: (-len(need), "case" not in dict(need), repr(need))):
        if need not in missing:
            continue
        best, best_gain = None, -1.0
        for point in _some_with(dict(need), axes, chance):
            if can_be(point) and (gain := sum(item in missing for item in _held_by(point)) / cost(point)) > best_gain:
                best, best_gain = point, gain
        if best is None:
            best = next(filter(by_day, _product({**axes, **{axis: (value,) for axis, value in need}})))
        points.append(best)
        missing.difference_update(_held_by(best))
    return _without_what_others_hold(points)


def _without_what_others_hold(points: list[Point]) -> list[Point]:
    """Returns the points without those all of whose pairs and triples others hold. The dearest are left out first."""
    times = Counter(itertools.chain.from_iterable(map(_held_by, points)))
    left = dict.fromkeys(points)
    for point in sorted(points, key=cost, reverse=True):
        if all(times[item] > 1 for item in _held_by(point)):
            del left[point]
            times.subtract(_held_by(point))
    return list(left)


def cost(point: Point) -> float:
    """How long a point takes, roughly. On the simulated device, written in Python, one rank is made no cheaper than two."""
    if point.device != "cpu" and point.bucket == "tiny" and point.case in CASES and "many" in CASES[point.case].tags:
        return 1000.0  # hundreds of buckets are in flight, and each kernel looks through them
    if point.device == "cpu":
        return (1.0, 1.5, 2.5, 3.5)[point.world - 1]
    return (5.0, 5.0, 12.0, 16.0)[point.world - 1]


def spot_checks() -> list[Point]:
    """A few points on every device that lacks what nobody asks for."""
    cases = ("clipped_by_the_two_norm", "several_backwards_through_branches_of_each_rank", "two_layers")
    chosen = itertools.product((2, 1), cases, UNNOTICED)
    points = [
        Point(1 + index % 2, world, ("bf16", "fp32", "fp16")[index % 3], "tiny", "plain", f"sim-{lack}", case)
        for index, (world, case, lack) in enumerate(chosen)
    ]
    return [point for point in points if can_be(point)]


def without_group(full: bool = False) -> list[Point]:
    """Points on devices that torch.distributed has no backend for, one for each other thing that they may lack: in the night at
    each stage, with all homes; in the day one for each of LACKS, and each stage and each home where nothing else is lacking."""
    homes, points = ("none", "half", "all"), []
    for index, lack in enumerate(("group", *(f"group,{other}" for other in CAPABILITIES if other != "group"))):
        every = list(itertools.product((0, 1, 2), homes))
        few = list(zip((0, 1, 2), homes, strict=True)) if lack == "group" else [every[index % 9]]
        few = few if lack.removeprefix("group,") not in UNNOTICED else []
        for number, (stage, home) in enumerate(every if full else few):
            dtype = ("fp32", "bf16", "fp16")[(index + number) % 3]
            dtype = "fp32" if dtype in lack else dtype
            case = "clipped_by_the_two_norm" if index % 2 else "two_layers"
            points.append(Point(stage, 2, dtype, "tiny", "plain", f"sim-{lack}", case, home))
    assert all(map(can_be, points))
    return points


def sharded_weights(full: bool = False) -> list[Point]:
    """Points at stage 3 on the host, where ranks see each other's memory and where they do not: in the day one for each of the
    subjects IN_SHARES, every fifth on one rank and the others on two."""
    points = [
        Point(3, world, dtype, bucket, "plain", device, case)
        for case in CASES
        for world, dtype, bucket, device in itertools.product(
            (2, 3, 1), ("fp32", "bf16", "fp16"), ("tiny", "huge"), (APART, "cpu")
        )
    ]
    points = [point for point in points if can_be(point)]
    if full:
        return points
    cases = dict.fromkeys(next(name for name, case in CASES.items() if tag in case.tags) for tag in IN_SHARES)
    found = []
    for index, case in enumerate(cases):
        those = [point for point in points if point.case == case and point.world == (2 if index % 5 else 1)]
        found.append(those[7 * index % len(those)])
    return found


def replicated(full: bool = False) -> list[Point]:
    """Points on the host whose states are in shares of a part of the ranks: in the day one of each thirteenth case, and
    of those that do not average."""
    points = [
        Point(stage, world, dtype, bucket, entry, "cpu", case, shard_ranks=world // 2 if world > 2 else 1)
        for case in CASES
        for stage, world, dtype, bucket, entry in itertools.product(
            (1, 2, 3), (4, 2, 3), ("fp32", "bf16", "fp16"), ("tiny", "huge"), ("plain", "engine")
        )
    ]
    points = [point for point in points if can_be(point)]
    if full:
        return points[::13]
    by_case: dict[str, list[Point]] = {}
    for point in points:
        by_case.setdefault(point.case, []).append(point)
    few = [those[7 * index % len(those)] for index, those in enumerate(by_case.values())]
    return [point for index, point in enumerate(few) if index % 13 == 0 or CASES[point.case].reduce != "mean"]


def simulated_replicas(every: int = 101) -> list[Point]:
    """The same on the simulated device, with all homes, every so many of them."""
    points = [
        Point(stage, world, dtype, "tiny", "plain", device, case, offload, shard_ranks=world // 2)
        for case in CASES
        for stage, world, dtype, device, offload in itertools.product(
            (1, 2, 3), (2, 4), ("bf16", "fp32"), ("sim", "sim:random"), ("none", "half", "all")
        )
        if "many" not in CASES[case].tags
    ]
    return [point for point in points if can_be(point)][::every]


def on_cuda(every: int = 31) -> list[Point]:
    """Points on a GPU at all stages with all homes, every so many of them: on one rank, and on two that share it."""
    points = [
        Point(stage, world, dtype, bucket, entry, device, case, offload)
        for case in CASES
        for (world, device), stage, dtype, bucket, entry, offload in itertools.product(
            ((1, CUDA), (2, CUDA_THROUGH_HOST)),
            (0, 1, 2, 3),
            ("fp32", "bf16", "fp16"),
            ("tiny", "huge"),
            ("plain", "engine"),
            ("none", "half", "all"),
        )
        if bucket == "huge" or "many" not in CASES[case].tags
    ]
    return [point for point in points if can_be(point)][::every]


def on_disk(full: bool = False) -> list[Point]:
    """Points on the host whose states are on disk, all or some of them: in the day one of each twelfth case whose optimizer
    steps one parameter after the other."""
    homes = ("half on disk", "disk", "parts on disk")
    homes_of_shares = (*homes, "all on disk", "weights on disk")  # homes of weights in shares
    points = [
        Point(stage, world, dtype, bucket, "plain", "cpu", case)
        for case in CASES
        if _steps_by_blocks(case)
        for stage, world, dtype, bucket in itertools.product((1, 2, 3), (2, 3, 1), ("bf16", "fp32", "fp16"), ("tiny", "huge"))
        if bucket == "huge" or "many" not in CASES[case].tags
    ]
    points = [
        replace(point, offload=own[at % len(own)])
        for at, point in enumerate(filter(can_be, points))
        for own in [homes_of_shares if point.stage == 3 else homes]
    ]
    if full:
        return points
    by_case: dict[str, list[Point]] = {}
    for point in points:
        if point.dtype != "fp32" and point.world < 3:
            by_case.setdefault(point.case, []).append(point)
    return [those[7 * at % len(those)] for at, those in enumerate(list(by_case.values())[::12])]


@cache
def _steps_by_blocks(name: str) -> bool:
    from zero.optim.several import as_one  # imported here, as tests.mutants loads this module and then changed libraries
    from zero.optim.traits import steps_by_blocks

    return steps_by_blocks(as_one(CASES[name].optimizer(CASES[name].build())))


def of_fastest_kernels(full: bool = False) -> list[Point]:
    """Points on the host that step with kernels="auto", of cases whose Adam has a faster step: in the day two of each."""
    points = [
        Point(stage, world, dtype, "tiny", "plain", "cpu", case, kernels="auto")
        for case in CASES
        if _is_adam(case)
        for stage, world, dtype in itertools.product((2, 0, 3, 1), (2, 1, 3), ("bf16", "fp32", "fp16"))
    ]
    points = [point for point in points if can_be(point)]
    by_case = {point.case: [other for other in points if other.case == point.case] for point in points}
    return points if full else [point for number, those in enumerate(by_case.values()) for point in those[number % 5 :: 17][:2]]


def _is_adam(name: str) -> bool:
    from zero.optim.traits import known_kind  # imported here for the same reason

    return known_kind(CASES[name].optimizer(CASES[name].build())) in (torch.optim.Adam, torch.optim.AdamW)


def simulated_sharded_weights(every: int = 331) -> list[Point]:
    """Points at stage 3 on the simulated device, every so many of them, and one on each that lacks something: in the day what
    streams and collectives are made of."""
    homes, devices = ("none", "half", "all"), ("sim", "sim:random")
    points = [
        Point(3, world, dtype, bucket, "plain", device, case, offload)
        for case in CASES
        for world, dtype, bucket, device, offload in itertools.product(
            (2, 1), ("fp32", "bf16", "fp16"), ("tiny", "huge"), devices, homes
        )
        if "many" not in CASES[case].tags
    ]
    points = [point for point in points if can_be(point)]
    lacks = (*LACKS, "group") if every < 1000 else ("streams", "events", "group")
    lacking = [Point(3, 2, "fp32", "tiny", "plain", f"sim-{lack}", "two_layers") for lack in lacks]
    return points[::every] + lacking


# Pairs and triples are tuples of (axis, value), in the order of the axes.
Held = tuple[tuple[str, object], ...]


def wanted(devices: Sequence[str] = DEVICES, cases: Sequence[str] | None = None) -> set[Held]:
    """Every pair, and every triple with stage and world and no case, that some point of the day can hold."""
    held: set[Held] = set()
    axes = _axes(devices, cases)
    # A case's few properties alone decide which values exclude each other, so one case of each kind stands for the axes of its
    # whole kind.
    kinds: dict[tuple, list[str]] = {}
    for name in axes["case"]:
        case = CASES[name]
        goes_further = tuple(bool(case.tags & tags) for tags in FURTHER.values())
        kind = (tuple(case.dtypes), case.needs_world, case.engine, case.host_only, tuple(case.needs), goes_further)
        kinds.setdefault(kind, []).append(name)
    for names in kinds.values():
        of_one = set()
        for point in filter(by_day, full(devices, names[:1])):
            of_one.update(_held_by(point))
        held.update(of_one)
        for name in names[1:]:
            held.update(tuple((axis, name if axis == "case" else value) for axis, value in item) for item in of_one)
    return held


def _product(axes: dict[str, Sequence]) -> Iterator[Point]:
    return (point for values in itertools.product(*axes.values()) if can_be(point := Point(*values)))


def _axes(devices: Sequence[str], cases: Sequence[str] | None) -> dict[str, Sequence]:
    return {**AXES, "device": devices, **({} if cases is None else {"case": cases})}


_NAMES = tuple(AXES)
_PAIRS = tuple(itertools.combinations(range(len(_NAMES)), 2))
_TRIPLES = tuple((0, 1, other) for other in range(2, len(_NAMES)) if _NAMES[other] != "case")


def _held_by(point: Point) -> list[Held]:
    values = [(name, getattr(point, name)) for name in _NAMES]
    return [tuple(values[index] for index in chosen) for chosen in (*_PAIRS, *_TRIPLES)]


def _some_with(fixed: dict[str, Any], axes: dict[str, Sequence], chance: random.Random) -> Iterator[Point]:
    """A random few of the points of the day with these values, without writing all of them down."""
    of_cases = [_axes_of(case, axes) for case in ([fixed["case"]] if "case" in fixed else axes["case"])]
    of_cases = [of_case for of_case in of_cases if all(value in of_case[axis] for axis, value in fixed.items())]
    for _ in range(TRIES):
        of_case = chance.choice(of_cases)
        yield Point(**{axis: chance.choice(values) for axis, values in of_case.items()} | fixed)


def _axes_of(case: str, axes: dict[str, Sequence]) -> dict[str, Sequence]:
    """What this case meets in the day."""
    usual = {axis: values for axis, values in COMMON.items() if not CASES[case].tags & FURTHER[axis]}
    return {**axes, "case": (case,), **{axis: [value for value in axes[axis] if value in usual[axis]] for axis in usual}}
