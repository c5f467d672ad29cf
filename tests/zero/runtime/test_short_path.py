"""The short path of a gradient is taken where it can be, and gives the bits of the long one."""

import ast
import inspect
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import walk
from tests.loopback import run_ranks
from tests.zoo.case import filled, real_numbers
from zero.errors import RankFailed
from zero.window import window as window_module
from zero.window.window import Window

LONG = mock.patch.object(Window, "takes_short_path", False)


class Branches(nn.Module):
    """A conv in channels-last, a layer that a step may leave out, one that is used twice, one larger than a bucket."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.twice, self.rare, self.wide = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64)

    def forward(self, x, uses_rare):
        hidden = self.twice(self.twice(self.conv(x).mean((2, 3))))
        return self.wide(self.rare(hidden) if uses_rare else hidden).square().mean()


def training(group, stage, dtype):
    """Steps of one, two and three backwards, with weights, no_sync and an edit of a gradient; returns what was trained, and how
    many parameters' gradients took the long path in each step."""
    torch.manual_seed(0)
    model = filled(Branches(), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, inner, stage=stage, dtype=dtype, bucket_bytes=64, group=group)
    window, took_long = optimizer.sharding.window, list[int]()

    def backward(step, micro=0):
        batch = real_numbers((2, 2, 5, 5), 10 * step + micro + 100 * group.rank)
        batch = batch if dtype is None else batch.to(getattr(torch, dtype))
        model(batch.to(memory_format=torch.channels_last), uses_rare=(step + group.rank) % 3 > 0).backward()

    for step in range(8):
        with mock.patch.object(window, "grad_ready", wraps=window.grad_ready) as long:
            if step % 4 == 1:
                with optimizer.no_sync():
                    backward(step)
            if step % 4 == 2:
                optimizer.weight(1.0 + group.rank)
            backward(step, 1)
            if step % 4 == 3:
                backward(step, 2)
                model.twice.weight.grad = torch.ones_like(model.twice.weight)
                backward(step, 3)
        took_long.append(len({call.args[0] for call in long.call_args_list}))
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.gathered():
        return [param.detach().clone() for param in model.parameters()], took_long


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_both_paths_give_the_same_bits(world, stage, dtype):
    short = run_ranks(world, lambda group: training(group, stage, dtype))
    with LONG:
        long = run_ranks(world, lambda group: training(group, stage, dtype))
    for (found, took_long), (expected, took_all) in zip(short, long, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert took_long[4] < took_all[4] / 2, "a step with nothing special in it"
        assert took_long[2] == took_all[2], "gradients that have a weight"


def test_after_a_parameters_first_gradient_only_the_first_of_a_backward_takes_the_long_path():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=128)
    window = optimizer.sharding.window
    for number in range(3):
        with mock.patch.object(window, "grad_ready", wraps=window.grad_ready) as long:
            model(torch.ones(1, 4)).sum().backward()
        assert len({call.args[0] for call in long.call_args_list}) == (16 if number == 0 else 1)
        optimizer.step()
        optimizer.zero_grad()


class Injected(Exception):
    """Raised in the middle of a backward."""


def at_once(param, act):
    """Calls `act` the next time that a gradient of a parameter has come."""

    def hook(_):
        handle.remove()
        act()

    handle = param.register_post_accumulate_grad_hook(hook)


def fail():
    raise Injected


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_that_fails_is_noticed_after_one_in_which_a_hook_cleared_the_window(world, short):
    def program(group):
        model = filled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), real=True)
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=64, group=group)
        for _ in range(2):  # after the first all places are known
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def begin_anew():
            optimizer.zero_grad()
            model[3].weight.grad = torch.ones(4, 4)

        at_once(model[3].weight, begin_anew)
        model(torch.ones(1, 4)).sum().backward()
        before = [param.detach().clone() for param in model.parameters()]
        at_once(model[2].weight, fail)
        with pytest.raises(Injected):
            model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RankFailed):
            optimizer.step()
        assert all(torch.equal(*both) for both in zip(model.parameters(), before, strict=True))

    with mock.patch.object(Window, "takes_short_path", short):
        run_ranks(world, program)


def test_what_a_window_changes_of_itself_is_in_its_records():
    """A window changes only these attributes of itself; the rest begins anew when a record is assigned."""
    beside = {"phase", "clears", "_settling"}
    window = next(node for node in ast.parse(inspect.getsource(window_module)).body if getattr(node, "name", "") == "Window")
    methods = [node for node in window.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    changed = {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "window")
    }
    assert changed == {"since_reset", "since_settling", "backward"} | beside


@pytest.mark.parametrize("short", [True, False])
def test_a_gradient_that_has_a_weight_opens_no_round_that_it_does_not_fill(short):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).bfloat16()
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=64)
    reducer = optimizer.sharding.window.reducer
    with mock.patch.object(Window, "takes_short_path", short):
        for _ in range(3):
            optimizer.weight(3.0)
            model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            assert reducer.open_buckets == 0 != reducer.wide_buckets
            optimizer.step()
            optimizer.zero_grad()


def test_on_one_rank_a_backward_that_carries_the_loss_scale_counts_once():
    """The callback that ends it runs before those gradients are taken that stay up to the end of a backward."""
    grads = []
    for scale in (1.0, 64.0):
        model = filled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), real=True)
        config = zero.ZeroConfig(stage=2, dtype="float16", loss_scale=scale, bucket_bytes=64)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, optimizer, *_ = zero.initialize(model=model, optimizer=inner, config=config)
        for number in range(2):
            engine.scale(engine(real_numbers((2, 4), number)).float().square().mean()).backward()
            grads += [optimizer.whole_grad(param) for param in model.parameters()]
            optimizer.zero_grad()
        optimizer.close()
    for one, other in zip(grads[: len(grads) // 2], grads[len(grads) // 2 :], strict=True):
        assert torch.allclose(one, other, rtol=2e-2, atol=1e-3)


def test_sequences_of_operations_by_the_long_path():
    with LONG:
        assert not list(walk.wrong_together(range(12), 8, stage=2))


def test_on_one_rank_an_operator_copies_what_came_for_a_bucket():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=256)
    num_buckets, grads = len(optimizer.sharding.layout_ref.layout.buckets), list[int]()
    for number in range(3):
        copy = mock.Mock(wraps=torch.cat)
        with mock.patch.object(torch, "cat", copy):
            model(torch.ones(1, 4)).sum().backward()
        grads.append(sum(line.any().item() for call in copy.call_args_list for line in call.args[0]))
        assert copy.call_count == (0 if number == 0 else num_buckets)
        optimizer.step()
        optimizer.zero_grad()
    assert grads[1:] == [16, 16]  # beside zeros between them


class WithAnEmptyParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(torch.cat([self.first(x), self.empty])).square().mean()


@pytest.mark.parametrize("world", [1, 2])
def test_a_bucket_does_not_wait_for_an_empty_parameter(world):
    def program(group):
        model = WithAnEmptyParameter()
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=10**6, group=group)
        reducer, left = optimizer.sharding.window.reducer, list[bool]()
        for _ in range(3):  # in the first of them it is not known yet what is used
            with mock.patch.object(reducer.inflight, "send", wraps=reducer.inflight.send) as send:
                model(torch.ones(2, 4)).backward()
            left.append(send.called and not reducer.open_buckets)
            optimizer.step()
            optimizer.zero_grad()
        return left[1:]

    assert run_ranks(world, program) == [[True, True]] * world
