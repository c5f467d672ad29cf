"""From the first gradient of a window on, `.grad` is the global gradient, whenever and however its parts offloader."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from tests import inside
from tests.promises.trainings import STAGES, on_loopback
from tests.zoo.case import filled, mlp, real_mlp, whole_numbers
from zero import shard
from zero.errors import RanksDiffer, ZeroError

WORLD = 2
PER_STAGE = pytest.mark.parametrize("stage", STAGES)


def batch(rank, micro=0):
    return whole_numbers((2, 4), "batch", rank, micro)


def plain(script, model, steps=2, **options):
    """What the script gives in plain torch, with the losses of all ranks in one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    losses = lambda micro: sum(model(batch(rank, micro)).square().mean() for rank in range(WORLD)) / WORLD  # noqa: E731
    for step in range(steps):
        script(model, optimizer, lambda micro, step=step: losses(2 * step + micro))
    return [p.detach().clone() for p in model.parameters()]


def sharded(script, make, steps=2, **options):
    """What it gives on every rank."""

    def program(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), group=group, **options)
        for step in range(steps):
            script(model, optimizer, lambda micro, step=step: model(batch(group.rank, 2 * step + micro)).square().mean())
        return [p.detach().clone() for p in model.parameters()]

    return on_loopback(WORLD, make, program)


def assert_as_in_plain_torch(script, make=real_mlp, **options):
    expected = plain(script, make())
    for found in sharded(script, make, **options):
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(found, expected, strict=True))


def two_backwards(model, optimizer, loss):
    loss(0).backward()
    loss(1).backward()


def in_no_sync(model, optimizer, loss):
    with optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext():
        two_backwards(model, optimizer, loss)


def with_a_part_cleared_between(model, optimizer, loss):
    loss(0).backward()
    model[0].zero_grad()
    loss(1).backward()


BACKWARDS = {
    "fewer than declared": (two_backwards, {"accumulation": 4}),
    "in no_sync": (in_no_sync, {}),
    "with a part cleared between": (with_a_part_cleared_between, {}),
    "not at the boundary": (two_backwards, {"accumulation": 3, "bucket_bytes": 28}),
}
CHANGES = {
    "clipped by norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "clipped by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "scaled in reverse": lambda model: [grad.mul_(0.5) for grad in reversed([p.grad for p in model.parameters()])],
}


@PER_STAGE
@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("backwards", BACKWARDS)
def test_what_is_done_between_backward_and_step_is_done_to_the_global_gradient(backwards, changed, stage):
    run, options = BACKWARDS[backwards]

    def script(model, optimizer, loss):
        run(model, optimizer, loss)
        CHANGES[changed](model)
        optimizer.step()
        optimizer.zero_grad()

    assert_as_in_plain_torch(script, stage=stage, **options)


@PER_STAGE
def test_a_gradient_that_is_kept_does_not_become_that_of_the_next_window(stage):
    def program(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage, group=group)
        model(batch(group.rank)).sum().backward()
        kept = [p.grad for p in model.parameters()]
        norm = kept[0].norm().item()
        optimizer.step()
        assert kept[0].norm().item() == norm
        optimizer.zero_grad()
        model(batch(group.rank, 1)).sum().backward()
        for use in (lambda: kept[0].norm(), lambda: kept[0].mul_(2.0), lambda: torch._foreach_mul_(kept, 2.0)):
            with pytest.raises(ZeroError, match=r"gradient of 0\.weight: its window has ended.*Read .grad again"):
                use()
        assert all(p.grad is not old for p, old in zip(model.parameters(), kept, strict=True))
        next(model.parameters()).grad = kept[0]
        with pytest.raises(ValueError, match=r"0\.weight to that of 0\.weight in an earlier window.*whole_grad"):
            optimizer.step()
        return True

    assert on_loopback(1, real_mlp, program) == [True]


def test_no_stand_in_is_made_anew_that_nobody_kept():
    model = real_mlp()
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=2)
    seen = set()
    for _ in range(3):
        model(batch(0)).sum().backward()
        seen |= {id(p.grad) for p in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == len(list(model.parameters()))


@PER_STAGE
def test_the_gradient_of_one_parameter_cannot_be_put_into_another(stage):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage)
    model(batch(0)).sum().backward()
    model[0].weight.grad = model[1].weight.grad
    with pytest.raises(ValueError, match=r"gradient of 0\.weight to that of 1\.weight.*whole_grad"):
        optimizer.step()
    optimizer.zero_grad()
    model(batch(0)).sum().backward()
    optimizer.step()


@PER_STAGE
def test_data_of_a_gradient_can_be_set(stage):
    def script(model, optimizer, loss):
        two_backwards(model, optimizer, loss)
        for number, p in enumerate(model.parameters()):
            p.grad.data = torch.full_like(p, 0.5 * number)
        optimizer.step()
        optimizer.zero_grad()

    assert_as_in_plain_torch(script, stage=stage)


@PER_STAGE
def test_a_gradient_of_the_users_own_counts_as_it_stands_whatever_others_carry(stage):
    """Loss scale and weights belong to what backward wrote."""

    def assign(model):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)

    def scaled(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage, dtype=torch.float16, group=group)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.backward(model(batch(group.rank).half()).sum())
        assign(model)
        optimizer.step()
        return [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]

    def weighted(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage, group=group)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.weight(8 * (1 + group.rank))
        model(batch(group.rank)).sum().backward()
        assign(model)
        optimizer.step()
        return [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]

    for program in (scaled, weighted):
        for moved in on_loopback(WORLD, mlp, program):
            assert all(torch.equal(each, torch.full_like(each, 0.0625)) for each in moved)


@PER_STAGE
def test_gradients_that_were_only_assigned_are_seen_by_whole_grad(stage):
    def program(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage, group=group)
        model[0].weight.grad = torch.full_like(model[0].weight, 1.0 + group.rank)
        return optimizer.whole_grad(model[0].weight), optimizer.whole_grad(model[2].weight)

    for found, nothing in on_loopback(WORLD, mlp, program):
        assert torch.equal(found, torch.full_like(found, 1.5)) and nothing is None


@PER_STAGE
def test_what_nobody_used_gets_no_gradient_from_whoever_touches_its_stand_in_first(stage):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = nn.Linear(4, 4), filled(nn.Linear(4, 4))

    def decay_by_hand(model, optimizer, loss):
        model.used(batch(0)).sum().backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=0.5)
        optimizer.step()
        assert model.unused.weight.grad is None
        assert optimizer.grad_norm == pytest.approx(
            torch.stack([optimizer.whole_grad(p).norm() for p in model.used.parameters()]).norm().item()
        )

    model = Two()
    before = model.unused.weight.detach().clone()
    decay_by_hand(model, shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage), None)
    assert torch.equal(model.unused.weight, before)


@PER_STAGE
@pytest.mark.parametrize("what", ["the learning rate", "what is frozen"])
def test_ranks_that_come_to_differ_are_told(what, stage):
    def program(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=stage, group=group)
        if what == "the learning rate":
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + group.rank)
        else:
            model[0].weight.requires_grad_(group.rank == 0)
        model(batch(group.rank)).sum().backward()
        with pytest.raises(RanksDiffer) as raised:
            optimizer.step()
        return str(raised.value)

    frozen = "at step, rank 0 trains 0.weight, and rank 1 has it frozen"
    expected = frozen if what == "what is frozen" else "rank 1 has lr=0.2, rank 0 has lr=0.1"
    assert all(expected in said for said in on_loopback(WORLD, real_mlp, program))


def test_after_a_window_no_more_than_two_staging_buffers_stay():
    """A rank that runs ahead of the other has many in flight, and keeps none of them for ever."""
    ahead = threading.Event()

    def program(group, model):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.125), stage=2, bucket_bytes=28, group=group)
        if group.rank == 1:
            assert ahead.wait(20.0)
        model(batch(group.rank)).sum().backward()
        ahead.set()
        optimizer.step()
        borrowed, most = inside.borrowed_buffers(optimizer), inside.most_borrowed_buffers(optimizer)
        return borrowed, most, inside.num_free_buffers(optimizer)

    (borrowed, most, kept), _ = on_loopback(WORLD, mlp, program)
    assert borrowed == 0 and most > 2 >= kept
