"""Ranks that do different things between a settling and the step: never a silent difference, and a way to go on."""

import contextlib
import time

import pytest
import torch
from torch import nn

import zero
from tests import faults, ranks
from tests.loopback import run_ranks
from tests.zoo.case import filled
from zero import Engine
from zero.errors import GroupLost, NonFinite, RankFailed, RanksDiffer

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
TIME_LIMIT_S = 20.0


class Trouble(Exception):
    pass


def sharded(group, stage, **options):
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), real=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return model, zero.shard(model, inner, stage=stage, bucket_bytes=64, group=group, **options)


def send(model, rank, step):
    model(torch.full((1, 4), float(rank + step))).square().mean().backward()


def look(model, optimizer, how):
    if how == "settle":
        optimizer.settle()
    elif how == "whole_grad":
        optimizer.whole_grad(model[0].weight)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train(model, optimizer, rank, steps):
    for step in steps:
        send(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def undisturbed(stage, steps):
    def program(group):
        return train(*sharded(group, stage), group.rank, steps)

    return run_ranks(2, program, TIME_LIMIT_S)[0]


def same(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@STAGES
@pytest.mark.parametrize("how", ["settle", "whole_grad", "clip"])
@pytest.mark.parametrize("by", ["the optimizer", "the model"])
def test_a_settled_window_that_one_rank_clears_is_an_error_on_all_and_no_other_window(by, how, stage):
    def program(group):
        model, optimizer = sharded(group, stage)
        send(model, group.rank, 0)
        look(model, optimizer, how)
        said = None
        if group.rank == 1:
            (optimizer if by == "the optimizer" else model).zero_grad()
        if group.rank == 0 or by == "the model":  # the optimizer's own has met the others already
            with pytest.raises((RankFailed, RanksDiffer)) as caught:
                send(model, group.rank, 1)
                optimizer.step()
            said = str(caught.value)
            optimizer.zero_grad()
        return said, train(model, optimizer, group.rank, range(2))

    (first, weights), (second, others) = run_ranks(2, program, TIME_LIMIT_S)
    if by == "the optimizer":
        assert first.startswith("Cannot go on: rank 1 failed or cleared its gradients at step 1") and second is None
    else:
        assert first == second and first.startswith("Cannot go on: rank 1 cleared gradients that were settled at step 1")
    expected = undisturbed(stage, range(2))
    assert same(weights, expected) and same(others, expected)


@pytest.mark.promise("L01")
@STAGES
@pytest.mark.parametrize("how", ["settle", "whole_grad", "clip"])
def test_an_error_of_one_rank_between_settling_and_step_is_named_and_the_next_step_is_as_if_it_had_not_been(how, stage):
    def program(group):
        model, optimizer = sharded(group, stage)
        train(model, optimizer, group.rank, range(1))
        said = None
        try:
            send(model, group.rank, 7)
            look(model, optimizer, how)
            if group.rank == 1:
                raise Trouble
            optimizer.step()
        except (Trouble, RankFailed) as error:
            said = str(error)
        optimizer.zero_grad()
        return said, train(model, optimizer, group.rank, range(1, 3))

    (first, weights), (_, others) = run_ranks(2, program, TIME_LIMIT_S)
    assert first.startswith("Cannot go on: rank 1 failed or cleared its gradients at step 2")
    expected = undisturbed(stage, range(3))
    assert same(weights, expected) and same(others, expected)


@STAGES
@pytest.mark.parametrize("what", ["whole_grad", "whole_state"])
def test_ranks_that_ask_for_different_parameters_are_told_and_get_nothing(what, stage):
    def program(group):
        model, optimizer = sharded(group, stage)
        train(model, optimizer, group.rank, range(1))
        send(model, group.rank, 1)
        told = pytest.raises(RanksDiffer, match=f"rank 1 of 2 came to {what} of 1.weight .*, rank 0 to {what} of 0.weight")
        with contextlib.nullcontext() if (what, stage) == ("whole_state", 0) else told:  # it has all
            getattr(optimizer, what)(model[group.rank].weight)
        optimizer.zero_grad()
        return train(model, optimizer, group.rank, range(1, 3))

    for weights in run_ranks(2, program, TIME_LIMIT_S):
        assert same(weights, undisturbed(stage, range(3)))


def test_an_error_while_weights_are_gathered_counts_as_one_of_the_update():
    def program(group):
        model, optimizer = sharded(group, 2)
        wait = faults.waiting_for_weights(optimizer)
        finish = wait.now

        def interrupted(used):
            finish(used)
            if group.rank == 1:
                raise Trouble

        send(model, group.rank, 0)
        with wait.replaced(interrupted):
            if group.rank == 1:
                with pytest.raises(Trouble):
                    optimizer.step()
                optimizer.zero_grad()
                return "it was this one"
            optimizer.step()
        optimizer.zero_grad()
        send(model, group.rank, 1)
        with pytest.raises(RankFailed) as caught:
            optimizer.step()
        optimizer.zero_grad()
        return str(caught.value)

    said, _ = run_ranks(2, program, TIME_LIMIT_S)
    assert said.startswith("Cannot go on: rank 1 failed or cleared its gradients at step 2, in the update (")


@pytest.mark.parametrize("fails", ["backward", "judging"])
def test_after_an_error_on_all_ranks_the_next_micro_step_of_an_engine_begins_a_window(fails):
    def program(group):
        model, optimizer = sharded(group, 2, accumulation=2, on_nonfinite="raise")
        engine = Engine(optimizer)

        def micro_step(number, factor=1.0):
            engine.backward(factor * engine(torch.full((1, 4), float(group.rank + number))).square().mean())
            engine.step()

        micro_step(0)
        handle = model[0].weight.register_hook(fail_at_once if fails == "backward" else torch.clone)
        with pytest.raises(Trouble if fails == "backward" else NonFinite):
            micro_step(1, factor=torch.inf if fails == "judging" else 1.0)
        handle.remove()
        engine.zero_grad()
        steps = []
        for number in range(4):
            micro_step(number)
            steps.append(engine.global_steps)
        return steps

    assert run_ranks(2, program, TIME_LIMIT_S) == [[0, 1, 1, 2]] * 2


# over gloo --------------------------------------------------------------------------------------------------------------


def train_late(rank, world, late):
    model, optimizer = sharded(None, 2, timeout_s=1.5, first_step_timeout_s=30.0)
    train(model, optimizer, rank, range(1))
    return be_late(model, optimizer, rank, late)


def be_late(model, optimizer, rank, late):
    if rank in late:
        time.sleep(5.0)
    try:
        train(model, optimizer, rank, range(1, 2))
    except GroupLost as error:
        return str(error)
    return None


@pytest.mark.promise("L01")
def test_two_ranks_that_are_late_are_named_and_nobody_is_said_to_be_gone():
    for said in ranks.run(3, train_late, (1, 2), timeout=60.0):
        assert "rank 1 was last seen before a backward of step 2 and rank 2 was last seen" in said, said
        assert "and did not come" in said
        assert "is gone" not in said


def fail_at_once(grad):
    raise Trouble


def stall_after_a_handled_error(rank, world):
    model, optimizer = sharded(None, 2, timeout_s=1.5, first_step_timeout_s=30.0)
    train(model, optimizer, rank, range(1))
    handle = model[0].weight.register_hook(fail_at_once)
    with pytest.raises(Trouble):
        send(model, rank, 1)
    handle.remove()
    optimizer.zero_grad()
    return be_late(model, optimizer, rank, (1,))


@pytest.mark.promise("L01")
def test_a_rank_that_stalls_after_an_error_that_it_handled_is_not_said_to_be_in_that_backward():
    for said in ranks.run(2, stall_after_a_handled_error, timeout=60.0):
        assert "rank 1 was last seen before a backward of step 2, and did not come" in said
