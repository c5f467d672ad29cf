"""F: parameters that do not train, not yet or no longer, that come late, or that are exchanged behind our back."""

import logging
import re
from functools import partial

import pytest
import torch
from torch import nn

from tests import faults, inside, ranks
from tests.loopback import run_ranks
from tests.oracle import compare, reference, train
from tests.promises.loops import TINY, alone, case_of, differs, on_ranks, one_step, same, traces_of, weights
from tests.promises.trainings import gloo_group, what_differs, what_differs_over_gloo
from tests.zoo.case import Mlp, backward, draw, filled, finish, real_loss, real_mlp, sgd
from tests.zoo.steps import real_step
from zero import shard
from zero.errors import RankFailed, RanksDiffer, ZeroError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
EPS = 1e-2


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=EPS, weight_decay=0.1)


def trainable_only(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=EPS)


# F01, F02, F08: what is frozen ------------------------------------------------------------------------------------------


def nearly_all_frozen():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)), nn.Linear(32, 1))
    for layer in model[:-1]:
        layer.requires_grad_(False)
    return filled(model, real=True)


@STAGES
def test_what_is_thawed_has_a_gradient_of_its_own_dtype(stage):
    model = real_mlp()
    model[0].requires_grad_(False)
    optimizer = shard(model, sgd()(model), stage=stage, dtype=torch.bfloat16)
    model[0].requires_grad_(True)
    backward(optimizer, model(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    optimizer.settle()
    assert [p.grad.dtype for p in model.parameters()] == [torch.bfloat16 for _ in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_thawed_may_be_settled_where_no_gradients_are_recorded(stage, mode):
    model, plain = real_mlp(), real_mlp()
    for one in (model, plain):
        one[0].requires_grad_(False)
    optimizer, beside = shard(model, sgd()(model), stage=stage), sgd()(plain)
    for one, its in ((model, optimizer), (plain, beside)):
        one[0].requires_grad_(True)
        for _ in range(2):
            one(torch.ones(2, 4)).sum().backward()
            with mode():
                norm = one[0].weight.grad.norm()
            assert norm > 0
            its.step()
            its.zero_grad()
    assert same(weights(model), weights(plain))


@pytest.mark.promise("F01")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("world", [1, 3])
def test_what_is_frozen_takes_no_byte_of_flat_memory_masters_gradients_or_state(stage, dtype, world):
    def program(model, optimizer, group):
        layout = inside.layout(optimizer)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trainable < 0.01 * sum(p.numel() for p in model.parameters())
        laid = sum(chunk.numel for chunk in layout.chunks)
        padding = sum(gap.numel for gaps in layout.gaps for gap in gaps)
        assert laid - padding == trainable
        assert sum(chunk.numel() for chunk in inside.chunks(optimizer).values()) == laid
        owned = layout.owned_numel
        assert inside.bytes_of_masters(optimizer) == 4 * owned
        backward(optimizer, model(torch.ones(2, 32, dtype=model[0].weight.dtype)).sum())
        optimizer.settle()
        assert inside.bytes_of_gradients(optimizer) == 4 * owned
        optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        own = sum(piece.in_param.numel for piece, _ in inside.pieces_and_masters(optimizer))
        assert sum(moment.numel() for moment in moments) == 2 * own <= 2 * trainable

    on_ranks(world, program, nearly_all_frozen, adamw, stage=stage, dtype=dtype)


@pytest.mark.promise("F02")
@STAGES
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_saved_with_one_layer_frozen_and_loaded_with_another_goes_on_as_plain_torch_does(stage, first, world):
    """Both directions: what had state is frozen and what had none is thawed."""

    def freeze(model, layer):
        for index in (0, 2):
            model[index].requires_grad_(index != layer)

    def train_two(model, optimizer, rank, start):
        return [one_step(model, optimizer, rank, start + step) for step in range(2)]

    def sharded(model, optimizer, group):
        freeze(model, first)
        train_two(model, optimizer, group.rank, 0)
        saved = optimizer.state_dict()
        kept = weights(model)
        optimizer.close()
        model.load_state_dict(kept)
        again = shard(model, adamw(model), stage=stage, group=group)
        freeze(model, 2 - first)
        again.load_state_dict(saved)
        train_two(model, again, group.rank, 2)
        found = again.state_dict()["state"]
        again.close()
        return saved["state"], weights(model), found

    def plain(model, optimizer, rank, world, step):
        freeze(model, first if step < 2 else 2 - first)
        yield from real_step(model, optimizer, rank, world, step)

    expected = reference(case_of(plain, optimizer=adamw, steps=4), world)
    for saved, found, state in on_ranks(world, sharded, real_mlp, adamw, stage=stage):
        assert set(saved) == {f"{2 - first}.weight", f"{2 - first}.bias"}
        assert set(state) == set(expected[0].state) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name, weight in expected[0].steps[-1].weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(state[name]["exp_avg"], expected[0].state[name]["exp_avg"], rtol=1e-6, atol=1e-6)
            assert state[name]["step"] == expected[0].state[name]["step"] == 2


@pytest.mark.promise("F08")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradient_bytes_go_with_what_is_trained_where_a_module_is_partly_frozen(world):
    def build():
        model = filled(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), real=True)
        for layer in model:
            layer.weight.requires_grad_(False)
        return model

    def program(model, optimizer, group):
        backward(optimizer, model(torch.ones(2, 64)).sum())
        optimizer.settle()
        assert all(layer.weight.grad is None and layer.bias.grad is not None for layer in model)
        # two biases of 64, in one bucket, of which each rank has its share
        expected = 4 * inside.layout(optimizer).owned_numel
        assert inside.bytes_of_gradients(optimizer) == expected <= 4 * (128 + 16 * world) // world
        optimizer.zero_grad()

    on_ranks(world, program, build, adamw, stage=2)


# F03, F04: toggled and grown --------------------------------------------------------------------------------------------


def toggled(model, optimizer, rank, world, step):
    model[2].requires_grad_(not 5 <= step < 10)
    before = model[2].weight.detach().clone()
    loss = yield from real_step(model, optimizer, rank, world, step)
    assert torch.equal(before, model[2].weight) == (5 <= step < 10)
    return loss


@pytest.mark.promise("F03")
@STAGES
@pytest.mark.parametrize("bucket_bytes", [28, 1 << 20])
def test_frozen_at_step_5_and_thawed_at_10_every_bit_is_plain_torchs(stage, bucket_bytes):
    assert differs(case_of(toggled, optimizer=adamw, steps=15), 1, stage=stage, bucket_bytes=bucket_bytes, exact=True) is None


@pytest.mark.promise("F03")
@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 3])
def test_frozen_at_step_5_and_thawed_at_10_on_several_ranks_equals_plain_torch(stage, dtype, world):
    assert differs(case_of(toggled, optimizer=adamw, steps=15), world, stage=stage, dtype=dtype) is None


def last_frozen():
    model = real_mlp()
    model[2].requires_grad_(False)
    return model


def grown(model, optimizer, rank, world, step):
    if step == 5:
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05, "weight_decay": 0.2})
    return (yield from real_step(model, optimizer, rank, world, step))


@pytest.mark.promise("F04")
@STAGES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_group_added_at_step_5_trains_as_in_plain_torch_and_is_saved_and_loaded(stage, world):
    case = case_of(grown, last_frozen, trainable_only, steps=10)
    expected = reference(case, world)

    def program(model, optimizer, group):
        first = case_of(grown, last_frozen, trainable_only, steps=7)
        train(first, model, optimizer, group.rank, world)
        assert len(optimizer.param_groups) == 2
        saved = optimizer.state_dict()
        optimizer.close()
        groups = [{"params": list(model[index].parameters())} for index in (0, 2)]
        again = shard(model, torch.optim.AdamW(groups, eps=EPS), stage=stage, group=group)
        again.load_state_dict(saved)
        assert [(g["lr"], g["weight_decay"]) for g in again.param_groups] == [(0.02, 0.01), (0.05, 0.2)]
        for step in range(7, 10):
            one_step(model, again, group.rank, step)
        state = again.state_dict()["state"]
        again.close()
        return weights(model), state

    for found, state in on_ranks(world, program, last_frozen, trainable_only, stage=stage):
        for name, weight in expected[0].steps[-1].weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)
            assert state[name]["step"] == expected[0].state[name]["step"] == (10 if name[0] == "0" else 5)


@pytest.mark.promise("F04")
@STAGES
def test_old_shares_keep_their_memory_when_the_line_is_extended(stage):
    model, optimizer = alone(last_frozen, adamw, stage=stage)
    one_step(model, optimizer)
    before = [model[0].weight.data_ptr(), *(master.data_ptr() for _, master in inside.masters_of(optimizer, 0))]
    model[2].requires_grad_(True)
    one_step(model, optimizer, step=1)
    assert [model[0].weight.data_ptr(), *(master.data_ptr() for _, master in inside.masters_of(optimizer, 0))] == before
    assert len(inside.layout(optimizer).chunks) == 2


@pytest.mark.promise("F04")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("late", [0, 1], ids=["the first", "the second"])
def test_where_there_is_no_memory_for_what_was_thawed_training_goes_on_as_before(stage, dtype, world, late):
    """`late`: which of its chunks fails, on the last rank."""
    fails = []

    def program(model, optimizer, group, tries):
        one_step(model, optimizer, group.rank)
        if tries:
            before, layout = weights(model), inside.layout(optimizer)
            model[2].requires_grad_(True)
            fails[:] = [len(layout.chunks) + late]
            with pytest.raises((MemoryError, RankFailed), match="nothing left"):
                one_step(model, optimizer, group.rank, 1)
            optimizer.zero_grad()
            assert same(weights(model), before)
            assert inside.layout(optimizer) is layout
            model[2].requires_grad_(False)
            one_step(model, optimizer, group.rank, 1)  # by the end of which all ranks have failed
            fails.clear()
        else:
            one_step(model, optimizer, group.rank, 1)
        model[2].requires_grad_(True)
        for step in range(2, 4):
            one_step(model, optimizer, group.rank, step)
        return weights(model)

    with faults.no_memory_for_a_chunk(fails, world - 1 if stage else 0):
        expected, found = (
            on_ranks(world, partial(program, tries=tries), last_frozen, adamw, stage=stage, dtype=dtype, bucket_bytes=TINY)
            for tries in (False, True)
        )
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.promise("F04")
@pytest.mark.parametrize("world", [1, 2])
def test_where_state_finds_no_memory_as_its_parameter_thaws_it_is_there_for_the_next_try(world):
    fails = []

    def stepped(model):
        inner = adamw(model)
        for step in range(3):
            one_step(model, inner, 0, step)
        model[2].requires_grad_(False)
        return inner

    def program(model, optimizer, group, tries):
        one_step(model, optimizer, group.rank)
        model[2].requires_grad_(True)
        if tries:
            fails.append(True)
            with pytest.raises((MemoryError, RankFailed), match="nothing left"):
                one_step(model, optimizer, group.rank, 1)
            optimizer.zero_grad()
            group.all_gather_bytes(b"")
            fails.clear()
            group.all_gather_bytes(b"")
        one_step(model, optimizer, group.rank, 1)
        found = optimizer.state_dict()["state"]
        return weights(model), found["2.weight"]["step"], found["2.weight"]["exp_avg"]

    with faults.no_memory_for_state(fails, world - 1):
        expected, found = (on_ranks(world, partial(program, tries=tries), real_mlp, stepped) for tries in (False, True))
    for (one, steps, mean), (other, other_steps, other_mean) in zip(found, expected, strict=True):
        assert same(one, other) and steps == other_steps == 4 and torch.equal(mean, other_mean)


@pytest.mark.promise("F02")
def test_where_another_rank_fails_to_build_what_is_frozen_has_its_dtype_still(monkeypatch):
    models = [last_frozen() for _ in range(2)]
    inner = [adamw(model) for model in models]

    use_kernels = faults.CHOICE_OF_KERNELS.now

    def fails_for_one(optimizer, kernels):
        if optimizer is inner[1]:
            raise MemoryError("nothing left")
        return use_kernels(optimizer, kernels)

    monkeypatch.setattr(*faults.CHOICE_OF_KERNELS, fails_for_one)

    def one(group):
        with pytest.raises((MemoryError, RankFailed), match="nothing left"):
            shard(models[group.rank], inner[group.rank], group=group, stage=2, dtype="bfloat16")

    run_ranks(2, one, 20.0)
    assert [parameter.dtype for model in models for parameter in model.parameters()] == [torch.float32] * 8


# F05, F06: attached and exchanged ---------------------------------------------------------------------------------------


class Grower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = Mlp(4, 4, 4), None

    def forward(self, x):
        return self.body(x) if self.extra is None else self.extra(self.body(x))


@pytest.mark.promise("F05", "O16")
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_attached_after_sharding_is_warned_of_once_by_its_trainable_names(world, caplog):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        model.extra = nn.Linear(4, 2)
        model.extra.bias.requires_grad_(False)
        for step in range(1, 4):
            one_step(model, optimizer, group.rank, step)
            model.zero_grad()

    with caplog.at_level(logging.WARNING, "zero"):
        on_ranks(world, program, lambda: filled(Grower(), real=True))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == world
    assert all("extra.weight" in text and "extra.bias" not in text and "add_param_group" in text for text in told)


@pytest.mark.promise("F05")
def test_an_attached_module_that_is_given_to_the_optimizer_is_trained_without_a_word(caplog):
    model, optimizer = alone(lambda: filled(Grower(), real=True))
    one_step(model, optimizer)
    model.extra = nn.Linear(4, 2)
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    before = model.extra.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "zero"):
        one_step(model, optimizer, step=1)
    assert not torch.equal(model.extra.weight, before)
    assert caplog.records == []


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


MUTATIONS = {
    "a Parameter assigned": (lambda model: setattr(model[2], "weight", nn.Parameter(torch.ones(3, 6))), "2.weight"),
    "a layer assigned": (lambda model: model.__setitem__(2, nn.Linear(6, 3)), "2.weight"),
    "moved to another dtype": (lambda model: model.to(torch.float64), "0.weight"),
    "halved": (lambda model: model.half(), "0.weight"),
    "one layer in bfloat16": (lambda model: model[2].bfloat16(), "2.weight"),
    "weight norm": (lambda model: nn.utils.parametrizations.weight_norm(model[2]), "2.weight"),
    "loaded with assign": (lambda model: model.load_state_dict(weights(model), assign=True), "0.weight"),
}


@pytest.mark.promise("F06")
@STAGES
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_step_after_a_parameter_was_exchanged_raises_its_name_on_every_rank(stage, mutation):
    """Only one rank exchanged it; all of them are told, and nobody hangs or steps."""
    mutate, name = MUTATIONS[mutation]

    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        if group.rank == 1:
            mutate(model)
        before = weights(model)
        backward(optimizer, sum(parameter.float().square().sum() for parameter in model.parameters()))
        with pytest.raises(ZeroError, match=f"{name}.* on rank 1") as caught:
            optimizer.step()
        optimizer.zero_grad()
        assert same(before, weights(model))
        return str(caught.value)

    assert len(set(on_ranks(2, program, stage=stage))) == 1


@pytest.mark.promise("F06")
def test_a_step_without_gradients_after_a_parameter_was_exchanged_raises_too():
    model, optimizer = alone()
    model[0].weight = nn.Parameter(torch.ones(6, 4))
    with pytest.raises(ZeroError, match=r"0\.weight"):
        optimizer.step()


@pytest.mark.promise("F06")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_keeps_the_same_parameter_goes_on_as_in_plain_torch(dtype, world):
    """Memory of the same kind given to `.data` is an edit like any other."""

    def script(model, optimizer, rank, world, step):
        if step == 1:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        if step == 2:
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())
        if step == 3:
            torch.nn.utils.parametrize.register_parametrization(model[2], "weight", Doubled(), unsafe=True)
            model[2].parametrizations.weight.original.data = model[2].parametrizations.weight.original.data * 0.5
        loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
        backward(optimizer, loss)
        yield "settle"
        finish(optimizer)
        return [parameter.detach() for parameter in model.parameters()]

    case = case_of(script, optimizer=sgd(0.1, momentum=0.5), steps=3)
    assert differs(case, world, dtype=dtype, bucket_bytes=28) is None


@pytest.mark.promise("F06")
@STAGES
def test_a_parametrization_that_keeps_the_parameter_goes_on_as_in_plain_torch(stage):
    def script(model, optimizer, rank, world, step):
        if step == 1:
            kept = model[2].weight
            torch.nn.utils.parametrize.register_parametrization(model[2], "weight", Doubled(), unsafe=True)
            assert model[2].parametrizations.weight.original is kept
        yield from real_step(model, optimizer, rank, world, step)

    found = []
    for make in (plain_model, sharded_model):
        model, optimizer = make(stage)
        for step in range(3):
            window = script(model, optimizer, 0, 1, step)
            assert list(window) == ["settle"]
        found.append(weights(model))
    assert same(*found)


def plain_model(stage):
    model = real_mlp()
    return model, sgd(0.1, momentum=0.5)(model)


def sharded_model(stage):
    return alone(make=sgd(0.1, momentum=0.5), stage=stage)


# F07, F09: agreement ----------------------------------------------------------------------------------------------------


def extra_frozen(rank):
    model = real_mlp()
    if rank == 1:
        model.append(nn.Linear(3, 3).requires_grad_(False))
    return model


def swapped(rank):
    model = nn.Module()
    names = ("first", "second")
    for name in names if rank == 0 else reversed(names):
        model.register_module(name, nn.Linear(4, 4))
    return model


def frozen_on_one(rank):
    model = real_mlp()
    model[2].bias.requires_grad_(rank == 0)
    return model


def wider(rank):
    return Mlp(4, 6 + rank, 3)


def in_bf16(rank):
    model = real_mlp()
    if rank == 1:
        model[2].bfloat16()
    return model


def other_group(rank):
    return real_mlp()


def unknown_subclass(rank):
    """Found on one rank only, before anything is compared: the other rank must not wait for it."""
    model = real_mlp()
    if rank == 1:
        model[2].weight = nn.Parameter(model[2].weight.detach().to(torch.complex64))
    return model


DISAGREEMENTS = {
    extra_frozen: "parameter 3.weight",
    swapped: "second.weight",
    frozen_on_one: "2.bias",
    wider: "0.weight",
    in_bf16: "2.weight .* bfloat16",
    other_group: "2.bias .* group 1",
    unknown_subclass: "2.weight is complex",
}


def try_to_shard(rank, world, build, stage):
    model = build(rank)
    params = list(model.parameters())
    groups = [params] if build is not other_group or rank == 0 else [params[:3], params[3:]]
    inner = torch.optim.SGD([{"params": params} for params in groups], lr=0.1)
    before = {name: (parameter.data_ptr(), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    try:
        shard(model, inner, stage=stage, group=gloo_group())
    except (ZeroError, ValueError) as error:
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


@pytest.mark.promise("F07")
@pytest.mark.parametrize("build", DISAGREEMENTS, ids=lambda build: build.__name__)
def test_ranks_that_build_different_things_are_told_the_first_difference_on_every_rank(build):
    said = ranks.run(2, try_to_shard, build, 2, timeout=30.0)
    assert all(re.search(DISAGREEMENTS[build], text) for text in said), said
    assert all("rank 1" in text or "Error: Cannot shard" in text for text in said)


@pytest.mark.promise("F07")
def test_of_three_ranks_the_one_that_differs_is_named():
    models = [extra_frozen(0), extra_frozen(0), extra_frozen(1)]

    def one(group):
        with pytest.raises(RanksDiffer, match=r"rank 0 lacks .*3\.weight.*, which rank 2 has"):
            shard(models[group.rank], sgd()(models[group.rank]), stage=1, group=group)

    run_ranks(3, one, 10.0)


@pytest.mark.promise("F09")
def test_a_frozen_module_whose_unused_input_requires_grad_trains_as_in_plain_torch():
    assert what_differs_over_gloo("gradient_passes_through_a_frozen_module") == []
    assert what_differs("gradient_passes_through_a_frozen_module") == []


def test_these_cases_compare_something():
    case = case_of(toggled, optimizer=adamw, steps=6)
    found, expected = traces_of(case, 1, stage=0), reference(case, 1)
    expected[0].steps[-1].weights["0.weight"][0, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"step 5, rank 0 of 1, parameter 0\.weight"):
        compare(found, expected, exact=True)
