"""LBFGS, in shares or not, and others that add something up over all parameters: at stage 0, where every rank has all."""

import copy

import pytest
import torch
from torch import nn

import zero
from tests.parity import hybrid
from tests.promises.loops import same, weights
from tests.zoo.case import filled
from zero.comm.loopback import run_ranks, solo
from zero.errors import RankFailed, RanksDiffer
from zero.optim.traits import num_moments
from zero.sharding.memory_usage import measured_bytes

OPTIM = torch.optim
WAYS = [{}, {"line_search_fn": "strong_wolfe"}, {"history_size": 2, "max_eval": 4}]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layers(x)


def net():
    return filled(Net(), real=True)


def lbfgs(model, way):
    return OPTIM.LBFGS(model.parameters(), lr=0.5, max_iter=6, **way)


def batch(step, dtype=torch.float64):
    """The same on all ranks, so that means over ranks are exact."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator).to(dtype), torch.randn(8, 3, generator=generator).to(dtype)


def train(model, optimizer, steps):
    """The losses, and how often they were computed."""
    losses, calls = [], []
    for step in steps:
        x, y = batch(step, next(model.parameters()).dtype)

        def closure(x=x, y=y, step=step):
            calls.append(step)
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, calls


@pytest.mark.promise("O10")
@pytest.mark.promise("O11")
@pytest.mark.parametrize("way", WAYS)
def test_lbfgs_is_plain_torchs_bit_by_bit_and_calls_its_closure_as_often(way):
    plain = net()
    optimizer = lbfgs(plain, way)
    expected = train(plain, optimizer, range(3))
    assert len(expected[1]) > 6

    def one(group):
        sharded = zero.shard(models[group.rank], lbfgs(models[group.rank], way), stage=0, group=group, bucket_bytes=64)
        told = train(models[group.rank], sharded, range(3))
        return told, weights(models[group.rank]), [sharded.whole_state(param) for param in models[group.rank].parameters()]

    state = optimizer.state[next(iter(plain.parameters()))]
    for world in (1, 4):
        models = [net() for _ in range(world)]
        for told, now, entries in run_ranks(world, one, 20.0):
            assert told == expected and same(now, weights(plain))
            assert torch.equal(torch.cat([entry["d"].reshape(-1) for entry in entries]), state["d"])
            assert all(entry["n_iter"] == state["n_iter"] for entry in entries)


IN_SHARES = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "clip": 0.05},
    {"stage": 2, "offload": "cpu"},
    {"stage": 2, "whole_tensors": True},
    {"stage": 3},
    {"stage": 3, "gathered_bytes": 0, "keep_whole_numel": 5},
]


@pytest.mark.promise("O10")
@pytest.mark.parametrize("options", IN_SHARES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_in_shares_it_is_plain_torchs_but_for_the_order_of_sums(world, options):
    """In buckets of 64 bytes, so that parameters are cut."""

    def one(group, bucket_bytes=64, **options):
        model = models[group.rank]
        optimizer = zero.shard(model, lbfgs(model, WAYS[1]), group=group, bucket_bytes=bucket_bytes, **options)
        told = train(model, optimizer, range(3))
        entries = [optimizer.whole_state(param) for param in model.parameters()]
        optimizer.close()
        return told, weights(model), entries

    models = [net().double()]
    [expected] = run_ranks(1, lambda group: one(group, stage=0, clip=options.get("clip")), 20.0)
    models = [net().double() for _ in range(world)]
    found = run_ranks(world, lambda group: one(group, **options), 20.0)
    for (losses, calls), now, entries in found:
        assert calls == expected[0][1] and losses == pytest.approx(expected[0][0], rel=1e-9)
        assert same(now, found[0][1])
        for name, value in expected[1].items():
            torch.testing.assert_close(now[name], value, rtol=1e-7, atol=1e-9)
        for mine, entry in zip(entries, expected[2], strict=True):
            assert mine.keys() == entry.keys() and "old_stps.3" in mine
            torch.testing.assert_close(mine["old_stps.3"], entry["old_stps.3"], rtol=1e-6, atol=1e-8)


@pytest.mark.promise("R15")
def test_so_it_is_with_states_in_shares_of_a_part_of_the_ranks():
    def one(group):
        model = models[group.rank]
        optimizer = zero.shard(model, lbfgs(model, WAYS[1]), stage=2, group=group, bucket_bytes=64)
        return train(model, optimizer, range(3)), weights(model)

    plain = net().double()
    losses, calls = train(plain, lbfgs(plain, WAYS[1]), range(3))
    models = [net().double() for _ in range(4)]
    for told, now in run_ranks(4, lambda group: one(hybrid(group, 2)), 20.0):
        assert told[1] == calls and told[0] == pytest.approx(losses, rel=1e-9)
        assert all(torch.allclose(now[name], value, rtol=1e-7, atol=1e-9) for name, value in weights(plain).items())


def test_a_rank_without_any_element_takes_part():
    def one(group, stage):
        model = models[group.rank]
        optimizer = zero.shard(model, OPTIM.LBFGS(model.parameters(), max_iter=4), stage=stage, group=group)
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = (model.weight - step).square().sum() * (1 + model.weight[0]).square()
                loss.backward()
                return loss

            optimizer.step(closure)
        optimizer.close()
        return weights(model)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))

    models = [Two()]
    [expected] = run_ranks(1, lambda group: one(group, 0), 20.0)
    for stage in (1, 3):
        models = [Two() for _ in range(4)]
        for now in run_ranks(4, lambda group, stage=stage: one(group, stage), 20.0):
            torch.testing.assert_close(now["weight"], expected["weight"], rtol=1e-9, atol=0)


def test_its_vectors_are_counted_as_moments():
    model = net().double()
    inner = OPTIM.LBFGS(model.parameters(), lr=0.5, max_iter=6, history_size=3)
    assert num_moments(inner) == [2 + 2 * 3]
    optimizer = zero.shard(model, inner, stage=2, group=solo())
    train(model, optimizer, range(3))
    held = measured_bytes(optimizer.sharding).device
    assert held.moments == 8 * sum(param.numel() * 8 for param in model.parameters()), held
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_state_of_plain_torch_goes_on(stage):
    plain = net().double()
    optimizer = lbfgs(plain, WAYS[1])
    train(plain, optimizer, range(2))
    before, saved = weights(plain), copy.deepcopy(optimizer.state_dict())
    expected, _ = train(plain, optimizer, range(2, 4))

    def begun(model, loads):
        model.load_state_dict(before)
        inner = lbfgs(model, WAYS[1])
        if not loads:
            inner.load_state_dict(copy.deepcopy(saved))
        return inner

    def one(group, loads):
        model = models[group.rank]
        sharded = zero.shard(model, begun(model, loads), stage=stage, group=group)
        if loads:
            sharded.load_state_dict(saved)
        return train(model, sharded, range(2, 4))[0]

    for loads in (False, True):
        models = [net().double(), net().double()]
        for losses in run_ranks(2, lambda group, loads=loads: one(group, loads), 20.0):
            assert losses == pytest.approx(expected, rel=1e-9)


def test_what_each_rank_has_is_evaluated_on_the_joint_batch():
    plain = net().double()
    expected, _ = train(plain, lbfgs(plain, WAYS[1]), range(2))

    def one(group):
        model, losses = models[group.rank], []
        optimizer = zero.shard(model, lbfgs(model, WAYS[1]), stage=0, group=group)
        for step in range(2):
            x, y = (values.chunk(2)[group.rank] for values in batch(step))

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, weights(model)

    models = [net().double() for _ in range(2)]
    (first, now), (second, other) = run_ranks(2, one, 20.0)
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(expected, rel=1e-9)
    assert same(now, other) and first != second
    assert all(torch.allclose(now[name], value, rtol=1e-7, atol=1e-9) for name, value in weights(plain).items())


@pytest.mark.parametrize(
    ("dtype", "stages"), [(None, (0, 0, 0)), ("bfloat16", (0, 0, 0)), (None, (1, 3, 0)), (None, (0, 2, 1))]
)
def test_it_goes_on_from_a_checkpoint_of_another_number_of_ranks_and_stage(tmp_path, dtype, stages):
    def sharded(group, stage):
        model = models[group.rank] if dtype or not any(stages) else models[group.rank].double()
        return zero.shard(model, lbfgs(model, WAYS[1]), stage=stage, group=group, dtype=dtype)

    def first(group):
        optimizer = sharded(group, stages[0])
        train(models[group.rank], optimizer, range(2))
        zero.save(tmp_path, optimizer, "there")

    def second(group):
        optimizer = sharded(group, stages[1])
        zero.load(tmp_path, optimizer)
        train(models[group.rank], optimizer, range(2, 4))
        optimizer.close()
        return weights(models[group.rank])

    def straight(group):
        train(models[group.rank], sharded(group, stages[2]), range(4))
        return weights(models[group.rank])

    models = [net(), net()]
    run_ranks(2, first, 20.0)
    models = [net() for _ in range(4)]
    found = run_ranks(4, second, 20.0)
    models = [net()]
    [expected] = run_ranks(1, straight, 20.0)
    for now in found:
        if any(stages):  # sums are taken in another order
            assert all(torch.allclose(now[name], value, rtol=1e-7, atol=1e-9) for name, value in expected.items())
        else:
            assert same(now, expected)


def test_what_it_cannot_do_is_said():
    model = net()
    for options, message in (
        ({"stage": 0, "on_nonfinite": "skip"}, "Cannot shard LBFGS where a step may be skipped"),
        ({"stage": 0, "dtype": "float16"}, "Cannot shard LBFGS where a step may be skipped"),
    ):
        with pytest.raises(ValueError, match=message):
            zero.shard(model, lbfgs(model, {}), **options)
    mixed = nn.ModuleList([net(), net().double()])
    with pytest.raises(ValueError, match=r"Cannot shard LBFGS with parameters of .* it takes all of them for one vector"):
        zero.shard(mixed, lbfgs(mixed, {}), stage=1)
    more = OPTIM.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match="Cannot shard LBFGS beside others"):
        zero.shard(model, [lbfgs(model, {}), more], stage=0)
    optimizer = zero.shard(model, lbfgs(model, {}), stage=0)
    with pytest.raises(ValueError, match="Cannot step LBFGS without a closure"):
        optimizer.step()
    with pytest.raises(ValueError, match="Cannot evaluate: the closure sent no loss backward"):
        optimizer.step(lambda: torch.tensor(1.0))
    assert optimizer.sharding.window.sync.step == 0
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_that_is_trained_later_is_so_as_in_plain_torch(stage):
    def trained(model, optimizer):
        model.layers[0].weight.requires_grad_(False)
        first = train(model, optimizer, range(2))
        model.layers[0].weight.requires_grad_(True)
        return first, train(model, optimizer, range(2, 4))

    def one(group):
        model = models[group.rank]
        model.layers[0].weight.requires_grad_(False)
        optimizer = zero.shard(model, lbfgs(model, {}), stage=stage, group=group)
        told = trained(model, optimizer)
        optimizer.close()
        return told, weights(model)

    plain = net().double()
    expected = trained(plain, lbfgs(plain, {}))
    models = [net().double(), net().double()]
    for told, now in run_ranks(2, one, 20.0):
        assert [calls for _, calls in told] == [calls for _, calls in expected]
        assert all(torch.allclose(now[name], value, rtol=1e-7, atol=1e-9) for name, value in weights(plain).items())


def test_a_parameter_that_is_trained_in_the_middle_of_a_step_is_refused():
    model = net()
    model.layers[0].weight.requires_grad_(False)
    optimizer = zero.shard(model, lbfgs(model, {}), stage=0)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        model.layers[0].weight.requires_grad_(True)
        return loss

    with pytest.raises(ValueError, match="Cannot evaluate: a parameter became trainable in the middle of a step of LBFGS"):
        optimizer.step(closure)
    optimizer.close()


def test_ranks_that_would_evaluate_differently_are_told():
    def one(group):
        model = models[group.rank]
        inner = lbfgs(model, {})
        if group.rank:  # as if it computed otherwise, so that it has arrived after the first evaluation
            inner._gather_flat_grad = lambda: torch.zeros(())
        optimizer = zero.shard(model, inner, stage=0, group=group)
        with pytest.raises(RanksDiffer, match="after 1 evaluations some ranks want another and others do not"):
            train(model, optimizer, range(1))

    models = [net(), net()]
    run_ranks(2, one, 20.0)


class Injected(Exception):
    """Raised in a closure."""


@pytest.mark.promise("T01")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_closure_that_raises_in_a_later_evaluation_leaves_weights_torn_until_a_load(world, stage, tmp_path):
    """They are at a point that the optimizer only tried."""

    def one(group):
        model = net()
        optimizer = zero.shard(model, OPTIM.LBFGS(model.parameters(), max_iter=3), stage=stage, group=group, timeout_s=20.0)
        calls = []

        def closure():
            calls.append(group.rank)
            optimizer.zero_grad()
            if len(calls) == failing and group.rank == 0:
                raise Injected
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            return loss

        failing = None
        optimizer.step(closure)
        zero.save(tmp_path, optimizer)
        optimizer.step(closure)
        expected = optimizer.state_dict()["masters"]
        for failing in (1, 2, 3):  # noqa: B007 - the closure reads it
            zero.load(tmp_path, optimizer)
            calls.clear()
            with pytest.raises((Injected, RankFailed)):
                optimizer.step(closure)
            optimizer.zero_grad()
            if len(calls) == 1:
                optimizer.state_dict()
            else:
                with pytest.raises(ValueError, match="broke off, so weights may be written in part"):
                    optimizer.state_dict()
        failing = None
        zero.load(tmp_path, optimizer)
        optimizer.step(closure)
        return same(optimizer.state_dict()["masters"], expected)

    assert all(run_ranks(world, one, 20.0))


class Summed(OPTIM.Optimizer):
    """Finds its rate from a sum over all parameters, as Prodigy does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "moved": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moved = sum(p.grad.abs().sum().item() for p in used)
        for group in self.param_groups:
            group["moved"] += moved
        for p in used:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (1 + self.param_groups[0]["moved"]))


class Prodigy(Summed):
    pass


@pytest.mark.promise("O11")
def test_sums_over_all_parameters_are_those_of_plain_torch_at_stage_0():
    def steps(model, optimizer):
        for step in range(3):
            x, y = batch(step, torch.float32)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), optimizer.param_groups[0]["moved"]

    def one(group):
        model = models[group.rank]
        return steps(model, zero.shard(model, Prodigy(model.parameters()), stage=0, group=group, bucket_bytes=64))

    plain = net()
    expected = steps(plain, Prodigy(plain.parameters()))
    models = [net(), net()]
    for found in run_ranks(2, one, 20.0):
        assert same(found[0], expected[0]) and found[1] == expected[1]
