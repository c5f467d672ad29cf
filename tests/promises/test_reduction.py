"""R: what is summed, in which dtype, divided by what, in which order and over which ranks."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.instruments import Ledger
from tests.promises.trainings import (
    STAGES,
    expected,
    gloo_group,
    masters_of,
    on_loopback,
    options_of,
    train_one,
    what_differs,
)
from tests.traces import compare
from tests.zoo import CASES
from tests.zoo.branches import ManyParameters
from tests.zoo.case import draw, filled, like, real_loss, real_numbers, whole_loss, whole_numbers
from zero import shard

ORDINARY = ("two_layers", "branch_chosen_by_rank_and_step", "parameter_larger_than_a_bucket")


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# R01 --------------------------------------------------------------------------------------------------------------------


def is_average(argument: Any) -> bool:
    return isinstance(argument, (dist.ReduceOp, dist.ReduceOp.RedOpType)) and argument == dist.ReduceOp.AVG


def train_where_average_means_sum(rank: int, world: int, names: list[str]) -> tuple[list[Any], list[str], int]:
    """Every collective of torch.distributed writes down its reduction; an AVG is done as a SUM, as old gloo did it."""
    asked: list[str] = []
    calls = 0

    def lying(collective: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            asked.extend(str(arg) for arg in args if isinstance(arg, (dist.ReduceOp, dist.ReduceOp.RedOpType)))
            args = tuple(dist.ReduceOp.SUM if is_average(arg) else arg for arg in args)
            if "op" in options:
                asked.append(str(options["op"]))
                options["op"] = dist.ReduceOp.SUM if is_average(options["op"]) else options["op"]
            return collective(*args, **options)

        return call

    names_of_collectives = (
        "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "all_gather_into_tensor",
        "broadcast",
    )  # fmt: skip
    traces = []
    with contextlib.ExitStack() as stack:
        for name in names_of_collectives:
            stack.enter_context(mock.patch.object(dist, name, lying(getattr(dist, name))))
        group = gloo_group()
        for name, stage in itertools.product(names, STAGES):
            model = CASES[name].build()
            options = options_of(name, stage, "fp32", "tiny")
            traces.append((name, stage, train_one(CASES[name], model, CASES[name].optimizer(model), group, options)))
    return traces, asked, calls


@pytest.mark.promise("R01")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_only_sums_are_sent_and_a_backend_whose_average_is_a_sum_changes_nothing(world):
    found = ranks.run(world, train_where_average_means_sum, list(ORDINARY[:2]))
    assert all("AVG" not in operation for _, asked, _ in found for operation in asked)
    assert all(calls > 20 for _, _, calls in found)
    for position, (name, stage, _) in enumerate(found[0][0]):
        ours = [traces[position][2] for traces, _, _ in found]
        compare(ours, expected(name, world, "fp32"), exact=CASES[name].is_exact("fp32", world), name=f"{name} stage={stage}")


# R02 to R04 -------------------------------------------------------------------------------------------------------------


def token_data(rank: int, micro: int, count: int) -> torch.Tensor:
    return real_numbers((count, 4), "tokens of R03", rank, micro)


COUNTS = ((7, 1, 5), (3, 8, 2))  # by micro-batch, by rank


def global_batch(counts: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    """REF1: one process, plain torch, the mean over all tokens that there are."""
    model = filled(nn.Linear(4, 3), real=True)
    optimizer = sgd(model, 0.1)
    found = []
    for _ in range(steps):
        tokens = [token_data(rank, micro, n) for micro, row in enumerate(counts) for rank, n in enumerate(row)]
        real_loss(model(torch.cat(tokens))).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def train_by_tokens(group: Any, model: nn.Module, stage: int, counts: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    optimizer = shard(model, sgd(model, 0.1), stage=stage, bucket_bytes=32, group=group)
    found = []
    for _ in range(steps):
        for micro, row in enumerate(counts):
            count = row[group.rank]
            optimizer.weight(count)
            real_loss(model(token_data(group.rank, micro, count))).backward()  # the mean over nothing is NaN
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def largest_difference(ours: Any, theirs: Any) -> float:
    pairs = [(mine[name], weight) for mine, step in zip(ours, theirs, strict=True) for name, weight in step.items()]
    return max((mine - weight).abs().max().item() for mine, weight in pairs)


@pytest.mark.promise("R03")
@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_uneven_token_counts_equals_one_process_on_the_whole_batch(stage):
    build = lambda: filled(nn.Linear(4, 3), real=True)  # noqa: E731
    found = on_loopback(3, build, lambda group, model: train_by_tokens(group, model, stage, COUNTS, 3))
    for ours in found:
        assert largest_difference(ours, global_batch(COUNTS, 3)) <= 1e-6


NONE_ON_RANK_1 = ((4, 0, 6),)


@pytest.mark.promise("R04")
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_tokens_contributes_zero_and_no_nan(stage):
    build = lambda: filled(nn.Linear(4, 3), real=True)  # noqa: E731

    def program(group, model):
        ledger = Ledger(group)
        return train_by_tokens(ledger, model, stage, NONE_ON_RANK_1, 3), ledger

    found = on_loopback(3, build, program)
    for ours, ledger in found:
        assert largest_difference(ours, global_batch(NONE_ON_RANK_1, 3)) <= 1e-6
        assert ledger.wires() == found[0][1].wires()


def masked_loss(model: nn.Module, rank: int, mask: torch.Tensor) -> torch.Tensor:
    return (model(token_data(rank, 0, 4)).square() * mask).sum() / (3 * mask.sum())


@pytest.mark.promise("R04")
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_tokens_are_all_masked_contributes_zero_and_no_nan(stage):
    """Its gradients are NaN, zero times infinity, and those of a batch without any token are zeros."""
    build = lambda: filled(nn.Linear(4, 3), real=True)  # noqa: E731

    def program(group, model):
        mask = torch.full((4, 1), float(group.rank != 1))
        if group.rank == 1:
            own = build()
            assert all(grad.isnan().all() for grad in torch.autograd.grad(masked_loss(own, 1, mask), list(own.parameters())))
        optimizer = shard(model, sgd(model, 0.1), stage=stage, bucket_bytes=32, group=group)
        optimizer.weight(mask.sum().item())
        masked_loss(model, group.rank, mask).backward()
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    plain = build()
    (sum(masked_loss(plain, rank, torch.ones(4, 1)) for rank in (0, 2)) / 2).backward()
    sgd(plain, 0.1).step()
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    for ours in on_loopback(3, build, program):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


# R05, R06: numbers ------------------------------------------------------------------------------------------------------


class Filled(nn.Module):
    """One parameter of a size, whose gradient is the coefficients."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, coefficients):
        return sum((item * c.to(item)).sum() for item, c in zip(self.items, coefficients, strict=True))


@pytest.mark.promise("R05")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_is_finite_though_the_sum_overflows_and_small_gradients_do_not_vanish(stage, dtype):
    large, small = torch.full((5,), 40000.0), torch.full((3,), 1e-7)

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, dtype=dtype, bucket_bytes=8, group=group, on_nonfinite="skip")
        for p, coefficients in zip(model.items, (large, small), strict=True):
            (p * coefficients.to(p)).sum().backward()
        whole = [optimizer.whole_grad(p) for p in model.items]
        optimizer.step()
        return whole, masters_of(optimizer), optimizer.skipped_steps

    for (big, little), masters, skipped in on_loopback(4, lambda: Filled(5, 3), program):
        assert torch.equal(big, large.to(dtype))
        assert (little > 0).all()
        assert torch.equal(masters["items.0"], -large.to(dtype).float())
        assert torch.equal(masters["items.1"], -small.to(dtype).float())
        assert skipped == 0


@pytest.mark.promise("R05")
def test_gradients_of_a_quarter_of_the_smallest_number_survive_the_mean_of_four():
    """Only one rank has it; its mean is not representable in fp16, and the fp32 sum keeps it."""

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=2, dtype=torch.float16, group=group)
        model([torch.full((4,), 6e-8 if group.rank == 2 else 0.0)]).backward()
        optimizer.step()
        return inside.whole_updated(optimizer, 0)

    for master in on_loopback(4, lambda: Filled(4), program):
        assert torch.equal(master, torch.full((4,), -(2.0**-24) / 4))


@pytest.mark.promise("R06")
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_of_three_buckets_is_summed_in_fp32_bit_for_bit(stage):
    """Half of the bits of each term would be lost if bf16 were added in bf16: 256 + 1 is 256 there."""
    numel, world = 3 * 96, 3
    gradients = [real_numbers((numel,), "R06", rank).bfloat16() * 2.0 ** (4 * rank) for rank in range(world)]
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total += gradient.float()
    expected_masters = -(total * (1.0 / 3.0))

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, dtype=torch.bfloat16, bucket_bytes=2 * 96, group=group)
        assert len(inside.buckets(optimizer)) == 3
        model([gradients[group.rank]]).backward()
        optimizer.step()
        return inside.whole_updated(optimizer, 0)

    for masters in on_loopback(world, lambda: Filled(numel), program):
        assert torch.equal(masters, expected_masters)


@pytest.mark.promise("R06")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_shall_travel_in_bf16_are_rounded_to_it_and_summed_in_fp32(stage):
    numel, world = 3 * 48, 3
    gradients = [real_numbers((numel,), "R06", rank) * 2.0 ** (4 * rank) for rank in range(world)]
    total = gradients[0].bfloat16().float()
    for gradient in gradients[1:]:
        total += gradient.bfloat16().float()

    def program(group, model):
        optimizer = shard(
            model, sgd(model), stage=stage, reduce_dtype="bfloat16", reduce="sum", bucket_bytes=4 * 48, group=group
        )
        model([gradients[group.rank]]).backward()
        optimizer.step()
        return inside.whole_updated(optimizer, 0), inside.bytes_in_flight(optimizer)

    for masters, num_bytes in on_loopback(world, lambda: Filled(numel), program):
        assert torch.equal(masters, -total)
        assert num_bytes == 2 * numel  # per rank, for three buckets


# R07 to R10: buckets and padding ----------------------------------------------------------------------------------------


@pytest.mark.promise("R07")
def test_memory_that_is_nan_before_and_after_its_use_never_reaches_a_number():
    names = (*ORDINARY, "five_backwards_a_step", "clipping_where_ranks_used_different_branches", "parameters_without_elements")
    seen: list[Any] = []

    @contextlib.contextmanager
    def poisoned():
        with faults.buffers_are_poison() as filled_with_nan:
            yield
            seen.extend(filled_with_nan)

    assert what_differs(names, setting=poisoned()) == []
    assert len(seen) > 1000


def layer_sizes(model: nn.Module) -> list[int]:
    return [p.numel() for p in model.parameters()]


def predicted_buckets(sizes: list[int], world: int, bucket_bytes: int, align_bytes: int = 64) -> int:
    """Parameters last to first, as many together as fit; a larger one in as many buckets as it needs."""
    align, limit = align_bytes // 4, max(1, bucket_bytes // 4)
    unit = world * align
    up = lambda numel, multiple: -(-numel // multiple) * multiple  # noqa: E731
    chunks, filled_up = [], 0
    for numel in reversed(sizes):
        if filled_up and filled_up + numel > limit:
            chunks.append(filled_up)
            filled_up = 0
        filled_up = up(filled_up + numel, align)
    chunks.append(filled_up)
    return sum(-(-up(numel, unit) // up(limit, unit)) for numel in chunks)


def four_layers() -> nn.Module:
    return filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True)


@pytest.mark.promise("R08")
@pytest.mark.parametrize("stage", STAGES)
def test_bucket_size_changes_no_bit_and_the_number_of_collectives_follows_from_it(stage):
    world, sizes = 3, layer_sizes(four_layers())

    def program(group, model, bucket_bytes):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model, 0.1), stage=stage, bucket_bytes=bucket_bytes, clip=1e9, group=ledger)
        for step in range(5):
            ledger.section = f"step {step}"
            real_loss(model(real_numbers((4, 8), "R08", group.rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, ledger

    weights = []
    for bucket_bytes in (1, 7, 1000, 10**9):
        found = on_loopback(world, four_layers, partial(program, bucket_bytes=bucket_bytes))
        buckets = predicted_buckets(sizes, world if stage else 1, bucket_bytes)
        for _, ledger in found:
            assert [len(ledger.rounds(f"step {step}")) for step in range(5)] == [buckets] * 5
            gathers = [len(ledger.of(f"step {step}", "all_gather")) for step in range(5)]
            assert gathers == [1 if stage else 0] * 5  # all of these few bytes are sent as one
            messages = [len(ledger.of(f"step {step}", "exchange")) for step in range(5)]
            assert messages == [2] * 5  # counts, then one judgement for all
        weights.append(found[0][0])
    assert all(torch.equal(weight, other[name]) for other in weights[1:] for name, weight in weights[0].items())


@pytest.mark.promise("R09")
@pytest.mark.parametrize("numel", [129, *(pytest.param(numel, marks=pytest.mark.full) for numel in (1, 2, 3, 5, 17, 65))])
def test_any_number_of_elements_on_any_number_of_ranks_with_nan_in_every_gap(numel):
    def program(group, model, stage, size):
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = shard(model, inner, stage=stage, bucket_bytes=size, group=group, kernels="torch")
        padding = faults.poison_padding(optimizer)
        norms = []
        for step in range(2):
            model([whole_numbers((numel,), "R09", group.rank, step) * group.size]).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.whole_state(model.items[0])
        return model.items[0].detach().clone(), norms, state["exp_avg_sq"], padding

    for stage, world, size in itertools.product(STAGES, (1, 2, 3, 4), (1, 10**6)):
        plain = Filled(numel)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        norms = []
        for step in range(2):
            plain([sum(whole_numbers((numel,), "R09", rank, step) for rank in range(world))]).backward()
            norms.append(plain.items[0].grad.norm().item())
            optimizer.step()
            optimizer.zero_grad()
        with faults.buffers_are_poison():
            found = on_loopback(world, lambda: Filled(numel), partial(program, stage=stage, size=size))
        for weight, our_norms, moments, padding in found:
            assert torch.equal(weight, plain.items[0])
            assert our_norms == pytest.approx(norms, rel=1e-6)
            assert torch.equal(moments, optimizer.state[plain.items[0]]["exp_avg_sq"])
            assert padding > 0


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(((), (1,), (1, 1), (3, 5))):
            self.register_parameter(f"p{index}", nn.Parameter(real_numbers(shape, "R10", index)))

    def forward(self, x):
        return (self.p3 * x).sum() * self.p0 + (self.p1 * self.p2).sum() * x.mean() + self.p1.sum()


@pytest.mark.promise("R10")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 10**6])
def test_one_rank_is_plain_torch_bit_for_bit(stage, size):
    plain, ours = Shapes(), Shapes()
    torchs = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    inner = torch.optim.AdamW(ours.parameters(), lr=0.05, weight_decay=0.1)
    sharded = shard(ours, inner, stage=stage, bucket_bytes=size, kernels="torch")
    for step in range(20):
        for model, optimizer in ((plain, torchs), (ours, sharded)):
            model(real_numbers((3, 5), "data of R10", step)).square().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True))
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        state = sharded.whole_state(mine)
        assert all(torch.equal(state[key], value) for key, value in torchs.state[theirs].items())


@pytest.mark.promise("R10")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [128, 10**6])
def test_on_one_rank_the_sums_of_backwards_that_branch_are_those_of_plain_torch_bit_for_bit(stage, size):
    """A bucket of which a backward leaves out a part waits for the next one."""
    build = lambda: filled(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), real=True)  # noqa: E731
    plain, ours = build(), build()
    sharded = shard(ours, sgd(ours, 0.1), stage=stage, bucket_bytes=size, kernels="torch")
    for window in range(3):
        for number in range(6):
            for model in (plain, ours):
                hidden = model[0](real_numbers((3, 4), "branches of R10", window, number))
                model[2](hidden if number % 3 else model[1](hidden)).square().sum().backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(sharded.whole_grad(mine), theirs.grad)
        sharded.zero_grad()
        plain.zero_grad()


# R11, R12: groups and order ---------------------------------------------------------------------------------------------


def train_in_two_groups(rank: int, world: int, stage: int) -> Any:
    """Two independent trainings side by side, in groups whose ranks are not those of the world."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    name = ("branches_in_reversed_order_on_odd_ranks", "two_layers")[mine]
    model = CASES[name].build()
    inner = CASES[name].optimizer(model)
    if stage == 2:  # the user's own process group, handed over as it is, and again when that training is over
        shard(model, inner, group=pairs[mine], **options_of(name, stage, "fp32", "tiny")).close()
        model = CASES[name].build()
        inner = CASES[name].optimizer(model)
    return train_one(CASES[name], model, inner, gloo_group(pairs[mine]), options_of(name, stage, "fp32", "tiny"))


@pytest.mark.promise("R11")
@pytest.mark.parametrize("stage", STAGES)
def test_two_sub_groups_train_two_models_without_touching_each_other(stage):
    found = ranks.run(4, train_in_two_groups, stage)
    for mine, name in enumerate(("branches_in_reversed_order_on_odd_ranks", "two_layers")):
        theirs = expected(name, 2, "fp32")
        assert [trace.world for trace in found[mine::2]] == [2, 2]
        compare(found[mine::2], theirs, exact=CASES[name].is_exact("fp32", 2), state=True, name=name)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x, order):
        for index in order:
            x = self.branches[index](x)
        return x


@pytest.mark.promise("R12")
@pytest.mark.parametrize("stage", STAGES)
def test_collectives_are_issued_in_one_order_on_all_ranks_whatever_the_order_of_arrival(stage):
    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model, 1e-3), stage=stage, bucket_bytes=1024, group=ledger)
        ready = []
        for step in range(4):
            order = [(index * (1 + 2 * (group.rank % 2)) + step) % 4 for index in range(4)]
            ready.append(order)
            ledger.section = f"step {step}"
            whole_loss(model(draw(model, (2, 16), group.rank, step), order), group.size, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return ledger, ready

    found = on_loopback(3, lambda: filled(TwoBranches(), high=1), program)
    assert found[0][1] != found[1][1]
    for ledger, _ in found:
        assert ledger.wires() == found[0][0].wires()
        assert len(ledger.rounds("step 3")) == 4


def with_collectives_of_the_users(rank: int, world: int, stage: int) -> Any:
    """The user's own on the world group: in forward, in hooks that fire amid ours, and in another order on each rank's step."""
    model = filled(TwoBranches(), high=1)
    optimizer = shard(model, sgd(model, 2.0**-10), stage=stage, bucket_bytes=1024)
    seen = []

    def total(*_):
        number = torch.full((3,), float(rank + 1))
        dist.all_reduce(number)
        seen.append(number[0].item())

    for branch in model.branches:
        branch.weight.register_hook(total)
    for step in range(3):
        order = [(index + step) % 4 for index in range(4)]
        total()
        whole_loss(model(draw(model, (2, 16), rank, step), order), world, step).backward()
        total()
        optimizer.step()
        total()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], seen


@pytest.mark.promise("R12", "L06")
@pytest.mark.parametrize("stage", STAGES)
def test_collectives_of_the_users_in_between_pair_with_each_other_only(stage):
    plain = filled(TwoBranches(), high=1)
    optimizer = sgd(plain, 2.0**-10)
    for step in range(3):
        order = [(index + step) % 4 for index in range(4)]
        for rank in range(3):
            whole_loss(plain(draw(plain, (2, 16), rank, step), order), 1, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights, seen in ranks.run(3, with_collectives_of_the_users, stage):
        assert seen == [6.0] * (3 * 7)
        assert all(torch.allclose(mine, p, rtol=1e-6, atol=1e-6) for mine, p in zip(weights, plain.parameters(), strict=True))


# R13, R14: streams, on the simulated device ------------------------------------------------------------------------------


class OnTwoStreams(nn.Module):
    """Two branches from one trunk, of which the second is computed on a stream of its own where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, accelerator=None, side=None):
        h = self.trunk(x)
        if side is None:
            return self.left(h) + self.right(h)
        main = accelerator.current_stream()
        side.wait_stream(main)
        with accelerator.in_stream(side):
            right = self.right(h)
        left = self.left(h)
        main.wait_stream(side)
        return left + right


NUM_SEEDS = 20


def loss_of_step(model: nn.Module, rank: int, world: int, step: int, *streams: Any) -> torch.Tensor:
    return whole_loss(model(draw(model, (2, 4), rank, step), *streams), world, step)


def train_in_random_order(rank: int, world: int, stage: int) -> Any:
    """Put-off work of every step runs in another legal order; the device's detector raises where two accesses have none."""
    import accelerators
    import accelerators_sim as simulated

    simulated.bring_up()
    accelerator = accelerators.get("sim")
    with torch.device("sim:0"):
        model = filled(OnTwoStreams(), high=1)
    optimizer = shard(model, sgd(model, 2.0**-12), stage=stage, bucket_bytes=64, timeout_s=20.0)
    side, found = accelerator.new_stream(), []
    for seed in range(NUM_SEEDS):
        simulated.configure(order=f"random:{seed}")
        loss_of_step(model, rank, world, seed, accelerator, side).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([p.detach().cpu().clone() for p in model.parameters()])
    optimizer.close()
    return found


class NeverDone:
    """A collective that is on its way until somebody insists."""

    def __init__(self, pending: Any) -> None:
        self.wait = pending.wait

    def done(self) -> bool:
        return False


class Slow(Ledger):
    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Any:
        return NeverDone(super().reduce_scatter(bucket, sum_dtype))

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Any:
        return NeverDone(super().all_reduce(bucket, sum_dtype))


def waits_of_backward(rank: int, world: int, stage: int) -> Any:
    """The waits of three backwards each: with small buckets, as they are; and where two and a half may be ahead."""
    import accelerators_sim as simulated

    simulated.bring_up()
    with torch.device("sim:0"):
        model = filled(TwoBranches(), high=1)
    ledger = Slow(inside.connected("sim", None, 20.0))
    optimizer = shard(model, sgd(model, 1e-3), stage=stage, bucket_bytes=1024, group=ledger)
    found = []
    for step in range(6):
        ledger.section = f"backward {step}"
        loss = whole_loss(model(draw(model, (2, 16), rank, step), range(4)), world, step)
        ahead = faults.host_ahead_at_most(2560) if step >= 3 else contextlib.nullcontext()
        with ahead, simulated.recorded_waits() as waits:
            loss.backward()
        ledger.section = "step"
        optimizer.step()
        optimizer.zero_grad()
        found.append((len(ledger.rounds(f"backward {step}")), [(wait.waiter, wait.awaited) for wait in waits]))
    optimizer.close()
    return found


def on_simulated_device(rank: int, world: int) -> Any:
    return train_in_random_order(rank, world, 2), waits_of_backward(rank, world, 2)


@pytest.fixture(scope="module")
def simulated_device():
    """Both trainings in one go: the device is its process's for good, and a process of one's own takes seconds to start."""
    return ranks.run(2, on_simulated_device, timeout=60.0, fresh=True)


@needs_sim
@pytest.mark.promise("R13")
def test_random_orders_of_overlapped_work_on_two_streams_give_the_same_and_race_nowhere(simulated_device):
    plain = filled(OnTwoStreams(), high=1)
    optimizer = sgd(plain, 2.0**-12)
    expected_weights = []
    for seed in range(NUM_SEEDS):
        for rank in range(2):
            loss_of_step(plain, rank, 1, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected_weights.append([p.detach().clone() for p in plain.parameters()])
    for found, _ in simulated_device:
        assert [seed for seed in range(NUM_SEEDS) if not close(found[seed], expected_weights[seed])] == []


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(mine, p, atol=1e-6) for mine, p in zip(ours, theirs, strict=True))


@needs_sim
@pytest.mark.promise("R14")
def test_in_backward_nothing_waits_for_a_collective_and_a_host_only_for_its_own_device_two_buckets_behind(simulated_device):
    for _, found in simulated_device:
        for step, (num_rounds, waits) in enumerate(found):
            assert num_rounds == 4
            between = [(waiter, awaited) for waiter, awaited in waits if waiter != awaited]
            # Each collective waits for what was computed, and that is all: the stream that computes waits for nothing, so who
            # waits for it waits for no rank. That is the host, where the bytes of two buckets are much, once a third one was
            # sent: see [Note: ahead of the device].
            assert {awaited for _, awaited in between} == {"the default stream of sim:0"}
            waiters = ["the host" if waiter == "the host" else waiter.split()[0] for waiter, _ in between]
            all_small = ["stream", "stream", "stream", "stream"]
            assert waiters == (["stream", "stream", "stream", "the host", "stream", "the host"] if step >= 3 else all_small)


# What is sent (CONTRACT.md section 4) -----------------------------------------------------------------------------------


def train_few_of_many(group: Any, model: nn.Module, stage: int) -> Any:
    ledger = Ledger(group)
    optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=512, group=ledger)
    layout = inside.layout(optimizer)
    reached = {bucket for param in model.reached for bucket in layout.buckets_of(param)}
    live = []
    for step in range(3):
        ledger.section = f"backward {step}"
        model(like(model, whole_numbers((2, 3), "few", group.rank, step))).backward()
        ledger.section = f"settle {step}"
        optimizer.settle()
        live.append(inside.bytes_of_gradients(optimizer))
        used = sum(p.grad is not None for p in model.parameters())
        ledger.section = f"step {step}"
        optimizer.step()
        optimizer.zero_grad()
        live.append(inside.bytes_of_gradients(optimizer))
    bytes_of_reached = sum(layout.buckets[bucket].span.numel * 4 for bucket in reached)
    return ledger, live, used, bytes_of_reached, len(reached), len(layout.buckets)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in STAGES[:-1]), STAGES[-1]])
def test_of_1083_parameters_only_the_buckets_of_the_63_reached_are_sent_and_kept(stage):
    world = 2
    found = on_loopback(world, lambda: filled(ManyParameters(63)), lambda g, m: train_few_of_many(g, m, stage))
    for ledger, live, used, reached_bytes, num_reached, num_buckets in found:
        assert num_reached < num_buckets
        assert used == 63
        share = reached_bytes // (world if stage else 1)
        assert live == [share, 0] * 3
        for step in range(3):
            rounds = ledger.rounds(f"backward {step}") + ledger.rounds(f"settle {step}")
            assert sum(entry.num_bytes for entry in rounds) == reached_bytes
            gathered = ledger.of(f"step {step}", "all_gather")
            assert sum(entry.num_bytes for entry in gathered) == (reached_bytes if stage else 0)
        # The first window learns the order: from the second on, everything leaves while backward runs.
        assert len(ledger.rounds("backward 1")) == len(ledger.rounds("backward 2")) == num_reached


class HeadFirst(nn.Module):
    """The head is registered first, so its slot is where backward is expected to end, and its gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 24, bias=False)
        self.body = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(6)))

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("stage", STAGES)
def test_with_the_head_registered_first_the_second_window_sends_as_gradients_come(stage):
    numel = 24 * 24  # the shares of 3 ranks divide it without a remainder

    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model, 1e-3), stage=stage, bucket_bytes=4 * numel, group=ledger)
        waiting = []
        for step in range(3):
            ledger.section = f"backward {step}"
            loss = whole_loss(model(draw(model, (2, 24), group.rank, step)), group.size, step)
            open_rounds: list[int] = []
            look = lambda _, seen=open_rounds: seen.append(inside.num_open_rounds(optimizer))  # noqa: E731
            handles = [p.register_post_accumulate_grad_hook(look) for p in model.parameters()]
            loss.backward()
            for handle in handles:
                handle.remove()
            waiting.append(max(open_rounds))
            ledger.section = f"step {step}"
            optimizer.step()
            optimizer.zero_grad()
        return ledger, waiting

    for ledger, waiting in on_loopback(3, lambda: filled(HeadFirst(), high=1), program):
        for step in range(3):
            rounds = ledger.rounds(f"backward {step}") + ledger.rounds(f"step {step}")
            assert [entry.num_bytes for entry in rounds] == [4 * numel] * 7
        # Once learned, no gradient waits for another: each leaves before the next one comes.
        assert waiting[1:] == [0, 0]
        assert len(ledger.rounds("backward 1")) == len(ledger.rounds("backward 2")) == 7
