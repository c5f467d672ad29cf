"""Q07: models that torch's plans made of DTensors train across groups of ranks as in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import zero
from tests import inside, ranks
from tests.experts import Enter, Leave
from zero.config.schema import ZeroConfig
from zero.errors import GroupLost

WIDTH, LENGTH, NUM_STEPS = 8, 4, 3
INPUTS, OUTPUTS = 9, 5  # two and four ranks have uneven parts of them, or none


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), Block(), Block(), nn.Linear(WIDTH, OUTPUTS)).double()


PLANS: dict[str, Any] = {
    "by columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "by sequences": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}


def parallel(model: nn.Module, mesh: Any, plan: str) -> nn.Module:
    own = copy.deepcopy(model)
    for name in ("1", "2"):
        parallelize_module(own.get_submodule(name), mesh, PLANS[plan])
    parallelize_module(own, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    if plan == "by sequences":  # sequences are cut between the blocks
        cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        joined = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(own, mesh, {"1": cut, "3": joined})
    else:
        parallelize_module(own, mesh, {"3": ColwiseParallel(output_layouts=Replicate())})
    return own


def batch_of(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(2, LENGTH, INPUTS, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y.full_tensor() if isinstance(y, DTensor) else y).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@functools.cache  # each rank asks for the same several times, and reads it
def trained_alone(groups: int, clip: float | None) -> tuple[nn.Module, list[float]]:
    model, norms = make_model(), []
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for index in range(groups):
            (loss_of(model, batch_of(step, index)) / groups).backward()
        norms.append(float(nn.utils.get_total_norm([param.grad for param in model.parameters()])))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, norms


def whole_of(param: torch.Tensor) -> torch.Tensor:
    return param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()


def differences(rank: int, world: int, plan: str, cases: list[Any]) -> list[float]:
    found = []
    for tp, given in cases:
        options = dict(given)
        by_user = options.pop("by_user", False)
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        expected, norms = trained_alone(world // tp, options.get("clip"))
        clip = options.pop("clip", None) if by_user else None
        model = parallel(make_model(), mesh["tp"], plan)
        before = {name: (id(param), type(param)) for name, param in model.named_parameters()}
        optimizer = zero.shard(model, adamw(model), group=mesh["dp"], **options)
        worst = 0.0
        for step in range(NUM_STEPS):
            loss_of(model, batch_of(step, mesh["dp"].get_local_rank())).backward()
            if by_user:
                worst = max(worst, abs(float(nn.utils.clip_grad_norm_(model.parameters(), clip)) / norms[step] - 1))
            optimizer.step()
            if not by_user:
                worst = max(worst, abs(optimizer.grad_norm / norms[step] - 1))
            optimizer.zero_grad()
        optimizer.check()
        assert {name: (id(param), type(param)) for name, param in model.named_parameters()} == before or options["stage"] == 3
        for _ in range(2):
            values = dict(expected.named_parameters())
            for name, param in model.named_parameters():
                worst = max(worst, float((whole_of(param) - values[name]).abs().max()))
            if _ == 0:
                optimizer.close()
        found.append(worst)
    return found


@pytest.mark.promise("Q07")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in turn", "all"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])  # by day random models are of four
def test_a_model_of_torchs_plans_trains_as_in_one_process(world: int, every: bool, plan: str) -> None:
    ways: list[dict[str, Any]] = [
        {"stage": 0, "clip": 0.05},
        {"stage": 1, "bucket_bytes": 256},
        {"stage": 2, "clip": 0.05, "by_user": True},
        {"stage": 2, "shared_memory": False},
        {"stage": 3, "keep_whole_numel": 0, "clip": 0.05},
        {"stage": 3, "keep_whole_numel": 0, "shared_memory": False, "gathered_bytes": 0},
    ]
    chosen = ways if every else ways[[*PLANS].index(plan) :: len(PLANS)]  # by day each way with one plan
    cases = [(tp, way) for tp in (2, 4) if tp <= world for way in chosen]
    for worst in ranks.run(world, differences, plan, cases):
        assert max(worst) < 1e-11, list(zip(cases, worst, strict=True))


def trained_from_a_checkpoint(rank: int, world: int, folder: str, tp: int, way: Any, first: int, last: int) -> float:
    """Trains from one step to another, with layers over so many ranks, between a load and a save."""
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    model = parallel(make_model(), mesh["tp"], "by columns and rows") if tp > 1 else make_model()
    with torch.no_grad():
        for param in model.parameters() if first else ():
            param.zero_()
    optimizer = zero.shard(model, adamw(model), group=mesh["dp"], keep_whole_numel=0, **way)
    if first:
        zero.load(folder, optimizer)
    groups, index = world // tp, mesh["dp"].get_local_rank()
    for step in range(first, last):
        for batch in range(index * 2 // groups, (index + 1) * 2 // groups):  # two in all
            (loss_of(model, batch_of(step, batch)) * groups / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.save(folder, optimizer)
    expected = make_model()
    plain = adamw(expected)
    for step in range(last):
        plain.zero_grad()
        for batch in range(2):
            (loss_of(expected, batch_of(step, batch)) / 2).backward()
        plain.step()
    values = dict(expected.named_parameters())
    worst = max(float((whole_of(param) - values[name]).abs().max()) for name, param in model.named_parameters())
    optimizer.close()
    return worst


@pytest.mark.promise("Q06", "Q07")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_checkpoint_goes_on_with_layers_over_another_number_of_ranks(every: bool, tmp_path: Path) -> None:
    ways: list[Any] = [(4, 2, {"stage": 3}), (4, 4, {"stage": 2}), (2, 1, {"stage": 1}), (2, 2, {"stage": 0}),
                       (1, 1, {"stage": 3}), (4, 2, {"stage": 2, "shared_memory": False})]  # fmt: skip
    for number, (world, tp, way) in enumerate(ways if every else ways[::2]):
        worst = ranks.run(world, trained_from_a_checkpoint, str(tmp_path), tp, way, number, number + 1)
        assert max(worst) < 1e-11, (number, worst)
    zero.export(tmp_path, tmp_path / "exported")
    weights = zero.read_export(tmp_path / "exported")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        name: tuple(value.shape) for name, value in make_model().state_dict().items()}  # fmt: skip


def shards_without_a_group(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model, said = parallel(make_model(), mesh["tp"], "by columns and rows"), []
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.weight is a DTensor, of which ranks \[0, 1\] have parts") as caught:
            zero.shard(model, adamw(model), stage=2)
        said.append(str(caught.value))
        zero.shard(model, adamw(model), stage=2, group=mesh["dp"]).close()  # this training says nothing of the next one
    return said


def shards_with_placements(rank: int, world: int) -> list[str]:
    mesh, said = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ep", "tp")), []
    for placements in ([Shard(1), Shard(2)], [Shard(0), Shard(0)], [Shard(0), Partial()]):
        model = nn.Module()
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4, 6), mesh, placements))
        with pytest.raises(ValueError, match="Cannot shard weight: its placements are") as caught:
            zero.shard(model, adamw(model), stage=2, group=mesh["ep"])
        said.append(str(caught.value))
    return said


@pytest.mark.promise("Q07")
def test_dtensors_whose_parts_are_in_no_rows_are_refused() -> None:
    [said] = ranks.run(1, shards_with_placements)
    assert all("along its first and another one. Distribute it so." in each for each in said), said


@pytest.mark.promise("Q07")
def test_whether_ranks_have_samples_of_their_own_is_said_and_not_guessed() -> None:
    assert all("pass group=mesh['dp']" in each for said in ranks.run(2, shards_without_a_group) for each in said)


def values_like(param: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(param.numel())
    return torch.randn(param.shape, generator=generator, dtype=torch.float64)


def change_grads(model: nn.Module, cut: bool) -> None:
    """Arithmetic on `.grad` with operands that are placed as the parameter is, or whole."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad.add_(param.detach(), alpha=0.1)
        param.grad.mul_(values_like(param))
        if cut and isinstance(param, DTensor):
            param.grad.add_(distribute_tensor(values_like(param), param.device_mesh, [Replicate()]))
        else:
            param.grad.add_(values_like(param))
        param.grad.mul_(values_like(param)[:1])


def trained_with_changed_grads(rank: int, world: int, plan: str, stage: int) -> float:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model, expected = parallel(make_model(), mesh["tp"], plan), make_model()
    optimizer, plain = zero.shard(model, adamw(model), stage=stage, group=mesh["dp"], keep_whole_numel=0), adamw(expected)
    for step in range(NUM_STEPS):
        loss_of(model, batch_of(step, mesh["dp"].get_local_rank())).backward()
        change_grads(model, cut=True)
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        for index in range(world // 2):
            (loss_of(expected, batch_of(step, index)) * 2 / world).backward()
        change_grads(expected, cut=False)
        plain.step()
    values = dict(expected.named_parameters())
    return max(float((whole_of(param) - values[name]).abs().max()) for name, param in model.named_parameters())


@pytest.mark.promise("Q07")
@pytest.mark.parametrize("plan", ["by sequences", pytest.param("by columns and rows", marks=pytest.mark.full)])
@pytest.mark.parametrize(("world", "stage"), [(2, 3), (4, 1), pytest.param(4, 3, marks=pytest.mark.full)])
def test_arithmetic_on_grad_takes_operands_of_the_whole_shape(world: int, stage: int, plan: str) -> None:
    assert max(ranks.run(world, trained_with_changed_grads, plan, stage)) < 1e-11


def trained_on_after_plain_steps(rank: int, world: int, stage: int, by_state_dict: bool) -> float:
    """Goes on sharded with an optimizer that has stepped the DTensors before, or with its state."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model, expected = parallel(make_model(), mesh["tp"], "by columns and rows"), make_model()
    inner, plain = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False), adamw(expected)
    for each, own in ((model, inner), (expected, plain)):
        loss_of(each, batch_of(0, 0)).backward()
        own.step()
        own.zero_grad()
    optimizer = zero.shard(model, adamw(model) if by_state_dict else inner, stage=stage, group=mesh["dp"], keep_whole_numel=0)
    if by_state_dict:
        optimizer.load_state_dict(inner.state_dict())
    for index in range(world // 2):
        (loss_of(expected, batch_of(1, index)) * 2 / world).backward()
    loss_of(model, batch_of(1, mesh["dp"].get_local_rank())).backward()
    plain.step()
    optimizer.step()
    values = dict(expected.named_parameters())
    return max(float((whole_of(param) - values[name]).abs().max()) for name, param in model.named_parameters())


@pytest.mark.promise("Q07")
@pytest.mark.parametrize(
    ("world", "stage", "by_state_dict"),
    [(2, 3, True), *(pytest.param(*each, marks=pytest.mark.full) for each in ((4, 1, False), (2, 3, False), (4, 1, True)))],
)
def test_state_that_a_plain_optimizer_had_of_dtensors_goes_on(world: int, stage: int, by_state_dict: bool) -> None:
    assert max(ranks.run(world, trained_on_after_plain_steps, stage, by_state_dict)) < 1e-11


def frozen_after_a_load(rank: int, world: int, plan: str, folder: str, stage: int) -> float:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    worst = 0.0
    for is_new in (True, False):
        model = parallel(make_model(), mesh["tp"], plan)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.mul_(2.0 if is_new else 0.0).requires_grad_("up" not in name and not name.startswith("1."))
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = zero.shard(model, torch.optim.AdamW(trained), stage=stage, group=mesh["dp"], keep_whole_numel=0)
        (zero.save if is_new else zero.load)(folder, optimizer)
        frozen = [getattr(param, "_local_tensor", param) for param in model.parameters() if not param.requires_grad]
        assert all(map(inside.is_absent, frozen)) == (stage == 3)
        for name, param in make_model().named_parameters():
            worst = max(worst, float((whole_of(model.get_parameter(name)) - 2 * param.detach()).abs().max()))
        optimizer.check()
        optimizer.close()
        assert not any(inside.is_absent(getattr(param, "_local_tensor", param)) for param in model.parameters())
        for name, param in make_model().named_parameters():
            worst = max(worst, float((whole_of(model.get_parameter(name)) - 2 * param.detach()).abs().max()))
    return worst


@pytest.mark.promise("Q06", "Q07")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_dtensors_are_in_shares_and_saved_and_loaded(tmp_path: Path, plan: str, stage: int) -> None:
    assert max(ranks.run(4, frozen_after_a_load, plan, str(tmp_path), stage)) == 0.0
    zero.export(tmp_path, tmp_path / "exported")
    weights = zero.read_export(tmp_path / "exported")
    assert all(torch.equal(weights[name], 2 * value) for name, value in make_model().state_dict().items())


def set_and_read(rank: int, world: int, stage: int, tp: int) -> list[float]:
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    model, differences = parallel(make_model(), mesh["tp"], "by columns and rows"), []
    optimizer = zero.shard(model, adamw(model), stage=stage, group=mesh["dp"], keep_whole_numel=0)
    loss_of(model, batch_of(0, mesh["dp"].get_local_rank())).backward()
    optimizer.step()
    for name in ("0.weight", "1.up.weight", "1.down.weight", "1.down.bias"):  # one of four ranks has nothing of the first
        param = model.get_parameter(name)
        values: Any = values_like(param)
        inside.set_master(optimizer, param, values)
        inside.set_state(optimizer, param, "exp_avg", values)
        moment = optimizer.whole_state(param)["exp_avg"]
        inside.set_state(optimizer, param, "exp_avg", moment)  # put back as it was read
        read = [param, inside.whole_master(optimizer, param), moment, optimizer.whole_state(param)["exp_avg"]]
        differences += [float((whole_of(each) - values).abs().max()) for each in read]
    return differences


def weights_of_files(rank: int, world: int, file: str) -> float:
    mesh, worst = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp")), 0.0
    for stage in (None, 2, 3):
        model = parallel(make_model(), mesh["tp"], "by columns and rows")
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        options = {"stage": stage, "keep_whole_numel": 0, "group": mesh["dp"]}
        optimizer = None if stage is None else zero.shard(model, adamw(model), **options)
        assert zero.load_weights(model, file) == ([], [])
        values = make_model().state_dict()
        for name, param in model.named_parameters():
            worst = max(worst, float((whole_of(param) - values[name]).abs().max()))
        if optimizer is not None:
            optimizer.close()
    return worst


@pytest.mark.promise("Q06", "Q09")
def test_each_rank_loads_its_own_rows_and_columns_of_the_weights_in_files(tmp_path: Path) -> None:
    torch.save(make_model().state_dict(), tmp_path / "weights.pt")
    assert max(ranks.run(4, weights_of_files, str(tmp_path / "weights.pt"))) == 0.0


@pytest.mark.promise("Q07")
@pytest.mark.parametrize(("stage", "tp"), [(1, 4), *(pytest.param(3, tp, marks=pytest.mark.full) for tp in (2, 4))])
def test_whole_values_of_dtensors_are_set_and_read(stage: int, tp: int) -> None:
    assert set(map(max, ranks.run(4, set_and_read, stage, tp))) == {0.0}


def found_by_verify(rank: int, world: int, plan: str, without: str) -> list[str]:
    """Returns what verify says of a model whose plan may lack an entry, beside a copy of what each rank has and the whole."""
    mesh, whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")), make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANS, plan, {name: style for name, style in PLANS[plan].items() if name != without})
        model = parallel(whole, mesh["tp"], plan)
    data = [batch_of(step, mesh["dp"].get_local_rank()) for step in range(2)]
    config, make = ZeroConfig(stage=2, bucket_bytes=512), functools.partial(torch.optim.AdamW, lr=0.05)
    return [str(zero.verify(model, data, loss_of, make, config, group=mesh["dp"], whole=each)) for each in (None, whole)]


@pytest.mark.promise("Q07")
@pytest.mark.parametrize(("plan", "without", "expected"), [
    ("by sequences", "norm", "different: step 0, parameter 1.norm.weight: its"),
    *(pytest.param(plan, "", "equal", marks=pytest.mark.full) for plan in PLANS),
])  # fmt: skip
def test_verify_finds_a_gradient_that_is_partial_along_the_mesh(plan: str, without: str, expected: str) -> None:
    for beside_copies, beside_whole in ranks.run(4, found_by_verify, plan, without):
        assert beside_copies.startswith("equal"), beside_copies
        assert beside_whole.startswith(expected), beside_whole


class Mpu:
    """Says which ranks share a model and which have samples of their own, as Megatron does."""

    def __init__(self, mesh: Any) -> None:
        self.get_data_parallel_group = mesh["dp"].get_group
        self.get_model_parallel_group = mesh["tp"].get_group
        self.get_model_parallel_world_size = mesh["tp"].size


class Cut(nn.Module):
    """A Block whose layers are cut by hand, into plain tensors that say how."""

    def __init__(self, whole: Block, mesh: Any) -> None:
        super().__init__()
        self.ranks, place, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.norm, self.up, self.down = whole.norm, nn.Module(), nn.Module()
        for layer, name, dim in (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1)):
            part = nn.Parameter(whole.get_parameter(f"{layer}.{name}").detach().chunk(size, dim)[place].clone())
            part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, 1
            self.get_submodule(layer).register_parameter(name, part)
        self.down.bias = whole.down.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = F.gelu(F.linear(Enter.apply(self.norm(x), self.ranks), self.up.weight, self.up.bias))
        return x + Leave.apply(F.linear(up, self.down.weight), self.ranks) + self.down.bias


def trained_by_an_engine(rank: int, world: int, how: str, stage: int) -> Any:
    """Returns the largest difference from one process, and numbers of the engine."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    expected, norms = trained_alone(world // 2, 0.05)
    if how == "cut by hand":
        model = make_model()
        model[1], model[2] = Cut(model[1], mesh["tp"]), Cut(model[2], mesh["tp"])
    else:
        model = parallel(make_model(), mesh["tp"], "by columns and rows")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.05, "zero_optimization": {"stage": stage}}
    said = {"group": mesh["dp"]} if how == "a mesh" else {"mpu": Mpu(mesh)}
    data = [batch_of(step, index)[sample] for step in range(NUM_STEPS) for sample in range(2) for index in range(world // 2)]
    engine, _, loader, _ = zero.initialize(model=model, optimizer=adamw(model), config=config, training_data=data, **said)
    assert len(loader.sampler) == NUM_STEPS * 2 and loader.sampler.rank == mesh["dp"].get_local_rank()
    loader = engine.deepspeed_io(data, route="eval")  # in order
    worst = 0.0
    for step, x in enumerate(loader):
        engine.backward(loss_of(engine, x))
        engine.step()
        worst = max(worst, abs(engine.get_global_grad_norm() / norms[step] - 1))
    engine.check()
    numbers = (engine.dp_world_size, engine.get_data_parallel_rank(), engine.mp_world_size, engine.get_model_parallel_rank(),
               engine.train_batch_size(), engine.global_samples)  # fmt: skip
    engine.destroy()
    values = dict(expected.named_parameters())
    for name, param in model.named_parameters():
        value, dim = values[name].detach(), getattr(param, "partition_dim", None)
        value = value if dim is None else value.chunk(2, dim)[mesh["tp"].get_local_rank()]
        worst = max(worst, float((whole_of(param) - value).abs().max()))
    return worst, numbers


@pytest.mark.promise("Q07")
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2))])
@pytest.mark.parametrize("how", [pytest.param("a mesh", marks=pytest.mark.full), "an mpu", "cut by hand"])
def test_an_engine_trains_parts_across_ranks_with_samples_of_their_own(how: str, stage: int) -> None:
    found = ranks.run(4, trained_by_an_engine, how, stage)
    assert max(worst for worst, _ in found) < 1e-11
    assert [numbers for _, numbers in found] == [(2, rank // 2, 2, rank % 2, 4, 12) for rank in range(4)]


def refused_by_an_engine(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    config, said = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}, []
    parts, cut = parallel(make_model(), mesh["tp"], "by columns and rows"), make_model()
    cut[1] = Cut(cut[1], mesh["tp"])
    cut[1].up.weight.partition_stride = 2
    along = make_model()
    along[0].weight.sequence_parallel = True
    calls: list[Any] = [(parts, {}), (make_model(), {"mpu": Mpu(mesh)}), (cut, {"mpu": Mpu(mesh)}), (along, {"mpu": Mpu(mesh)}),
                        (make_model(), {"mpu": Mpu(mesh), "group": mesh["dp"]})]  # fmt: skip
    for model, options in calls:
        with pytest.raises(ValueError) as caught:
            zero.initialize(model=model, optimizer=adamw(model), config=config, **options)
        said.append(str(caught.value))
    return said


@pytest.mark.promise("Q07")
def test_an_engine_refuses_parts_of_which_nobody_said_who_has_samples_of_their_own() -> None:
    expected = ["without group: 0.weight is a DTensor", "no parameter says that it is a part", "how 1.up.weight is cut",
                "0.weight has a part of its gradient on each rank", "Pass one."]  # fmt: skip
    for said in ranks.run(2, refused_by_an_engine):
        assert all(text in each for text, each in zip(expected, said, strict=True))


def killed_in_a_backward(rank: int, world: int) -> str:
    """Rank 3 dies in its second backward. Returns the error of the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(make_model(), mesh["tp"], "by columns and rows")
    optimizer = zero.shard(model, adamw(model), group=mesh["dp"], stage=2, timeout_s=5.0)
    for step in range(2):
        loss = loss_of(model, batch_of(step, mesh["dp"].get_local_rank()))
        if (rank, step) == (3, 1):
            model[0].bias.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with contextlib.suppress(RuntimeError):  # the collectives of layers fail too, as torch has them
            loss.backward()
        try:
            optimizer.step()
        except GroupLost as error:
            return str(error)
        optimizer.zero_grad()
    return "nothing was raised"


@pytest.mark.full
def test_a_rank_of_a_mesh_that_dies_is_named_on_all_others_with_what_it_did() -> None:
    *others, killed = ranks.outcomes(4, killed_in_a_backward, fresh=True)
    assert killed.kind == "died"
    for outcome in others:
        assert "rank 3 was last seen in a backward of step 2" in outcome.value and "is gone" in outcome.value, outcome
