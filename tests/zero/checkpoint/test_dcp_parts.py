"""Torch's distributed checkpoints of trainings whose ranks have parts of parameters: to plain torch, to FSDP2, and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from tests import experts, ranks
from tests.devices import IS_TORCH_2_8
from zero.__main__ import main

INPUTS, WIDTH, OUTPUTS = 5, 6, 3  # two and four ranks have uneven parts of inputs and outputs, or none


class Layers(nn.Module):
    """Layers that a plan cuts by columns and rows, in uneven parts too, around one that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))


PLAN: dict[str, Any] = {
    "first": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def layers(seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    return Layers().double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Columns(nn.Module):
    """A layer of which a rank has some columns: a plain part, cut as torch would not cut it."""

    lengths = 1, INPUTS - 1

    def __init__(self, layer: nn.Linear, mesh: Any) -> None:
        super().__init__()
        self.part, self.group, self.bias = mesh.get_local_rank(), mesh.get_group(), layer.bias
        self.weight = nn.Parameter(layer.weight.detach().split(self.lengths, 1)[self.part].clone())
        zero.part([self.weight], mesh, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x.split(self.lengths, -1)[self.part], self.weight)
        return experts.Leave.apply(y, self.group) + self.bias  # type: ignore[no-any-return]


def cut(model: Layers, mesh: Any, with_columns: bool = False) -> Layers:
    parallelize_module(model, mesh, {name: style for name, style in PLAN.items() if not with_columns or name != "first"})
    if with_columns:
        model.first = Columns(model.first, mesh)
    return model


def batch_of(step: int, index: int) -> torch.Tensor:
    return torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(100 * step + index), dtype=torch.float64)


def train(model: nn.Module, optimizer: Any, step: int, indexes: range) -> None:
    """Steps on the mean over these batches."""
    for index in indexes:
        (model(batch_of(step, index)).square().mean() / len(indexes)).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: torch.Tensor, param: Any = None) -> torch.Tensor:
    """All of a parameter, or of a moment that this rank has beside its part of one."""
    if isinstance(param, DTensor) and value.dim() and not isinstance(value, DTensor):
        cut_as = {"device_mesh": param.device_mesh, "placements": param.placements, "run_check": False}
        value = DTensor.from_local(value, **cut_as, shape=param.shape, stride=param.stride())
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


State = tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]  # weights, and the optimizer's state


def state_in_shares(model: Layers, optimizer: Any) -> State:
    named = dict(model.named_parameters())
    weights = {name: whole(param) for name, param in named.items()}
    states = {name: {key: whole(value, param) for key, value in optimizer.whole_state(param).items()}
              for name, param in named.items()}  # fmt: skip
    if isinstance(model.first, Columns):
        for values in (weights, states["first.weight"]):
            for key in ("first.weight", "exp_avg", "exp_avg_sq"):
                if key in values:
                    parts: list[Any] = [None] * 2
                    dist.all_gather_object(parts, values[key], model.first.group)
                    values[key] = torch.cat(parts, 1)
    return weights, states


def state_of(model: nn.Module, optimizer: Any) -> State:
    weights, states = get_state_dict(model, optimizer)
    return {name: whole(value) for name, value in weights.items()}, {
        name: {key: whole(value) for key, value in state.items()} for name, state in states["state"].items()
    }


def assert_same(ones: State, others: State) -> None:
    """Weights and moments have the same bits."""
    assert ones[0].keys() == others[0].keys() == ones[1].keys() == others[1].keys()
    for name, value in ones[0].items():
        assert torch.equal(value, others[0][name]), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ones[1][name][key], others[1][name][key]), (name, key)


def assert_close(ones: State, others: State) -> None:
    for name, value in ones[0].items():
        torch.testing.assert_close(value, others[0][name], rtol=0, atol=1e-12)


def load_with_torch(model: nn.Module, optimizer: Any, folder: Path, alone: bool = False) -> None:
    """Loads as torch's documentation has it. The optimizer has states to load into."""
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def trained_by_fsdp2(rank: int, world: int, tp: int, load: Path | None, save: Path | None) -> Any:
    """Layers over `tp` ranks in shares of the others; returns the state when it was saved or loaded, and a step later."""
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    model = cut(layers(0 if load is None else 1), mesh["tp"])
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer, own = adamw(model), range(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    for step in (0, 1) if load is None else ():
        train(model, optimizer, step, own)
    if load is not None:
        load_with_torch(model, optimizer, load)
    if save is not None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=save)
    before = state_of(model, optimizer)
    train(model, optimizer, 2, own)
    return before, state_of(model, optimizer)


def trained_here(
    rank: int, world: int, tp: int, stage: int, groups: int, load: Path | None, save: Path | None, columns: bool = False
) -> Any:
    """The same with zero, on as many batches."""
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    model = layers(0 if load is None else 1)
    if tp > 1:
        cut(model, mesh["tp"], columns)
    optimizer = zero.shard(model, adamw(model), stage=stage, group=mesh["dp"], bucket_bytes=256, keep_whole_numel=0)
    number = groups * tp // world
    own = range(mesh["dp"].get_local_rank() * number, (mesh["dp"].get_local_rank() + 1) * number)
    if load is not None:
        zero.load(load, optimizer)
    for step in (0, 1) if load is None else ():
        train(model, optimizer, step, own)
    if save is not None:
        zero.save(save, optimizer)
        if not columns:  # each rank writes its own part of a DTensor, and reads it
            with optimizer.gathered():
                weights = model.state_dict()
                dcp.save({"model": weights}, checkpoint_id=save / "weights")
                for value in weights.values():
                    value.zero_()
                dcp.load({"model": weights}, checkpoint_id=save / "weights")
        with pytest.raises(ValueError, match=r"has parts of parameters.*zero\.export\(\.\.\., format='dcp'\)"):
            dcp.save({"optim": optimizer}, checkpoint_id=save / "refused")
        with pytest.raises(ValueError, match="to read run `python -m zero import`"):
            dcp.load({"optim": optimizer}, checkpoint_id=save)
    before = state_in_shares(model, optimizer)
    train(model, optimizer, 2, own)
    after = state_in_shares(model, optimizer)
    optimizer.close()
    return before, after


def loaded_alone(folder: Path, groups: int) -> Any:
    model = layers(1)
    optimizer = adamw(model)
    load_with_torch(model, optimizer, folder, alone=True)
    before = copy.deepcopy(state_of(model, optimizer))
    train(model, optimizer, 2, range(groups))
    return before, state_of(model, optimizer)


NIGHT = pytest.mark.full


@pytest.mark.skipif(IS_TORCH_2_8, reason="FSDP2 of torch 2.8 takes the sum over gloo, not the mean")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=NIGHT)])
def test_layers_that_fsdp2_saved_over_ranks_and_in_shares_go_on_here(world: int, tmp_path: Path) -> None:
    """Two of four ranks have a part each in two shares, some in pieces of pieces and some in none."""
    theirs, groups = tmp_path / "theirs", world // 2
    before, after = ranks.run(world, trained_by_fsdp2, 2, None, theirs, apart="fsdp2")[0]
    alone = loaded_alone(theirs, groups)
    assert_same(alone[0], before)
    assert_close(alone[1], after)
    assert main(["import", str(theirs), str(tmp_path / "ours")]) == 0
    ways = [(2, 2, 3, False), (1, 1, 1, False), (2, 2, 2, True), (2, 1, 3, False), (4, 2, 3, False), (4, 2, 0, True)]
    for number, tp, stage, columns in ways[: 2 if world == 2 else None]:
        its_groups = max(groups, number // tp)
        for found in ranks.run(number, trained_here, tp, stage, its_groups, tmp_path / "ours", None, columns):
            assert_same(found[0], before)
            if its_groups == groups:
                assert_close(found[1], after)


@pytest.mark.parametrize(
    ("world", "stage", "columns"), [(2, 3, False), (2, 2, True), *(pytest.param(4, 3, c, marks=NIGHT) for c in (False, True))]
)
def test_layers_over_ranks_go_on_in_plain_torch_and_fsdp2(world: int, stage: int, columns: bool, tmp_path: Path) -> None:
    ours, theirs, groups = tmp_path / "ours", tmp_path / "theirs", world // 2
    before, after = ranks.run(world, trained_here, 2, stage, groups, None, ours, columns)[0]
    zero.export(ours, theirs, format="dcp")
    alone = loaded_alone(theirs, groups)
    assert_same(alone[0], before)
    assert_close(alone[1], after)
    if not columns:
        weights = layers(1).state_dict()
        dcp.load({"model": weights}, checkpoint_id=ours / "weights", no_dist=True)
        assert all(torch.equal(weights[name], value) for name, value in before[0].items())
    if not IS_TORCH_2_8:
        for found in ranks.run(world, trained_by_fsdp2, 2, theirs, None, apart="fsdp2"):
            assert_same(found[0], before)
            assert_close(found[1], after)


# experts ----------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "listed": experts.Listed, "uneven": experts.Uneven, "uneven DTensors": experts.UnevenDistributed,
    "batched": experts.Batched, "DTensors": experts.Distributed,
}  # fmt: skip


def step_on(model: nn.Module, optimizer: Any, step: int, own: range) -> None:
    for batch in [experts.batches(4, step)[index] for index in own]:
        (experts.loss_of(model, batch) / len(own)).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of_part(model: nn.Module, optimizer: Any) -> State:
    weights = {name: experts.local_of(param.detach()).clone() for name, param in model.named_parameters()}
    states = {name: optimizer.whole_state(param) for name, param in model.named_parameters()}
    return weights, {name: {key: experts.local_of(value) for key, value in state.items()} for name, state in states.items()}


def trained_with_experts(rank: int, world: int, kind: str, ep: int, stage: int, load: Path | None, save: Path | None) -> Any:
    """Trains on four batches, as many on each rank; returns what it has of the state, then and a step later."""
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("same", "ep"))["ep"]
    model = experts.parted(experts.mixture(KINDS[kind]), mesh)
    optimizer = zero.shard(model, adamw(model), stage=stage, keep_whole_numel=0, **experts.group_of(model))
    own = range(rank * 4 // world, (rank + 1) * 4 // world)
    if load is not None:
        zero.load(load, optimizer)
    for step in (0, 1) if load is None else ():
        step_on(model, optimizer, step, own)
    if save is not None:
        zero.save(save, optimizer)
    before = state_of_part(model, optimizer)
    step_on(model, optimizer, 2, own)
    after = state_of_part(model, optimizer)
    optimizer.close()
    return mesh.get_local_rank(), before, after


def cut_for(kind: str, state: State, part: int, ep: int) -> State:
    """Returns what a rank should have of a whole state."""

    def cut_values(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = experts.mixture(KINDS[kind])
        model.load_state_dict(values)
        model.experts.cut(part, ep)
        return {name: param.detach() for name, param in model.named_parameters()}

    weights, states = state
    moments = {key: cut_values({name: its[key] for name, its in states.items()}) for key in ("exp_avg", "exp_avg_sq")}
    steps = {name: next(iter(states.values()))["step"] for name in moments["exp_avg"]}
    assert len({float(its["step"]) for its in states.values()}) == 1, "each expert got rows in each step"
    return cut_values(weights), {name: {**{key: moments[key][name] for key in moments}, "step": steps[name]} for name in steps}


@pytest.mark.parametrize(
    ("kind", "num_ways"), [("listed", 1), ("uneven", 1), *(pytest.param(kind, None, marks=NIGHT) for kind in KINDS)]
)
def test_experts_go_to_plain_torch_and_come_back_over_other_ranks(kind: str, num_ways: int | None, tmp_path: Path) -> None:
    saved = ranks.run(2, trained_with_experts, kind, 2, 3, None, tmp_path / "ours")
    zero.export(tmp_path / "ours", tmp_path / "theirs", format="dcp")
    model = experts.mixture(KINDS[kind])
    optimizer = adamw(model)
    load_with_torch(model, optimizer, tmp_path / "theirs", alone=True)
    before = copy.deepcopy(state_of(model, optimizer))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "again", no_dist=True)
    step_on(model, optimizer, 2, range(4))
    after = state_of(model, optimizer)
    assert main(["import", str(tmp_path / "again"), str(tmp_path / "back")]) == 0
    loaded = [(2, saved)]
    for world, ep, stage in [(2, 2, 1), (2, 1, 2), (4, 4, 3), (4, 2, 0), (1, 1, 3)][:num_ways]:
        loaded.append((ep, ranks.run(world, trained_with_experts, kind, ep, stage, tmp_path / "back", None)))
    for ep, of_ranks in loaded:
        for part, its, its_after in of_ranks:
            assert_same(its, cut_for(kind, before, part, ep))
            assert_close(its_after, cut_for(kind, after, part, ep))
