"""M01 to M07 with offload: bytes of each rank, on the device and on the host, as its own accounting has them."""

import gc
import itertools
import os
import weakref
from unittest import mock

import pytest
import torch

import accelerators
from tests import ranks
from tests.devices import needs_sim
from tests.promises.loops import alone, one_step, same, weights
from tests.promises.offloads import SHARDED, adamw, on_sim, send
from tests.promises.test_core_memory import Peak, deep, tensors_inside
from tests.zoo.case import backward, draw, real_loss, real_mlp
from zero.comm.loopback import solo
from zero.memory.offload import Host
from zero.optimizer import shard
from zero.plan.budget import budget_of

KIB = 1024
WIDTH, NUM_LAYERS, LAYERS_A_BUCKET = 256, 16, 4


# what the plan predicts -------------------------------------------------------------------------------------------------


def measure(rank, world, points):
    """By point: bytes on the device between windows, the most during one, the same as predicted; and those on the host."""
    from accelerators import simulated

    simulated.bring_up()
    simulated.configure(order="eager")  # what is in flight at a time depends on nothing but the program
    device, found = accelerators.get("sim"), []
    for stage, dtype, offload in points:
        gc.collect()
        before = device.memory().allocated
        with torch.device("sim:0"):
            model = deep(NUM_LAYERS, WIDTH)
        bucket_bytes = LAYERS_A_BUCKET * WIDTH * WIDTH * (2 if dtype else 4)
        options = {"stage": stage, "dtype": dtype, "offload": offload, "bucket_bytes": bucket_bytes, "timeout_s": 20.0}
        optimizer = shard(model, adamw(model), **options)
        for step in range(2):
            loss = real_loss(model(draw(model, (1, WIDTH), rank, step, real=True)))
            device.reset_peak_memory()
            backward(optimizer, loss)
            del loss
            optimizer.step()
            gradients = optimizer.parts.window.shares.shard.num_bytes
            peak = device.memory().peak - before
            optimizer.zero_grad()
        states = device.memory().allocated - before
        budget = budget_of(
            optimizer.parts.line.layout,
            rank,
            num_in_flight=optimizer.parts.window.reducer._staging.most_borrowed,
            has_host=True,
        )
        own = [*optimizer.parts.masters.shard.present()]
        own += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        on_host = sum(tensor.nbytes for tensor in own if tensor.is_cpu) + (gradients if offload else 0)
        lent = optimizer.parts.masters.shard.host.num_lent_bytes if offload else 0
        found.append(((states, budget.states), (peak, budget.peak), (on_host, budget.host.total), (lent, budget.in_transit)))
        optimizer.close()
        del optimizer, model, own
        gc.collect()
        found[-1] += (device.memory().allocated - before,)
    return found


@needs_sim
@pytest.mark.promise("M03", "M04", "M05", "M07")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bytes_of_each_rank_are_those_predicted_for_each_stage_with_offload_and_without(world):
    points = list(itertools.product((1, 2), (None, "bfloat16"), (None, "cpu")))
    for of_rank in ranks.run(world, measure, points, apart="sim", timeout=120.0):
        for point, (states, peak, on_host, lent, left) in zip(points, of_rank, strict=True):
            assert states[0] == pytest.approx(states[1], rel=0.02), point
            assert peak[0] == pytest.approx(peak[1], rel=0.02), point
            assert on_host[0] == on_host[1] and lent[0] <= lent[1], point
            assert (on_host[0] > 0) == (point[2] == "cpu")
            assert left <= NUM_LAYERS * WIDTH * WIDTH * 4, "closing leaves the plain model, which goes with its last user"


# construction, inside, the end ------------------------------------------------------------------------------------------


def construct_and_close(rank, world):
    """What construction takes beyond the model, what is inside, and what is left of it after `close` and after `del`."""
    from accelerators import simulated
    from accelerators.simulated import pinned

    simulated.bring_up()
    simulated.configure(order="late")
    device, found = accelerators.get("sim"), []
    for dtype, how in itertools.product((None, "bfloat16"), ("close", "del", "del in a window")):
        gc.collect()
        before, pinned_before = device.memory().allocated, pinned._watched.alive
        with torch.device("sim:0"):
            model = deep(NUM_LAYERS, WIDTH)
        model_bytes = device.memory().allocated - before
        device.reset_peak_memory()
        bucket_bytes = LAYERS_A_BUCKET * WIDTH * WIDTH * 4
        optimizer = shard(model, adamw(model), stage=2, dtype=dtype, offload="cpu", bucket_bytes=bucket_bytes, timeout_s=20.0)
        peak = device.memory().peak - before - model_bytes
        loss = real_loss(model(draw(model, (1, WIDTH), rank, 0, real=True)))
        backward(optimizer, loss)
        optimizer.step()
        optimizer.zero_grad()
        del loss
        skip = {id(parameter) for parameter in model.parameters()} | {id(model)}
        inside = tensors_inside(optimizer.parts, skip)
        if how == "del in a window":
            backward(optimizer, real_loss(model(draw(model, (1, WIDTH), rank, 1, real=True))))
        histories = [
            path
            for path, tensor in inside.items()
            if tensor.grad_fn is not None or tensor.requires_grad != isinstance(tensor, torch.nn.Parameter)
        ]
        refs = [weakref.ref(share.untyped_storage()) for share in optimizer.parts.masters.shard.present()]
        values = weights(model)
        gc.disable()
        if how == "close":
            optimizer.close()
        del optimizer, inside
        dead = all(ref() is None for ref in refs)
        gc.enable()
        device.synchronize()
        kept = same(values, weights(model)) and {parameter.device.type for parameter in model.parameters()} == {"sim"}
        weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        del values
        left = device.memory().allocated - before
        found.append(
            (
                peak / bucket_bytes / (3 if dtype else 1),
                histories,
                dead,
                kept,
                left - weights_bytes,
                pinned._watched.alive - pinned_before,
            )
        )
        del model
    return found


@needs_sim
@pytest.mark.promise("M01", "M02", "M07")
@pytest.mark.parametrize("world", [1, 2])
def test_an_offloaded_optimizer_is_built_within_one_bucket_and_gives_everything_back(world):
    for of_rank in ranks.run(world, construct_and_close, apart="sim", timeout=120.0):
        for in_buckets, histories, dead, kept, left, pinned in of_rank:
            assert in_buckets <= 1.05, "where it is cast, the bucket in fp32, of twice the bytes, and as it is then"
            assert histories == []
            assert dead and kept
            assert left <= 0 and pinned == 0


def many_steps(model, optimizer, rank):
    from accelerators.simulated import pinned

    device, found = accelerators.get("sim"), []
    gc.collect()
    gc.disable()
    for step in range(330):
        for micro in range(1 + step % 2):
            send(model, optimizer, rank, step % 3, micro)
        if step % 3 == 2:
            optimizer.discard()
            continue
        optimizer.step()
        optimizer.zero_grad()
        if step % 30 == 28:
            device.synchronize()
            host = optimizer.parts.masters.shard.host
            found.append((device.memory().allocated, host.num_lent_bytes, pinned._watched.alive, len(gc.get_objects())))
    gc.enable()
    return found


@needs_sim
@pytest.mark.promise("M06")
def test_300_offloaded_steps_leave_as_many_bytes_and_objects_as_there_were():
    [[found]] = on_sim(1, many_steps, [{"stage": 2, "offload": "cpu", "dtype": "bfloat16"}])
    device, lent, pinned, objects = zip(*found[1:], strict=True)
    assert len(set(device)) == len(set(lent)) == len(set(pinned)) == 1
    assert objects[-1] - objects[0] <= 20, "a leak is one for each of 270 steps"


# the CPU accelerator ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("H01", "M05")
@SHARDED
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_on_the_cpu_offload_copies_nothing_and_needs_no_more_memory(stage, dtype):
    peaks = []
    for offload in (None, "cpu"):
        model = deep(NUM_LAYERS, WIDTH)
        crossing = mock.patch.object(Host, "_cross", side_effect=AssertionError("a copy that goes nowhere"))
        with crossing, mock.patch.object(Host, "empty", side_effect=AssertionError("memory for it")), Peak() as peak:
            optimizer = shard(
                model, adamw(model), stage=stage, dtype=dtype, offload=offload, group=solo(), bucket_bytes=KIB * KIB
            )
            for step in range(2):
                loss = real_loss(model(draw(model, (1, WIDTH), 0, step, real=True)))
                backward(optimizer, loss)
                optimizer.step()
                optimizer.zero_grad()
                del loss
        assert optimizer.parts.masters.shard.host is None
        if not dtype:  # a master is the weight itself
            shares = optimizer.parts.masters.shard.present()
            assert {share.untyped_storage().data_ptr() for share in shares} <= {
                parameter.untyped_storage().data_ptr() for parameter in model.parameters()
            }
        peaks.append(peak.most)
        optimizer.close()
    assert peaks[1] <= peaks[0]


# refused ----------------------------------------------------------------------------------------------------------------


def refused(rank, world, cap, options):
    """What construction says, and that it changed nothing."""
    from accelerators import simulated

    simulated.bring_up()
    simulated.configure(order="late")
    with torch.device("sim:0"):
        model = deep(NUM_LAYERS, WIDTH)
    before = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()}
    lacking = ["pin"] if options.get("pinned") else []
    accelerator = accelerators.get("sim")
    held = accelerator.memory().allocated
    accelerator.reset_peak_memory()
    with simulated.without(*lacking), mock.patch.dict(os.environ, {"ACCELERATOR_MEMORY": cap} if cap else {}):
        vars(accelerator).pop("can_pin", None)
        with mock.patch.object(Host, "empty", side_effect=AssertionError("allocated")) as empty:
            try:
                offload = {"pinned": True} if options.get("pinned") else "cpu"
                shard(model, adamw(model), stage=2, offload=offload, timeout_s=20.0)
                said = None
            except (ValueError, MemoryError) as error:
                said = f"{type(error).__name__}: {error}"
    vars(accelerator).pop("can_pin", None)
    after = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()}
    return said, before == after, accelerator.memory().peak - held, empty.called


@needs_sim
@pytest.mark.promise("H01")
@pytest.mark.parametrize("world", [1, 2])
def test_host_memory_that_will_not_suffice_is_an_error_with_both_numbers_before_anything_is_allocated(world):
    # masters, two moments and gradients of fp32, and some for weights on their way
    needed = 4 * 4 * NUM_LAYERS * WIDTH * WIDTH // world
    for said, unchanged, allocated, made in ranks.run(world, refused, "1MB", {}, apart="sim"):
        assert said.startswith("MemoryError: Offloading to the host was asked for, which needs ")
        bytes_needed = int(said.split(" which needs ")[1].split()[0])
        assert needed <= bytes_needed <= 1.5 * needed
        assert f"on each of {world} ranks of this machine, but 0 bytes" in said and "Offload a smaller part" in said
        assert unchanged and allocated <= KIB and not made


@needs_sim
@pytest.mark.promise("H01")
@pytest.mark.parametrize("world", [1, 2])
def test_pinning_that_is_asked_for_and_refused_is_an_error_before_anything_is_allocated(world):
    for said, unchanged, allocated, made in ranks.run(world, refused, None, {"pinned": True}, apart="sim"):
        assert said.startswith("ValueError: Pinned host memory was asked for, ")
        assert "bytes of it (" in said and "of host memory are available" in said and "can be pinned for sim" in said
        assert "Leave pinned out" in said
        assert unchanged and allocated <= KIB and not made


@pytest.mark.parametrize("offload", ["gpu", "disk", {"home": "nvme"}, {"ratio": 1.5}, {"ratio": -0.1}, {"hom": "cpu"}])
def test_an_offload_device_that_is_unknown_is_an_error(offload):
    model = real_mlp()
    before = model[0].weight.data_ptr()
    with pytest.raises((ValueError, TypeError), match=r"(?s)offload|home|ratio"):
        shard(model, adamw(model), stage=2, offload=offload)
    assert model[0].weight.data_ptr() == before
    model, optimizer = alone(offload="cpu")
    one_step(model, optimizer)
    optimizer.close()


def test_a_group_of_the_optimizer_with_an_unknown_home_is_an_error_too():
    model = real_mlp()
    inner = torch.optim.AdamW([{"params": model.parameters(), "offload": "disk"}])
    with pytest.raises(ValueError, match="disk"):
        shard(model, inner, stage=2)


@needs_sim
def test_with_pageable_memory_the_bits_are_the_same(monkeypatch):
    points = [{"stage": 2, "offload": offload} for offload in (None, "cpu", {"pinned": False})]
    for none, pinned, pageable in on_sim(1, three_steps, points):
        assert none[0] == pinned[0] == pageable[0]
        assert (pinned[1], pageable[1]) == (True, False)


def three_steps(model, optimizer, rank):
    for step in range(3):
        send(model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    pinned = all(share.is_pinned() for share in optimizer.parts.masters.shard.present())
    return {name: weight.tolist() for name, weight in weights(model).items()}, pinned
