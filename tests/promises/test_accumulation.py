"""A: several backwards a step, declared or not, no_sync, clearing at any time, and what a step does without gradients."""

from __future__ import annotations

import contextlib
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests import faults, inside, ranks
from tests.instruments import Ledger
from tests.oracle import reference
from tests.promises.trainings import (
    STAGES,
    gloo_group,
    loopback_traces,
    on_loopback,
    sgd,
)
from tests.promises.windows import random_windows
from tests.traces import compare, weights_of
from tests.zoo import CASES
from tests.zoo.branches import Branches
from tests.zoo.case import draw, filled, mlp, real_loss, real_mlp, whole_loss
from zero import Engine, shard
from zero.errors import RanksDiffer


def micro_step(model: Any, rank: int, world: int, *key: int) -> None:
    whole_loss(model(draw(model, (2, 4), rank, *key)), world, *key).backward()


def plain_sum(keys: Any, world: int) -> list[torch.Tensor]:
    """The global gradient of the micro-batches with these keys, by plain torch in one process."""
    return _plain_sum(tuple(keys), world)


@cache
def _plain_sum(keys: tuple[Any, ...], world: int) -> list[torch.Tensor]:
    model = mlp()
    for rank, key in itertools.product(range(world), keys):
        micro_step(model, rank, 1, *key)
    return [p.grad for p in model.parameters()]


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(mine, p) for mine, p in zip(ours, theirs, strict=True))


# A01 to A04: how many, and who divides ----------------------------------------------------------------------------------


@pytest.mark.promise("A01")
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_of_all_backwards_since_the_last_step_counts_however_many(stage):
    for world, size, backwards in itertools.product((1, 2, 3), (28, 10**6), (1, 2, 5)):

        def program(group, model, size=size, backwards=backwards):
            optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=size, group=group)
            for window in range(2):
                for micro in range(backwards):
                    micro_step(model, group.rank, group.size, window, micro)
                grads = [optimizer.whole_grad(p) for p in model.parameters()]
                assert same(grads, plain_sum([(window, micro) for micro in range(backwards)], group.size))
                optimizer.zero_grad()
            return True

        assert all(on_loopback(world, mlp, program))


@pytest.mark.promise("A03")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("declared", [None, 1, 3])
def test_windows_of_two_five_and_one_equal_one_process_with_weights(stage, declared):
    """Whatever was declared: fewer or more backwards than that are right too."""
    lengths = (2, 5, 1)

    def tokens(step, micro, rank):
        return 1 + (3 * step + 2 * micro + rank) % 4

    def program(group, model):
        optimizer = shard(model, sgd(model, 0.1), stage=stage, accumulation=declared, group=group)
        for step, length in enumerate(lengths):
            for micro in range(length):
                count = tokens(step, micro, group.rank)
                optimizer.weight(count)
                real_loss(model(draw(model, (count, 4), group.rank, step, micro, real=True))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = real_mlp()
    theirs = sgd(plain, 0.1)
    for step, length in enumerate(lengths):
        where = itertools.product(range(length), range(3))
        batch = [draw(plain, (tokens(step, micro, r), 4), r, step, micro, real=True) for micro, r in where]
        real_loss(plain(torch.cat(batch))).backward()
        theirs.step()
        theirs.zero_grad()
    for weights in on_loopback(3, real_mlp, program):
        assert all(torch.allclose(mine, p, atol=1e-6) for mine, p in zip(weights, plain.parameters(), strict=True))


# A05 to A07: when it is sent --------------------------------------------------------------------------------------------


@pytest.mark.promise("A05")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bucket_bytes", [28, 10**6])
@pytest.mark.parametrize("said", ["no_sync", "require_backward_grad_sync"])
def test_inside_no_sync_nothing_is_sent_and_the_sum_is_that_of_syncing_each_time(stage, bucket_bytes, said):
    """Or where the model has DDP's attribute."""

    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=bucket_bytes, group=ledger)
        for window in range(3):
            ledger.section = f"inside {window}"
            model.require_backward_grad_sync = said == "no_sync"
            with optimizer.no_sync() if said == "no_sync" else contextlib.nullcontext():
                for micro in range(2):
                    micro_step(model, group.rank, group.size, window, micro)
                    # The gradient that it stands for waits on this rank.
                    assert all(p.grad is not None for p in model.parameters())
            ledger.section, model.require_backward_grad_sync = f"outside {window}", True
            micro_step(model, group.rank, group.size, window, 2)
            grads = [optimizer.whole_grad(p) for p in model.parameters()]
            assert ledger.of(f"inside {window}") == []
            assert same(grads, plain_sum([(window, micro) for micro in range(3)], group.size))
            # One reduction for the whole window, however many backwards.
            assert len(ledger.rounds(f"outside {window}")) == len(inside.buckets(optimizer))
            optimizer.zero_grad()
        return True

    assert all(on_loopback(2, mlp, program))


@pytest.mark.promise("A05")
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_and_syncing_backwards_mix_in_any_order_on_each_rank(stage):
    """Also where only one rank is local, and where a parameter is used in `no_sync` alone."""
    patterns = ("sl", "ls", "sls", "lsl", "ll", "ssl")

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=64, group=group)
        for window, pattern in enumerate(patterns):
            pattern = pattern if group.rank != 1 else pattern[::-1]
            for micro, kind in enumerate(pattern):
                with optimizer.no_sync() if kind == "l" else contextlib.nullcontext():
                    which = (group.rank,) if kind == "l" else ()
                    whole_loss(model(draw(model, (2, 4), group.rank, window, micro), which), group.size, window).backward()
            grads = [optimizer.whole_grad(p) for p in model.parameters()]
            plain = branches()
            for rank in range(group.size):
                for micro, kind in enumerate(patterns[window] if rank != 1 else patterns[window][::-1]):
                    which = (rank,) if kind == "l" else ()
                    whole_loss(plain(draw(plain, (2, 4), rank, window, micro), which), 1, window).backward()
            for mine, p in zip(grads, plain.parameters(), strict=True):
                assert (mine is None) == (p.grad is None)
                assert mine is None or torch.equal(mine, p.grad)
            optimizer.zero_grad()
        return True

    assert all(on_loopback(3, branches, program))


def branches() -> nn.Module:
    return filled(Branches(3), high=1)


@pytest.mark.promise("A06", "A07")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("declared", [1, 3])
def test_each_of_the_first_three_windows_has_every_bit_of_every_micro_batch(stage, world, declared):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=64, accumulation=declared, group=group)
        for window in range(3):
            for micro in range(declared):
                micro_step(model, group.rank, group.size, window, micro)
            grads = [optimizer.whole_grad(p) for p in model.parameters()]
            assert same(grads, plain_sum([(window, micro) for micro in range(declared)], group.size))
            optimizer.zero_grad()
        return True

    assert all(on_loopback(world, mlp, program))


# A08 to A10: clearing ---------------------------------------------------------------------------------------------------

CLEARINGS = {
    "engine": lambda engine, to_none: engine.zero_grad(set_to_none=to_none),
    "optimizer": lambda engine, to_none: engine.optimizer.zero_grad(set_to_none=to_none),
    "module": lambda engine, to_none: engine.module.zero_grad(set_to_none=to_none),
}
# The contents of the window when it is cleared, with a word for each backward: synchronising, local, none; and whether it was
# settled.
POINTS = {
    "nothing": "",
    "one backward": "s",
    "two backwards": "ss",
    "local only": "l",
    "local then synchronised": "ls",
    "synchronised then local": "sl",
    "settled": "s!",
    "settled and more": "s!s",
    "stepped": "s+",
    "stepped and more": "s+s",
}


@pytest.mark.promise("A08", "A09")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("who", CLEARINGS)
@pytest.mark.parametrize("to_none", [True, False])
def test_every_clearing_at_every_point_of_a_window_clears_everything(stage, who, to_none):
    for number, (name, point) in enumerate(POINTS.items()):
        accumulation = 1 + (number + stage) % 2

        def program(group, model, point=point, accumulation=accumulation):
            optimizer = shard(model, sgd(model, 0.0), stage=stage, bucket_bytes=64, accumulation=accumulation, group=group)
            engine = Engine(optimizer)
            for number, kind in enumerate(point):
                if kind == "!":
                    optimizer.settle()
                elif kind == "+":
                    optimizer.step()
                else:
                    with optimizer.no_sync() if kind == "l" else contextlib.nullcontext():
                        micro_step(model, group.rank, group.size, 1, number)
            CLEARINGS[who](engine, to_none)
            for p in model.parameters():
                assert to_none or p.grad is not None or not point
                assert not to_none or p.grad is None
            if not to_none and point:
                assert all(not optimizer.whole_grad(p).any() for p in model.parameters())
            micro_step(model, group.rank, group.size, 2)
            return [accumulation * optimizer.whole_grad(p) for p in model.parameters()]  # an engine divides

        with faults.buffers_are_poison():
            for grads in on_loopback(2, mlp, program):
                assert same(grads, plain_sum([(2,)], 2)), name


@pytest.mark.promise("A09")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("to_none", [True, False])
def test_zeros_count_as_a_gradient_and_none_does_not(stage, to_none):
    """AdamW moves and decays by what it remembers, at a zero gradient, and leaves alone what has none."""

    def train(model, optimizer, rank, world):
        for step in range(4):
            which = (0,) if step == 0 else ()
            (model(draw(model, (3, 4), rank, step, real=True), which)).square().mean().backward()
            yield
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    def program(group, model):
        inner = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-2)
        for _ in train(model, shard(model, inner, stage=stage, group=group), group.rank, group.size):
            pass
        return [p.detach().clone() for p in model.parameters()]

    plains = [filled(Branches(2), real=True) for _ in range(2)]
    torchs = [torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-2) for model in plains]
    runs = [train(model, optimizer, rank, 2) for rank, (model, optimizer) in enumerate(zip(plains, torchs, strict=True))]
    for _ in range(4):
        for run in runs:
            next(run)
        for one, other in zip(plains[0].parameters(), plains[1].parameters(), strict=True):
            if one.grad is not None:
                mean = (one.grad + other.grad) / 2
                one.grad.copy_(mean)
                other.grad.copy_(mean)
    for run in runs:
        next(run, None)
    for weights in on_loopback(2, lambda: filled(Branches(2), real=True), program):
        assert all(torch.allclose(mine, p, atol=1e-6) for mine, p in zip(weights, plains[0].parameters(), strict=True))


@pytest.mark.promise("A10")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_discarded_window_leaves_no_bit_behind(stage, settled, dtype):
    """A NaN on one rank, looked at or not, then thrown away; momentum would carry any residue on."""

    def train(with_bad_batch):
        def program(group, model):
            optimizer = shard(model, sgd(model, momentum=0.5), stage=stage, dtype=dtype, bucket_bytes=64, group=group)
            for step in range(3):
                if with_bad_batch and step == 1:
                    loss = model(draw(model, (2, 4), group.rank, 9)).sum()
                    (loss * float("nan") if group.rank == 1 else loss).backward()
                    if settled:
                        assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
                    optimizer.discard()
                whole_loss(model(draw(model, (2, 4), group.rank, step)), group.size, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights_of(model), optimizer.state_dict()["state"]

        return on_loopback(2, mlp, program)

    for (weights, state), (clean, clean_state) in zip(train(True), train(False), strict=True):
        assert same(weights.values(), clean.values())
        assert all(torch.equal(state[n]["momentum_buffer"], s["momentum_buffer"]) for n, s in clean_state.items())


# A11 to A15 -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A11")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["synchronised", "no_sync", "declared"])
def test_256_micro_steps_in_bf16_lose_nothing_that_fp32_keeps(stage, how):
    """In bf16 a thousandth added to one is one."""

    def program(group, model):
        declared = 257 if how == "declared" else None
        optimizer = shard(model, sgd(model, 1.0), stage=stage, dtype=torch.bfloat16, accumulation=declared, group=group)
        (model.weight * 1.0).sum().backward()
        for _ in range(256):
            with optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext():
                (model.weight * 1e-3).sum().backward()
        return norm_of(optimizer, model.weight)

    each = torch.tensor(1e-3, dtype=torch.bfloat16).float().item()
    exact = 1.0 + 256 * each
    found = on_loopback(2, lambda: nn.Linear(1, 1, bias=False), program)
    assert found == [exact, exact]


def norm_of(optimizer: Any, param: nn.Parameter) -> float:
    """Of a gradient of one element, in the precision of the sums."""
    optimizer.settle()
    return param.grad.norm().item()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def gan_step(gan: Any, optimizers: Any, rank: int, step: int) -> Any:
    """The generator's loss leaves gradients on the discriminator, which only its own zero_grad takes away."""
    generator_optimizer, discriminator_optimizer = optimizers
    real, noise = (draw(gan, (3, 4), rank, step, micro, real=True) for micro in range(2))
    discriminator_optimizer.zero_grad()
    fake = gan.generator(noise)
    (gan.discriminator(real).mean() - gan.discriminator(fake.detach()).mean()).square().backward()
    yield gan.discriminator
    discriminator_optimizer.step()
    generator_optimizer.zero_grad()
    gan.discriminator(fake).square().mean().backward()
    yield gan.generator
    generator_optimizer.step()


def plain_gan(world: int, steps: int) -> nn.Module:
    gans = [filled(Gan(), real=True) for _ in range(world)]
    optimizers = [[sgd(g.generator, 0.1), sgd(g.discriminator, 0.1, momentum=0.5)] for g in gans]
    for step in range(steps):
        runs = [gan_step(gan, pair, rank, step) for rank, (gan, pair) in enumerate(zip(gans, optimizers, strict=True))]
        for _ in range(2):
            parts = [next(run) for run in runs]
            for params in zip(*(part.parameters() for part in parts), strict=True):
                mean = sum(p.grad for p in params) / world
                for p in params:
                    p.grad.copy_(mean)
        for run in runs:
            next(run, None)
    return gans[0]


def train_gan(stage: int, rank: int, groups: Any) -> Any:
    gan = filled(Gan(), real=True)
    generator = shard(gan.generator, sgd(gan.generator, 0.1), stage=stage, bucket_bytes=40, group=groups[0])
    discriminator = shard(gan.discriminator, sgd(gan.discriminator, 0.1, momentum=0.5), stage=stage, group=groups[1])
    for step in range(10):
        for _ in gan_step(gan, (generator, discriminator), rank, step):
            pass
    return weights_of(gan)


def gan_over_gloo(rank: int, world: int, stage: int) -> Any:
    return train_gan(stage, rank, (gloo_group(), gloo_group()))


@pytest.mark.promise("A13")
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in STAGES[:-1]), STAGES[-1]])
def test_two_optimizers_over_parts_of_one_model_do_not_touch_each_other(stage):
    expected = weights_of(plain_gan(2, 10))
    for weights in ranks.run(2, gan_over_gloo, stage):
        assert all(torch.allclose(weights[name], weight, atol=2e-6) for name, weight in expected.items())


def joint_loss_over_gloo(rank: int, world: int, stage: int) -> Any:
    one, other = mlp(), filled(nn.Linear(3, 2))
    engines = [Engine(shard(m, sgd(m, 2.0**-6), stage=stage, group=gloo_group())) for m in (one, other)]
    for step in range(3):
        whole_loss(engines[1](engines[0](draw(one, (2, 4), rank, step))), world, step).backward()
        for engine in engines:
            engine.step()
    return [*weights_of(one).values(), *weights_of(other).values()]


@pytest.mark.promise("A13")
@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_with_one_joint_loss_each_step_their_own(stage):
    one, other = mlp(), filled(nn.Linear(3, 2))
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=2.0**-6)
    for step in range(3):
        for rank in range(2):
            whole_loss(other(one(draw(one, (2, 4), rank, step))), 1, step).backward()
        both.step()
        both.zero_grad()
    expected = [*one.parameters(), *other.parameters()]
    for weights in ranks.run(2, joint_loss_over_gloo, stage):
        assert same(weights, expected)


@pytest.mark.promise("A14")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_step_without_gradients_does_nothing_and_a_second_step_applies_them_again(stage, world):
    """Before the first forward, after clearing, and twice in a row: what plain torch does, which clears nothing."""

    def train(model, optimizer, rank, size):
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        found = [[p.detach().clone() for p in model.parameters()]]
        for step in range(2):
            micro_step(model, rank, size, step)
            optimizer.step()
            optimizer.step()
            found.append([p.detach().clone() for p in model.parameters()])
        optimizer.zero_grad()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
        return found

    def program(group, model):
        optimizer = shard(model, sgd(model, momentum=0.5, weight_decay=0.5), stage=stage, bucket_bytes=64, group=group)
        found = train(model, optimizer, group.rank, group.size)
        return found, len(optimizer.state_dict()["state"])

    plains = [mlp() for _ in range(world)]

    class Averaging:
        """Every rank's plain optimizer, stepping on the mean of gradients that were added up since they were last cleared."""

        def __init__(self) -> None:
            self.inner = sgd(plains[0], momentum=0.5, weight_decay=0.5)

        def step(self):
            for params in zip(*(model.parameters() for model in plains), strict=True):
                params[0].grad = None if params[0].grad is None else params[0].grad.clone()
            self.inner.step()

        def zero_grad(self):
            self.inner.zero_grad()

    def plain_micro_step(*key):
        for rank in range(world):
            whole_loss(plains[0](draw(plains[0], (2, 4), rank, *key)), 1, *key).backward()

    expected, optimizer = [], Averaging()
    start = [p.detach().clone() for p in plains[0].parameters()]
    for step in range(2):
        plain_micro_step(step)
        optimizer.step()
        optimizer.step()
        expected.append([p.detach().clone() for p in plains[0].parameters()])
    for found, _ in on_loopback(world, mlp, program):
        assert same(found[0], start)
        for ours, theirs in zip(found[1:3], expected, strict=True):
            assert all(torch.allclose(mine, p, rtol=1e-6, atol=1e-6) for mine, p in zip(ours, theirs, strict=True))
        assert same(found[3], found[2])


@pytest.mark.promise("A15")
@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_sent_at_construction_and_never_again(stage):
    def program(group, model):
        if group.rank:
            model.norm.running_mean.fill_(7.0)
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model, 0.01), stage=stage, accumulation=3, group=ledger)
        assert (model.norm.running_mean == 0).all()
        ledger.section = "training"
        means = []
        for micro in range(3):
            model(draw(model, (5, 4), group.rank, 0, micro, real=True)).square().mean().backward()
            means.append(model.norm.running_mean.clone())
        optimizer.step()
        assert ledger.of("training", "broadcast") == []
        return means

    expected = []
    for rank in range(2):
        plain = CASES["batch_norm_statistics_of_each_rank"].build()
        for micro in range(3):
            plain(draw(plain, (5, 4), rank, 0, micro, real=True))
            expected.append(plain.norm.running_mean.clone())
    first, second = on_loopback(2, CASES["batch_norm_statistics_of_each_rank"].build, program)
    assert same([*first, *second], expected)


# Anything, in any order -------------------------------------------------------------------------------------------------


@pytest.mark.promise("A01", "A08", "A14")
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 40))])
def test_windows_drawn_by_chance_equal_the_oracle(seed):
    """Backwards, no_sync, clearing, edits, failures and steps as they come; on ranks that differ in what they use."""
    stage, world = ((2, 2), (1, 2), (0, 2), (2, 3), (1, 3), (2, 1))[seed % 6]
    case = random_windows(seed, length=3 + seed % 14, steps=2)
    options = {"bucket_bytes": (28, 100, 1000)[seed % 3], "accumulation": (None, None, 2, 3)[seed % 4]}
    ours = loopback_traces(case, world, stage=stage, dtype=None, **options)
    compare(ours, reference(case, world), exact=world < 3, state=True, name=case.name)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_after_the_model_cleared_its_own_gradients_uses_the_global_norm(stage):
    """What was sent before is still on its way, so the new gradients wait; they are the global ones all the same."""

    def program(group, model):
        optimizer = shard(model, sgd(model, 0.5), stage=stage, group=group)
        norms = []
        for step in range(2):
            micro_step(model, group.rank, group.size, step, 0)
            model.zero_grad()
            micro_step(model, group.rank, group.size, step, 1)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.zero_grad()
        return norms

    expected = [torch.stack([g.norm() for g in plain_sum([(step, 1)], 2)]).norm().item() for step in range(2)]
    found = on_loopback(2, mlp, program)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_clear_their_models_differently_are_told(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        micro_step(model, group.rank, group.size, 0, 0)
        if group.rank == 1:
            model.zero_grad()
        micro_step(model, group.rank, group.size, 0, 1)
        with pytest.raises(RanksDiffer, match=r"rank 1 cleared its gradients 1 times"):
            optimizer.step()
        optimizer.zero_grad()
        micro_step(model, group.rank, group.size, 0, 2)
        return [optimizer.whole_grad(p) for p in model.parameters()]

    for grads in on_loopback(2, mlp, program):
        assert same(grads, plain_sum([(0, 2)], 2))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_that_clears_to_zeros_may_weigh_its_micro_batches(stage, to_none):
    def program(group, model):
        optimizer = shard(model, sgd(model, 0.0), stage=stage, group=group)
        found = []
        for step in range(2):
            optimizer.weight(1 + 2 * group.rank)
            (model.weight * (1 + group.rank + step)).sum().backward()
            found.append(optimizer.whole_grad(model.weight).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return found

    for found in on_loopback(2, lambda: nn.Linear(1, 1, bias=False), program):
        assert found == [(1 + 3 * 2) / 4, (2 + 3 * 3) / 4]
