"""E: building a sharded optimizer that fails half-way, twice over one model, or beside others."""

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests import faults, ranks
from tests.loopback import loopback, run_ranks
from tests.oracle import reference
from tests.promises.loops import TINY, adamw, case_of, one_step, same, weights
from tests.promises.trainings import gloo_group
from tests.zoo.case import backward, draw, filled, real_loss, real_mlp, sgd
from tests.zoo.steps import real_step
from zero import shard
from zero.errors import RankFailed

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


# E01: half-way ----------------------------------------------------------------------------------------------------------


class Injected(Exception):
    pass


# The places where construction can fail: a part of it, and the number of the call.
PLACES = {
    "the checks": (faults.CHECK_OF_PARAMS, 1),
    "the first chunk read": (faults.READING_A_CHUNK, 1),
    "the third chunk read": (faults.READING_A_CHUNK, 3),
    "the first chunk written": (faults.WRITING_A_CHUNK, 1),
    "the last chunk written": (faults.WRITING_A_CHUNK, 4),
    "a master taken": (faults.TAKING_A_MASTER, 3),
    "the masters cut": (faults.CUTTING_MASTERS, 1),
    "the log": (faults.LOG_OF_THE_FLATTENER, 1),
    "the reducer": (faults.MAKING_THE_REDUCER, 1),
    "the aliases": (faults.MAKING_ALIASES, 1),
    "the window": (faults.MAKING_THE_WINDOW, 1),
    "the updater": (faults.MAKING_THE_UPDATER, 1),
    "state adopted": (faults.ADAPTION_OF_STATE, 1),
    "kernels chosen": (faults.CHOICE_OF_KERNELS, 1),
    "the first hook": (faults.ATTACHING_A_HOOK, 1),
    "the last hook": (faults.ATTACHING_A_HOOK, 4),
}
_here = threading.local()


@contextlib.contextmanager
def failing(monkeypatch, place, on_rank):
    part, at = PLACES[place]
    original = part.now
    calls = {}

    def fail(*args, **options):
        rank = getattr(_here, "rank", 0)
        calls[rank] = calls.get(rank, 0) + 1
        if calls[rank] == at and rank == on_rank:
            raise Injected(place)
        return original(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(*part, fail)
        yield
    assert calls.get(on_rank, 0) >= at, f"{place} was never reached"


def check_plain(model, inner, before, state, dtype=torch.float32):
    """The model and the optimizer are what they were, and train as such."""
    after = weights(model)
    assert {name: weight.dtype for name, weight in after.items()} == {name: weight.dtype for name, weight in before.items()}
    assert same(before, after)
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert all(s.nbytes() == p.nbytes for s, p in zip(storages, model.parameters(), strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    real_loss(model(draw(model, (3, 4), 0, 0, real=True))).backward()
    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
    model.zero_grad()
    assert list(inner.state) == list(state) and all(same_state(inner.state[p], state[p]) for p in state)
    assert not any(group.get("fused") for group in inner.param_groups)


def same_state(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.promise("E01")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("place", PLACES)
def test_construction_that_fails_half_way_leaves_the_plain_model_and_raises_one_error(monkeypatch, place, dtype):
    model = real_mlp()
    inner = adamw(model)
    one_step(model, inner)
    before, state = weights(model), {parameter: dict(entries) for parameter, entries in inner.state.items()}
    options = {"stage": 2, "dtype": dtype, "kernels": "fused", "bucket_bytes": TINY}
    with failing(monkeypatch, place, 0), pytest.raises(Injected, match=place) as caught:
        shard(model, inner, **options)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    check_plain(model, inner, before, state)
    # and then it can be built, and goes on as if nothing had been
    other = real_mlp()
    plain = torch.optim.AdamW(other.parameters(), lr=0.02, eps=1e-2)
    other.load_state_dict(before)
    plain.load_state_dict(copy.deepcopy(inner.state_dict()))
    optimizers = [shard(model, inner, **options), shard(other, plain, **options)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        one_step(each, optimizer, step=1)
    assert same(weights(model), weights(other))


@pytest.mark.promise("E01")
@STAGES
@pytest.mark.parametrize("place", PLACES)
def test_construction_that_fails_on_one_rank_raises_on_all_and_nobody_hangs(monkeypatch, place, stage):
    models = [real_mlp() for _ in range(3)]
    inners = [adamw(model) for model in models]
    before = weights(models[0])

    def program(group):
        _here.rank = group.rank
        model, inner = models[group.rank], inners[group.rank]
        with pytest.raises(Injected if group.rank == 1 else RankFailed, match=place) as caught:
            shard(model, inner, stage=stage, group=group, bucket_bytes=TINY)
        check_plain(model, inner, before, {})
        return str(caught.value)

    with failing(monkeypatch, place, 1):
        said = run_ranks(3, program, 5.0)
    assert all(text.startswith("Cannot shard: rank 1 of 3 failed") for text in (said[0], said[2]))

    def again(group):
        optimizer = shard(models[group.rank], inners[group.rank], stage=stage, group=group, bucket_bytes=TINY)
        for step in range(2):
            one_step(models[group.rank], optimizer, group.rank, step)
        return weights(models[group.rank])

    expected = reference(case_of(real_step, optimizer=adamw, steps=2), 3)[0].steps[-1].weights
    for found in run_ranks(3, again, 5.0):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.promise("E01")
def test_construction_that_fails_after_the_cast_gives_every_rank_that_has_whole_masters_its_unrounded_weights(monkeypatch):
    models = [real_mlp() for _ in range(2)]
    inners = [adamw(model) for model in models]
    before = weights(models[0])

    def program(group):
        _here.rank = group.rank
        with pytest.raises((Injected, RankFailed)):
            shard(models[group.rank], inners[group.rank], stage=0, dtype="bfloat16", group=group)
        check_plain(models[group.rank], inners[group.rank], before, {})

    with failing(monkeypatch, "the last hook", 0):
        run_ranks(2, program, 5.0)


def fail_on_rank_1(rank, world):
    """Over gloo: a model that one rank cannot shard, then the same one that all can."""
    model = real_mlp()
    if rank == 1:
        model[2].bias = nn.Parameter(torch.zeros(3) * 1j)
    inner = sgd()(model)
    try:
        shard(model, inner, stage=2, timeout_s=20.0)
    except (ValueError, RankFailed) as error:
        said = str(error)
    model = real_mlp()
    optimizer = shard(model, sgd()(model), stage=2, timeout_s=20.0)
    one_step(model, optimizer, rank)
    optimizer.close()
    return said, weights(model)


@pytest.mark.promise("E01")
def test_over_gloo_a_rank_that_cannot_build_tells_the_other_and_both_can_build_again():
    (first, one), (second, other) = ranks.run(2, fail_on_rank_1, timeout=40.0)
    assert first.startswith("Cannot shard: rank 1 of 2 failed") and "2.bias is complex" in first
    assert second.startswith("Cannot shard: parameter 2.bias is complex")
    assert same(one, other)


# E02: twice -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("E02")
@STAGES
@pytest.mark.parametrize("how", ["another optimizer", "the same optimizer", "the sharded optimizer", "a part of the model"])
def test_a_model_sharded_twice_is_an_error_and_the_first_one_goes_on(stage, how):
    model = real_mlp()
    inner = sgd()(model)
    optimizer = shard(model, inner, stage=stage)
    again = {
        "another optimizer": lambda: (model, sgd()(model)),
        "the same optimizer": lambda: (model, inner),
        "the sharded optimizer": lambda: (model, optimizer),
        "a part of the model": lambda: (model[2], sgd()(model[2])),
    }[how]
    with pytest.raises(ValueError, match="sharded already"):
        shard(*again(), stage=stage)
    for step in range(2):
        one_step(model, optimizer, step=step)
    plain = real_mlp()
    whole = sgd()(plain)
    for step in range(2):
        one_step(plain, whole, step=step)
    assert same(weights(model), weights(plain))


@pytest.mark.promise("E02")
def test_a_model_already_distributed_is_refused_by_name():
    # the first FSDP wants an accelerator when it is made; its name is what we look at
    older = type("FullyShardedDataParallel", (nn.Sequential,), {})
    for wrap in (DataParallel, older, lambda model: nn.Sequential(DataParallel(model))):
        model = wrap(real_mlp())
        with pytest.raises(ValueError, match=r"DataParallel, which distributes gradients itself"):
            shard(model, sgd()(model), stage=1)
    assert ranks.run(1, refuse_distributed) == [["DistributedDataParallel", "FSDPLinear"]]


def refuse_distributed(rank, world):
    from torch.distributed.fsdp import fully_shard

    found = []
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model[0]) and model):
        model = wrap(real_mlp())
        with pytest.raises(ValueError, match="distributes gradients itself") as caught:
            shard(model, sgd()(model), stage=1, group=gloo_group())
        found += [name for name in ("DistributedDataParallel", "FSDPLinear") if name in str(caught.value)]
    return found


@pytest.mark.promise("E02")
def test_a_closed_optimizer_says_so_and_its_model_is_plain():
    model = real_mlp()
    optimizer = shard(model, sgd()(model), stage=2)
    one_step(model, optimizer)
    optimizer.close()
    optimizer.close()
    param = model[0].weight
    needed = {
        "backward": (model(draw(model, (3, 4), 0, 0, real=True)).sum(),), "set_gradient_accumulation_boundary": (True,),
        "weight": (1.0,), "whole_grad": (param,), "whole_state": (param,), "any_rank": (True,),
        "load_state_dict": (optimizer.inner.state_dict(),), "add_param_group": ({"params": [nn.Parameter(torch.ones(2))]},),
    }  # fmt: skip
    ours = [part for part in type(optimizer).__mro__ if part.__module__.startswith("zero.")]
    found = {name: member for part in ours for name, member in vars(part).items() if not name.startswith("_")}
    names = [name for name, member in found.items() if callable(member)]
    assert {*needed, "step", "settle", "state_dict"} < {*names}
    for name in names:
        if name != "close":
            with pytest.raises(ValueError, match="was closed: its model is plain again"), contextlib.ExitStack() as stack:
                asked = getattr(optimizer, name)(*needed.get(name, ()))
                stack.enter_context(asked)
    with pytest.raises(ValueError, match="was closed: its model is plain again"):
        shard(model, optimizer, stage=2)
    model.zero_grad()
    real_loss(model(draw(model, (3, 4), 0, 0, real=True))).backward()
    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())


def test_the_optimizer_of_another_model_is_refused_and_so_is_what_is_no_model():
    model = real_mlp()
    with pytest.raises(ValueError, match=r"none of its 4 trainable parameters is in the SGD .*Make the optimizer from this"):
        shard(model, sgd()(copy.deepcopy(model)), stage=2)
    with pytest.raises(TypeError, match=r"Cannot shard: the first argument is of type NoneType and not a module"):
        shard(None, sgd()(model), stage=2)
    model.requires_grad_(False)  # the parameters that it trains may lie outside of the model
    shard(model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), stage=2).close()


# E03: several -----------------------------------------------------------------------------------------------------------

SEVERAL = (
    {"stage": 2, "dtype": "bfloat16", "bucket_bytes": TINY},
    {"stage": 1, "dtype": None, "clip": 0.1},
    {"stage": 0, "dtype": "float16", "accumulation": 2},
)


def build_one(number):
    torch.manual_seed(number)
    return filled(nn.Sequential(nn.Linear(4, 5 + number), nn.Tanh(), nn.Linear(5 + number, 3)), real=True)


def train_several(rank, groups, numbers, steps=4):
    """Interleaved: all forwards, all backwards the other way round, then steps."""
    models = {number: build_one(number) for number in numbers}
    optimizers = {n: shard(model, adamw(model), group=groups[n], **SEVERAL[n]) for n, model in models.items()}
    for step in range(steps):
        losses = {n: real_loss(model(draw(model, (3, 4), rank, step, n, real=True))) for n, model in models.items()}
        for n in reversed(numbers):
            backward(optimizers[n], losses[n])
        for n in numbers:
            optimizers[n].step()
        for n in reversed(numbers):
            optimizers[n].zero_grad()
    found = {n: weights(model) for n, model in models.items()}
    for optimizer in optimizers.values():
        optimizer.close()
    return found


@pytest.mark.promise("E03")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_three_optimizers_interleaved_in_a_process_each_train_as_alone(world):
    def run(numbers):
        groups = [loopback(world, 10.0) for _ in SEVERAL]
        return run_ranks(world, lambda outer: train_several(outer.rank, [group[outer.rank] for group in groups], numbers), 20.0)

    run_on_all = run((0, 1, 2))
    for number in range(3):
        for mine, alone in zip(run_on_all, run((number,)), strict=True):
            assert same(mine[number], alone[number])
            assert not same(mine[number], weights(build_one(number)))


def several_over_gloo(rank, world):
    run_on_all = train_several(rank, [gloo_group() for _ in SEVERAL], (0, 1, 2))
    alone = [train_several(rank, [gloo_group() for _ in SEVERAL], (number,))[number] for number in range(3)]
    return [same(run_on_all[number], alone[number]) for number in range(3)]


@pytest.mark.promise("E03")
def test_three_optimizers_interleaved_over_gloo_each_train_as_alone():
    assert ranks.run(2, several_over_gloo, timeout=40.0) == [[True] * 3] * 2


@pytest.mark.promise("E03")
def test_optimizers_over_two_parts_of_one_model_do_not_touch_each_other():
    def program(group):
        model = models[group.rank]
        other = loops[group.rank]
        first = shard(model, sgd()(model[0]), stage=2, group=group)
        second = shard(model, sgd()(model[2]), stage=1, group=other)
        for step in range(2):
            loss = real_loss(model(draw(model, (3, 4), group.rank, step, real=True)))
            loss.backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    models, loops = [real_mlp() for _ in range(2)], loopback(2, 10.0)
    expected = reference(case_of(real_step, steps=2), 2)[0].steps[-1].weights
    for found in run_ranks(2, program, 10.0):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)


# what is passed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 4}, "stage"),
        ({"stage": 1, "reduce": "sum", "predivide": 2.0}, "predivide"),
        *(({"stage": 1, "reduce": divisor}, "reduce") for divisor in (0.0, -1.0, float("nan"), "average")),
        *(({"stage": 2, "bucket_bytes": size}, "bucket_bytes") for size in (0, -1)),
        ({"stage": 1, "bucket_bites": 3}, "bucket_bytes"),
        ({"stage": 1, "dtype": "int8"}, "dtype"),
    ],
)
def test_a_wrong_argument_is_a_value_error_before_anything_is_changed(arguments, words):
    model = real_mlp()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=words):
        shard(model, sgd()(model), **arguments)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_what_is_no_optimizer_is_a_type_error():
    with pytest.raises(TypeError, match=r"Cannot shard with a list: it is not an optimizer\. Pass a torch\.optim\.Optimizer"):
        shard(real_mlp(), [], stage=1)


@pytest.mark.promise("E04")
def test_called_twice_with_the_same_objects_it_does_the_same_and_changes_none_of_them():
    options = {"stage": 1, "keep_fp32": ["norm"], "dtype": "bfloat16", "clip": 0.5}
    given, found = copy.deepcopy(options), []
    for _ in range(2):
        model = real_mlp()
        groups = [{"params": list(model[2].parameters()), "lr": 0.1}, {"params": list(model[0].parameters())}]
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        inner = torch.optim.SGD(groups, lr=0.05)
        before = [list(group) for group in inner.param_groups]
        optimizer = shard(model, inner, **options)
        one_step(model, optimizer)
        assert options == given
        assert [list(group) for group in inner.param_groups] == before
        assert [group["lr"] for group in inner.param_groups] == [0.1, 0.05] and settings[0] == {"lr": 0.1}
        found.append((weights(model), optimizer.config.digest, optimizer.state_dict()["param_groups"]))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
