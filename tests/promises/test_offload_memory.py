"""M01 to M07 with offload: bytes of each rank, on the device and on the host, as its own accounting has them."""

import gc
import itertools
import os
import re
import weakref
from unittest import mock

import pytest
import torch

import accelerators
import zero
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.loops import alone, one_step, same, weights
from tests.promises.offloads import SHARDED, adamw, on_sim, place_of, send
from tests.promises.test_core_memory import Peak, deep
from tests.zoo.case import backward, draw, real_loss, real_mlp
from zero import Engine, shard

KIB = 1024
WIDTH, NUM_LAYERS, LAYERS_A_BUCKET = 128, 16, 4


# what the plan predicts -------------------------------------------------------------------------------------------------


rounds = []  # whatever this process has sent


def in_pace(group, bucket, sum_dtype, reduce=faults.REDUCE_SCATTER.now):
    """A round of a rank that keeps pace with the others: it is over when the next one is sent."""
    pending = reduce(group, bucket, sum_dtype)
    if inside.is_over_at_once(pending):
        return pending
    rounds.append(number := len(rounds))
    return faults.over_when(pending, lambda: len(rounds) > number + 1)


def measure(rank, world, points, device_type="sim", width=WIDTH):
    """By point: bytes on the device between windows, the most during one, the same as predicted; and those on the host."""
    place, device, found = place_of(rank, device_type), accelerators.get(device_type), []
    with place:
        real_loss(deep(2, width)(torch.ones(1, width))).backward()  # makes the device's libraries take their memory
    for stage, dtype, offload, layers_a_bucket, backwards in points:
        gc.collect()
        before = device.memory().allocated
        with place:
            model = deep(NUM_LAYERS, width)
        bucket_bytes = layers_a_bucket * width * width * (2 if dtype else 4)
        options = {"stage": stage, "dtype": dtype, "offload": offload, "bucket_bytes": bucket_bytes, "timeout_s": 20.0}
        with faults.REDUCE_SCATTER.replaced(in_pace):
            optimizer, peak = shard(model, adamw(model), kernels="torch", **options), 0
        for step in range(3):
            # made before any of them is used, since bringing inputs to the device waits for copies from it
            losses = [real_loss(model(draw(model, (1, width), rank, step, micro, real=True))) for micro in range(backwards)]
            while losses:
                device.reset_peak_memory()
                backward(optimizer, losses.pop())
                peak = max(peak, device.memory().peak - before)
            device.reset_peak_memory()
            optimizer.step()
            peak = max(peak, device.memory().peak - before)
            gradients = [share.nbytes for share in inside.shares_of_gradients(optimizer) if share.is_cpu]
            optimizer.zero_grad()
        states = device.memory().allocated - before
        budget = inside.planned(optimizer, rank, num_backwards=backwards)
        own = [*inside.shares_of_masters(optimizer)]
        own += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        on_host = sum(tensor.nbytes for tensor in own if tensor.is_cpu) + sum(gradients)
        lent = inside.lent_host_bytes(optimizer)
        found.append(((states, budget.states), (peak, budget.peak), (on_host, budget.host.total), (lent, budget.in_transit)))
        optimizer.close()
        del optimizer, model, own
        gc.collect()
        found[-1] += (device.memory().allocated - before,)
    return found


GEOMETRIES = {"four buckets": 4, "one bucket": NUM_LAYERS, "three buckets": 6, "a bucket a layer": 1}


def check_prediction(world, points, device_type="sim", width=WIDTH):
    for of_rank in ranks.run(world, measure, points, device_type, width, apart=device_type, timeout=240.0):
        for point, (states, peak, on_host, lent, left) in zip(points, of_rank, strict=True):
            assert states[0] == pytest.approx(states[1], rel=0.02), point
            if point[2] is None or device_type == "sim":
                assert peak[1] <= 1.15 * peak[0], point
            assert peak[0] <= 1.02 * peak[1], point  # copies that are early free what late ones keep
            assert on_host[0] == on_host[1] and lent[0] == lent[1], point
            assert (on_host[0] > 0) == (point[2] is not None)
            assert left <= NUM_LAYERS * width * width * 4, "closing leaves the plain model, which goes with its last user"


EVERY = list(itertools.product((1, 2), (None, "bfloat16"), (None, "cpu")))
PAIRS = [EVERY[index] for index in (0, 3, 5, 6)]  # in which any two values meet


@needs_sim
@pytest.mark.promise("M03", "M04", "M05", "M07")
@pytest.mark.parametrize(
    ("world", "points"),
    [(2, PAIRS), *(pytest.param(world, EVERY, marks=pytest.mark.full) for world in (1, 2, 4))],
    ids=lambda value: value if isinstance(value, int) else "pairs" if value is PAIRS else "all",
)
def test_the_bytes_of_each_rank_are_those_predicted_for_each_stage_with_offload_and_without(world, points):
    check_prediction(world, [(*point, 4, 1) for point in points])


@needs_sim
@pytest.mark.promise("M03", "M04", "M05", "M07")
@pytest.mark.parametrize(
    ("geometry", "world"),
    [
        ("four buckets", 1),
        *(pytest.param(geometry, 2, marks=pytest.mark.full) for geometry in GEOMETRIES),
        *(pytest.param(geometry, 1, marks=pytest.mark.full) for geometry in GEOMETRIES if geometry != "four buckets"),
    ],
)
def test_so_they_are_for_any_buckets_and_any_number_of_backwards(world, geometry):
    points = itertools.product((2,), (None, "bfloat16"), (None, "cpu"), [GEOMETRIES[geometry]], (1, 3))
    # Outputs of layers for several backwards are not in the prediction: of layers that are wide they are less than 2 %.
    width = 2 * WIDTH if geometry == "a bucket a layer" else WIDTH
    check_prediction(world, [*points, (2, "bfloat16", {"ratio": 0.5}, GEOMETRIES[geometry], 1)], width=width)


class Unknown(torch.optim.AdamW):
    """Nobody knows whether it may be given one block after the other, so it steps on everything at once."""

    def step(self, closure=None):
        return super().step(closure)


def unknown(model):
    return Unknown(model.parameters(), lr=0.02)


def lent_for_steps(model, optimizer, rank):
    found = []
    for step in range(3):
        send(model, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    for at_once in (False, True):
        found.append(inside.planned(optimizer, rank, num_backwards=1, by_blocks=not at_once).in_transit)
    return inside.lent_host_bytes(optimizer), found


@needs_sim
@pytest.mark.promise("H01")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_optimizer_that_steps_on_everything_at_once_needs_all_weights_on_the_host_and_that_is_predicted(world):
    points = [{"dtype": dtype, "offload": "cpu", "make": make, "elementwise": True} for dtype in (None, "bfloat16")
              for make in (adamw, unknown)]  # fmt: skip
    for of_rank in on_sim(world, lent_for_steps, points):
        for point, (lent, (by_blocks, at_once)) in zip(points, of_rank, strict=True):
            assert by_blocks < at_once
            assert lent == (at_once if point["make"] is unknown else by_blocks)


# construction, inside, the end ------------------------------------------------------------------------------------------


def construct_and_close(rank, world):
    """What construction takes beyond the model, what is inside, and what is left of it after `close` and after `del`."""
    import accelerators_sim as simulated
    from accelerators_sim import pinned

    simulated.bring_up()
    simulated.configure(order="late")
    device, found = accelerators.get("sim"), []
    for dtype, how in itertools.product((None, "bfloat16"), ("close", "destroy", "del", "del in a window")):
        gc.collect()
        before, pinned_before = device.memory().allocated, pinned.num_alive()
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
        held = inside.tensors_inside(optimizer, skip)
        if how == "del in a window":
            backward(optimizer, real_loss(model(draw(model, (1, WIDTH), rank, 1, real=True))))
        histories = [
            path
            for path, tensor in held.items()
            if tensor.grad_fn is not None or tensor.requires_grad != isinstance(tensor, torch.nn.Parameter)
        ]
        refs = [weakref.ref(share.untyped_storage()) for share in inside.shares_of_masters(optimizer)]
        values = weights(model)
        let_go = inside.hold_window(optimizer)  # as torch's thread does, whose hooks hold it until their next turn
        gc.disable()
        if how == "close":
            optimizer.close()
        if how == "destroy":
            Engine(optimizer).destroy()
        del optimizer, held
        dead = all(ref() is None for ref in refs)
        gc.enable()
        device.synchronize()
        kept = same(values, weights(model)) and {parameter.device.type for parameter in model.parameters()} == {"sim"}
        weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        del values
        left = device.memory().allocated - before
        let_go()
        found.append(
            (
                peak / bucket_bytes / (3 if dtype else 1),
                histories,
                dead,
                kept,
                left - weights_bytes,
                pinned.num_alive() - pinned_before,
            )
        )
        del model
    return found


@needs_sim
@pytest.mark.promise("M01", "M02", "M07")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_offloaded_optimizer_is_built_within_one_bucket_and_gives_everything_back(world):
    for of_rank in ranks.run(world, construct_and_close, apart="sim", timeout=240.0):
        for in_buckets, histories, dead, kept, left, pinned in of_rank:
            assert in_buckets <= 1.05, "where it is cast, the bucket in fp32, of twice the bytes, and as it is then"
            assert histories == []
            assert dead and kept
            assert left <= 0 and pinned == 0


def many_steps(model, optimizer, rank):
    from accelerators_sim import pinned

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
            lent = inside.lent_host_bytes(optimizer)
            found.append((device.memory().allocated, lent, pinned.num_alive(), len(gc.get_objects())))
    gc.enable()
    return found


@pytest.mark.full
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
        crossing = faults.COPY_BETWEEN_HOST_AND_DEVICE.replaced(side_effect=AssertionError("a copy that goes nowhere"))
        with crossing, faults.MEMORY_ON_HOST.replaced(side_effect=AssertionError("memory for it")), Peak() as peak:
            options = {"stage": stage, "dtype": dtype, "bucket_bytes": LAYERS_A_BUCKET * WIDTH * WIDTH * 4}
            optimizer = shard(model, adamw(model), offload=offload, group=solo(), **options)
            for step in range(2):
                loss = real_loss(model(draw(model, (1, WIDTH), 0, step, real=True)))
                backward(optimizer, loss)
                optimizer.step()
                optimizer.zero_grad()
                del loss
        assert inside.host_is_device(optimizer)
        if not dtype:  # a master is the weight itself
            shares = inside.shares_of_masters(optimizer)
            assert {share.untyped_storage().data_ptr() for share in shares} <= {
                parameter.untyped_storage().data_ptr() for parameter in model.parameters()
            }
        peaks.append(peak.most)
        optimizer.close()
    assert peaks[1] <= peaks[0]


# refused ----------------------------------------------------------------------------------------------------------------


def refused(rank, world, cap, options):
    """What construction says, and that it changed nothing."""
    import accelerators_sim as simulated

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
        with faults.MEMORY_ON_HOST.replaced(side_effect=AssertionError("allocated")) as empty:
            try:
                offload = {"pinned": True} if options.get("pinned") else "cpu"
                shard(model, adamw(model), stage=2, offload=offload, timeout_s=20.0)
                said = None
            except (ValueError, MemoryError) as error:
                said = f"{type(error).__name__}: {error}"
    after = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()}
    return said, before == after, accelerator.memory().peak - held, empty.called


@needs_sim
@pytest.mark.promise("H01")
@pytest.mark.parametrize("world", [1, 2])
def test_host_memory_that_will_not_suffice_is_an_error_with_both_numbers_before_anything_is_allocated(world):
    # masters, two moments and gradients of fp32, and some for weights on their way
    needed = 4 * 4 * NUM_LAYERS * WIDTH * WIDTH // world
    for said, unchanged, allocated, made in ranks.run(world, refused, "1MB", {}, apart="sim"):
        assert said.startswith("MemoryError: Cannot keep ")
        bytes_needed = int(said.split()[3])
        assert needed <= bytes_needed <= 2 * needed
        assert f"for each of {world} ranks of this machine: 0 bytes" in said and "Offload a smaller part" in said
        assert unchanged and allocated <= KIB and not made


@needs_sim
@pytest.mark.promise("H01")
@pytest.mark.parametrize("world", [1, 2])
def test_pinning_that_is_asked_for_and_refused_is_an_error_before_anything_is_allocated(world):
    for said, unchanged, allocated, made in ranks.run(world, refused, None, {"pinned": True}, apart="sim"):
        assert said.startswith("ValueError: Cannot pin ")
        needed, available, piece = map(int, re.findall(r"(\d+) bytes", said))
        assert f"and no piece of {piece} bytes can be pinned for sim" in said
        assert 0 < piece < needed < available
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


def with_settings(settings, offload, kind=torch.optim.AdamW):
    import accelerators_sim as simulated

    simulated.bring_up()
    model = real_mlp().to("sim:0")
    given = {name: value.to("sim:0") if isinstance(value, torch.Tensor) else value for name, value in settings.items()}
    optimizer = shard(model, kind(model.parameters(), **given), stage=2, group=solo(), offload=offload, bucket_bytes=64)
    one_step(model, optimizer)
    assert optimizer.state_dict()["state"]
    optimizer.close()


@needs_sim
@pytest.mark.parametrize(
    ("settings", "said"),
    [({"lr": torch.tensor(0.01)}, "lr is a tensor on sim:0.*Give a number"), ({"capturable": True}, "capturable.*Leave it")],
)
def test_settings_that_a_step_on_the_host_cannot_use_are_an_error_before_the_first(settings, said):
    ranks.run(1, refuses_settings, settings, said, apart="sim")


def refuses_settings(rank, world, settings, said):
    for offload in ("cpu", {"ratio": 0.5}):
        with pytest.raises(ValueError, match=rf"(?s)Cannot offload group 0 .*{said}"):
            with_settings(settings, offload)
    with_settings(settings, None)


@needs_sim
def test_a_part_of_what_torch_rounds_otherwise_on_the_host_is_refused_where_it_could_not_be_saved():
    ranks.run(1, refuses_a_part, apart="sim")


def refuses_a_part(rank, world):
    kind = torch.optim.ASGD
    with pytest.raises(ValueError, match=r"ratio=0\.5 .*eta.*Make the optimizer with foreach=False"):
        with_settings({"lr": 0.02}, {"ratio": 0.5}, kind)
    for settings, offload in (({"foreach": False}, {"ratio": 0.5}), ({}, "cpu"), ({}, None)):
        with_settings({"lr": 0.02, **settings}, offload, kind)


def test_a_group_of_the_optimizer_with_an_unknown_home_is_an_error_too():
    model = real_mlp()
    inner = torch.optim.AdamW([{"params": model.parameters(), "offload": "disk"}])
    with pytest.raises(ValueError, match="disk"):
        shard(model, inner, stage=2)


@needs_sim
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_masters_and_gradients_are_pinned_and_with_pageable_memory_the_bits_are_the_same(kernels):
    points = [{"stage": 2, "kernels": kernels, "offload": offload} for offload in (None, "cpu", {"pinned": False})]
    for none, pinned, pageable in on_sim(1, three_steps, points):
        assert none[0] == pinned[0] == pageable[0]
        assert (pinned[1], pageable[1]) == (True, False)


def three_steps(model, optimizer, rank):
    for step in range(3):
        send(model, optimizer, rank, step)
        optimizer.step()
        kept = [*inside.shares_of_masters(optimizer), *inside.shares_of_gradients(optimizer)]
        optimizer.zero_grad()
    [pinned] = {tensor.is_pinned() for tensor in kept}
    return {name: weight.tolist() for name, weight in weights(model).items()}, pinned


def groups_that_remember_more_or_less(model):
    one, other = (list(model[index].parameters()) for index in (0, 2))
    return torch.optim.AdamW([{"params": one, "amsgrad": True}, {"params": other}], lr=0.02, eps=1e-2)


def host_bytes(model, optimizer, rank):
    """What there is of shares on the host, and what was predicted."""
    send(model, optimizer, rank, 0)
    optimizer.step()
    kept = [*inside.shares_of_masters(optimizer), *inside.shares_of_gradients(optimizer)]
    kept += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    budget = inside.planned(optimizer, rank, inside.moments_of(optimizer))
    return sum(tensor.nbytes for tensor in kept), budget.host.total


@needs_sim
@pytest.mark.promise("M07")
@pytest.mark.parametrize("world", [1, 2])
def test_moments_of_groups_with_settings_of_their_own_are_predicted(world):
    options = {"offload": "cpu", "make": groups_that_remember_more_or_less}
    points = [{**options, "kernels": kernels} for kernels in ("torch", "fused")]
    for of_rank in on_sim(world, host_bytes, points):
        assert [found == predicted for found, predicted in of_rank] == [True, True], of_rank


# what crosses ---------------------------------------------------------------------------------------------------------------


def crossed(model, optimizer, rank):
    records, found = zero.MetricsWriter(None, optimizer), []
    for step in range(3):
        backward(optimizer, real_loss(model(draw(model, (3, 64), rank, step, real=True))))
        optimizer.step()
        optimizer.zero_grad()
        found.append(records.write()["link"])
    return found, sum(param.nbytes for param in model.parameters())


@needs_sim
def test_records_say_what_crossed_between_the_device_and_the_host():
    options = {"dtype": "bfloat16", "bucket_bytes": 2**12, "offload": "cpu"}
    [[below, at]] = on_sim(1, crossed, [{"stage": 2, **options}, {"stage": 3, "gathered_bytes": 0, **options}], build=deep)
    for (steps, whole), sent, (least, most) in ((below, 3, (1.0, 1.0)), (at, 2, (1.5, 2.0))):
        for link in steps:  # gradients in fp32, and weights to be looked at for edits; new weights, or twice for operators
            assert link["to_host_bytes"] == sent * whole
            assert least * whole <= link["to_device_bytes"] <= most * whole
            assert link["waited_ms"] >= 0.0
