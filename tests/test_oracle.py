"""The oracle is right itself: it equals plain torch, equals hand-written training on real ranks, and sees what differs."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import oracle, ranks
from tests.oracle import DynamicScale, StaticScale, Trace, compare, reference, train
from tests.zoo import CASES, Case
from tests.zoo.case import backward, draw, finish, like, real_mlp, real_numbers, sgd

pytestmark = pytest.mark.of_tests

WORLDS = [1, 2, 3, 4]


def case_of(script, build=real_mlp, optimizer=None, **fields):
    return Case(script.__name__, build, script, optimizer or sgd(0.1), **fields)


# Against plain torch on the global batch --------------------------------------------------------------------------------


def mean_loss(model, optimizer, rank, world, step):
    backward(optimizer, model(draw(model, (5, 4), rank, step, real=True)).square().mean())
    yield "settle"
    finish(optimizer)


@pytest.mark.parametrize("world", WORLDS)
def test_it_equals_plain_torch_on_the_concatenated_batch(world):
    case = case_of(mean_loss, optimizer=sgd(0.1, momentum=0.9, weight_decay=0.1), steps=5)
    model = case.build()
    optimizer = case.optimizer(model)
    traces = reference(case, world)
    for step in range(case.steps):
        batch = torch.cat([draw(model, (5, 4), rank, step, real=True) for rank in range(world)])
        model(batch).square().mean().backward()
        finish(optimizer)
        for trace in traces:
            for name, weight in model.named_parameters():
                torch.testing.assert_close(trace.steps[step].weights[name], weight.detach(), rtol=1e-6, atol=1e-6)


def tokens_of(rank, step, micro):
    return [(7, 1, 5), (3, 8, 2), (4, 0, 6)][micro][(rank + step) % 3]


def weighted_loss(model, optimizer, rank, world, step):
    for micro in range(3):
        tokens = tokens_of(rank, step, micro)
        optimizer.weight(tokens)
        x = like(model, real_numbers((tokens, 4), rank, step, micro))
        # Over no tokens at all the mean is NaN, and must count for nothing.
        backward(optimizer, model(x).square().sum() / tokens if tokens else model(x).sum() * float("nan"))
    yield "settle"
    finish(optimizer)


def test_weights_make_the_mean_over_all_tokens():
    case = case_of(weighted_loss)
    model = case.build()
    optimizer = case.optimizer(model)
    traces = reference(case, 3)
    for step in range(case.steps):
        parts = [real_numbers((tokens_of(r, step, m), 4), r, step, m) for r in range(3) for m in range(3)]
        batch = torch.cat(parts)
        (model(batch).square().sum() / len(batch)).backward()
        finish(optimizer)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(traces[0].steps[step].weights[name], weight.detach(), rtol=1e-6, atol=1e-6)


class TwoNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.often, self.never = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))


def only_on_rank_two(model, optimizer, rank, world, step):
    if rank == 2:
        backward(optimizer, 6 * model.often)
    yield "settle"
    grads = (model.often.grad, model.never.grad)
    finish(optimizer)
    return grads


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 2.0), ("sum", 6.0), (12.0, 0.5)])
def test_absent_ranks_count_as_zero_and_what_nobody_has_stays_none(reduce, expected):
    case = case_of(only_on_rank_two, TwoNumbers, sgd(1.0, weight_decay=1.0), steps=1, reduce=reduce)
    for trace in reference(case, 3):
        often, never = trace.steps[0].observed
        assert often.item() == expected
        assert never is None
        assert trace.steps[0].weights["never"].item() == 1.0
        assert trace.steps[0].weights["often"].item() == 1.0 - expected - 1.0


# One rank is plain torch, and `train` runs it ---------------------------------------------------------------------------

BEYOND_TORCH = {"weights", "idle", "discard", "divisor", "sharpness"}


# A case that needs low precision of the device has weights in it from the start, and plain torch has no fp32 masters.
PLAIN = [n for n, case in CASES.items() if "fp32" in case.dtypes and not case.tags & BEYOND_TORCH and not case.needs]


@pytest.mark.parametrize("name", PLAIN)
def test_at_world_one_it_is_plain_torch_bit_for_bit(name):
    case = CASES[name]
    model = case.build()
    compare([train(case, model, plain_optimizer(case, model), 0, 1)], reference(case, 1), exact=True, name=name)


def plain_optimizer(case, model):
    optimizer = case.optimizer(model)
    optimizer.settle = lambda: None  # plain gradients are always settled
    return optimizer


# Against training written by hand on real ranks -------------------------------------------------------------------------


def train_by_hand(rank, world, name):
    """What a user would write without any library: reduce every gradient where the global one must exist."""
    case = CASES[name]
    model = case.build()
    optimizer = plain_optimizer(case, model)
    trace = Trace(rank, world)
    for number in range(case.steps):
        window, observed = case.script(model, optimizer, rank, world, number), None
        while True:
            try:
                next(window)
            except StopIteration as end:
                observed = end.value
                break
            average(model, world)
        trace.steps.append(oracle.Step(oracle.weights_of(model), oracle.copied(observed)))
    trace.buffers = oracle.copied(dict(model.named_buffers()))
    return trace


def average(model, world):
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        used = torch.tensor(float(parameter.grad is not None))
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(used)
        dist.all_reduce(grad)
        parameter.grad = grad * (1 / world) if used else None


def train_all_by_hand(rank, world, names):
    return {name: train_by_hand(rank, world, name) for name in names}


BY_HAND = [
    "two_layers",
    "shared_module_in_reentrant_checkpoint",
    "tied_weight_with_two_backwards_and_clipping",
    "branch_switched_off_after_warm_up",
    "branch_chosen_by_rank_and_step",
    "branches_in_reversed_order_on_odd_ranks",
    "experts_routed_by_data",
    "gradient_penalty",
    "last_backward_leaves_a_branch_out",
    "windows_of_different_length_on_each_rank",
    "gradients_cleared_to_zeros",
    "batch_norm_statistics_of_each_rank",
    "clipping_beside_frozen_parameters",
    "a_little_of_everything",
    "torchs_own_grad_scaler_with_one_overflow",
    "adamw_groups_edited_at_every_step",
    "weights_clamped_through_data",
    "gradients_assigned_by_some_ranks_for_some_parameters",
]


@pytest.mark.parametrize("world", [2, 3])
def test_it_equals_training_by_hand_on_real_ranks(world):
    by_rank = ranks.run(world, train_all_by_hand, BY_HAND)
    for name in BY_HAND:
        exact = CASES[name].is_exact("fp32", world)
        compare([traces[name] for traces in by_rank], reference(CASES[name], world), exact=exact, name=name)


# Low precision ----------------------------------------------------------------------------------------------------------


class OneNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0 + 2.0**-12, 3.0]))


def times_rank(model, optimizer, rank, world, step):
    x = torch.tensor([2.0**-8 * (rank + 1), 1.0 + rank], dtype=model.weight.dtype)
    backward(optimizer, (model.weight * x).sum())
    yield "settle"
    finish(optimizer)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_keep_what_the_stored_weights_round_away(dtype):
    low = oracle.DTYPES[dtype]
    traces = reference(case_of(times_rank, OneNumber, sgd(0.125), steps=4), 2, dtype)
    # Powers of two throughout, so the gradient is exact and only the stored weights round.
    master = torch.tensor([1.0 + 2.0**-12, 3.0])
    for step in traces[0].steps:
        master = master - 0.125 * torch.tensor([2.0**-8 * 1.5, 1.5])
        assert torch.equal(step.masters["weight"], master)
        assert torch.equal(step.weights["weight"], master.to(low))
        assert step.grads["weight"].dtype == torch.float32


def many_small(model, optimizer, rank, world, step):
    for _ in range(256):
        backward(optimizer, model.weight[0] * 2.0**-10)
    backward(optimizer, model.weight[0] * 1.0)
    yield "settle"
    finish(optimizer)


def test_gradients_of_many_backwards_are_summed_in_fp32():
    trace = reference(case_of(many_small, OneNumber, steps=1), 1, "bf16")[0]
    assert trace.steps[0].grads["weight"][0].item() == 256 * 2.0**-10 + 1.0


def edit_or_swap(model, optimizer, rank, world, step):
    yield from times_rank(model, optimizer, rank, world, step)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(9.0)
        model.weight.copy_(before)
        if step == 1:
            model.weight[1] = 0.5


def test_edits_are_adopted_and_restored_weights_keep_their_masters():
    untouched = reference(case_of(times_rank, OneNumber, sgd(0.125), steps=3), 2, "bf16")[0]
    edited = reference(case_of(edit_or_swap, OneNumber, sgd(0.125), steps=3), 2, "bf16")[0]
    for one, other in zip(untouched.steps, edited.steps, strict=True):
        assert one.masters["weight"][0] == other.masters["weight"][0]
    assert edited.steps[2].masters["weight"][1].item() == 0.5 - 0.125 * 1.5


def infinite_once(model, optimizer, rank, world, step):
    factor = float("inf") if step == 1 and rank == 1 else 1.0
    backward(optimizer, model.weight.sum() * factor)
    yield "settle"
    finish(optimizer)


def test_a_loss_scale_skips_the_step_for_all_and_halves():
    scale = DynamicScale(scale=8.0, window=2, hysteresis=1)
    case = case_of(infinite_once, OneNumber, sgd(0.5, momentum=0.5), steps=4)
    for trace in reference(case, 2, "fp16", loss_scale=scale):
        first, skipped, third, fourth = (step.weights["weight"] for step in trace.steps)
        assert torch.equal(first, skipped)
        assert not torch.equal(skipped, third)
        assert not torch.equal(third, fourth)
        assert [step.loss_scale for step in trace.steps] == [8.0, 4.0, 4.0, 8.0]


# What it refuses --------------------------------------------------------------------------------------------------------


def forgets_to_settle(model, optimizer, rank, world, step):
    backward(optimizer, model(draw(model, (2, 4), rank, step)).sum())
    finish(optimizer)
    yield "settle"


def settles_on_one_rank_only(model, optimizer, rank, world, step):
    if rank == 0:
        yield "settle"


def edits_on_one_rank_only(model, optimizer, rank, world, step):
    yield "settle"
    with torch.no_grad():
        model[0].bias.add_(rank)


@pytest.mark.parametrize(
    ("script", "words"),
    [(forgets_to_settle, "must yield"), (settles_on_one_rank_only, "different points"), (edits_on_one_rank_only, r"0\.bias")],
)
def test_a_script_that_could_not_be_right_is_refused(script, words):
    with pytest.raises(AssertionError, match=words):
        reference(case_of(script), 2)


# What it sees -----------------------------------------------------------------------------------------------------------


@cache
def traces_of(name, dtype):
    return reference(CASES[name], 2, dtype)


def traces_with(change, name="a_little_of_everything", dtype="fp32"):
    expected = traces_of(name, dtype)
    ours = copy.deepcopy(expected)
    compare(ours, expected, exact=True, state=True)
    change(ours)
    return ours, expected


def change_weight(ours):
    ours[1].steps[2].weights["optional.bias"][1] += 1e-4
    ours[1].steps[3].weights["scalar"].add_(1.0)


def change_state(ours):
    ours[0].state["scalar"]["momentum_buffer"].add_(0.01)


def drop_state(ours):
    del ours[0].state["scalar"]


def change_what_was_returned(ours):
    ours[0].steps[1].observed += 0.01


def drop_a_step(ours):
    ours[1].steps.pop()


def change_dtype(ours):
    ours[0].steps[0].weights["scalar"] = ours[0].steps[0].weights["scalar"].double()


def make_nan(ours):
    ours[0].steps[0].weights["scalar"].fill_(float("nan"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_weight, r"step 2, rank 1 of 2, parameter optional\.bias: 1 of 3 elements differ by up to 0\.0001.*\[1\]"),
        (change_state, "optimizer state, scalar, momentum_buffer"),
        (drop_state, "optimizer state: there are"),
        (change_what_was_returned, "step 1, rank 0 of 2, what the script returned"),
        (drop_a_step, "step 3, rank 1 of 2: there is no such step"),
        (change_dtype, r"parameter scalar: it is \(\) of torch.float64"),
        (make_nan, "parameter scalar"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_a_difference_is_named(change, words, exact):
    ours, expected = traces_with(change)
    with pytest.raises(AssertionError, match=f"the case: .*{words}"):
        compare(ours, expected, exact=exact, state=True, name="the case")


def test_a_buffer_that_differs_is_named():
    def change(ours):
        ours[1].buffers["norm.running_mean"][0] += 0.01

    with pytest.raises(AssertionError, match=r"rank 1 of 2, buffers, norm\.running_mean"):
        compare(*traces_with(change, "batch_norm_statistics_of_each_rank"), exact=False)


def test_rounding_is_tolerated_unless_every_bit_is_asked_for():
    def change(ours):
        ours[0].steps[0].weights["embedding.weight"][0, 0] *= 1 + 2.0**-22

    ours, expected = traces_with(change)
    compare(ours, expected, exact=False)
    with pytest.raises(AssertionError, match="every bit"):
        compare(ours, expected, exact=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stored_weights_may_differ_by_one_unit_in_the_last_place_and_not_by_two(dtype):
    def by_units(units):
        def change(ours):
            # Neighbours of a 16-bit float are neighbours as integers.
            ours[0].steps[0].weights["0.weight"].view(torch.int16)[0, 0] += units

        return change

    compare(*traces_with(by_units(1), "two_layers", dtype), exact=False)
    with pytest.raises(AssertionError, match="one unit in the last place"):
        compare(*traces_with(by_units(2), "two_layers", dtype), exact=False)


def test_masters_and_gradients_are_compared_where_both_have_them():
    def change_master(ours):
        ours[0].steps[0].masters["0.weight"][0, 0] += 1e-3

    def change_gradient(ours):
        ours[0].steps[0].grads = {"0.weight": ours[0].steps[0].grads["0.weight"] + 1e-2}

    def say_none(ours):
        ours[0].steps[0].grads = {"0.weight": None}

    for change, words in ((change_master, "master of 0.weight"), (change_gradient, "gradient of"), (say_none, "gradient of")):
        with pytest.raises(AssertionError, match=words):
            compare(*traces_with(change, "two_layers", "bf16"), exact=False)


def test_the_order_of_sums_can_be_turned_around():
    def loss(model, optimizer, rank, world, step):
        backward(optimizer, model.weight[0] * (1.0, 1e8, -1e8)[rank])
        yield "settle"
        return model.weight.grad[0]

    case = replace(case_of(loss, OneNumber, steps=1), reduce="sum")
    assert reference(case, 3)[0].steps[0].observed.item() == 0.0
    assert reference(case, 3, backwards_order=True)[0].steps[0].observed.item() == 1.0


def test_a_static_scale_changes_nothing_that_can_be_seen():
    plain = reference(CASES["two_layers"], 2, "fp16")
    scaled = reference(CASES["two_layers"], 2, "fp16", loss_scale=StaticScale(8.0))
    for trace in plain:
        for step in trace.steps:
            step.loss_scale = 8.0
    compare(plain, scaled, exact=True)
