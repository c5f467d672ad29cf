"""Checkpoints resume exactly, load anywhere, and are never half loaded."""

import contextlib
import errno
import json
import logging
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

import zero
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.loopback import run_ranks, solo
from tests.promises.checkpoints import (
    Net,
    adamw,
    batch,
    build,
    everything,
    first_difference,
    go_on,
    loss_of,
    manifest_of,
    sharded,
    train,
    without_dropout,
)
from tests.traces import copied
from zero import Engine, shard
from zero.config.schema import ZeroConfig
from zero.errors import BadCheckpoint, CheckpointFailed, RanksDiffer

TIME_LIMIT_S = 30.0


def on_threads(world, program):
    return run_ranks(world, program, TIME_LIMIT_S)


@contextlib.contextmanager
def training(group=None, make=adamw, **options):
    optimizer = sharded(solo() if group is None else group, make, **options)
    try:
        yield optimizer
    finally:
        optimizer.close()


def saved(folder, world=1, steps=2, tag=None, **options):
    """A checkpoint after some steps, and everything that was in it."""

    def program(group):
        with training(group, **options) as optimizer:
            train(optimizer, range(steps), group.rank, group.size)
            zero.save(folder, optimizer, tag)
            return everything(optimizer)

    return on_threads(world, program)[0]


# C07, C22: exact --------------------------------------------------------------------------------------------------------


def one_of_each(kind):
    lr = {"SGD": 0.05, "Adadelta": 1.0, "Rprop": 0.01}.get(kind.__name__, 0.01)
    more = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5, "centered": True}, "Adam": {"amsgrad": True}}

    def make(model):
        params = [param for param in model.parameters() if param.requires_grad]
        settings = more.get(kind.__name__, {})
        return kind([{"params": params[:2]}, {"params": params[2:], "lr": lr / 2}], lr=lr, **settings)

    return make


def resumes_exactly(rank, world, folder, kinds, options):
    """Six steps, and three, a save, and three more by others; the first differences by optimizer."""
    found = []
    for name in kinds:
        kind = next(kind for kind in inside.kinds_by_element() if kind.__name__ == name)
        whole = go_on(rank, world, f"{folder}/{name}/straight", 0, 6, {**options, "make": one_of_each(kind)}, saves=False)
        go_on(rank, world, f"{folder}/{name}", 0, 3, {**options, "make": one_of_each(kind)})
        rest = go_on(rank, world, f"{folder}/{name}", 3, 6, {**options, "make": one_of_each(kind)}, saves=False)
        whole["losses"], whole["extra"] = whole["losses"][3:], {"last": 3}
        difference = first_difference(whole, rest, name)
        if difference is not None:
            found.append(difference)
    return found


@pytest.mark.promise("C07")
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        pytest.param({"stage": 2}, None, marks=pytest.mark.full, id="fp32"),
        pytest.param({"stage": 1, "dtype": "bfloat16"}, ["AdamW", "SGD", "Lion"], id="bf16 by day"),
        pytest.param({"stage": 1, "dtype": "bfloat16"}, None, marks=pytest.mark.full, id="bf16"),
    ],
)
def test_three_steps_and_a_save_and_three_more_are_six_bit_for_bit_with_every_optimizer(tmp_path, options, kinds):
    """With dropout, groups, and buffers that count."""
    known = [kind.__name__ for kind in inside.kinds_by_element()]
    assert set(kinds or ()) <= set(known)
    for found in ranks.run(2, resumes_exactly, str(tmp_path), kinds or known, options, timeout=120.0):
        assert found == []


def engine_that_goes_on(rank, world, folder, first, last, tag=None):
    torch.manual_seed(300 + rank)
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 12 // world,
        "fp16": {"enabled": True, "initial_scale_power": 40, "loss_scale_window": 2, "hysteresis": 1},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 64},
        "gradient_clipping": 0.5,
    }
    model = build()
    inner = adamw(model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(inner, [3, 5, 6], gamma=0.3)
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=inner, config=config, lr_scheduler=schedule)
    client = None
    if first:
        path, client = engine.load_checkpoint(folder, tag)
        assert path == os.path.join(folder, tag or f"global_step{first}")
    scales, rates = [], []
    for step in range(first, last):
        train(engine, [step], rank, world)
        scales.append(engine.loss_scale())
        rates.append(engine.get_lr())
    counters = engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps
    assert engine.save_checkpoint(folder, client_state={"epoch": last}) is True
    found = {**everything(optimizer), "scales": scales, "rates": rates, "counters": counters}
    engine.close()
    return found, client


@pytest.mark.promise("C22")
def test_a_schedule_and_a_dynamic_loss_scale_go_on_where_they_were(tmp_path):
    """A scale of 2**40 makes the first windows overflow: the checkpoint lies between two skipped steps, and others between
    steps of a schedule with milestones."""
    straight = [found for found, _ in ranks.run(2, engine_that_goes_on, str(tmp_path / "straight"), 0, 34)]
    assert len(set(straight[0]["scales"])) > 5
    assert len({rate for rate, _ in straight[0]["rates"]}) > 2
    folder = str(tmp_path / "stopped")
    scales, rates = [], []
    for first, last in ((0, 11), (11, 31), (31, 34)):
        parts = ranks.run(2, engine_that_goes_on, folder, first, last, fresh=first == 11)
        scales += parts[0][0]["scales"]
        rates += parts[0][0]["rates"]
        assert [client for _, client in parts] == ([{"epoch": first}] * 2 if first else [None] * 2)
    for (found, _), whole in zip(parts, straight, strict=True):
        assert first_difference(whole, {**found, "scales": scales, "rates": rates}) is None


def every_schedule(inner):
    """One of each class of torch.optim.lr_scheduler, those around others too."""
    kinds = torch.optim.lr_scheduler
    made = {
        "LambdaLR": lambda: kinds.LambdaLR(inner, lambda step: 0.9**step),
        "MultiplicativeLR": lambda: kinds.MultiplicativeLR(inner, lambda step: 0.9),
        "StepLR": lambda: kinds.StepLR(inner, 2),
        "MultiStepLR": lambda: kinds.MultiStepLR(inner, [2, 4, 4, 6]),
        "ConstantLR": lambda: kinds.ConstantLR(inner, total_iters=4),
        "LinearLR": lambda: kinds.LinearLR(inner, total_iters=6),
        "ExponentialLR": lambda: kinds.ExponentialLR(inner, 0.8),
        "PolynomialLR": lambda: kinds.PolynomialLR(inner, 7),
        "CosineAnnealingLR": lambda: kinds.CosineAnnealingLR(inner, 7),
        "CosineAnnealingWarmRestarts": lambda: kinds.CosineAnnealingWarmRestarts(inner, 3),
        "CyclicLR": lambda: kinds.CyclicLR(inner, 0.001, 0.1, 3, cycle_momentum=False),
        "OneCycleLR": lambda: kinds.OneCycleLR(inner, 0.1, 12),
        "ReduceLROnPlateau": lambda: kinds.ReduceLROnPlateau(inner, patience=1),
        "SequentialLR": lambda: kinds.SequentialLR(
            inner, [kinds.LinearLR(inner, total_iters=3), kinds.CosineAnnealingLR(inner, 5)], [3]
        ),
        "ChainedScheduler": lambda: kinds.ChainedScheduler(
            [kinds.ConstantLR(inner, total_iters=3), kinds.ExponentialLR(inner, 0.9)]
        ),
    }
    return made


def rates_of(make, folder, first, last, loads):
    model = build()
    inner = adamw(model)
    schedule = every_schedule(inner)[make]()
    optimizer = shard(model, inner, stage=2, group=solo())
    try:
        if loads:
            zero.load(folder, optimizer, scheduler=schedule)
        rates = []
        for step in range(first, last):
            train(optimizer, [step], 0, 1)
            schedule.step(*([1.0] if make == "ReduceLROnPlateau" else []))
            rates.append([group["lr"] for group in optimizer.param_groups])
        zero.save(folder, optimizer, scheduler=schedule)
        return rates
    finally:
        optimizer.close()


def test_every_class_of_schedules_is_among_those_that_resume():
    kinds = torch.optim.lr_scheduler
    known = {name for name in kinds.__all__ if name != "LRScheduler"}
    assert known == set(every_schedule(None))


BY_DAY = ("LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR")


@pytest.mark.promise("C22")
@pytest.mark.parametrize("make", [
    pytest.param(make, marks=[] if make in BY_DAY else pytest.mark.full)
    for make in every_schedule(None)
])  # fmt: skip
def test_the_rates_of_every_schedule_go_on_as_in_a_straight_run(make, tmp_path):
    straight = rates_of(make, tmp_path / "straight", 0, 9, False)
    stopped = rates_of(make, tmp_path / "stopped", 0, 4, False) + rates_of(make, tmp_path / "stopped", 4, 9, True)
    assert stopped == straight
    assert len({tuple(rate) for rate in straight}) > 1


# C04, C05, C18: anywhere ------------------------------------------------------------------------------------------------


@pytest.mark.promise("C04")
@pytest.mark.promise("C18")
def test_a_chain_of_1_3_2_and_4_ranks_is_one_run_on_one(tmp_path):
    options = {"make": without_dropout, "stage": 2}
    straight = go_on_threads(1, tmp_path / "straight", 0, 12, options)
    for number, world in enumerate((1, 3, 2, 4)):
        chain = go_on_threads(world, tmp_path / "chain", 3 * number, 3 * number + 3, options)
        assert len(list((tmp_path / "chain" / f"global_step{3 * number + 3}").glob("rank-*"))) == world
    assert chain["exact"].keys() == straight["exact"].keys()
    for name, exact in straight["exact"].items():
        assert torch.allclose(chain["exact"][name], exact, rtol=1e-5, atol=1e-6), name
    for name, entries in straight["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(chain["state"][name][key], value, rtol=1e-4, atol=1e-6)


def go_on_threads(world, folder, first, last, options):
    given = dict(options)
    make = given.pop("make", adamw)

    def program(group):
        with training(group, make, **given) as optimizer:
            if first:
                zero.load(folder, optimizer)
            train(optimizer, range(first, last), group.rank, group.size)
            zero.save(folder, optimizer)
            return everything(optimizer)

    return on_threads(world, program)[0]


PLACES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "bucket_bytes": 10**6},
    "stage 2": {"stage": 2, "bucket_bytes": 28},
    "aligned to 16": {"stage": 2, "align_bytes": 16},
    "offloaded": {"stage": 2, "offload": "cpu"},
    "bf16": {"stage": 2, "dtype": "bfloat16"},
    "fp16": {"stage": 1, "dtype": "float16"},
}
DAILY = ("bf16",)


@pytest.mark.promise("C05")
@pytest.mark.parametrize("before", [name if name in DAILY else pytest.param(name, marks=pytest.mark.full) for name in PLACES])
def test_what_was_saved_at_one_place_is_loaded_at_every_other_bit_for_bit(before, tmp_path):
    """And goes on there: a step more is the step that a training there would take from these numbers."""
    old = saved(tmp_path, world=2, **PLACES[before])
    for after, options in PLACES.items():

        def program(group, options=options):
            with training(group, **options) as optimizer:
                zero.load(tmp_path, optimizer)
                return everything(optimizer), train(optimizer, [2], group.rank, group.size)

        for found, losses in on_threads(3, program):
            for part in ("exact", "state"):
                assert first_difference(old[part], found[part], f"{before} to {after}: {part}") is None
            for name, weight in found["model"].items():
                exact = old["exact"].get(name.replace("shared", "second"), old["model"][name])
                assert torch.equal(weight, exact.to(weight.dtype)), (after, name)
            assert losses[0] == losses[0]


def on_device(rank, world, folder, device, first, last, options):
    import accelerators_sim as simulated

    simulated.bring_up()  # before autograd has counted the devices
    return go_on(rank, world, folder, first, last, {**options, "device": device, "make": without_dropout})


@needs_sim
@pytest.mark.promise("C05")
def test_a_training_moves_from_the_cpu_to_a_device_with_and_without_offload_and_back(tmp_path):
    folder = str(tmp_path)
    old = ranks.run(2, on_device, folder, "cpu", 0, 2, {}, apart="sim")[0]
    for number, (device, options) in enumerate([("sim", {"offload": "cpu"}), ("sim", {}), ("cpu", {"stage": 0})], 2):
        new = ranks.run(2, on_device, folder, device, number, number + 1, options, apart="sim")[0]
    straight = ranks.run(2, on_device, f"{folder}/straight", "cpu", 0, 5, {}, apart="sim")[0]
    for name, exact in straight["exact"].items():
        torch.testing.assert_close(new["exact"][name], exact, rtol=1e-5, atol=1e-6, msg=name)
    assert old["extra"] is None
    assert new["extra"] == {"last": 4}


@pytest.mark.full
def test_a_compiled_training_goes_on_eagerly_and_the_other_way_round(tmp_path):
    for number, compiled in enumerate((True, False, True)):
        options = {"compiled": compiled, "make": without_dropout}
        found = ranks.run(1, go_on, str(tmp_path / "mixed"), 2 * number, 2 * number + 2, options)[0]
    straight = ranks.run(1, go_on, str(tmp_path / "straight"), 0, 6, {"make": without_dropout})[0]
    for name, exact in straight["exact"].items():
        torch.testing.assert_close(found["exact"][name], exact, rtol=1e-5, atol=1e-6, msg=name)


def test_random_numbers_of_python_numpy_and_torch_go_on(tmp_path):
    with training() as optimizer:
        zero.save(tmp_path, optimizer)
        first = random.random(), numpy.random.rand(), torch.rand(3).tolist()
        zero.load(tmp_path, optimizer)
        assert (random.random(), numpy.random.rand(), torch.rand(3).tolist()) == first


# C09, C10, C11, C13: what is in it --------------------------------------------------------------------------------------


def half_a_window(optimizer, rank, size):
    with optimizer.no_sync():
        optimizer.backward(loss_of(optimizer.model, 0, rank, size))


@pytest.mark.promise("C09")
@pytest.mark.parametrize("how", ["in no_sync", "after a backward", "after clipping", "on one rank", "between micro-steps"])
def test_a_save_in_the_middle_of_a_window_is_refused_on_all_ranks_and_leaves_nothing(how, tmp_path):
    def program(group):
        with training(group, accumulation=2 if how == "between micro-steps" else None) as optimizer:
            target = Engine(optimizer) if how == "between micro-steps" else optimizer
            if how == "in no_sync":
                half_a_window(optimizer, group.rank, group.size)
            elif how != "on one rank" or group.rank == 1:
                target.backward(loss_of(optimizer.model, 0, group.rank, group.size))
            if how == "after clipping":
                nn.utils.clip_grad_norm_(optimizer.model.parameters(), 1.0)
            if how == "between micro-steps":
                target.step()
            refused = r"in the middle of an accumulation.*no step has used"
            with pytest.raises((ValueError, CheckpointFailed), match=refused) as caught:
                zero.save(tmp_path, target)
            if how == "on one rank":
                assert "rank 1: " in str(caught.value)
            target.discard() if how == "between micro-steps" else optimizer.discard()
            zero.save(tmp_path, target, "whole")

    on_threads(2, program)
    assert sorted(os.listdir(tmp_path)) == ["latest", "whole"]


def test_a_save_between_step_and_zero_grad_is_one_after_the_step(tmp_path):
    with training() as optimizer:
        optimizer.backward(loss_of(optimizer.model, 0, 0, 1))
        optimizer.step()
        zero.save(tmp_path, optimizer)
        before = everything(optimizer)
        optimizer.zero_grad()
        train(optimizer, [1], 0, 1)
        zero.load(tmp_path, optimizer)
        assert first_difference(before, everything(optimizer)) is None


@pytest.mark.promise("C10")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_alone_and_a_new_optimizer_are_a_training_that_begins_with_these_weights(dtype, tmp_path):
    old = saved(tmp_path, world=2, dtype=dtype)

    def fresh(group):
        """As if these weights had been in the model when it was sharded."""
        model = build()
        tied = {name.replace("second", "shared"): exact for name, exact in old["exact"].items()}
        model.load_state_dict({**old["model"], **tied, **old["exact"]}, strict=True)
        optimizer = shard(model, torch.optim.Adagrad(model.parameters(), lr=0.1), stage=2, dtype=dtype, group=group)
        return stepped(optimizer, group)

    def loaded(group):
        model = build()
        optimizer = shard(model, torch.optim.Adagrad(model.parameters(), lr=0.1), stage=2, dtype=dtype, group=group)
        with pytest.raises(ValueError, match="Cannot load into Adagrad: the state is that of AdamW"):
            zero.load(tmp_path, optimizer)
        zero.load(tmp_path, optimizer, optimizer_states=False, counters=False)
        return stepped(optimizer, group)

    def stepped(optimizer, group):
        optimizer.model.eval()
        train(optimizer, [5], group.rank, group.size)
        try:
            return everything(optimizer)
        finally:
            optimizer.close()

    for one, other in zip(on_threads(2, fresh), on_threads(2, loaded), strict=True):
        assert first_difference(one, other) is None


@pytest.mark.promise("C11")
def test_values_follow_names_through_wrappers_and_never_positions(tmp_path):
    """Saved from a compiled model inside of a wrapper, loaded into the plain one; two layers of one shape that changed their
    order keep their values by name."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    class Two(nn.Module):
        def __init__(self, order):
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(3, 3))

    first = Two(["a", "b"])
    wrapped = Wrapper(torch.compile(Wrapper(first), backend="eager"))
    optimizer = shard(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9), stage=2, group=solo())
    first.a(torch.ones(1, 3)).sum().backward()
    first.b(torch.full((1, 3), 2.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zero.save(tmp_path, optimizer, "wrapped")
    expected = {name: param.detach().clone() for name, param in first.named_parameters()}
    moments = {name: optimizer.whole_state(param)["momentum_buffer"].clone() for name, param in first.named_parameters()}
    optimizer.close()

    swapped = Two(["b", "a"])
    other = shard(swapped, torch.optim.SGD(swapped.parameters(), lr=0.1, momentum=0.9), stage=2, group=solo())
    zero.load(tmp_path, other)
    for name, param in swapped.named_parameters():
        assert torch.equal(param, expected[name]), name
        assert torch.equal(other.whole_state(param)["momentum_buffer"], moments[name]), name
    other.close()

    renamed = nn.Module()
    renamed.a, renamed.c = nn.Linear(3, 3), nn.Linear(3, 2)
    third = shard(renamed, torch.optim.SGD(renamed.parameters(), lr=0.1, momentum=0.9), stage=2, group=solo())
    with pytest.raises(ValueError, match=r"Only in the model: c\.weight, c\.bias\. Only in the checkpoint: .*\bb\.bias"):
        zero.load(tmp_path, third)
    third.close()


@pytest.mark.promise("C13")
def test_it_holds_what_the_state_dict_holds_frozen_and_buffers_and_nothing_that_is_not_persistent(tmp_path):
    old = saved(tmp_path, tag="a")
    manifest = manifest_of(tmp_path, "a")
    names = {*manifest["parameters"], *manifest["buffers"], *manifest["aliases"]}
    assert names == set(build().state_dict())
    model = build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(3)
    optimizer = shard(model, adamw(model), stage=2, kernels="torch", group=solo())
    zero.load(tmp_path, optimizer)
    assert first_difference(old["model"], everything(optimizer)["model"]) is None
    assert model.scratch.tolist() == [3, 3, 3]
    assert model.steps.item() == 2
    optimizer.close()


def test_the_configuration_that_it_was_trained_with_can_be_read_from_it(tmp_path):
    options = {"dtype": "bfloat16", "offload": {"ratio": 0.5}, "clip": 1.0, "accumulation": 3, "on_nonfinite": "skip"}
    with training(**options) as optimizer:
        zero.save(tmp_path, optimizer, "a")
        assert ZeroConfig(**inside.training_saved_in(tmp_path / "a")["config"]) == optimizer.config
        assert optimizer.config.accumulation == 3


def test_modules_that_keep_more_than_tensors_get_it_back(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    def made():
        model = nn.Sequential(Counting(3, 3), nn.Linear(3, 1))
        return model, shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, group=solo())

    model, optimizer = made()
    model[0].seen = 5
    zero.save(tmp_path, optimizer)
    other, loading = made()
    zero.load(tmp_path, loading)
    assert other[0].seen == 5
    zero.export(tmp_path, tmp_path / "out.safetensors")
    plain = nn.Sequential(Counting(3, 3), nn.Linear(3, 1))
    plain.load_state_dict(zero.read_export(tmp_path / "out.safetensors"))
    assert plain[0].seen == 5
    optimizer.close()
    loading.close()


def test_a_parameter_that_is_frozen_now_and_one_that_was_trained_keep_their_state(tmp_path):
    with training() as optimizer:
        train(optimizer, range(2), 0, 1)
        zero.save(tmp_path, optimizer)
        before = everything(optimizer)
    model = build()
    model.first.requires_grad_(False)
    inner = torch.optim.AdamW(list(adamw_groups(model)), lr=0.01, eps=1e-3)
    other = shard(model, inner, stage=2, group=solo())
    zero.load(tmp_path, other)
    after = everything(other)
    assert first_difference(before["state"], {name: after["state"][name] for name in before["state"]}) is None
    assert first_difference(before["model"], after["model"]) is None
    other.close()


def adamw_groups(model):
    frozen = {id(param) for param in model.frozen.parameters()}
    params = [param for param in model.parameters() if id(param) not in frozen]
    yield {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1}
    yield {"params": [param for param in params if param.dim() <= 1], "lr": 0.02}


def test_weights_exchanged_for_others_by_their_data_are_what_is_saved_and_what_is_loaded_is_what_trains(tmp_path):
    """Whoever evaluates with averaged weights has them in the model for a while."""
    with training() as optimizer:
        param = optimizer.model.first.weight
        averaged = torch.full_like(param, 0.25)
        own, param.data = param.data, averaged
        zero.save(tmp_path, optimizer, "averaged")
        param.data = own
        assert not torch.equal(param, averaged)
        param.data = torch.zeros_like(param)
        zero.load(tmp_path, optimizer, "averaged")
        assert torch.equal(param, averaged)
        optimizer.model.eval()
        train(optimizer, [1], 0, 1)
        assert not torch.equal(param, averaged)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("late", ["unfrozen", "added"])
def test_a_parameter_that_got_its_memory_late_resumes_exactly_in_bf16(late, world, tmp_path):
    """Its master is wider than its weight, and there is none yet where it is loaded."""

    def begun(group):
        model = build()
        model.first.requires_grad_(False)
        params = [param for param in model.parameters() if param is not model.first.weight]
        optimizer = shard(model, torch.optim.Adam(params, lr=0.01), stage=2, dtype="bfloat16", group=group)
        if late == "added":
            optimizer.add_param_group({"params": [model.first.weight], "lr": 0.02})
            model.first.weight.requires_grad_(True)
        else:
            model.first.bias.requires_grad_(True)
        model.eval()
        return optimizer

    def straight(group):
        with contextlib.closing(begun(group)) as optimizer:
            train(optimizer, range(8), group.rank, group.size)
            return everything(optimizer)

    def stopped(group):
        with contextlib.closing(begun(group)) as optimizer:
            train(optimizer, range(5), group.rank, group.size)
            zero.save(tmp_path, optimizer)
        with contextlib.closing(begun(group)) as optimizer:
            zero.load(tmp_path, optimizer)
            train(optimizer, range(5, 8), group.rank, group.size)
            return everything(optimizer)

    for one, other in zip(on_threads(world, straight), on_threads(world, stopped), strict=True):
        assert first_difference(one, other) is None


def test_one_rate_tensor_of_several_groups_becomes_one_of_each_where_they_differ(tmp_path):
    def made():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": layer.parameters()} for layer in model]
        return shard(model, torch.optim.AdamW(groups, lr=torch.tensor(0.01)), stage=2, group=solo())

    with contextlib.closing(made()) as first, contextlib.closing(made()) as second:
        first.param_groups[0]["lr"] = torch.tensor(0.5)
        zero.save(tmp_path, first)
        zero.load(tmp_path, second)
        assert [group["lr"].item() for group in second.param_groups] == pytest.approx([0.5, 0.01])


def test_buffers_and_extra_of_any_strides_are_saved_as_they_look(tmp_path):
    whole = torch.arange(4000.0).reshape(1000, 4)

    class Strided(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("column", whole[:, 1])
            self.frozen = nn.Parameter(whole[::2, 2].clone(), requires_grad=False)

    def made():
        model = Strided()
        return shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, group=solo())

    with contextlib.closing(made()) as first:
        extra = {"column": whole[:, 0], "every": whole[::2], "wide": torch.ones(1).expand(2000), "bytes": whole.byte()[:, 1]}
        zero.save(tmp_path, first, extra=extra)
        with contextlib.closing(made()) as second:
            second.model.column = torch.zeros(1000)
            found = zero.load(tmp_path, second)
            assert all(torch.equal(found[key], value) for key, value in extra.items())
            assert torch.equal(second.model.column, whole[:, 1])
            assert torch.equal(second.model.frozen, whole[::2, 2])


def test_a_load_in_the_middle_of_a_window_begins_a_new_one_whatever_is_loaded(tmp_path):
    with training(accumulation=2) as optimizer:
        engine = Engine(optimizer)
        zero.save(tmp_path, engine)
        for options in ({}, {"load_module_only": True}):
            engine.backward(loss_of(optimizer.model, 0, 0, 1))
            engine.step()
            engine.load_checkpoint(tmp_path, **options)
            assert not engine.in_window
            before = engine.global_steps
            for micro_step in range(2):
                engine.backward(loss_of(optimizer.model, micro_step, 0, 1))
                engine.step()
                assert engine.global_steps == before + micro_step


def test_a_schedule_goes_on_at_its_rate_without_the_optimizers_state(tmp_path):
    def made():
        model = build()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        return shard(model, inner, stage=2, group=solo()), torch.optim.lr_scheduler.StepLR(inner, 1, 0.1)

    optimizer, schedule = made()
    for step in range(3):
        train(optimizer, [step], 0, 1, schedule)
    zero.save(tmp_path, optimizer, scheduler=schedule)
    optimizer.close()
    other, again = made()
    zero.load(tmp_path, other, scheduler=again, optimizer_states=False)
    train(other, [3], 0, 1, again)
    assert other.param_groups[0]["lr"] == pytest.approx(1e-4)
    other.close()


# C02, C03, C14, C15, C20, C21: what goes wrong --------------------------------------------------------------------------


def full_disk_on(rank_of_trouble, rank, world, folder, how):
    """What each rank is told, and what there is after: a limit of the system on files, or an error of the system."""
    torch.manual_seed(0)
    optimizer = sharded()
    train(optimizer, [0], rank, world)
    zero.save(folder, optimizer, "before")
    real = {name: getattr(os, name) for name in ("open", "write", "mkdir", "rename")}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    target = folder
    if rank == rank_of_trouble:
        if how == "file too large":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        elif how == "no space left":
            os.write = lambda *given: full(real["write"], *given)
        elif how == "read-only":
            os.open = lambda path, flags, *rest, **named: read_only(real["open"], path, flags, *rest, **named)
        elif how == "another place":
            target = folder + "-of-another-machine"
    try:
        zero.save(target, optimizer, "after", extra=torch.zeros(10**4))
        told = None
    except CheckpointFailed as error:
        told = type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for name, function in real.items():
            setattr(os, name, function)
    there = sorted(os.listdir(folder))
    zero.load(folder, optimizer)
    zero.save(folder, optimizer, "again")
    optimizer.close()
    return told, there


def full(really, descriptor, content):
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(28, "No space left on device")
    return really(descriptor, content)


def read_only(really, path, flags, *rest, **named):
    if flags & os.O_CREAT:
        raise OSError(30, "Read-only file system")
    return really(path, flags, *rest, **named)


@pytest.mark.promise("C02")
@pytest.mark.parametrize("how", ["file too large", "no space left", "read-only", "another place"])
@pytest.mark.parametrize("trouble", [0, 1])
def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_left_of_it(trouble, how, tmp_path):
    found = ranks.run(2, run_full_disk, trouble, str(tmp_path), how)
    told = {told for told, _ in found}
    assert len(told) == 1
    kind, message = told.pop()
    assert kind == "CheckpointFailed"
    named = 1 if how == "another place" else trouble  # of two places, rank 1's is not the one that rank 0 made
    assert f"rank {named}: " in message
    assert [there for _, there in found] == [["before", "latest"]] * 2
    assert sorted(os.listdir(tmp_path)) == ["again", "before", "latest"]


def run_full_disk(rank, world, trouble, folder, how):
    return full_disk_on(trouble, rank, world, folder, how)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 9),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "missing": lambda path: path.unlink(),
    "another of that size": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "one bit": lambda path: flip(path, path.stat().st_size - 5),
    "one bit of its header": lambda path: flip(path, 30),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    saved(folder, world=2, tag="old")
    saved(folder, world=2, tag="new", steps=3)
    return folder


@pytest.mark.promise("C03")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
def test_a_damaged_file_is_named_on_all_ranks_and_the_training_stays_as_it_was(name, damage, old_and_new, tmp_path):
    shutil.copytree(old_and_new, tmp_path, dirs_exist_ok=True)
    DAMAGE[damage](tmp_path / "new" / name)

    def program(group):
        with training(group) as optimizer:
            train(optimizer, [7, 8], group.rank, group.size)
            before, drawn = everything(optimizer), torch.get_rng_state()
            with pytest.raises((BadCheckpoint, CheckpointFailed, FileNotFoundError), match=name.replace(".", r"\.")):
                zero.load(tmp_path, optimizer)
            assert first_difference(before, everything(optimizer)) is None
            assert torch.equal(drawn, torch.get_rng_state())
            zero.load(tmp_path, optimizer, "old")

    on_threads(2, program)


@pytest.mark.promise("C03")
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_rank_that_lacks_a_file_which_another_one_verifies_is_named_before_anything_is_changed(damage, old_and_new, tmp_path):
    for rank in range(2):  # each rank has a copy on its own machine, and rank 1's lacks rank 0's file
        shutil.copytree(old_and_new, tmp_path / str(rank))
    DAMAGE[damage](tmp_path / "1" / "new" / "rank-00000.safetensors")

    def program(group):
        with training(group) as optimizer:
            train(optimizer, [7, 8], group.rank, group.size)
            before = everything(optimizer)
            with pytest.raises(CheckpointFailed, match=r"rank 1: .*rank-00000\.safetensors: .* Nothing was changed"):
                zero.load(tmp_path / str(group.rank), optimizer)
            assert first_difference(before, everything(optimizer)) is None

    on_threads(2, program)


class Refusing(nn.Linear):
    """Its extra state is refused on one rank."""

    refuses = False

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        if self.refuses:
            raise KeyError("a version that is not there any more")


@pytest.mark.parametrize("who", ["a schedule of another class", "a schedule", "a module"])
def test_a_schedule_or_a_module_that_refuses_what_was_saved_leaves_all_ranks_as_they_were(who, tmp_path, monkeypatch):
    kinds = torch.optim.lr_scheduler
    asked = "StepLR was saved" if who == "a schedule of another class" else "rank 1: KeyError"

    def made(group):
        model = nn.Sequential(Refusing(3, 3))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return shard(model, inner, stage=2, group=group), kinds.StepLR(inner, 1)

    def program(group):
        optimizer, schedule = made(group)
        zero.save(tmp_path, optimizer, "a", scheduler=schedule)
        optimizer.backward(optimizer.model(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        before, rates = everything(optimizer), copied(schedule.state_dict())
        loading = schedule
        if who == "a schedule of another class":
            loading = kinds.ExponentialLR(optimizer.inner, 0.5)
        elif group.rank == 1 and who == "a module":
            optimizer.model[0].refuses = True
        elif group.rank == 1:
            real, calls = schedule.load_state_dict, []

            def refuse_once(state):
                calls.append(state)
                if len(calls) == 1:
                    raise KeyError("_schedulers")
                real(state)

            schedule.load_state_dict = refuse_once
        with pytest.raises((ValueError, CheckpointFailed), match=asked):
            zero.load(tmp_path, optimizer, scheduler=loading)
        optimizer.model[0].refuses = False
        vars(schedule).pop("load_state_dict", None)
        assert first_difference(before["exact"], everything(optimizer)["exact"]) is None
        assert first_difference(before["state"], everything(optimizer)["state"]) is None
        assert first_difference(rates, schedule.state_dict()) is None
        zero.load(tmp_path, optimizer, scheduler=schedule)
        optimizer.close()

    on_threads(2, program)


@pytest.mark.parametrize("differing", [{"optimizer_states": False}, {"counters": False}, {"scheduler": None}, {"tag": "b"}])
def test_a_load_that_ranks_ask_for_differently_is_told_on_all_and_changes_nothing(differing, tmp_path):
    def program(group):
        with training(group) as optimizer:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer.inner, 1)
            for tag in "ab":
                zero.save(tmp_path, optimizer, tag, scheduler=schedule)
            train(optimizer, [0], group.rank, group.size, schedule)
            before = everything(optimizer)
            given = {"tag": "a", "scheduler": schedule, **(differing if group.rank == 1 else {})}
            with pytest.raises(RanksDiffer, match=r"by rank 0 with .* and by rank 1 with"):
                zero.load(tmp_path, optimizer, **given)
            assert first_difference(before, everything(optimizer)) is None

    on_threads(2, program)


def test_ranks_that_see_different_directories_are_told_so_and_none_begins_anew(tmp_path):
    def program(group):
        with training(group) as optimizer:
            engine = Engine(optimizer)
            engine.save_checkpoint(tmp_path / "here", async_save=True)
            with pytest.raises(RanksDiffer, match="rank 1 with"):
                engine.load_checkpoint(tmp_path / ("here" if group.rank == 0 else "elsewhere"))
            assert engine.load_checkpoint(tmp_path / "here")[0] == str(tmp_path / "here" / "global_step0")

    on_threads(2, program)


def test_a_model_of_other_shapes_is_refused_by_name_and_stays_as_it_was(tmp_path):
    """Though it has as many elements."""

    def made(inside, outside):
        model = nn.Sequential(nn.Linear(inside, outside, bias=False))
        return shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, group=solo())

    one, other = made(3, 4), made(4, 3)
    zero.save(tmp_path, one)
    before = everything(other)
    with pytest.raises(ValueError, match=r"0\.weight \(\(4, 3\) in the checkpoint, \(3, 4\) in the model\)"):
        zero.load(tmp_path, other)
    assert first_difference(before, everything(other)) is None
    one.close()
    other.close()


FORGERIES = {
    "a dtype of no tensor": lambda body: body["parameters"]["first.weight"]["state"].update(exp_avg="load"),
    "another dtype": lambda body: body["parameters"]["first.weight"].update(value_dtype="int32"),
    "a state that is not there": lambda body: body["parameters"]["first.weight"]["state"].update(third="float32"),
    "a file that is not there": lambda body: body["parameters"]["first.weight"]["stretches"][0].update(file=7),
    "a file of elsewhere": lambda body: body["files"][0].update(name="../rank-00000.safetensors"),
    "a gap": lambda body: body["parameters"]["first.weight"]["stretches"][0].update(start=1),
    "no groups": lambda body: body["training"]["v"].__setitem__(slice(None), []),
    "another buffer": lambda body: body["buffers"]["norm.running_mean"].update(shape=[3]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_manifest_that_has_its_hash_and_does_not_fit_its_files_changes_nothing(forgery, tmp_path):
    saved(tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    FORGERIES[forgery](body)
    path.write_text(inside.sealed_manifest(body))
    with training() as optimizer:
        train(optimizer, [5], 0, 1)
        before = everything(optimizer)
        with pytest.raises((BadCheckpoint, ValueError)):
            zero.load(tmp_path, optimizer)
        assert first_difference(before, everything(optimizer)) is None


@pytest.mark.promise("C21")
def test_a_checkpoint_of_a_newer_format_is_refused_as_such(tmp_path):
    saved(tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with training() as optimizer:
        with pytest.raises(BadCheckpoint, match=r"format has version 2, and this version of zero reads 1"):
            zero.load(tmp_path, optimizer)


def only_rank_0_saves(rank, world, folder):
    optimizer = sharded(timeout_s=5.0)
    if rank == 0:
        with pytest.raises(RanksDiffer, match="step, zero_grad or settling") as caught:
            zero.save(folder, optimizer)
        return str(caught.value)
    with pytest.raises(RanksDiffer) as caught:
        train(optimizer, [0], rank, world)
    return str(caught.value)


@pytest.mark.promise("C14")
def test_a_save_that_only_one_rank_calls_is_told_so_within_seconds(tmp_path):
    for told in ranks.run(2, only_rank_0_saves, str(tmp_path), timeout=20.0):
        assert "Call step, zero_grad" in told
    assert list(tmp_path.iterdir()) == []


BAD_ON_RANK_1 = {
    "another tag": ({"tag": "b"}, RanksDiffer, r"rank 1 with {\"tag\": \"b\""),
    "no directory": ({"directory": None}, CheckpointFailed, "rank 1: TypeError"),
    "a bad tag": ({"tag": "b/c"}, CheckpointFailed, "rank 1: ValueError: Cannot use tag='b/c': a tag names a folder"),
    "another number to keep": ({"keep_last": 3}, RanksDiffer, "rank 1 with"),
    "nothing to keep": ({"keep_last": 0}, CheckpointFailed, "rank 1: ValueError: Cannot save with keep_last=0"),
}


@pytest.mark.promise("C15")
@pytest.mark.parametrize("bad", BAD_ON_RANK_1)
def test_a_bad_argument_on_one_rank_is_told_on_all_before_anything_is_written(bad, tmp_path):
    differing, kind, message = BAD_ON_RANK_1[bad]

    def program(group):
        given = {"directory": tmp_path, "tag": "a", **(differing if group.rank == 1 else {})}
        with training(group) as optimizer:
            with pytest.raises(kind, match=message):
                zero.save(given.pop("directory"), optimizer, **given)
            return sorted(os.listdir(tmp_path))

    assert on_threads(2, program) == [[], []]


@pytest.mark.parametrize(
    ("extra", "path"),
    [({"a": [1, object()]}, r"extra\['a'\]\[1\]"), (lambda: 0, "extra"), ({"model": nn.Linear(1, 1)}, r"extra\['model'\]")],
    ids=["object", "function", "module"],
)
def test_what_cannot_be_stored_is_refused_at_save_with_the_path_to_it(extra, path, tmp_path):
    def program(group):
        with training(group) as optimizer:
            with pytest.raises((ValueError, CheckpointFailed), match=path):
                zero.save(tmp_path, optimizer, extra=extra)

    on_threads(2, program)
    assert list(tmp_path.iterdir()) == []


def test_whatever_a_save_takes_a_load_gives_back(tmp_path):
    """JSON of other makes ends at some depth, at 64 bits, and at texts that no file could have as its name."""
    deep = "bottom"
    for level in range(98):
        deep = {level: deep} if level % 2 else (deep,)
    extra = {"deep": deep, "long": -(10**3000), "odd": "\ud800 \0 \u2028", "name": os.fsdecode(b"\xff.txt"), "": {}, "$": "v"}
    with training() as optimizer:
        zero.save(tmp_path, optimizer, extra=extra)
        assert first_difference(extra, zero.load(tmp_path, optimizer)) is None


def test_what_would_come_back_as_another_is_refused_at_save_with_the_path_to_it(tmp_path):
    with faults.stored_values_come_back_as("bytes", lambda value: bytearray()), training() as optimizer:
        with pytest.raises(ValueError, match=r"Cannot save .*extra\['a'\]\[1\]: a load would return another value"):
            zero.save(tmp_path, optimizer, extra={"a": [1, b"x"]})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_none_and_one_that_is_a_checkpoint_itself_are_told_so(tmp_path):
    with training() as optimizer:
        for call in (zero.save, zero.load):
            with pytest.raises(ValueError, match="Cannot use '' as a directory of checkpoints"):
                call("", optimizer)
        zero.save(tmp_path, optimizer, "a")
        with pytest.raises(FileNotFoundError, match=r"Give its directory .*, and tag='a'"):
            zero.load(tmp_path / "a", optimizer)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointFailed, match=r"Cannot write to .*file: File exists\. Name another"):
            zero.save(tmp_path / "file", optimizer)


def test_nothing_of_python_but_values_is_read_and_no_pickle(tmp_path):
    """C08 in spirit: whatever reads a checkpoint needs no pickle at all."""
    saved(tmp_path, world=2, tag="a")
    for path in (tmp_path / "a").iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert safetensors.torch.load_file(path)


@pytest.mark.promise("C20")
@pytest.mark.parametrize(
    "name", ["latest", "a.saving-1234", "global_step3/manifest.json", "pytorch_model_fsdp_0/optimizer", "x y %d {}"]
)
def test_a_directory_may_be_called_like_anything(name, tmp_path):
    folder = tmp_path / name
    old = saved(folder, tag="optimizer")
    with training() as optimizer:
        zero.load(folder, optimizer)
        assert first_difference(old["exact"], everything(optimizer)["exact"]) is None


@pytest.mark.promise("C16")
def test_a_checkpoint_is_hardly_larger_than_what_is_in_it(tmp_path):
    model = nn.Sequential(nn.Linear(400, 800), nn.Linear(800, 400))
    whole = torch.zeros(10**6)

    def program(group):
        copied = nn.Sequential(nn.Linear(400, 800), nn.Linear(800, 400))
        optimizer = shard(copied, torch.optim.AdamW(copied.parameters(), lr=0.1), stage=2, dtype="bfloat16", group=group)
        copied(torch.ones(2, 400, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        zero.save(tmp_path, optimizer, "a", extra={"view": whole[:100_000]})
        optimizer.close()

    on_threads(2, program)
    payload = 12 * sum(param.numel() for param in model.parameters()) + 4 * 100_000
    found = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert found <= 1.02 * payload


# keep_last, engine, async -----------------------------------------------------------------------------------------------


def test_old_checkpoints_go_only_when_the_new_one_is_complete(tmp_path, monkeypatch):
    with training() as optimizer:
        for step in range(3):
            train(optimizer, [step], 0, 1)
            zero.save(tmp_path, optimizer, keep_last=2)
        assert sorted(os.listdir(tmp_path)) == ["global_step2", "global_step3", "latest"]
        monkeypatch.setattr(*faults.FOLDER_SYNC, lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointFailed, match="Input/output error"):
            zero.save(tmp_path, optimizer, "broken", keep_last=1)
        assert sorted(os.listdir(tmp_path)) == ["global_step2", "global_step3", "latest"]


def test_an_engine_without_a_checkpoint_begins_anew_and_says_so(tmp_path, caplog):
    with training() as optimizer:
        engine = Engine(optimizer)
        with caplog.at_level(logging.WARNING, "zero"):
            assert engine.load_checkpoint(tmp_path) == (None, None)
        assert "There is no checkpoint" in caplog.text
        with pytest.raises(FileNotFoundError, match="no folder of that name"):
            engine.load_checkpoint(tmp_path, "a")
        assert engine.load_checkpoint(tmp_path, load_module_strict=False) == (None, None)
        with pytest.raises(ValueError, match="Cannot use custom_load_fn"):
            engine.load_checkpoint(tmp_path, custom_load_fn=print)


def test_an_engine_loads_the_module_alone_or_without_the_optimizer_or_the_schedule(tmp_path):
    def made():
        model = build()
        inner = adamw(model)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
        return Engine(shard(model, inner, stage=2, group=solo()), schedule)

    engine = made()
    train(engine, range(3), 0, 1)
    engine.save_checkpoint(tmp_path, "a", {"b": 1}, save_latest=False)
    old = everything(engine.optimizer)
    for options, steps, states, last in [
        ({}, 3, True, 3),
        ({"load_module_only": True}, 0, False, 0),
        ({"load_optimizer_states": False}, 3, False, 3),
        ({"load_lr_scheduler_states": False}, 3, True, 0),
    ]:
        other = made()
        assert other.load_checkpoint(tmp_path, "a", **options) == (str(tmp_path / "a"), {"b": 1})
        new = everything(other.optimizer)
        assert first_difference(old["model"], new["model"]) is None
        assert (new["state"] == {}) is not states
        assert (other.global_steps, other.lr_scheduler.last_epoch) == (steps, last)
        other.close()
    engine.close()


@pytest.mark.promise("C17")
def test_a_save_in_the_background_has_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """Everything is changed while the writer is held up."""
    gate = threading.Event()
    real = faults.WRITING_A_FILE.now

    def held_up(*arguments, **options):
        assert gate.wait(TIME_LIMIT_S)
        return real(*arguments, **options)

    monkeypatch.setattr(*faults.WRITING_A_FILE, held_up)

    def program(group):
        with training(group) as optimizer:
            train(optimizer, [0], group.rank, group.size)
            extra = {"list": [1], "tensor": torch.ones(1000)}
            before = everything(optimizer)
            saving = zero.save(tmp_path, optimizer, "a", extra, async_save=True)
            assert not saving.done()
            extra["list"].append(2)
            extra["tensor"].zero_()
            train(optimizer, [1, 2], group.rank, group.size)
            changed = everything(optimizer)
            gate.set()
            assert saving.wait() == tmp_path / "a"
            assert zero.latest(tmp_path) == "a"
            found = zero.load(tmp_path, optimizer)
            assert found["list"] == [1]
            assert found["tensor"].sum() == 1000
            assert first_difference(before, everything(optimizer)) is None
            assert first_difference(before, changed) is not None

    on_threads(2, program)


@pytest.mark.promise("C17")
@pytest.mark.parametrize("then", ["wait", "save", "load"])
@pytest.mark.parametrize("trouble", [0, 1])
def test_a_writer_that_fails_in_the_background_is_told_on_all_ranks_at_the_next_call(
    trouble, then, tmp_path, monkeypatch, caplog
):
    real = faults.WRITING_A_FILE.now

    def failing(path, *arguments, **options):
        if path.name.endswith(f"rank-{trouble:05}.safetensors") and "broken" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *arguments, **options)

    monkeypatch.setattr(*faults.WRITING_A_FILE, failing)
    saved(tmp_path, world=2, tag="good")

    def program(group):
        with training(group) as optimizer:
            saving = zero.save(tmp_path, optimizer, "broken", async_save=True)
            train(optimizer, [1], group.rank, group.size)
            call = {
                "wait": saving.wait,
                "save": lambda: zero.save(tmp_path, optimizer, "next"),
                "load": lambda: zero.load(tmp_path, optimizer),
            }[then]
            left = r"No space left on device\. Make room there, or name a place on another disk"
            with pytest.raises(CheckpointFailed, match=rf"broken: it failed on.*rank {trouble}: .*{left}(; |\. The )"):
                call()
            with pytest.raises(CheckpointFailed, match="broken: it failed on"):
                saving.wait()  # raises as often as it is asked
            zero.load(tmp_path, optimizer, "good")
            assert not inside.has_unreported_save(optimizer)  # its error would keep a copy of all states

    on_threads(2, program)
    assert sorted(os.listdir(tmp_path)) == ["good", "latest"]
    assert "could not be written" in caplog.text


@pytest.mark.promise("C17")
def test_on_a_disk_without_any_room_no_rank_waits_for_another_to_say_so(tmp_path, monkeypatch):
    """Not even the reason can be written, which another test lets pass."""
    real, is_full = os.write, threading.Event()

    def write(descriptor, piece):
        if is_full.is_set() and stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, piece)

    monkeypatch.setattr(os, "write", write)
    saved(tmp_path, world=2, tag="good")

    def program(group):
        with training(group) as optimizer:
            is_full.set()
            begun = time.monotonic()
            saving = zero.save(tmp_path, optimizer, "broken", async_save=True)
            with pytest.raises(CheckpointFailed, match=r"broken: it failed on rank 0: .*No space left.*; rank 1: .*No space"):
                saving.wait()
            assert time.monotonic() - begun < optimizer.config.timeout_s
            is_full.clear()
            zero.load(tmp_path, optimizer)
            zero.save(tmp_path, optimizer, "next")

    on_threads(2, program)
    assert sorted(os.listdir(tmp_path)) == ["good", "latest", "next"]


SAVES_AND_LEAVES = """
import sys, torch, zero
model = torch.nn.Linear(300, 300)
optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
zero.save(sys.argv[1], optimizer, "last", async_save=True)
"""


@pytest.mark.full
def test_a_program_that_ends_while_it_saves_ends_when_that_is_done(tmp_path):
    env = {**os.environ, "ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", SAVES_AND_LEAVES, str(tmp_path)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["last", "latest"]


# C06, C12, C19: out of it -----------------------------------------------------------------------------------------------


class TiedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.norm(self.emb(tokens)))


def step_tied(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randint(11, (8,), generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_adamw(model):
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "lr": 0.02}], lr=0.01)


@pytest.mark.promise("C12")
@pytest.mark.promise("C19")
@pytest.mark.parametrize("shard_bytes", [None, 100])
def test_what_is_exported_trains_on_in_plain_torch_with_its_ties(shard_bytes, tmp_path):
    torch.manual_seed(3)
    model = TiedNet()
    plain = TiedNet()
    optimizer = shard(model, plain_adamw(model), stage=2, group=solo(), kernels="torch")
    for step in range(3):
        step_tied(model, optimizer, step)
    zero.save(tmp_path / "c", optimizer)
    out = tmp_path / "out" / ("model.safetensors" if shard_bytes is None else "shards")
    written = zero.export(tmp_path / "c", out, shard_bytes=shard_bytes, optimizer=tmp_path / "optimizer.pt")
    assert all(path.is_file() for path in written)
    state = zero.read_export(out)
    assert state["head.weight"] is state["emb.weight"]
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state, strict=True)
    assert plain.head.weight is plain.emb.weight
    inner = plain_adamw(plain)
    inner.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for step in range(3, 6):
        step_tied(model, optimizer, step)
        step_tied(plain, inner, step)
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    stored = sum(tensor.nbytes for name, tensor in state.items() if name != "head.weight")
    files = [path for path in written if path.suffix == ".safetensors" and path.stat().st_size]
    assert (len(files) > 1) is (shard_bytes is not None)
    assert sum(path.stat().st_size for path in files) < stored + 2000 * len(files)
    if shard_bytes is None:
        again = TiedNet()
        safetensors.torch.load_model(again, out, strict=True)
        assert torch.equal(again.emb.weight, state["emb.weight"])
    optimizer.close()


def test_an_export_has_the_names_of_the_model_whatever_they_are(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Module()
            self.module.format, self.module.pt = nn.Linear(2, 2), nn.Linear(2, 2)
            self.module.pt.weight = self.module.format.weight

    model = Odd()
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, group=solo())
    zero.save(tmp_path / "c", optimizer)
    zero.export(tmp_path / "c", tmp_path / "m.safetensors")
    Odd().load_state_dict(zero.read_export(tmp_path / "m.safetensors"), strict=True)
    optimizer.close()


def test_two_models_in_one_directory_do_not_take_each_others_files_away(tmp_path):
    with training() as one, training() as other:
        savings = [zero.save(tmp_path, target, tag, async_save=True) for target, tag in ((one, "one"), (other, "other"))]
        for saving in savings:
            saving.wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "other"]


@pytest.mark.promise("C06")
def test_a_checkpoint_of_twelve_ranks_is_put_together_in_the_order_of_their_numbers(tmp_path):
    def program(group):
        with training(group, make=torch_sgd) as optimizer:
            zero.save(tmp_path, optimizer, "a")

    on_threads(12, program)
    zero.export(tmp_path, tmp_path / "out.safetensors")
    for name, tensor in build().state_dict().items():
        assert torch.equal(zero.read_export(tmp_path / "out.safetensors")[name], tensor), name


def torch_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.promise("C08")
def test_the_exported_optimizer_is_loaded_with_weights_only(tmp_path):
    saved(tmp_path / "c", world=3)
    zero.export(tmp_path / "c", tmp_path / "m.safetensors", optimizer=tmp_path / "o.pt", dtype=torch.bfloat16)
    inner = adamw(build())
    inner.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    assert [group["weight_decay"] for group in inner.param_groups] == [0.1, 0.01]
    assert all(state["step"] == 2 for state in inner.state.values())
    state = zero.read_export(tmp_path / "m.safetensors")
    assert {state[name].dtype for name, _ in build().named_parameters()} == {torch.bfloat16}
    assert state["steps"].dtype == torch.int64


@pytest.mark.parametrize("at", [900, -9], ids=["header", "values"])
def test_an_export_of_a_damaged_checkpoint_names_the_file_and_writes_nothing(at, tmp_path):
    saved(tmp_path / "c", tag="a")
    flip(tmp_path / "c" / "a" / "rank-00000.safetensors", at)
    with pytest.raises(BadCheckpoint, match=r"rank-00000\.safetensors"):
        zero.export(tmp_path / "c", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "."}, "that is a folder"), ({"out": "file", "shard_bytes": 9}, "that is a file"),
        ({"shard_bytes": 0}, "shard_bytes=0"), ({"dtype": torch.int8}, "in torch.int8"),
    ],
)  # fmt: skip
def test_an_export_that_cannot_be_is_refused_before_anything_is_written(options, message, tmp_path):
    saved(tmp_path, tag="a")
    (tmp_path / "file").touch()
    given = {**options, "out": tmp_path / options.get("out", "new")}
    with pytest.raises(ValueError, match=message):
        zero.export(tmp_path, **given)
    assert sorted(os.listdir(tmp_path)) == ["a", "file", "latest"]


def test_the_network_of_these_tests_has_the_difficulties_that_they_are_about():
    model = Net()
    assert "scratch" not in model.state_dict()
    assert model.shared.weight is model.second.weight
    assert not model.conv.weight.is_contiguous()
    assert batch(0, 1, 3, torch.float32).shape == (4, 5)
