"""LBFGS, and others that add something up over all parameters: at stage 0, where every rank has all of them."""

import pytest
import torch
from torch import nn

import zero
from tests.promises.loops import same, weights
from tests.zoo.case import filled
from zero.comm.loopback import run_ranks
from zero.errors import RanksDiffer

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
        return train(models[group.rank], sharded, range(3)), weights(models[group.rank]), sharded.whole_state(first(group.rank))

    def first(rank):
        return next(iter(models[rank].parameters()))

    state = optimizer.state[next(iter(plain.parameters()))]
    for world in (1, 2, 4):
        models = [net() for _ in range(world)]
        for told, now, entries in run_ranks(world, one, 20.0):
            assert told == expected and same(now, weights(plain))
            assert torch.equal(entries["d"], state["d"]) and entries["n_iter"] == state["n_iter"]


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


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_it_goes_on_from_a_checkpoint_of_another_number_of_ranks(tmp_path, dtype):
    def sharded(group):
        return zero.shard(models[group.rank], lbfgs(models[group.rank], WAYS[1]), stage=0, group=group, dtype=dtype)

    def first(group):
        optimizer = sharded(group)
        train(models[group.rank], optimizer, range(2))
        zero.save(tmp_path, optimizer, "there")

    def second(group):
        optimizer = sharded(group)
        zero.load(tmp_path, optimizer)
        train(models[group.rank], optimizer, range(2, 4))
        return weights(models[group.rank])

    def straight(group):
        train(models[group.rank], sharded(group), range(4))
        return weights(models[group.rank])

    models = [net(), net()]
    run_ranks(2, first, 20.0)
    models = [net() for _ in range(4)]
    found = run_ranks(4, second, 20.0)
    models = [net()]
    [expected] = run_ranks(1, straight, 20.0)
    assert all(same(now, expected) for now in found)


def test_what_it_cannot_do_is_said():
    model = net()
    for options, message in (
        ({"stage": 1}, "Cannot shard LBFGS: it searches along one line .* Use stage=0"),
        ({"stage": 0, "on_nonfinite": "skip"}, "Cannot shard LBFGS where a step may be skipped"),
        ({"stage": 0, "dtype": "float16"}, "Cannot shard LBFGS where a step may be skipped"),
    ):
        with pytest.raises(ValueError, match=message):
            zero.shard(model, lbfgs(model, {}), **options)
    more = OPTIM.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match="Cannot shard LBFGS beside others"):
        zero.shard(model, [lbfgs(model, {}), more], stage=0)
    optimizer = zero.shard(model, lbfgs(model, {}), stage=0)
    with pytest.raises(ValueError, match="Cannot step LBFGS without a closure"):
        optimizer.step()
    with pytest.raises(ValueError, match="Cannot evaluate: the closure sent no loss backward"):
        optimizer.step(lambda: torch.tensor(1.0))
    optimizer.close()


def test_a_parameter_that_is_trained_later_is_refused_and_not_left_where_it_is():
    model = net()
    model.layers[0].weight.requires_grad_(False)
    optimizer = zero.shard(model, lbfgs(model, {}), stage=0)
    train(model, optimizer, range(1))
    model.layers[0].weight.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="Cannot step LBFGS: a parameter became trainable after its first step"):
            train(model, optimizer, range(1))
    optimizer.close()


def test_ranks_that_would_evaluate_differently_are_told():
    def one(group):
        model = models[group.rank]
        inner = lbfgs(model, {})
        if group.rank:  # as if it computed otherwise, so that it has arrived after the first evaluation
            inner._gather_flat_grad = lambda: torch.zeros(())
        optimizer = zero.shard(model, inner, stage=0, group=group)
        with pytest.raises(RanksDiffer, match="after 1 evaluations some ranks want another one and some do not"):
            train(model, optimizer, range(1))

    models = [net(), net()]
    run_ranks(2, one, 20.0)


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
