"""A12: what adds up in a window, and what ends it, with shares of gradients on the host."""

import contextlib
from functools import partial

import pytest
import torch

import accelerators
import zero
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.promises.offloads import (
    DTYPES,
    DTYPES_IN_TURN,
    SHARDED,
    bits,
    difference,
    grads,
    in_threes,
    on_sim,
    pairs,
    pairs_in_turn,
    place_of,
    send,
    train_windows,
)
from tests.promises.test_core_memory import deep
from tests.zoo.branches import ManyParameters
from tests.zoo.case import draw, filled, real_loss

# windows ----------------------------------------------------------------------------------------------------------------


def several_backwards(model, optimizer, rank):
    return train_windows(model, optimizer, rank, (3, 1, 2))


def declared_accumulation(model, optimizer, rank):
    return train_windows(model, optimizer, rank, (3, 3))


@needs_sim
@pytest.mark.promise("A12")
@SHARDED
@DTYPES_IN_TURN
def test_several_backwards_with_offload_match_no_offload(stage, dtype):
    for none, half, whole in in_threes(on_sim(2, several_backwards, pairs(stage, (dtype,)))):
        assert difference(half, none) is None and difference(whole, none) is None


@pytest.mark.full  # by day tests/promises/test_accumulation.py declares it without offload
@needs_sim
@pytest.mark.promise("A12")
@SHARDED
def test_declared_accumulation_with_offload_is_unchanged(stage):
    for none, half, whole in in_threes(on_sim(2, declared_accumulation, pairs_in_turn(stage, accumulation=3))):
        assert difference(half, none) is None and difference(whole, none) is None


def bytes_of_windows(model, optimizer, rank):
    """Host bytes that a window of one backward and one of two make, beside what there is for good."""
    device, found = accelerators.get("sim"), []
    make = faults.MEMORY_ON_HOST.now
    for length in (1, 1, 2):
        made, lent = [], inside.lent_host_bytes(optimizer)
        note = lambda host, numel, dtype, made=made: made.append(numel * dtype.itemsize) or make(host, numel, dtype)  # noqa: E731
        device.synchronize()
        before = device.memory().allocated
        with faults.MEMORY_ON_HOST.replaced(note):
            for micro in range(length):
                send(model, optimizer, rank, 0, micro)
            optimizer.settle()
            inside.shares_of_gradients(optimizer)  # everything has arrived
        buffers = inside.free_staging_bytes(optimizer)
        on_device = device.memory().allocated - before
        lent = inside.lent_host_bytes(optimizer) - lent
        found.append((sum(made), lent, inside.bytes_of_gradients(optimizer), on_device, buffers))
        inside.throw_away_gradients(optimizer)  # without a step, which lends memory for other ends
        optimizer.zero_grad()
    return found


@needs_sim
@pytest.mark.promise("A12")
@SHARDED
def test_a_single_backward_with_offload_allocates_no_accumulator(stage):
    points = [{"stage": stage, "dtype": dtype, "offload": "cpu"} for dtype in DTYPES]
    for of_rank in on_sim(2, bytes_of_windows, points):
        for first, second, of_two in of_rank:
            for is_first, (made, lent, shard_bytes, on_device, buffers) in ((True, first), (False, second)):
                assert made == is_first * shard_bytes, "the shard itself, which is kept, and nothing beside it"
                assert shard_bytes > lent == 0
                assert on_device <= buffers, "on the device there are the buckets' buffers only"
            made, lent, shard_bytes, on_device, buffers = of_two
            # at stage 1 the two meet in .grad or in the bucket, at stage 2 the second one lands beside the shard
            assert made == lent
            assert on_device <= buffers


@contextlib.contextmanager
def events_of_a_step(optimizer):
    """By name and in order: a bucket that is stepped, with the copies back that have not ended; one that is sent back; one that
    is gathered."""
    events, gathering = [], faults.gathering_of(optimizer)
    step, send_up, gather = faults.STEP_OF_BLOCKS.now, faults.SENDING_TO_DEVICE.now, gathering.now

    def note_step(updater, batch, used):
        events.append(("step", {block.bucket for block in batch}, inside.num_weights_on_their_way(optimizer)))
        step(updater, batch, used)

    def note_copy(host, source, target):
        events.append(("copy",))
        return send_up(host, source, target)

    def note_gather(bucket):
        events.append(("gather",))
        return gather(bucket)

    with (
        faults.STEP_OF_BLOCKS.replaced(note_step),
        faults.SENDING_TO_DEVICE.replaced(note_copy),
        gathering.replaced(note_gather, create=True),
    ):
        yield events


def order_of_a_step(model, optimizer, rank):
    send(model, optimizer, rank, 0, 0)
    with events_of_a_step(optimizer) as events, faults.publishes_every_bucket_alone():
        optimizer.step()
    return events


@needs_sim
@SHARDED
@pytest.mark.parametrize("world", [1, 2])
def test_weights_of_a_bucket_travel_back_and_are_gathered_while_the_next_one_is_stepped(world, stage):
    for [events] in on_sim(world, order_of_a_step, [{"stage": stage, "dtype": "bfloat16", "offload": "cpu"}]):
        steps = [event for event in events if event[0] == "step"]
        assert len(steps) > 2 and all(len(buckets) == 1 for _, buckets, _ in steps)
        # each bucket leaves before the next one is begun
        names = ["step", "copy", "gather"][: 1 + world]
        assert [event[0] for event in events] == names * len(steps)
        if world == 1:  # with more ranks, gloo waits for what it sends
            assert [on_their_way for _, _, on_their_way in steps] == [0] + [1] * (len(steps) - 1)


def order_of_a_backward(model, optimizer, rank):
    """Gradients that are there, and shares of them that leave."""
    events, send_down = [], faults.READING_FROM_DEVICE.now
    for name, layer in (("first", model[-1]), ("last", model[0])):
        layer.weight.register_hook(lambda grad, name=name: events.append(f"{name} gradient"))
    for layer in model[::4]:
        layer.weight.register_hook(lambda grad: torch.distributed.barrier())  # no rank gets ahead of another

    def note_copy(host, source, target):
        events.append("copy")
        return send_down(host, source, target)

    for step in range(2):  # the first learns the order of the gradients
        events.clear()
        with faults.READING_FROM_DEVICE.replaced(note_copy):
            send(model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return events


@needs_sim
@SHARDED
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_shares_of_gradients_leave_for_the_host_while_backward_goes_on(world, stage):
    for none, half, whole in on_sim(world, order_of_a_backward, pairs_in_turn(stage), partial(deep, 16, 4)):
        assert "copy" not in none and "copy" in half
        meanwhile = whole[whole.index("first gradient") : whole.index("last gradient")]
        assert meanwhile.count("copy") >= whole.count("copy") / 2


# what ends a window -----------------------------------------------------------------------------------------------------


def is_empty(optimizer):
    """Nothing of a window is left, on its way or arrived."""
    is_left = inside.num_gradients_in_memory(optimizer) or inside.num_copies_to_host(optimizer)
    return not is_left and not inside.has_settled_gradients(optimizer)


def reset_in_every_way(model, optimizer, rank):
    found = []
    for step, way in enumerate(("step", "zero_grad", "zeros", "by the model", "settled", "failed", "failed on one rank")):
        send(model, optimizer, rank, step, 0)
        send(model, optimizer, rank, step, 1)
        if way == "step":
            optimizer.step()
        if way == "settled":
            optimizer.settle()
        if way == "failed" or (way == "failed on one rank" and rank == 1):
            with pytest.raises(ArithmeticError):
                fail_in_backward(model, rank)
        if way == "by the model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=way != "zeros")
            if way != "zeros":
                assert is_empty(optimizer), way
        # Gradients that were left over would be in this window's.
        send(model, optimizer, rank, step, 2)
        found.append((way, grads(model, optimizer)))
        optimizer.step()
        optimizer.zero_grad()
        assert is_empty(optimizer)
        found.append(bits(model, optimizer))
    return found


def fail_in_backward(model, rank):
    """After the gradients of the last layer came, and before those of the first."""

    def fail(grad):
        raise ArithmeticError("seen by the test")

    hidden = model[1](model[0](draw(model, (3, 4), rank, 9, real=True)))
    hidden.register_hook(fail)
    real_loss(model[2](hidden)).backward()


@pytest.mark.full
@needs_sim
@pytest.mark.promise("A12")
@SHARDED
def test_a_step_a_clearing_and_a_failed_backward_reset_everything_with_offload(stage):
    for none, half, whole in in_threes(on_sim(2, reset_in_every_way, pairs_in_turn(stage))):
        assert difference(half, none) is None and difference(whole, none) is None


# 1,083 parameters of which 63 are reached -------------------------------------------------------------------------------

REACHED = set(ManyParameters(63).reached)


def with_the_full_configuration(rank, world, device, stage):
    with place_of(rank, device):
        model = filled(ManyParameters(63))
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    given = list(model.parameters())
    before = [parameter.detach().cpu().clone() for parameter in given]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
        },
        "wall_clock_breakdown": True,
    }
    with accelerators.using(device):
        engine, optimizer, _, _ = zero.initialize(model=model, model_parameters=given, config=config)
    found = []
    for step in range(2):
        x = draw(model, (2, 3), rank, step)
        if step == 1 and rank == world - 1:
            x = x * torch.inf  # fp16, dynamic: skipped by all
        engine.backward(engine(x).float())
        engine.settle()
        arrived = {index for index, parameter in enumerate(model.parameters()) if parameter.grad is not None}
        engine.step()
        found.append((arrived, engine.was_step_applied(), engine.loss_scale()))
    moved = {
        i
        for i, (p, old) in enumerate(zip(model.parameters(), before, strict=True))
        if not torch.equal(p.detach().cpu().float(), old)
    }
    kept = [id(one) for one in model.parameters()] == [id(one) for one in given]
    held = [id(param) for group in optimizer.param_groups for param in group["params"]] == [id(one) for one in given]
    homes = {share.device.type for share in inside.shares_of_masters(optimizer)}
    engine.close()
    return found, moved, kept and held, homes


@pytest.mark.promise("H01")
@SHARDED
@pytest.mark.parametrize(
    ("device", "world"),
    [
        pytest.param("sim", 1, marks=needs_sim),
        *(pytest.param(*other, marks=[needs_sim, pytest.mark.full]) for other in (("cpu", 1), ("cpu", 2), ("sim", 2))),
    ],
)
def test_of_1083_parameters_63_arrive_and_1020_stay_with_the_full_configuration(stage, world, device):
    options = {"apart": "sim"} if device == "sim" else {}
    for found, moved, identical, homes in ranks.run(world, with_the_full_configuration, device, stage, **options):
        assert [arrived for arrived, _, _ in found] == [REACHED] * 2
        assert [(applied, scale) for _, applied, scale in found] == [(True, 16.0), (False, 8.0)]
        assert moved == REACHED and len(REACHED) == 63
        assert identical
        assert homes == {"cpu"}
