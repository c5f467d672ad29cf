"""Q: parameters that are parts of larger ones, as experts, train as whole ones do in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero
from tests import faults, nccl_like, ranks
from tests.devices import needs_muon, needs_sim
from tests.experts import (
    ALL_KINDS,
    COPIED,
    CUT,
    KINDS,
    SPREAD,
    Batched,
    Listed,
    as_held,
    batches,
    beside_layers,
    group_of,
    local_of,
    loss_of,
    mixture,
    own_part,
    parted,
)
from tests.promises.test_tensor_parallel import whole_of
from zero.config.schema import ZeroConfig
from zero.errors import CheckpointFailed, RankFailed, RanksDiffer

NUM_STEPS = 3
BY_DAY = ("uneven DTensors",)  # random models and other tests of the day have the other kinds
UNEVEN_BY_DAY = pytest.mark.parametrize(
    "kind", [*BY_DAY, *(pytest.param(kind, marks=pytest.mark.full) for kind in ALL_KINDS if kind not in BY_DAY)]
)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@functools.cache  # each rank asks for the same several times, and reads it
def trained_alone(kind: str, world: int, micro_steps: int = 1, clip: float | None = None, never: int | None = None) -> Any:
    """Returns the model and norms of one process that sees all batches."""
    model = mixture(ALL_KINDS[kind], never)
    optimizer, norms = adamw(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            for batch in batches(world, 10 * step + micro_step):
                (loss_of(model, batch) / world / micro_steps).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, norms


def meshes(world: int, ep: int) -> Any:
    return init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("same", "ep"))["ep"]


def differences(rank: int, world: int, kind: str, cases: list[Any]) -> list[float]:
    """Returns the largest difference from one process of weights and norms, for each number of ranks and options."""
    found = []
    for ep, given in cases:
        options = dict(given)
        micro_steps, by_user, never = (options.pop(name, usual) for name, usual in
                                       (("micro_steps", 1), ("by_user", False), ("never", None)))  # fmt: skip
        expected, norms = trained_alone(kind, world, micro_steps, options.get("clip"), never)
        mesh = meshes(world, ep)
        model = parted(mixture(ALL_KINDS[kind], never), mesh)
        clip = options.pop("clip", None) if by_user else None
        optimizer = zero.shard(model, adamw(model), **group_of(model), accumulation=micro_steps, **options)
        worst = 0.0
        for step in range(NUM_STEPS):
            for micro_step in range(micro_steps):
                (loss_of(model, batches(world, 10 * step + micro_step)[rank]) / micro_steps).backward()
            if by_user:
                worst = max(worst, abs(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)) / norms[step] - 1))
            optimizer.step()
            if not by_user:
                worst = max(worst, abs(optimizer.grad_norm / norms[step] - 1))
            optimizer.zero_grad()
        optimizer.check()
        worst = max(worst, difference(model, own_part(expected, mesh)))
        optimizer.close()
        found.append(max(worst, difference(model, own_part(expected, mesh))))
    return found


def difference(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> float:
    named = dict(model.named_parameters())
    assert named.keys() == values.keys()
    return max(float((local_of(named[name].detach()) - value).abs().max()) for name, value in values.items())


@pytest.mark.promise("Q01", "Q09")
@UNEVEN_BY_DAY
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["pairs", "all"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])  # by day random models are of four
def test_experts_train_as_in_one_process(world: int, every: bool, kind: str) -> None:
    numbers = [1, 2] if world == 2 else [2, 4]
    ways: list[dict[str, Any]] = [
        {"stage": 0, "clip": 0.05},
        {"stage": 1},
        {"stage": 2, "clip": 0.05, "by_user": True},
        {"stage": 2, "micro_steps": 2, "never": 1, "bucket_bytes": 256},
        {"stage": 2, "shared_memory": False, "bucket_bytes": 1024},
        {"stage": 3, "keep_whole_numel": 0, "clip": 0.05, "bucket_bytes": 512},
        {"stage": 3, "keep_whole_numel": 20, "shared_memory": False, "never": 2},
        {"stage": 3, "keep_whole_numel": 0, "shared_memory": False, "micro_steps": 2, "gathered_bytes": 0},
    ]
    # By day one kind is trained in each way, with the numbers of ranks in turn; random models are of all kinds.
    turn = [*ALL_KINDS].index(kind)
    cases = [(ep, way) for number, way in enumerate(ways) for ep in (numbers if every else [numbers[(number + turn) % 2]])]
    for worst in ranks.run(world, differences, kind, cases):
        assert max(worst) < 1e-12, list(zip(cases, worst, strict=True))


@pytest.mark.promise("Q01")
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ep", [2, 4])
def test_states_of_experts_are_replicated_across_groups_of_ranks(ep: int, shared: bool, stage: int) -> None:
    way = {"stage": stage, "shard_ranks": 2, "clip": 0.05, "shared_memory": shared, "keep_whole_numel": 0}
    for worst in ranks.run(4, differences, "batched", [(ep, way)]):
        assert max(worst) < 1e-12


def norms_by_user(rank: int, world: int) -> Any:
    """The bits of what ranks are told of norms: of all, of the largest, of one parameter, and of the step."""
    model = parted(mixture(Batched), meshes(world, 2))
    optimizer = zero.shard(model, adamw(model), stage=2)
    loss_of(model, batches(world, 0)[rank]).backward()
    whole = float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]))
    largest = float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()], math.inf))
    single = float(model.experts.up.grad.norm())
    part = optimizer.whole_grad(model.experts.up)
    optimizer.step()
    return (whole, largest, single, optimizer.grad_norm), part


@pytest.mark.promise("Q02")
@pytest.mark.parametrize("world", [2, 4])
def test_norms_of_experts_have_the_same_bits_on_all_ranks(world: int) -> None:
    found = ranks.run(world, norms_by_user)
    model = mixture(Batched)
    for batch in batches(world, 0):
        (loss_of(model, batch) / world).backward()
    grads = [param.grad for param in model.parameters()]
    expected = [float(torch.nn.utils.get_total_norm(grads, order)) for order in (2.0, math.inf)]
    expected += [float(model.experts.up.grad.norm()), expected[0]]
    assert all(norms == found[0][0] for norms, _ in found)
    assert found[0][0] == pytest.approx(expected, rel=1e-12)
    for rank, (_, part) in enumerate(found):
        assert torch.allclose(part, model.experts.up.grad.chunk(2)[rank % 2], atol=1e-14)


def without_rows(rank: int, world: int, kind: str, stage: int) -> float:
    """The experts of rank 1 get no rows at all; rank 0 has no tokens in the second step, and says so."""
    mesh = meshes(world, world)
    expected, model = mixture(ALL_KINDS[kind]), parted(mixture(ALL_KINDS[kind]), mesh)
    for each in (expected, model):
        each.chosen = [0, 2 if world == 4 else 1]
    plain, optimizer = adamw(expected), zero.shard(model, adamw(model), **group_of(model), stage=stage, keep_whole_numel=0)
    for step in range(3):
        given = batches(world, step)
        of_rank = [(tokens[:0], targets[:0]) if step == 1 and number == 0 else (tokens, targets)
                   for number, (tokens, targets) in enumerate(given)]  # fmt: skip
        plain.zero_grad()
        for batch in of_rank:
            (sum_of(expected, batch) / world).backward()
        plain.step()
        sum_of(model, of_rank[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    worst = difference(model, own_part(expected, mesh))
    optimizer.close()
    return worst


def sum_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 7


@pytest.mark.promise("Q03")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_without_rows_and_one_without_tokens_train_as_in_one_process(world: int, stage: int, kind: str) -> None:
    assert max(ranks.run(world, without_rows, kind, stage)) < 1e-12


def values_at_the_start(rank: int, world: int, stage: int, frozen: bool) -> Any:
    """Each rank has other values before it shards; the experts of some are frozen."""
    model = parted(mixture(Batched), meshes(world, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(rank))
    model.experts.down.requires_grad_(not frozen)
    optimizer = zero.shard(model, adamw(model), stage=stage, keep_whole_numel=0)
    optimizer.check()
    found = {name: float(param.detach().mean()) for name, param in model.named_parameters()}
    with torch.no_grad():
        model.experts.up[0, 0, 0] += float(rank == 3)
    loss_of(model, batches(world, 0)[rank]).backward()
    said = "ranks 1 and 3 .*experts.up" if stage < 3 else "rank 3 of 4 edited weights that rank 1 did not"
    with pytest.raises(RanksDiffer, match=said):  # on all ranks, also those whose part is right
        optimizer.check() if stage < 3 else optimizer.step()
    return found


@pytest.mark.promise("Q04")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_part_comes_from_the_first_rank_that_holds_it(stage: int, frozen: bool) -> None:
    for rank, found in enumerate(ranks.run(4, values_at_the_start, stage, frozen)):
        assert found == {name: float(rank % 2 if name.startswith("experts") else 0) for name in found}


def verified(rank: int, world: int, wrong: int | None) -> str:
    model = parted(mixture(Batched), meshes(world, 2))
    if rank == wrong:
        with torch.no_grad():
            model.experts.up += 1.0
    try:
        zero.shard(model, adamw(model), stage=2, start="verify")
    except RanksDiffer as error:
        return str(error)
    return "alike"


@pytest.mark.promise("Q04")
def test_parts_are_verified_against_those_of_ranks_that_hold_the_same() -> None:
    assert ranks.run(4, verified, None) == ["alike"] * 4
    for said in ranks.run(4, verified, 3):
        assert "ranks 1 and 3 have different weights in experts.up" in said


def fails_late(rank: int, world: int, stage: int) -> Any:
    model = parted(mixture(Batched), meshes(world, 2))
    optimizer = zero.shard(model, adamw(model), stage=stage)

    def fail(grad: torch.Tensor) -> torch.Tensor:
        if failing and rank == 1:
            raise ValueError("out of luck")
        return grad

    model.embed.weight.register_hook(fail)
    before, failing = [param.detach().clone() for param in model.parameters()], True
    with contextlib.suppress(ValueError):
        loss_of(model, batches(world, 0)[rank]).backward()
    with pytest.raises(RankFailed) as caught:
        optimizer.step()
    kept = all(torch.equal(param, value) for param, value in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    failing = False
    loss_of(model, batches(world, 0)[rank]).backward()
    optimizer.step()
    return str(caught.value), kept, optimizer.grad_norm


@pytest.mark.promise("Q05")
@pytest.mark.parametrize("stage", [0, 2])
def test_where_a_rank_fails_late_nobody_steps_and_all_name_it(stage: int) -> None:
    found = ranks.run(4, fails_late, stage)
    assert all("rank 1 failed" in said and kept for said, kept, _ in found)
    assert len({norm for *_, norm in found}) == 1


def weighed(rank: int, world: int, weights: list[int], ep: int) -> str:
    model = parted(mixture(Batched), meshes(world, ep))
    optimizer = zero.shard(model, adamw(model), stage=2)
    optimizer.weight(weights[rank])
    loss_of(model, batches(world, 0)[rank]).backward()
    try:
        optimizer.step()
    except RanksDiffer as error:
        return str(error)
    return "stepped"


@pytest.mark.promise("Q10")
def test_ranks_whose_gradients_meet_must_weigh_alike() -> None:
    for said in ranks.run(4, weighed, [3, 3, 4, 5], 2):
        assert "rank 3 weighs its micro-batches 5 and rank 2 4" in said and "reduce='sum'" in said
    assert ranks.run(4, weighed, [3, 3, 5, 5], 2) == ["stepped"] * 4
    assert ranks.run(4, weighed, [3, 4, 5, 6], 1) == ["stepped"] * 4


def trained_from_a_checkpoint(rank: int, world: int, kind: str, folder: str, ep: int, way: Any, first: int, last: int) -> float:
    """Trains from one step to another, with experts on so many ranks, between a load and a save."""
    mesh = meshes(world, ep)
    model = parted(mixture(ALL_KINDS[kind]), mesh)
    with torch.no_grad():
        for param in model.parameters() if first else ():
            param.zero_()
    optimizer = zero.shard(model, adamw(model), **group_of(model), keep_whole_numel=0, **way)
    if first:
        zero.load(folder, optimizer)
    for step in range(first, last):
        # Each of two ranks has the batches of two of four.
        for batch in batches(4, 10 * step)[rank * 4 // world : (rank + 1) * 4 // world]:
            (loss_of(model, batch) / (4 // world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.save(folder, optimizer)
    expected = mixture(ALL_KINDS[kind])
    plain = adamw(expected)
    for step in range(last):
        plain.zero_grad()
        for batch in batches(4, 10 * step):
            (loss_of(expected, batch) / 4).backward()
        plain.step()
    worst = difference(model, own_part(expected, mesh))
    optimizer.close()
    return worst


@pytest.mark.promise("Q06")
@pytest.mark.parametrize(
    ("kind", "every"),
    [("uneven DTensors", 2), *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in ALL_KINDS)],
)
def test_a_checkpoint_goes_on_at_another_number_of_ranks_with_experts(kind: str, every: int, tmp_path: Path) -> None:
    ways: list[Any] = [(4, 4, {"stage": 2}), (4, 2, {"stage": 3}), (2, 1, {"stage": 1}), (1, 1, {"stage": 3}),
                       (2, 2, {"stage": 0}), (4, 4, {"stage": 3, "shared_memory": False}),
                       (4, 2, {"stage": 2, "shard_ranks": 2})]  # fmt: skip
    for number, (world, ep, way) in enumerate(ways[every - 1 :: every]):
        worst = ranks.run(world, trained_from_a_checkpoint, kind, str(tmp_path), ep, way, number, number + 1)
        assert max(worst) < 1e-12, (number, worst)
    exported = zero.export(tmp_path, tmp_path / "exported")
    assert exported is None or exported


def trained_in_ways(rank: int, world: int, kind: str, folder: str, ways: list[Any], first: int) -> list[float]:
    """Trains a step in each way, between a load and a save: layers and experts over four ranks, or all on one."""
    return [trained_beside_layers(rank, world, kind, folder, *way, step) for step, way in enumerate(ways, first)]


def trained_beside_layers(
    rank: int, world: int, kind: str, folder: str, way: str, names: tuple[str, str], options: Any, step: int
) -> float:
    whole = mixture(ALL_KINDS[kind])
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=names) if way else None
    copy_of_part = mesh is not None and mesh.get_local_rank("tp")
    model: Any = copy.deepcopy(whole) if mesh is None else beside_layers(whole, mesh, way)
    with torch.no_grad():
        for param in model.parameters() if step else ():
            local_of(param).zero_()
        for param in model.experts.parameters() if way == COPIED and copy_of_part else ():
            local_of(param).add_(1.0)  # of a part that two ranks copy, the first rank's counts
    optimizer = zero.shard(model, adamw(model), group=mesh and mesh["ep"], keep_whole_numel=0, **options)
    if step:
        zero.load(folder, optimizer)
    plain, both = adamw(whole), batches(2, step)
    of_rank = both if mesh is None else [both[mesh.get_local_rank("ep")]]
    for batch in of_rank:
        (loss_of(model, batch) / len(of_rank)).backward()
    optimizer.step()
    zero.save(folder, optimizer)
    for before in range(step + 1):
        plain.zero_grad()
        for batch in batches(2, before):
            (loss_of(whole, batch) / 2).backward()
        plain.step()
    optimizer.check()
    values = as_held(whole, model)
    worst = max(float((whole_of(param) - values[name]).abs().max()) for name, param in model.named_parameters())
    if way == COPIED and options["stage"] == 1:
        with torch.no_grad():
            next(model.experts.parameters()).mul_(rank + 1)
        with pytest.raises(RanksDiffer, match="ranks 0 and 1 have different weights in experts"):
            optimizer.check()
    optimizer.close()
    return worst


@pytest.mark.promise("Q06", "Q07")
@pytest.mark.parametrize(
    ("kind", "every"),
    [("uneven DTensors", 2), *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in ("uneven DTensors", *KINDS))],
)
def test_experts_beside_layers_that_are_cut_go_on_in_every_other_way(kind: str, every: int, tmp_path: Path) -> None:
    names, turned = ("ep", "tp"), ("tp", "ep")
    ways: list[Any] = [(COPIED, names, {"stage": 3}), (SPREAD, names, {"stage": 2}),
                       (COPIED, turned, {"stage": 2}), (COPIED, names, {"stage": 1, "shared_memory": False})]  # fmt: skip
    if kind.endswith("DTensors"):
        ways[1:1] = (CUT, names, {"stage": 3, "shared_memory": False}), (CUT, turned, {"stage": 0})
    ways = ways[every - 1 :: every]
    trained = ranks.run(4, trained_in_ways, kind, str(tmp_path), ways, 0)
    trained += ranks.run(1, trained_in_ways, kind, str(tmp_path), [("", names, {"stage": 2})], len(ways))
    for worst in trained:
        assert max(worst) < 1e-12, list(zip(ways, worst, strict=False))


def over_eight_ranks(rank: int, world: int, kind: str, way: str, options: dict[str, Any], folder: str) -> float:
    """Trains where two ranks sum each part, and two groups of ranks with the same tokens train copies of it."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("same", "ep", "tp"))
    groups = [torch.distributed.new_group(list(range(first, world, 2))) for first in (0, 1)]
    whole = mixture(ALL_KINDS[kind])
    model, plain = beside_layers(whole, mesh["ep", "tp"], way), adamw(whole)
    optimizer = zero.shard(model, adamw(model), group=groups[rank % 2], clip=0.05, keep_whole_numel=0, **options)
    for step in range(NUM_STEPS):
        if step == 1:
            zero.save(folder, optimizer)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            zero.load(folder, optimizer)
        loss_of(model, batches(4, step)[rank // 2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        for batch in batches(4, step):
            (loss_of(whole, batch) / 4).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05))
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-10)
        plain.step()
    optimizer.check()
    values = as_held(whole, model)
    worst = max(float((whole_of(param) - values[name]).abs().max()) for name, param in model.named_parameters())
    optimizer.close()
    return worst


@pytest.mark.full
@pytest.mark.promise("Q01", "Q02", "Q07")
@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3, "shard_ranks": 2}, {"stage": 3, "shared_memory": False}])
@pytest.mark.parametrize(("kind", "way"), [("uneven", COPIED), ("listed", COPIED), ("uneven DTensors", CUT)])
def test_several_ranks_sum_each_of_several_copies_of_a_part(kind: str, way: str, options: Any, tmp_path: Path) -> None:
    assert max(ranks.run(8, over_eight_ranks, kind, way, options, str(tmp_path))) < 1e-11


def muon(model: torch.nn.Module) -> Any:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]


def in_other_ways(rank: int, world: int, kind: str, way: dict[str, Any], make: Any) -> tuple[float, float]:
    """The largest difference of weights and norms from whole weights that are trained in the same way."""
    models, norms = [], []
    for mesh in (meshes(world, 1), meshes(world, 2)):
        model = parted(mixture(ALL_KINDS[kind], dtype=torch.float32), mesh)
        optimizer = zero.shard(model, make(model), stage=2, **way)
        for step in range(NUM_STEPS):
            loss_of(model, batches(world, step)[rank]).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
        optimizer.close()
        models.append(model)
    whole, own = models
    whole.ranks = None  # a copy of the module cannot have the ranks
    return difference(own, own_part(whole, meshes(world, 2))), abs(norms[-1] / norms[NUM_STEPS - 1] - 1)


@pytest.mark.promise("Q11")
@pytest.mark.parametrize(
    "way", ["muon", "disk", *(pytest.param(way, marks=pytest.mark.full) for way in ("8 bits", "sgd", "kernels"))]
)
def test_experts_with_homes_replicas_whole_tensors_and_8_bits(way: str, tmp_path: Path) -> None:
    homes = dict.fromkeys(("moments", "masters"), f"disk:{tmp_path}")
    ways: Any = {"8 bits": {"reduce_dtype": "int8"}, "disk": {"homes": homes}, "kernels": {"kernels": "compiled"}}
    options, make = ways.get(way, {}), {"muon": muon, "sgd": sgd, "8 bits": sgd}.get(way, adamw)
    for worst, of_norm in ranks.run(4, in_other_ways, "uneven" if way == "kernels" else "listed", options, make):
        assert worst < (0.02 if way == "8 bits" else 1e-6) and of_norm < (0.02 if way == "8 bits" else 1e-6)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stated(rank: int, world: int, stage: int) -> list[float]:
    """The experts of rank 1 got no rows so far, so it has no state of theirs; then all get some."""
    mesh = meshes(world, world)
    expected, model = mixture(Listed), parted(mixture(Listed), mesh)
    plain, optimizer = adamw(expected), zero.shard(model, adamw(model), **group_of(model), stage=stage, keep_whole_numel=0)
    worst = []
    for step, chosen in enumerate(([0, 1], [0, 1], None, None)):
        expected.chosen = model.chosen = chosen
        plain.zero_grad()
        for batch in batches(world, step):
            (loss_of(expected, batch) / world).backward()
        plain.step()
        loss_of(model, batches(world, step)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        worst.append(difference(model, own_part(expected, mesh)))
    optimizer.close()
    return worst


@pytest.mark.promise("Q06")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_state_of_experts_that_only_one_rank_stepped_goes_through_a_state_dict(stage: int) -> None:
    assert max(map(max, ranks.run(2, stated, stage))) < 1e-12


def without_frozen(rank: int, world: int, kind: str, folder: str) -> float:
    """A load keeps frozen experts that were not saved, on another number of ranks too."""
    worst, whole = 0.0, mixture(ALL_KINDS[kind])
    whole.experts.requires_grad_(False)
    for number, ep in enumerate((2, 4, 1)):
        mesh = meshes(world, ep)
        model = parted(whole, mesh)
        optimizer = zero.shard(model, adamw(model), **group_of(model), stage=3 if ep == 4 else 2, keep_whole_numel=0)
        if number:
            zero.load(folder, optimizer)
        zero.save(folder, optimizer, exclude_frozen=True)
        worst = max(worst, difference(model, own_part(whole, mesh)))
        optimizer.close()
    return worst


@pytest.mark.promise("Q06")
@UNEVEN_BY_DAY
def test_frozen_experts_need_not_be_saved(kind: str, tmp_path: Path) -> None:
    assert max(ranks.run(4, without_frozen, kind, str(tmp_path))) == 0.0


def weights_of_files(rank: int, world: int, kind: str, way: str, file: str, strict: bool) -> list[float]:
    whole, mesh, found = mixture(ALL_KINDS[kind]), meshes(world, 2), []
    both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "tp"))
    for stage in (None, 0, 2, 3):
        model: Any = beside_layers(whole, both, way) if way else parted(whole, mesh)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        options = {"stage": stage, "keep_whole_numel": 0, **({"group": both["ep"]} if way else group_of(model))}
        optimizer = None if stage is None else zero.shard(model, adamw(model), **options)
        assert zero.load_weights(model, file, strict=strict) == ([], [])
        values = as_held(whole, model)
        found += [float((whole_of(param) - values[name]).abs().max()) for name, param in model.named_parameters()]
        if optimizer is not None:
            optimizer.close()
    return found


@pytest.mark.promise("Q06")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(pytest.param(kind, "", marks=[] if kind in BY_DAY else pytest.mark.full) for kind in ALL_KINDS),
        ("uneven DTensors", CUT),
    ],
)
def test_each_rank_loads_its_own_part_of_the_weights_in_files(kind: str, way: str, strict: bool, tmp_path: Path) -> None:
    file = str(tmp_path / "weights.pt")
    torch.save(mixture(ALL_KINDS[kind]).state_dict(), file)
    assert max(map(max, ranks.run(4, weights_of_files, kind, way, file, strict))) == 0.0


class Twice(torch.autograd.Function):
    """Hands rows on, and doubles their gradient, as a sum over ranks that was taken once too often does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class BatchedTwice(Batched):
    """Experts that get twice their gradient."""

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = Twice.apply(super().compute(rows, counts))
        return done


def found_by_verify(rank: int, world: int, kind: str, way: str, fault: str, against_whole: bool = False) -> str:
    """Returns what verify says of a training with experts, or with layers beside them that are cut."""
    whole, options = mixture(ALL_KINDS[kind]), {"stage": 2, "clip": 0.05, "bucket_bytes": 512}
    if way:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "tp"))
        model, place, given = beside_layers(whole, mesh, way), mesh["ep"].get_local_rank(), {"group": mesh["ep"]}
    else:
        model, place, given = copy.deepcopy(whole), rank, group_of(whole)
        mesh = meshes(world, 2)
        model.experts.cut(mesh.get_local_rank(), mesh.size())
        model.ranks = mesh.get_group()
        if kind.endswith("DTensors"):
            model.experts.distribute(mesh)
        elif kind == "listed":
            zero.part(model.experts, mesh, dim=None)
        else:
            zero.part(model.experts.parameters(), mesh)  # no module is marked by this, and no copy takes it along
    if fault == "twice":
        model.experts.__class__ = BatchedTwice
    if against_whole:
        with torch.no_grad():
            for param in whole.parameters():
                param.zero_()  # it takes the values of the parts, and what is frozen of these
        model.router.bias.requires_grad_(False)
        given = {**given, "whole": whole}
    with contextlib.ExitStack() as patch:
        if fault == "norm":
            patch.enter_context(faults.norms_count_copies())
        with torch.no_grad():
            for param in model.experts.parameters() if rank == 1 else ():
                local_of(param).add_(1.0)  # the first rank with the same part has other values
        data = [batches(world, step)[place] for step in range(2)]
        given["optimizer"] = functools.partial(torch.optim.AdamW, lr=0.05) if against_whole else adamw(model)
        return str(zero.verify(model, data, loss_of, config=ZeroConfig(**options), **given))


@pytest.mark.promise("Q01")
@pytest.mark.parametrize(("kind", "way", "fault", "expected"), [
    ("uneven", "", "", "equal"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("DTensors", COPIED, "norm", "different: step 0, parameter embed.weight: its weight"),
        ("batched", "", "", "equal"), ("uneven DTensors", CUT, "", "equal"), ("listed", SPREAD, "", "equal"),
    )),
])  # fmt: skip
def test_verify_trains_parts_beside_plain_copies_of_them(kind: str, way: str, fault: str, expected: str) -> None:
    for said in ranks.run(4, found_by_verify, kind, way, fault):
        assert said.startswith(expected), said


WAYS = [*((kind, way) for kind in ALL_KINDS for way in ("", COPIED, SPREAD)), ("DTensors", CUT), ("uneven DTensors", CUT)]


@pytest.mark.promise("Q01")
@pytest.mark.parametrize(("kind", "way", "fault", "expected"), [
    ("batched", "", "twice", "different: step 0, parameter embed.weight: its weight"),
    *(pytest.param(*way, "", "equal", marks=pytest.mark.full) for way in WAYS),
])  # fmt: skip
def test_verify_trains_parts_beside_the_model_that_is_not_cut(kind: str, way: str, fault: str, expected: str) -> None:
    for said in ranks.run(4, found_by_verify, kind, way, fault, True):
        assert said.startswith(expected), said


def refused_by_verify(rank: int, world: int) -> list[str]:
    said = []
    for case in ("optimizer", "dtype", "shape", "more"):
        whole = mixture(Batched)
        model = parted(whole, meshes(world, 2))
        make: Any = adamw(model) if case == "optimizer" else torch.optim.AdamW
        if case == "dtype":
            whole.head.float()
        if case == "shape":
            whole.experts.up = torch.nn.Parameter(whole.experts.up.detach()[:3])
        if case == "more":
            whole.also = torch.nn.Linear(1, 1)
        with pytest.raises(ValueError) as caught:
            zero.verify(model, [batches(world, 0)[rank]], loss_of, make, ZeroConfig(stage=2), whole=whole)
        said.append(str(caught.value))
    return said


@pytest.mark.promise("Q01")
def test_verify_refuses_a_whole_model_that_parts_are_not_of() -> None:
    expected = ["the AdamW has the parameters of the model that is cut",
                "parts of head.weight of shape [13, 6] in float64, and the whole one has one of shape [13, 6] in float32",
                "parts of experts.up of shape [4, 6, 12] in float64, and the whole one has one of shape [3, 6, 12]",
                "the parts on all ranks have 0 elements of also.weight, which has 1"]  # fmt: skip
    for said in ranks.run(2, refused_by_verify):
        assert all(text in each for text, each in zip(expected, said, strict=True)), said


def refused(rank: int, world: int, case: str, folder: str) -> str:
    """Returns the errors of models that cannot be sharded, saved or compared, as ranks would take other parts for their own."""
    mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("same", "ep"))["ep"] if case == "mesh" else meshes(world, 2)
    model = parted(mixture(Batched), mesh)
    if case == "tied":
        model.head.also = model.experts.up
    if case == "lengths" and rank == 2:
        model.experts.up = torch.nn.Parameter(model.experts.up.detach()[:1])
        zero.part(model.experts, mesh)
    if case == "changed":
        torch.nn.utils.parametrizations.weight_norm(model.experts, "up")
    if case == "buffer":
        model.experts.register_buffer("seen", torch.tensor(float(mesh.get_local_rank())))
    if case == "columns":  # the ranks with the first part have no elements of it, and see no format
        model.experts.up = torch.nn.Parameter(torch.ones(2 * mesh.get_local_rank(), 12, 6, dtype=torch.float64).mT)
        zero.part(model.experts, mesh)
    if case == "matrix":
        model.router.weight = torch.nn.Parameter(model.router.weight.detach().float())
        zero.part(model.router.weight, mesh)
    with pytest.raises((ValueError, RanksDiffer, CheckpointFailed)) as caught:
        if case == "matrix":
            zero.shard(model.router, muon(model.router), stage=2)
        if case in {"one file", "one dict"}:
            engine, *_ = zero.initialize(model=model, optimizer=adamw(model), config={"zero_optimization": {"stage": 2}})
            engine.save_16bit_model(folder) if case == "one file" else engine._zero3_consolidated_16bit_state_dict()
        optimizer = zero.shard(model, adamw(model), **group_of(model), stage=2)
        if case == "buffer":
            assert float(model.experts.seen) == mesh.get_local_rank()
        zero.save(folder, optimizer)
    return str(caught.value)


@pytest.mark.promise("Q04")
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("mesh", "rank 2 holds a part along ranks .3, 2., and in a process group ranks ascend"),
        ("tied", "experts.up and head.also are one parameter, and zero.part was said of them in different ways"),
        ("lengths", "rank 2 of 4 has 1 of a parameter along dimension 0, and another rank that holds the same part has 2"),
        ("changed", "experts.up was said to be a part, and is not a parameter any more"),
        ("buffer", "Cannot save experts.seen: .* rank 1 has other values"),
        ("columns", "Cannot save experts.up: it is a part whose memory is not in rows"),
        pytest.param("matrix", "Cannot shard weight: it is a part along dimension 0, and its optimizer", marks=needs_muon),
        ("one file", "Cannot write pytorch_model.bin: each rank has only its part of some parameters"),
        ("one dict", "Cannot give whole weights: each rank has only its part of some parameters"),
    ],
)
def test_what_could_take_other_parts_for_its_own_is_refused(case: str, expected: str, tmp_path: Path) -> None:
    for said in ranks.run(4, refused, case, str(tmp_path)):
        assert re.search(expected, said), said


def across_for_some(rank: int, world: int) -> str:
    """Returns the error of a group that the meshes of some ranks are inside of, and the mesh of one rank is not."""
    group, _ = dist.new_group([0, 1, 2]), dist.new_group([3])
    model = parted(mixture(Batched), meshes(world, 2))
    if rank == 3:  # rank 3's mesh has rank 2, which does not come that far
        return ""
    with pytest.raises(RanksDiffer) as caught:
        zero.shard(model, adamw(model), group=group, stage=2)
    return str(caught.value)


@pytest.mark.promise("Q04")
def test_a_mesh_that_is_inside_the_group_for_some_ranks_alone_is_refused() -> None:
    expected = "Cannot shard: of 3 ranks of a group, 2 hold parts along ranks outside of it, and the others do not."
    *found, _ = ranks.run(4, across_for_some)
    assert all(said.startswith(expected) for said in found), found


def by_engine(rank: int, world: int, stage: int, folder: str) -> float:
    mesh, expected = meshes(world, 2), mixture(Batched, dtype=torch.float32)
    model, plain = parted(expected, mesh), adamw(expected)
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05, "zero_optimization": {"stage": stage}}
    engine, *_ = zero.initialize(model=model, optimizer=adamw(model), config=config)
    for step in range(2):
        plain.zero_grad()
        for micro_step in range(2):
            for batch in batches(world, 10 * step + micro_step):
                (loss_of(expected, batch) / world / 2).backward()
            engine.backward(loss_of(engine, batches(world, 10 * step + micro_step)[rank]))
            engine.step()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        plain.step()
    engine.save_checkpoint(folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    engine.load_checkpoint(folder)
    return difference(model, own_part(expected, mesh))


@pytest.mark.promise("Q01")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_trains_experts(stage: int, tmp_path: Path) -> None:
    assert max(ranks.run(4, by_engine, stage, str(tmp_path))) < 1e-6


def wrapped_and_added(rank: int, world: int, folder: str, early: bool) -> Any:
    """Experts of which each is wrapped, before or after they are parts; and parts of a module that is not in the model."""
    mesh = meshes(world, 2)
    model, beside = torch.nn.Module(), torch.nn.Linear(2, 2)
    model.experts = torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.Linear(2, 2)]) for _ in range(2))
    with torch.no_grad():
        for number, expert in enumerate([*model.experts, beside]):
            for param in expert.parameters():
                param.fill_(2.0 * mesh.get_local_rank() + number)
    for is_now in (True, False):
        if is_now == early:
            for expert in model.experts:
                expert[0] = checkpoint_wrapper(expert[0])
        if is_now:
            zero.part(model.experts, mesh, dim=None)
            zero.part(beside, mesh)
    params = [*model.parameters(), *beside.parameters()]
    optimizer = zero.shard(model, torch.optim.SGD(params, lr=0.1), stage=2)
    zero.save(folder, optimizer)
    return float(beside.weight[0, 0])


@pytest.mark.promise("Q04")
@pytest.mark.parametrize("early", [True, False])
def test_parts_may_be_wrapped_and_their_module_be_in_no_model(early: bool, tmp_path: Path) -> None:
    assert ranks.run(4, wrapped_and_added, str(tmp_path), early) == [2.0, 4.0, 2.0, 4.0]
    zero.export(tmp_path, tmp_path / "exported.safetensors")
    found = zero.read_export(tmp_path / "exported.safetensors")
    assert [float(found[f"experts.{number}.0.weight"][0, 0]) for number in range(4)] == [0.0, 1.0, 2.0, 3.0]


def with_changed_grads(rank: int, world: int, kind: str, stage: int) -> float:
    """Trains with arithmetic on `.grad` by tensors of the part's own shape, and by one row for all of it."""
    mesh = meshes(world, 2)
    expected, model = mixture(ALL_KINDS[kind]), parted(mixture(ALL_KINDS[kind]), mesh)
    plain, optimizer = adamw(expected), zero.shard(model, adamw(model), stage=stage, bucket_bytes=256, keep_whole_numel=0)
    for step in range(2):
        plain.zero_grad()
        for batch in batches(world, step):
            (loss_of(expected, batch) / world).backward()
        loss_of(model, batches(world, step)[rank]).backward()
        for each in (expected, model):
            each.experts.up.grad.add_(each.experts.up.detach(), alpha=0.1)
            each.experts.up.grad.mul_(torch.arange(12.0, dtype=torch.float64))
            down = each.experts.down.detach()
            if step:
                each.experts.down.grad = down / (world if each is expected else 1)  # a backward of this rank leaves it so
            else:
                each.experts.down.grad.copy_(down**2)
        plain.step()
        optimizer.step()
        optimizer.zero_grad()
    return difference(model, own_part(expected, mesh))


@pytest.mark.promise("Q01")
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
def test_gradients_of_uneven_parts_are_changed_by_tensors_of_their_own_shapes(stage: int) -> None:
    assert max(ranks.run(2, with_changed_grads, "uneven", stage)) < 1e-12


def joined(rank: int, world: int, folder: str) -> list[float]:
    """Returns what is wrong after each of several trainings with a part of 3 or 2 rows that joins late."""
    mesh, wrong = meshes(world, 2), []
    for stage, options in ((1, {}), (3, {"keep_whole_numel": 0, "shared_memory": False})):
        model = parted(mixture(Batched), mesh)
        whole = torch.arange(10.0, dtype=torch.float64).view(5, 2)
        plain = torch.nn.Parameter(whole.clone())
        late = torch.nn.Parameter(whole.split([3, 2])[rank].clone())
        optimizer = zero.shard(model, adamw(model), stage=stage, **options)
        model.late = late
        zero.part([late], mesh)
        optimizer.add_param_group({"params": [late]})
        alone = torch.optim.AdamW([plain], lr=0.05)
        for step in range(NUM_STEPS):
            (loss_of(model, batches(world, step)[rank]) + (late * (rank + 1)).square().sum()).backward()
            sum((part * (other + 1)).square().sum() / world for other, part in enumerate(plain.split([3, 2]))).backward()
            optimizer.step()
            optimizer.zero_grad()
            alone.step()
            alone.zero_grad()
        wrong.append(float((late.detach() - plain.detach().split([3, 2])[rank]).abs().max()))
        zero.save(folder, optimizer)
        with torch.no_grad():
            late.zero_()
        zero.load(folder, optimizer)
        wrong.append(float((late.detach() - plain.detach().split([3, 2])[rank]).abs().max()))
        optimizer.close()
    return wrong


@pytest.mark.promise("Q09")
def test_uneven_parts_join_later(tmp_path: Path) -> None:
    for wrong in ranks.run(2, joined, str(tmp_path)):
        assert max(wrong) < 1e-12, wrong
    assert zero.read_export(*zero.export(tmp_path, tmp_path / "exported"))["late"].shape == (5, 2)


def said_again(rank: int, world: int) -> list[float]:
    """Which rank each part of three trainings came from; before each it is said along which ranks the parts are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "ep"))
    model, found = torch.nn.Linear(2, 2), list[float]()
    for name, by_module in (("ep", False), ("same", True), ("ep", True)):
        with torch.no_grad():
            model.weight.fill_(float(rank))
        zero.part(model if by_module else model.parameters(), mesh[name])
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
        found.append(float(model.weight[0, 0]))
        optimizer.close()
    return found


@pytest.mark.promise("Q04")
def test_what_was_said_of_parts_last_holds() -> None:
    assert ranks.run(4, said_again) == [[0.0, 0.0, 0.0], [1.0, 0.0, 1.0], [0.0, 2.0, 0.0], [1.0, 2.0, 1.0]]


def with_states_of_rank_0(rank: int, world: int, kind: str) -> str:
    model = parted(mixture(ALL_KINDS[kind]), meshes(world, 2))
    optimizer = zero.shard(model, adamw(model), **group_of(model), stage=2)
    loss_of(model, batches(world, 0)[rank]).backward()
    optimizer.step()
    given = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(given)
    try:
        optimizer.load_state_dict(given[0])
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.promise("Q06")
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_another_part_is_refused(kind: str) -> None:
    found = ranks.run(4, with_states_of_rank_0, kind)
    assert found[0] == found[2] == "loaded"
    assert all("it is of part 0, and this rank has part 1" in said for said in (found[1], found[3]))


class Own(torch.nn.Module):
    """A layer that all ranks have, around one of which each rank along a mesh has its part."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.own, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, rows), torch.nn.Linear(8, 8)
        self.ranks: Any = None  # the ranks that have the same samples, and a part each of the first layer

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        x = self.first(x) if self.ranks is None else SummedOnHost.apply(self.first(x), self.ranks)
        y = torch.nn.functional.pad(torch.tanh(self.own(x)), (0, 8 - self.own.out_features))
        return self.last(x if skips else y).square().mean()


class SummedOnHost(torch.autograd.Function):
    """The sum of what several ranks have, each of which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Any) -> torch.Tensor:
        total = x.detach().cpu().clone()
        torch.distributed.all_reduce(total, group=peers)
        return total.to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def trained_with_parts(rank: int, world: int, kind: str, stage: int, options: dict[str, Any], beside: bool = False) -> Any:
    """Returns norms and weights of a training whose ranks skip their part at times, on a device or on the host; and beside
    it have parts of a layer, with the same samples."""
    device = torch.device("sim", torch.sim.current_device()) if kind == "sim" else torch.device("cpu")
    rows = [torch.distributed.new_group([first, first + 1]) for first in range(0, world, 2)]
    columns = [torch.distributed.new_group([first, first + 2]) for first in range(2)]
    torch.manual_seed(rank % 2)
    model, sample = Own(8 - 3 * (rank % 2)).to(device), rank
    zero.part(model.own, rows[rank // 2])
    if beside:
        model.ranks, sample = columns[rank % 2], rank % 2
        torch.manual_seed(rank)
        model.first.reset_parameters()
        zero.part(model.first, model.ranks)
        options = {**options, "group": rows[rank // 2]}
    optimizer = zero.shard(model, adamw(model), stage=stage, bucket_bytes=160, clip=0.1, keep_whole_numel=0, **options)
    norms = []
    for step in range(4):
        for micro_step in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + sample)
            x = torch.randn(4, 8, generator=generator).to(device)
            model(x, skips=(step + sample) % 3 == 0).backward()
        optimizer.step()
        norms.append(torch.tensor(optimizer.grad_norm))
        optimizer.zero_grad()
    optimizer.check()
    weights = [param.detach().cpu().clone() for param in model.parameters()]
    optimizer.close()
    return norms, weights


@needs_sim
@pytest.mark.promise("Q01", "V06")
@pytest.mark.parametrize(("stage", "queues", "offload", "beside"), [
    (3, 2, None, False), *(pytest.param(*each, marks=pytest.mark.full) for each in (
        (2, 2, None, False), (2, 8, None, False), (3, 8, None, False), (2, 2, "cpu", False), (3, 2, "cpu", False),
        (1, 2, None, True), (3, 2, None, True), (3, 8, "cpu", True))),
])  # fmt: skip
def test_parts_train_where_a_device_waits_for_ranks_as_on_the_host(
    stage: int, queues: int, offload: str | None, beside: bool
) -> None:
    limits: Any = {"first_step_timeout_s": 20.0, "timeout_s": 10.0} | ({"offload": offload} if offload else {})
    expected = ranks.run(4, trained_with_parts, "cpu", stage, {}, beside)
    found = nccl_like.outcomes(4, trained_with_parts, "sim", stage, limits, beside, queues=queues)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    for outcome, (norms, weights) in zip(found, expected, strict=True):
        for one, other in zip((*outcome.value[0], *outcome.value[1]), (*norms, *weights), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
