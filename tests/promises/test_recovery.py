"""After a failure: ranks that are all there go on over new connections, and processes end as they should."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accelerators
import zero
from accelerators.memory import MemoryReading
from tests import faults, inside, programs, ranks
from tests.config_values import OTHER_VALUES
from tests.devices import needs_linux, needs_sim
from tests.faults import end_as_the_interpreter_does
from tests.loopback import run_ranks
from tests.zoo.case import filled
from zero.errors import CheckpointFailed, GroupLost, NonFinite, RankFailed, RanksDiffer

LIMIT_S = 1.5



def small():
    return filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), real=True)


def sharded(model, **options):
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 30.0, "bucket_bytes": 64}
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return zero.shard(model, inner, **{"stage": 2, **limits, **options})


def one_step(model, optimizer, rank, step):
    model(torch.full((1, 4), float(rank + step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# Going on ---------------------------------------------------------------------------------------------------------------


def stall_and_go_on(rank, world, late, new_world, stage):
    model = small()
    optimizer = sharded(model, stage=stage)
    one_step(model, optimizer, rank, 0)
    said = None
    if late:
        model(torch.full((1, 4), 7.0)).square().mean().backward()
        if rank == 1:
            time.sleep(2 * LIMIT_S + 1.0)
        with pytest.raises(GroupLost) as raised:
            optimizer.step()
        said = str(raised.value)
        if new_world:
            store = dist.distributed_c10d._get_default_store()
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
        optimizer.rebuild(dist.group.WORLD if new_world else None)
    one_step(model, optimizer, rank, 1)
    one_step(model, optimizer, rank, 2)
    optimizer.check()
    return said, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("new_world", "stage"),
    [(True, 2), *(pytest.param(*one, marks=pytest.mark.full) for one in [(False, 2), (False, 3), (True, 3)])],
)
def test_after_a_rank_came_too_late_all_go_on_as_if_the_window_had_not_been(new_world, stage):
    undisturbed = ranks.run(2, stall_and_go_on, False, False, stage)
    found = ranks.run(2, stall_and_go_on, True, new_world, stage)
    assert "rank 1 was last seen after a backward of step 2, and did not come" in found[0][0]
    assert found[0][0].split(": ", 1)[1] in found[1][0]
    for (_, weights), (_, expected) in zip(found, undisturbed, strict=True):
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def in_a_part(rank, world, stage, rebuilds, parts_ways):
    """Ranks 0 and 1 train, one training after the other. The first may end with a round that rank 1 never sent."""
    group, found = dist.new_group([0, 1]), None
    if rank < 2:
        options = {"stage": stage, "group": group, "shared_memory": False}
        if parts_ways:
            model = small()
            optimizer = sharded(model, **{**options, "stage": 2})
            one_step(model, optimizer, rank, 0)
            (model if rank == 0 else model[1])(torch.ones(1, 4)).square().mean().backward()
            optimizer.close()
        model = small()
        optimizer = sharded(model, **options)
        for step in range(3):
            one_step(model, optimizer, rank, step)
            if rebuilds:
                optimizer.rebuild()
        optimizer.close()
        found = [param.detach().clone() for param in model.parameters()]
    dist.barrier()
    return found


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(("rebuilds", "parts_ways"), [(True, False), (False, True)])
def test_a_part_of_the_ranks_connects_anew_without_the_others_and_what_was_before_is_not_in_it(stage, rebuilds, parts_ways):
    undisturbed = ranks.run(3, in_a_part, stage, False, False)
    found = ranks.run(3, in_a_part, stage, rebuilds, parts_ways)
    for weights, expected in zip(found[:2], undisturbed[:2], strict=True):
        assert all(map(torch.equal, weights, expected))


def after_a_loss(rank, world):
    """Messages of two ranks have a process group that is kept, and rank 1 has none any more, as after a failure."""
    for number in range(3):
        model = small()
        optimizer = sharded(model, stage=3, shared_memory=False, gathered_bytes=0)
        one_step(model, optimizer, rank, number)
        optimizer.close()
        if rank == 1 and number == 0:
            faults.forget_free_wires()


def test_ranks_that_kept_different_process_groups_make_new_ones():
    found = ranks.outcomes(2, after_a_loss, timeout=30.0)
    assert all(outcome.ok for outcome in found), ranks.describe(found)


def close_before_and_after_rebuild(rank, world, late):
    model = small()
    optimizer = sharded(model, stage=3, shared_memory=False, gathered_bytes=0)
    one_step(model, optimizer, rank, 0)
    said = []
    if late:
        model(torch.full((1, 4), 7.0)).square().mean().backward()
        if rank == 1:
            time.sleep(2 * LIMIT_S + 1.0)
        with pytest.raises(GroupLost):
            optimizer.step()
        for _ in range(2):
            with pytest.raises(GroupLost) as raised:
                optimizer.close()
            said.append(str(raised.value))
        optimizer.rebuild()
        one_step(model, optimizer, rank, 1)
    else:
        one_step(model, optimizer, rank, 1)
    optimizer.close()
    optimizer.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    return said, {name: param.detach().clone() for name, param in model.named_parameters()}


def test_close_at_stage_3_can_be_tried_again_after_rebuild():
    undisturbed = ranks.run(2, close_before_and_after_rebuild, False)
    found = ranks.run(2, close_before_and_after_rebuild, True)
    for (said, weights), (_, expected) in zip(found, undisturbed, strict=True):
        assert len(said) == 2 and all(text.startswith("Cannot close: the weights are in shares") for text in said)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def interrupt_in_a_message(rank, world, stage, function):
    """Rank 1 is interrupted while it reads or writes a message, and calls rebuild() at once."""
    model = small()
    optimizer = sharded(model, stage=stage, timeout_s=600.0, first_step_timeout_s=600.0)
    one_step(model, optimizer, rank, 0)
    model(torch.ones(1, 4)).square().mean().backward()
    dist.barrier()  # otherwise rank 0 may hear of it in its forward, which asks for weights
    interrupted = faults.pipes_fail(function, KeyboardInterrupt)
    with interrupted if rank == 1 else contextlib.nullcontext():
        lost = pytest.raises(GroupLost, match=r"rank 1 called rebuild\(\), (in|after) a backward of step 2")
        with pytest.raises(KeyboardInterrupt) if rank == 1 else lost:
            optimizer.step()
    model.zero_grad()
    optimizer.rebuild()
    one_step(model, optimizer, rank, 1)
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@needs_linux
@pytest.mark.parametrize(("stage", "function"), [(2, "_Way.move"), (2, "_write"), (3, "_Channel.take")])
def test_a_rank_that_was_interrupted_in_a_message_is_not_taken_for_dead_and_all_go_on(stage, function):
    found = ranks.run(2, interrupt_in_a_message, stage, function, timeout=60.0)  # a tenth of the limit of a step
    assert are_undisturbed(found, stage)


def interrupt_between_steps(rank, world, shared_memory):
    """Rank 1 is interrupted in code of its own, and calls rebuild() at once; the other one asks it for weights meanwhile."""
    model = small()
    limits = {"timeout_s": 600.0, "first_step_timeout_s": 600.0}
    optimizer = sharded(model, stage=3, shared_memory=shared_memory, gathered_bytes=1, **limits)
    one_step(model, optimizer, rank, 0)
    if rank == 0:
        with pytest.raises(GroupLost, match=r"rank 1 called rebuild\(\)"):
            one_step(model, optimizer, rank, 1)
    model.zero_grad()
    optimizer.rebuild()
    one_step(model, optimizer, rank, 1)
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@needs_linux
@pytest.mark.parametrize("shared_memory", [True, False])
def test_at_stage_3_ranks_that_wait_for_one_that_was_interrupted_hear_that_it_rebuilds(shared_memory):
    found = ranks.run(2, interrupt_between_steps, shared_memory, timeout=60.0)  # a tenth of the limit
    assert are_undisturbed(found, 3)


def undisturbed_twice(rank, world, stage):
    model = small()
    optimizer = sharded(model, stage=stage)
    for step in range(2):
        one_step(model, optimizer, rank, step)
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@functools.cache
def weights_of_two_steps(stage):
    return ranks.run(2, undisturbed_twice, stage)


def are_undisturbed(found, stage):
    return all(map(torch.equal, itertools.chain(*found), itertools.chain(*weights_of_two_steps(stage))))


def lose_it_in_the_update(rank, world, folder, stage, clears):
    model = small()
    optimizer = sharded(model, stage=stage)
    one_step(model, optimizer, rank, 0)
    zero.save(folder, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    broken = faults.update_fails(optimizer) if rank == 1 else None
    with broken or contextlib.nullcontext(), pytest.raises(MemoryError) if rank == 1 else contextlib.nullcontext():
        optimizer.step()
    model.zero_grad()  # no other rank hears of it
    if clears:
        optimizer.zero_grad()  # all ranks clear together
    for _ in range(2):
        with pytest.raises(RanksDiffer, match=r"rank 1 was lost in the middle of a step.*Load a checkpoint"):
            optimizer.rebuild()
    zero.load(folder, optimizer)
    optimizer.rebuild()  # the load has replaced what was torn
    return optimizer.any_rank(rank == 1)


@pytest.mark.parametrize(("stage", "clears"), [(2, False), (2, True), (3, True)])
def test_ranks_lost_in_the_middle_of_a_step_are_connected_but_told_to_load_and_go_on_from_that(tmp_path, stage, clears):
    assert ranks.run(2, lose_it_in_the_update, tmp_path, stage, clears) == [True, True]


def torn_alone(rank, world, folder, stage, how):
    """One rank fails in the middle of an update, and all go on. Returns losses from what was loaded on, and what was raised."""
    model = small()
    optimizer = sharded(model, stage=stage)
    one_step(model, optimizer, rank, 0)
    zero.save(folder, optimizer)
    model(torch.full((1, 4), float(rank))).square().mean().backward()
    broken = faults.update_fails(optimizer) if rank == 1 else None
    with broken or contextlib.nullcontext(), pytest.raises(MemoryError) if rank == 1 else contextlib.nullcontext():
        optimizer.step()
    raised = None
    if how == "next step":
        model.zero_grad()
        with pytest.raises(RankFailed, match=r"rank 1 failed.* in the update") as caught:
            one_step(model, optimizer, rank, 1)
        raised = str(caught.value)
        optimizer.zero_grad()
        for name in "torn", "weights":
            with pytest.raises(CheckpointFailed, match=r"rank 1: ValueError: Cannot save: step 2 broke off"):
                zero.save(folder, optimizer, name)
            zero.load(folder, optimizer, optimizer_states=False)  # states are stepped in part still
    zero.load(folder, optimizer)
    one_step(model, optimizer, rank, 1)
    optimizer.check()
    optimizer.rebuild()  # the weights are whole
    return raised, optimizer.whole_state(model[0].weight)["momentum_buffer"]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_update_that_failed_on_one_rank_is_told_at_the_next_step_and_mended_by_a_load(tmp_path, stage):
    at_once, told = (ranks.run(2, torn_alone, tmp_path / how, stage, how) for how in ("load at once", "next step"))
    assert told[0][0] == told[1][0] is not None
    assert all(torch.equal(one[1], at_once[0][1]) for one in (*at_once, *told))


class InModes(torch.optim.SGD):
    """An optimizer whose weights change when it is told to train or to evaluate."""

    train = eval = lambda self: None


def fail_to_read_a_bucket(rank, world, how):
    """Of four buckets that an operation sends, rank 0 fails to read the second; then all ranks meet."""
    model = small()
    optimizer = zero.shard(model, InModes(model.parameters(), lr=0.1), stage=2, bucket_bytes=16, timeout_s=5.0)
    one_step(model, optimizer, rank, 0)
    model(torch.ones(1, 4)).square().mean().backward()
    assert len(inside.buckets(optimizer)) == 4
    gathering = faults.gathering_of(optimizer)
    pending, gather, sent = [], gathering.now, gathering.replaced()
    # Each is read before the next is sent.
    with sent as gathers, faults.publishes_every_bucket_alone(), faults.publishes_at_most(1):

        def begin(*arguments):
            pending.append(gather(*arguments))
            if rank == 0 and len(pending) == 2:
                pending[-1] = mock.Mock(**{"done.return_value": False, "wait.side_effect": KeyboardInterrupt})
            return pending[-1]

        gathers.side_effect = begin
        # Ranks tell each other how a change of modes went, which one that was interrupted does not.
        missed = pytest.raises(RanksDiffer) if how == "eval" else contextlib.nullcontext()
        with pytest.raises(KeyboardInterrupt) if rank == 0 else missed:
            getattr(optimizer, how)()
    sent = len(pending)
    if rank == 0 and how == "eval":
        with missed:
            optimizer.any_rank(False)
    told = optimizer.any_rank(rank == 0)
    if how == "eval":
        optimizer.train()
        # A bucket that was not read must not be taken for the next one that is sent.
        with pytest.raises(ValueError, match=r"optimizer.eval\(\) broke off"):
            optimizer.check()  # is sent next, or this would name a parameter
    return sent, told


@pytest.mark.parametrize("how", ["step", "eval"])
def test_a_rank_that_fails_to_read_a_bucket_sends_the_others_and_all_go_on_together(how):
    (sent, told), others = ranks.run(2, fail_to_read_a_bucket, how)
    assert (sent, told) == others and sent == 4 and told


def torn_while_another_saves(rank, world, folder):
    model = small()
    optimizer = sharded(model)
    one_step(model, optimizer, rank, 0)
    zero.save(folder, optimizer, async_save=True)  # ranks tell each other of it later
    model(torch.full((1, 4), float(rank))).square().mean().backward()
    if rank == 0:
        with faults.update_fails(optimizer), pytest.raises(MemoryError):
            optimizer.step()
        with pytest.raises(RanksDiffer, match="rank 1 of 2 came to a save"):
            optimizer.zero_grad()
    else:
        optimizer.step()
        with pytest.raises(RanksDiffer, match="rank 1 of 2 came to a save"):
            zero.save(folder, optimizer)
    with pytest.raises(RanksDiffer, match="rank 0 was lost in the middle of a step, and rank 1 has taken 2"):
        optimizer.rebuild()
    zero.load(folder, optimizer)
    one_step(model, optimizer, rank, 1)
    optimizer.check()
    return inside.num_steps(optimizer)


def test_where_ranks_parted_before_they_told_of_a_save_they_do_so_after_rebuild(tmp_path):
    assert ranks.run(2, torn_while_another_saves, tmp_path) == [2, 2]


def of_different_steps(rank, world, folder):
    model = small()
    optimizer = sharded(model)
    one_step(model, optimizer, rank, 0)
    zero.save(folder, optimizer)
    if rank == 1:
        inside.count_a_step_alone(optimizer)
    for _ in range(2):
        with pytest.raises(RanksDiffer, match="so their weights differ"):
            optimizer.rebuild()
    zero.load(folder, optimizer)
    optimizer.rebuild()
    one_step(model, optimizer, rank, 1)
    return inside.num_steps(optimizer)


def test_ranks_that_were_lost_after_different_steps_load_and_go_on(tmp_path):
    assert ranks.run(2, of_different_steps, tmp_path) == [2, 2]


# Time limits ------------------------------------------------------------------------------------------------------------


def compile_for_long(rank, world):
    model = small()
    optimizer = sharded(model)
    if rank == 1:
        time.sleep(2 * LIMIT_S)
    one_step(model, optimizer, rank, 0)
    one_step(model, optimizer, rank, 1)
    if rank == 1:
        time.sleep(LIMIT_S + 3.0)
        return None
    started = time.monotonic()
    with pytest.raises(GroupLost, match="rank 1 was last seen before a backward of step 3, and did not come"):
        one_step(model, optimizer, rank, 2)
    return time.monotonic() - started


@pytest.mark.promise("P11")
def test_the_first_step_may_take_longer_than_those_that_follow():
    took, _ = ranks.run(2, compile_for_long)
    assert took + 0.1 >= LIMIT_S


def never_come(rank, world):
    if rank == 1:
        time.sleep(LIMIT_S + 2.0)
        return
    with pytest.raises(GroupLost, match="Cannot connect 2 ranks: nothing was seen of rank 1 within 1 s"):
        sharded(small(), timeout_s=1.0, first_step_timeout_s=1.0)


def test_a_rank_that_never_shards_is_named():
    ranks.run(2, never_come)


# Agreement --------------------------------------------------------------------------------------------------------------


def test_weights_that_differ_are_found_every_so_many_steps_and_named():
    def program(group):
        model = small()
        model[1].weight.requires_grad_(False)
        optimizer = sharded(model, group=group, check_weights_every=2)
        one_step(model, optimizer, group.rank, 0)
        if group.rank == 1:
            with torch.no_grad():
                model[1].weight[0, 0] += 1.0
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RanksDiffer, match=r"ranks 0 and 1 have different weights in 1\.weight"):
            optimizer.step()
        return inside.num_steps(optimizer)

    assert run_ranks(2, program, time_limit_s=20.0) == [2, 2]


def test_ranks_whose_settings_drift_apart_stop_with_both_digests_and_the_first_difference():
    def program(group):
        model = small()
        optimizer = sharded(model, group=group)
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.25 * group.rank
        model(torch.ones(1, 4)).sum().backward()
        digests = r"settings [0-9a-f]{8} in its optimizer's groups, rank 0 with [0-9a-f]{8}"
        with pytest.raises(RanksDiffer, match=f"{digests}: rank 1 has momentum=0.75, rank 0 has momentum=0.5"):
            optimizer.step()

    run_ranks(2, program, time_limit_s=20.0)


def break_an_update(rank, world, at_call, tmp_path):
    """What is said of an update that breaks off on rank 1, and the weights after a load and two steps."""
    model = small()
    optimizer = sharded(model, timeout_s=20.0)
    one_step(model, optimizer, rank, 0)
    zero.save(tmp_path, optimizer)
    calls, said, step = [], [], torch.optim.SGD.step

    def fail(inner):
        calls.append(None)
        if rank == 1 and len(calls) == at_call:
            raise ArithmeticError("too much of it")
        step(inner)

    with mock.patch.object(torch.optim.SGD, "step", fail), faults.MOST_TOGETHER.replaced(return_value=0):
        for _ in range(2):  # ranks that did not fail hear of it at their next step
            try:
                model(torch.full((1, 4), float(rank + 1))).square().mean().backward()
                optimizer.step()
                said.append(None)
            except (ArithmeticError, RankFailed) as error:
                said.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
                break
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="step 2 broke off"):
        optimizer.check()  # all have the same weights, or this would name a parameter
    zero.load(tmp_path, optimizer)
    for step in (1, 2):
        one_step(model, optimizer, rank, step)
    return said, [param.detach().clone() for param in model.parameters()]


def undisturbed(rank, world):
    model = small()
    optimizer = sharded(model)
    for step in range(3):
        one_step(model, optimizer, rank, step)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.promise("K12")
@pytest.mark.parametrize("at_call", [1, 3])  # the calls for the four buckets
def test_an_update_that_breaks_off_on_one_rank_is_told_as_such_on_all_and_after_a_load_all_go_on(at_call, tmp_path):
    (first, of_first), (second, of_second) = ranks.run(2, break_an_update, at_call, tmp_path)
    place = "in the update (this rank's share of the weights may be stepped in part: load a checkpoint to have them whole)"
    [(kind, text, notes)] = second
    assert (kind, text) == ("ArithmeticError", "too much of it")
    assert notes == [f"This was in step 2, {place}."] or sys.version_info < (3, 11)
    assert first[0] is None
    kind, text, _ = first[1]
    assert kind == "RankFailed" and f"rank 1 failed or cleared its gradients at step 3, {place}, where" in text
    for mine, theirs, expected in zip(of_first, of_second, *ranks.run(2, undisturbed)[:1], strict=True):
        assert torch.equal(mine, expected) and torch.equal(theirs, expected)


@pytest.mark.promise("L05")
def test_ranks_with_different_configurations_are_told_the_first_difference_at_construction():
    models = [small() for _ in range(2)]
    of_an_engine = {"accumulation_dtype", "autocast", "cast_inputs", "count_micro_steps", "drop_last", "optimizer", "report"}
    of_an_engine |= {"schedule", "batch", "tensor_ranks", "expert_ranks", "sequence_ranks"}
    of_an_engine |= {"kernels"}  # and SGD has no compiled step
    told = {
        "stage": "stage=1, rank 0 has stage=2", "offload": "offload.home='host', rank 0 has offload=None",
        "homes": "homes.moments.home='disk', rank 0 has homes.moments=None",
        "loss_scale": "on_nonfinite='skip', rank 0 has on_nonfinite='propagate'",
    }  # fmt: skip

    def program(group):
        for name, value in OTHER_VALUES.items():
            if name not in of_an_engine:
                with pytest.raises(RanksDiffer, match=f"rank 1 has {re.escape(told.get(name, f'{name}='))}"):
                    sharded(models[group.rank], group=group, **{"stage": 2, **({name: value} if group.rank else {})})

    run_ranks(2, program, time_limit_s=20.0)


def test_of_long_names_the_error_shows_where_they_differ():
    name = "block_" * 60

    def program(group):
        model = nn.ModuleDict({name: nn.Linear(2, 3 + group.rank)})
        with pytest.raises(RanksDiffer, match=r"rank 1 has \.\.\..*weight \(4, 2\) .*, rank 0 has \.\.\..*weight \(3, 2\) "):
            sharded(model, group=group)

    run_ranks(2, program, time_limit_s=20.0)


@pytest.mark.promise("L05")
def test_ranks_whose_weights_are_to_be_cast_from_different_dtypes_are_told_so():
    """Rank 0's are sent as they are."""

    def program(group):
        with pytest.raises(RanksDiffer, match=r"has parameter .* float16 to be bfloat16 .* rank 0 has parameter"):
            sharded(small().to(torch.float16 if group.rank else torch.bfloat16), group=group, dtype="bfloat16")

    run_ranks(2, program, time_limit_s=20.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_where_gradients_stop_being_finite_is_told_by_parameter_and_rank(stage, dtype):
    def program(group):
        model = small()
        optimizer = sharded(model, group=group, stage=stage, dtype=dtype, on_nonfinite="raise")
        x = torch.ones(1, 4, dtype=model[0].weight.dtype)
        loss = model(x).sum()
        loss = loss + (model[1].bias * (math.nan if group.rank == 1 else 1.0)).sum()
        loss.backward()
        with pytest.raises(NonFinite, match=r"is nan: in 1\.bias, from rank 1\. Nothing was applied"):
            optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()  # what was found belongs to its own window
        return optimizer.skipped_steps

    assert run_ranks(3, program, time_limit_s=20.0) == [0, 0, 0]


# Memory -----------------------------------------------------------------------------------------------------------------


def flatten_on_a_device_that_promised_too_much(rank, world):
    import accelerators_sim as simulated

    simulated.bring_up()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    logging.getLogger("zero").setLevel("INFO")
    accelerator = accelerators.get("sim")
    with torch.device("sim"):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    expected = [param.detach().cpu().clone() for param in model.parameters()]
    held = accelerator.memory().allocated
    total, accelerator.read_memory = accelerator.memory().total, lambda index: MemoryReading(None, 1 << 30, held, held)
    try:
        simulated.configure(memory_bytes=held + 1000)  # and not one chunk of 262,144 bytes more
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=2**18)
        assert any("(insufficient memory)" in line for line in lines), lines
        found = [param.detach().cpu() for param in model.parameters()]
        assert all(torch.equal(weight, before) for weight, before in zip(found, expected, strict=True))
        del accelerator.read_memory
        simulated.configure(memory_bytes=held + 400_000)  # room for gradients, and not for a bucket of them
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(torch.ones(1, 128, device="sim")).sum().backward()
        assert inside.backward_failed(optimizer)  # the other ranks will hear of it
        return str(raised.value)
    finally:
        simulated.configure(memory_bytes=total)
        logging.getLogger("zero").removeHandler(handler)


@needs_sim
def test_out_of_memory_at_flattening_goes_by_the_host_and_elsewhere_says_what_would_fit():
    [said] = ranks.run(1, flatten_on_a_device_that_promised_too_much, apart="sim")
    assert "Cannot allocate memory for a buffer to send gradients from" in said
    assert "are free; what is kept and sent for training needs" in said
    assert "With bucket_bytes=32768 it would need 655360" in said


# Ends -------------------------------------------------------------------------------------------------------------------

PROGRAM = """
    import os, signal, sys, time
    import torch, zero
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without it
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=2, bucket_bytes=64, LIMITS)
    def step():
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
"""


def meeting():
    """The environment of processes that are to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {**os.environ, **ranks.DEFAULT_ENV, "ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start(program, world=2, limits="", first="", **more):
    """Processes of a user's own program, as plain environment variables start it."""
    shared = meeting()
    whole = textwrap.dedent(first) + textwrap.dedent(PROGRAM).replace("LIMITS", limits) + textwrap.dedent(program)
    command = [sys.executable, "-W", "error", "-c", whole]
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )
        for rank in range(world)
    ]


def ends(processes, timeout=60.0):
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            found.append((process.returncode, out.strip(), said_by_itself(err)))
    finally:
        for process in processes:
            process.kill()
    return found


def said_by_itself(err):
    return "\n".join(line for line in err.splitlines() if not line.startswith("[Gloo] Rank"))


FORKED_WORKERS = """
    model.register_forward_hook(lambda *_, held=optimizer: None)  # a cycle, which is left
    class Rows(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return torch.full((8,), float(i))
    for batch in torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork"):
        model(batch).sum().backward()
    child = os.fork()
    if child == 0:
        try:
            step()
        except ValueError as error:
            print(error, flush=True)
        sys.exit(0)
    os.waitpid(child, 0)
    optimizer.zero_grad()
    second = torch.nn.Linear(2, 2)
    other = zero.shard(second, torch.optim.SGD(second.parameters(), lr=1.0), stage=1)
    second(torch.ones(1, 2)).sum().backward()
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.promise("L09", "X12")
def test_with_forked_children_a_second_optimizer_and_gradients_under_way_a_program_ends_well():
    program = textwrap.dedent(PROGRAM).replace("LIMITS", "") + textwrap.dedent(FORKED_WORKERS)
    for rank, done in enumerate(programs.ranks_with_torch(2, program, meeting())):
        assert (done.returncode, said_by_itself(done.stderr)) == (0, "")
        assert f"rank {rank} is process" in done.stdout and "from which this one was forked" in done.stdout


@pytest.mark.full
def test_a_program_that_ended_torch_distributed_itself_ends_well():
    last = "optimizer.offload_states(); torch.distributed.destroy_process_group(); del model, optimizer"
    assert ends(start(last)) == [(0, "", "")] * 2


@pytest.mark.full
@pytest.mark.promise("X12")
def test_ranks_that_are_daemons_of_a_program_end_with_it():
    program = """
        import multiprocessing, os, sys
        import torch, zero
        def main(rank):
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
            model = torch.nn.Linear(4, 2)
            optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        ranks = [multiprocessing.get_context("fork").Process(target=main, args=(rank,), daemon=True) for rank in range(2)]
        for rank in ranks: rank.start()
        for rank in ranks: rank.join()
        print([rank.exitcode for rank in ranks])
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=meeting(), capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "[0, 0]"), result.stderr
    assert not [line for line in result.stderr.splitlines() if not line.startswith("[Gloo] Rank")]


@pytest.mark.full
@pytest.mark.promise("X15")
def test_ctrl_c_ends_every_rank_within_the_time_limit_with_its_traceback():
    last = "print('ready', flush=True)\nwhile True: step()"
    # The limit covers what is in flight between two that end.
    processes = start(last, limits="timeout_s=5.0, first_step_timeout_s=30.0")
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        found = ends(processes)
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - begun < 20.0
    for code, _, err in found:
        assert code != 0
        assert "KeyboardInterrupt" in err or "GroupLost" in err
    assert any("KeyboardInterrupt" in err for _, _, err in found)


BREAKS_OFF = """
    def fail(_): raise LookupError("no such batch")
    if optimizer.group.rank == 1: model[0].weight.register_hook(fail)
    step()
"""


@pytest.mark.full
@pytest.mark.promise("L07")
def test_an_error_of_one_program_is_told_by_the_other_with_its_words_and_the_parameter():
    found = ends(start(BREAKS_OFF))  # with the usual time limits, which nobody waits for
    assert [code for code, _, _ in found] == [1, 1], found
    assert "LookupError: no such batch" in found[1][2].splitlines()[-1]
    assert "rank 1 raised LookupError: no such batch (<string>:" in found[0][2]
    assert "in a backward of step 2, at parameter '0.weight'" in found[0][2]


STANDS_STILL = """
    print("ready", flush=True)
    if optimizer.group.rank == 1: time.sleep(600)
    step()
"""


@pytest.mark.full
@pytest.mark.promise("X15")
def test_ctrl_c_ends_a_rank_that_waits_for_one_that_stands_still_long_before_the_time_limit():
    waits, stands = processes = start(STANDS_STILL, limits="timeout_s=300.0")
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)  # it has sent all its gradients by then
        waits.send_signal(signal.SIGINT)
        _, err = waits.communicate(timeout=60.0)
    finally:
        stands.kill()
        waits.kill()
    assert waits.returncode == -signal.SIGINT and "KeyboardInterrupt" in err


def fail_before_sharding(rank, world, trained_before):
    before = sharded(small()) if trained_before else None  # this one still exists
    if rank == 1:
        end_as_the_interpreter_does(LookupError("no such model"))
    with pytest.raises(GroupLost, match=r"Cannot connect 2 ranks: rank 1 raised LookupError: no such model"):
        sharded(small(), timeout_s=60.0, first_step_timeout_s=600.0)
    return before is not None


@pytest.mark.promise("L01")
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_rank_that_raises_before_it_shards_is_named_without_waiting_for_the_time_limit(trained_before):
    waiting, ended = ranks.outcomes(2, fail_before_sharding, trained_before, timeout=30.0)
    assert waiting.ok and ended.kind == "died", ranks.describe([waiting, ended])


def gloo_threads(kind="gloo", others=(), until_gone=False):
    """Those of gloo that are none of the `others`; one that has ended is still listed for a moment."""
    deadline = time.monotonic() + 5.0
    while True:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it is gone by now
                if task.name not in others and kind in (task / "comm").read_text():
                    found.add(task.name)
        if not (found and until_gone) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def threads():
    """All there are, by number: a thread of gloo is named when it first runs, which may be long after it was made."""
    return set(os.listdir("/proc/self/task"))


COUNTS_THREADS_LAST = f"""
import atexit, contextlib, time
from pathlib import Path
{inspect.getsource(gloo_threads)}
atexit.register(lambda: print(len(gloo_threads("pt_gloo", until_gone=True))))  # before all others, so that it runs after them
"""


ENGINE = """
    del optimizer
    engine = zero.initialize(model=model, config={"optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 2})[0]
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    del engine
"""
REFUSED = """
    del optimizer
    try: zero.shard(model, None)
    except ValueError: pass
"""
ENDED_BY_THE_USER = """
    del optimizer
    torch.distributed.destroy_process_group()
"""
ONE_RAISES = "if optimizer.group.rank == 1: raise LookupError\nstep()"
ENDINGS = ("step()", ENDED_BY_THE_USER, ONE_RAISES, "optimizer.close()", "del optimizer", ENGINE, REFUSED, "raise LookupError")


@pytest.mark.full
@pytest.mark.promise("X12")
@needs_linux
@pytest.mark.parametrize("last", ENDINGS)
def test_no_thread_that_takes_the_lock_of_the_interpreter_is_left_when_that_ends(last):
    """One that waits for the lock while the interpreter ends takes the process down with SIGABRT, whatever had been trained."""
    found = ends(start(last, first=COUNTS_THREADS_LAST))
    assert [out for _, out, _ in found] == ["0", "0"], found


def train_and_end(rank, world, how):
    before = threads()
    model = small()
    if how == "destroy":
        config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 1}
        engine = zero.initialize(model=model, config=config)[0]
        during = gloo_threads(others=before)
        engine.destroy()
    else:
        optimizer = sharded(model)
        one_step(model, optimizer, rank, 0)
        during = gloo_threads(others=before)
        if how == "close":
            optimizer.close()
        del optimizer
    return during, gloo_threads(others=before, until_gone=True)


@pytest.mark.promise("M02")
@needs_linux
@pytest.mark.parametrize("how", ["close", "del", "destroy"])
def test_connections_that_were_made_for_a_training_end_with_it(how):
    for during, after in ranks.run(2, train_and_end, how):
        assert during and not after


def close_in_a_forked_child(rank, world, how):
    model = small()
    optimizer = sharded(model)
    one_step(model, optimizer, rank, 0)
    child = os.fork()
    if child == 0:
        try:
            if how == "close":
                optimizer.close()
            del optimizer
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    one_step(model, optimizer, rank, 1)
    optimizer.check()
    return status


@pytest.mark.promise("X12")
@pytest.mark.parametrize("how", ["close", "del"])
def test_what_a_forked_process_closes_stays_open_for_its_parent(how):
    assert ranks.run(2, close_in_a_forked_child, how) == [0, 0]


def close_while_a_save_is_written(rank, world, folder):
    before = threads()
    optimizer = sharded(small())
    one_step(optimizer.model, optimizer, rank, 0)
    group, saving = optimizer.group, zero.save(folder, optimizer, async_save=True)
    optimizer.close()
    path = saving.wait()
    with pytest.raises(GroupLost, match="it was closed"):
        group.all_gather_bytes(b"")
    left = gloo_threads(others=before, until_gone=True)
    zero.load(path.parent, sharded(small()))
    return left


@pytest.mark.promise("M02")
@needs_linux
def test_how_a_save_went_is_told_to_all_ranks_also_when_the_training_was_closed_meanwhile_and_then_connections_end(tmp_path):
    assert ranks.run(2, close_while_a_save_is_written, tmp_path) == [set(), set()]


# Starting again --------------------------------------------------------------------------------------------------------


def norms_of(folder, world, restarts=0, **environment):
    """What the elastic example printed, step by step; a step that was trained twice is there twice."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--max-restarts", str(restarts)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    command += [str(Path(__file__).parents[2] / "examples" / "elastic.py"), str(folder)]
    # Ranks that torchrun starts again are given the store of the attempt before, with addresses of the dead (pytorch#135712).
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    shared = {**os.environ, **ranks.DEFAULT_ENV, "ACCELERATOR": "cpu", **own_store, **environment}
    result = subprocess.run(command, env=shared, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"step (\d+) of 12 with (\d) ranks, norm (\S+)", result.stdout)
    return [(int(step), int(size), float(norm)) for step, size, norm in found]


@pytest.mark.full
def test_a_port_that_another_program_uses_is_named_with_what_to_set():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {**meeting(), "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        program = textwrap.dedent(PROGRAM).replace("LIMITS", "")
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert f"port {port} is in use by another program. Set MASTER_PORT" in result.stderr.splitlines()[-1]


def test_the_elastic_example_without_a_folder_prints_how_to_start_it():
    example = Path(__file__).parents[2] / "examples" / "elastic.py"
    result = programs.python(example)
    assert result.returncode == 1 and result.stderr.startswith("usage: torchrun ") and "Traceback" not in result.stderr


@pytest.mark.full
def test_after_a_killed_rank_the_launcher_starts_again_from_the_latest_checkpoint_and_the_curve_goes_on(tmp_path):
    undisturbed = norms_of(tmp_path / "calm", 2)
    disturbed = norms_of(tmp_path / "killed", 2, restarts=1, DIE_AT_STEP="8")
    assert [step for step, _, _ in undisturbed] == list(range(1, 13))
    assert [step for step, _, _ in disturbed] == [*range(1, 8), *range(7, 13)]  # the latest checkpoint was of step 6
    assert disturbed[:7] == undisturbed[:7] and disturbed[7:] == undisturbed[6:]
    (tmp_path / "calm" / "latest").write_text("global_step9")
    alone = norms_of(tmp_path / "calm", 1)  # with fewer ranks it goes on too
    assert [(step, size) for step, size, _ in alone] == [(10, 1), (11, 1), (12, 1)]
    for (_, _, norm), (_, _, expected) in zip(alone, undisturbed[9:], strict=True):
        assert norm == pytest.approx(expected, rel=1e-5)
