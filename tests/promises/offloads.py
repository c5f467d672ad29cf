"""Trainings on a device whose shares live on the host, beside the same ones without, in rank processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelerators
from accelerators.backends.cuda import CudaAccelerator
from tests import ranks
from tests.devices import CudaThroughHost
from tests.promises.loops import OWN_BITS, adamw, weights
from tests.traces import copied
from tests.zoo.case import backward, draw, real_loss, real_mlp
from zero import ShardedOptimizer, shard
from zero.config.schema import Offload

SMALL = 64  # bytes of a bucket: one share of most ranks and one gap

DTYPES_IN_TURN = pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.full), "bfloat16"])
SHARDED = pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2])
DTYPES = (None, "bfloat16")

# The program of one rank with a model and its optimizer. Its result is compared between the points.
Program = Callable[[nn.Module, ShardedOptimizer, int], Any]
Options = dict[str, Any]


def on_sim(
    world: int, program: Program, points: Iterable[Options], build: Callable[[], nn.Module] = real_mlp, order: str = "late"
) -> list[list[Any]]:
    """By rank: what `program` gives at each point, which is a dict of options of `shard`, on the simulated device."""
    return on_device("sim", world, program, points, build, order)


def on_device(
    device: str,
    world: int,
    program: Program,
    points: Iterable[Options],
    build: Callable[[], nn.Module] = real_mlp,
    order: str = "late",
) -> list[list[Any]]:
    """The same on a device of any type."""
    return ranks.run(world, train_points, program, list(points), build, device, order, apart=device)


def place_of(rank: int, device: str, order: str = "late") -> torch.device:
    """Where a rank trains: all of them on one simulated device, else each on one of its own while there are any."""
    if device == "sim":
        import accelerators_sim as simulated

        simulated.bring_up()
        simulated.configure(order=order)
        return torch.device("sim:0")
    if device == "cuda:staged":  # ranks share a GPU, and their processes are for that alone
        CudaAccelerator.communication_backend = CudaThroughHost.communication_backend
    accelerator = accelerators.get(device.partition(":")[0])
    if device != "cpu":
        accelerator.set_index(rank % accelerator.device_count())
    return accelerator.device()


def train_points(
    rank: int,
    world: int,
    program: Program,
    points: Sequence[Options],
    build: Callable[[], nn.Module],
    device: str,
    order: str,
) -> list[Any]:
    place, found = place_of(rank, device, order), []
    for point in points:
        given = {**OWN_BITS, "bucket_bytes": SMALL, "timeout_s": 20.0, **point}
        with place:
            model = build()
        optimizer = shard(model, given.pop("make", adamw)(model), **given)
        try:
            found.append(program(model, optimizer, rank))
        finally:
            optimizer.close()
    return found


def difference(one: Any, other: Any, where: str = "", rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """The first place where a bit differs, or more than that is allowed, NaN equal to NaN; None where there is none."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        wrong = 0 if not alike else int((~torch.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True)).sum())
        return None if alike and not wrong else f"{where}: {wrong} elements of {one} are not those of {other}"
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = [list(one), *one.values()], [list(other), *(other.get(key) for key in one)]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs_of_both = enumerate(zip(one, other, strict=True))
        inside = (difference(mine, theirs, f"{where}[{at}]", rtol, atol) for at, (mine, theirs) in pairs_of_both)
        return next((found for found in inside if found is not None), None)
    if isinstance(one, float) and isinstance(other, float) and abs(one - other) <= atol + rtol * abs(other):
        return None
    return None if one == other or (one != one and other != other) else f"{where}: {one!r} is not {other!r}"


def send(model: nn.Module, optimizer: Any, rank: int, step: int, micro: int = 0) -> None:
    """One micro-batch, forward and backward."""
    backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, micro, real=True))))


def bits(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """All that a training leaves behind, on the host; a collective."""
    saved, found = optimizer.state_dict(), copied(weights(model))
    masters = copied(saved["masters"])
    for name in [name for name in masters if found[name].dtype == torch.float32]:
        assert torch.equal(masters.pop(name), found[name])  # a copy on the host of what needs no rounding
    norm = optimizer.grad_norm
    # Sums in fp64 are added up in another order on a device than on the host.
    norm = norm if norm is None else torch.tensor(norm, dtype=torch.float32)
    return {"weights": found, "masters": masters, "state": copied(saved["state"]), "norm": norm}


def grads(model: nn.Module, optimizer: ShardedOptimizer) -> list[Any]:
    """The global gradients on the host; a collective."""
    return copied([optimizer.whole_grad(param) for param in model.parameters()])


def train_windows(model: nn.Module, optimizer: ShardedOptimizer, rank: int, lengths: Sequence[int]) -> list[Any]:
    """Windows of so many backwards; each one's gradients, and everything after its step."""
    found = []
    for step, length in enumerate(lengths):
        for micro in range(length):
            send(model, optimizer, rank, step, micro)
        found.append(grads(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        found.append(bits(model, optimizer))
    return found


def pairs(stage: int, dtypes: Sequence[str | None] = DTYPES, **options: Any) -> Iterator[Options]:
    """Each dtype without offload and then with it, half and whole."""
    for dtype, offload in itertools.product(dtypes, (None, Offload(ratio=0.5), "cpu")):
        yield {"stage": stage, "dtype": dtype, "offload": offload, **options}


def pairs_in_turn(stage: int, **options: Any) -> Iterator[Options]:
    """The same with one dtype a stage."""
    return pairs(stage, DTYPES[stage % 2 :][:1], **options)


def in_threes(found: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """Of every rank, what was found without offload and then with half and all of it."""
    for of_rank in found:
        yield from zip(of_rank[::3], of_rank[1::3], of_rank[2::3], strict=True)
