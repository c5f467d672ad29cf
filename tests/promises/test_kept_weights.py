"""Stage 3 with small parameters that every rank keeps whole."""

import itertools

import pytest
import torch
from torch import nn

import zero
from tests import inside, ranks
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from tests.promises.test_sharded_weights import mlp, same, shard, train, values

KEEP = 32  # biases, and no weight
KINDS = [False, True] * 3  # by parameter, in the model's order: weights are smaller than the limit in no layer


def kept(model):
    return [not inside.is_absent(param) for param in model.parameters()]


def trained(rank, world, device, dtype, shared_memory, offload):
    place = place_of(rank, device, "random:1")
    model, plain = mlp().to(place), mlp().to(place)
    options = {"dtype": dtype, "shared_memory": shared_memory, "offload": offload}
    optimizer, beside = shard(model, 3, keep_whole_numel=KEEP, **options), shard(plain, 2, **options)
    assert kept(model) == KINDS
    assert all(type(param) is nn.Parameter for param in list(model.parameters())[1::2])
    for one, sharded in ((model, optimizer), (plain, beside)):
        torch.manual_seed(rank)
        for step in range(3):
            with torch.no_grad():  # edits of both kinds
                one[0].bias.mul_(0.5)
                one[2].weight[1:3].add_(1.0)
                one[4].bias.data = one[4].bias.data + step
            x = torch.randn(4, 8).to(place, next(one.parameters()).dtype)
            one(x).square().mean().backward()
            sharded.step()
            sharded.zero_grad()
    assert same(values(model), values(plain))
    assert same(*([inside.whole_master(each, param) for param in each.model.parameters()] for each in (optimizer, beside)))
    optimizer.check()
    if offload is None:
        optimizer.offload_states()
        optimizer.reload_states()
        assert same(values(model), values(plain))
    before = values(plain)
    for one in (optimizer, beside):
        one.close()
    assert not any(inside.is_absent(param) for param in model.parameters()) and same(values(model), before)


BY_DAY = [(1, "bfloat16", True), (2, None, True), (3, "bfloat16", False)]
AT_NIGHT = [one for one in itertools.product((1, 2, 3), (None, "bfloat16"), (True, False)) if one not in BY_DAY]


@pytest.mark.parametrize(
    ("world", "dtype", "shared_memory"), [*BY_DAY, *(pytest.param(*one, marks=pytest.mark.full) for one in AT_NIGHT)]
)
def test_small_parameters_that_stay_whole_train_like_those_of_stage_2(world, dtype, shared_memory):
    ranks.run(world, trained, "cpu", dtype, shared_memory, None)


@needs_sim
@pytest.mark.parametrize("offload", [{"ratio": 0.5}, *(pytest.param(each, marks=pytest.mark.full) for each in (None, "cpu"))])
def test_so_they_do_on_a_device_with_states_there_or_on_the_host(offload):
    ranks.run(2, trained, "sim", "bfloat16", True, offload, apart="sim")


def from_meta(rank, world, folder, way):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))
        model[0].bias.requires_grad_(False)
    expected = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    torch.manual_seed(1)
    for module in expected:
        module.reset_parameters()
    optimizer = shard(model, 3, keep_whole_numel=KEEP)
    assert kept(model) == [False, False, True, True, False, True]  # a frozen one that has no memory yet is in shares
    with pytest.raises(RuntimeError, match=r"Cannot step: nobody has written to .*2\.bias.*\(6 such"):
        optimizer.step()
    if way == "init":
        torch.manual_seed(1)
        for module in model:
            module.reset_parameters()
    else:
        if rank == 0:
            torch.save(expected.state_dict(), f"{folder}/weights.pt")
        optimizer.check()  # all have come here
        zero.load_weights(model, f"{folder}/weights.pt")
    assert same(values(model), values(expected))
    expected[0].bias.requires_grad_(False)
    beside = shard(expected, 2)
    train(model, optimizer, rank)
    train(expected, beside, rank)
    assert same(values(model), values(expected))
    optimizer.close()
    beside.close()


@pytest.mark.parametrize("way", ["init", "load"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_from_the_meta_device_is_given_its_values_as_without_them(world, way, tmp_path):
    ranks.run(world, from_meta, str(tmp_path), way)


def unwritten(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    optimizer = shard(model, 3, keep_whole_numel=KEEP)
    nn.init.ones_(model[0].bias)
    optimizer.close()
    assert [param.is_meta for param in model.parameters()] == [True, False, True, True]


def test_what_nobody_wrote_is_on_the_meta_device_again_after_close():
    ranks.run(2, unwritten)


def resumed(rank, world, folder, saved, loaded):
    model, other = mlp(), mlp()
    optimizer = shard(model, 3, keep_whole_numel=saved)
    train(model, optimizer, rank)
    zero.save(folder, optimizer)
    continued = shard(other, 3, keep_whole_numel=loaded)
    zero.load(folder, continued)
    assert same(values(model), values(other))
    train(model, optimizer, rank)
    train(other, continued, rank)
    assert same(values(model), values(other))
    optimizer.close()
    continued.close()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(0, KEEP), (KEEP, 10**9), *(pytest.param(*one, marks=pytest.mark.full) for one in [(KEEP, 0), (10**9, KEEP)])],
)
def test_a_checkpoint_does_not_depend_on_what_is_kept(saved, loaded, tmp_path):
    ranks.run(2, resumed, str(tmp_path), saved, loaded)


def frozen_and_late(rank, world):
    models = [mlp(), mlp()]
    optimizers = []
    for model, stage in zip(models, (3, 2), strict=True):
        for param in model[2].parameters():
            param.requires_grad_(False)
        optimizers.append(shard(model, stage, **({"keep_whole_numel": KEEP} if stage == 3 else {})))
    assert kept(models[0]) == KINDS
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, rank)
        for param in model[2].parameters():
            param.requires_grad_(True)
        train(model, optimizer, rank)
        model.append(nn.Linear(4, 8))
        with torch.no_grad():
            for param in model[-1].parameters():
                param.fill_(0.125)
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        train(model, optimizer, rank)
    assert kept(models[0]) == [*KINDS, True, True]
    assert same(*map(values, models))
    for optimizer in optimizers:
        optimizer.close()


def test_frozen_and_late_parameters_are_kept_too():
    ranks.run(2, frozen_and_late)


def counted(rank, world, device, offload):
    model = mlp().to(place_of(rank, device))
    optimizer = shard(model, 3, keep_whole_numel=KEEP, offload=offload, dtype="bfloat16")
    is_host = inside.device_of_masters(optimizer).type == "cpu"
    found, planned = inside.memory_in_use(optimizer), inside.planned(optimizer, rank, shards_weights=True, on_host=is_host)
    optimizer.close()
    return [(one.device.weights, one.host.weights) for one in (found, planned)]


@pytest.mark.parametrize(("device", "offload"), [
    ("cpu", None), *(pytest.param("sim", offload, marks=[needs_sim, pytest.mark.full]) for offload in (None, "cpu")),
])  # fmt: skip
def test_the_plan_counts_them_whole_on_the_device(device, offload):
    for found, planned in ranks.run(2, counted, device, offload, apart=device if device == "sim" else ""):
        assert found == planned and found[0] > 0
