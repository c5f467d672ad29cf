"""U: what users change in weights and gradients by hand."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests import inside
from tests.oracle import reference
from tests.promises.loops import TINY, adamw, alone, case_of, differs, on_ranks, one_step, same, weights
from tests.zoo.case import backward, draw, filled, finish, no_sync, real_loss, real_mlp, real_numbers, sgd
from tests.zoo.steps import real_step
from zero import shard
from zero.errors import RanksDiffer

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
DTYPES = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


# U01 to U03: edits take effect ------------------------------------------------------------------------------------------


def initialise(model, step):
    torch.nn.init.constant_(model[0].bias, 0.3)
    torch.nn.init.eye_(model[2].weight)


def load(model, step):
    model.load_state_dict({name: real_numbers(p.shape, "loaded", step, name) for name, p in model.named_parameters()})


def clamp(model, step):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def scale_by_foreach(model, step):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.75)


def assign_data(model, step):
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.25


def edit_one_element(model, step):
    with torch.no_grad():
        model[2].weight[1, 2] = 3.0 + step


EDITS = {edit.__name__: edit for edit in (initialise, load, clamp, scale_by_foreach, assign_data, edit_one_element)}


@pytest.mark.promise("U01", "U02", "U03")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world", [3])
def test_after_an_edit_and_a_step_with_zero_gradients_the_weights_stay_as_edited(stage, dtype, edit, world):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        before = weights(model)
        EDITS[edit](model, 0)
        edited = weights(model)
        backward(optimizer, sum(parameter.sum() for parameter in model.parameters()) * 0)
        finish(optimizer)
        assert same(edited, weights(model))
        assert not same(before, edited)
        for name, master in optimizer.state_dict()["masters"].items():
            changed = edited[name] != before[name]
            assert torch.equal(master[changed], edited[name][changed].float())
        return edited

    found = on_ranks(world, program, stage=stage, dtype=dtype, bucket_bytes=TINY)
    assert all(same(found[0], other) for other in found)


@pytest.mark.promise("U01", "U02", "U03")
@STAGES
@DTYPES
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world", [2])
def test_edited_at_each_of_ten_steps_training_equals_plain_torch(stage, dtype, edit, world):
    def script(model, optimizer, rank, world, step):
        if step:
            EDITS[edit](model, step)
        return (yield from real_step(model, optimizer, rank, world, step))

    case = case_of(script, optimizer=sgd(0.1, momentum=0.5), steps=10)
    assert differs(case, world, stage=stage, dtype=dtype, bucket_bytes=TINY) is None


class EditsInItsStep(torch.optim.AdamW):
    """A user's own, which does to the weights what their new values will be written over."""

    weights = ()

    def step(self, closure=None):
        super().step(closure)
        for weight in self.weights:
            weight.fill_(9.0)


@pytest.mark.promise("U01")
def test_what_a_step_itself_edits_is_written_over_by_its_new_weights():
    found = []
    for edits in (False, True):
        model = filled(real_mlp(), real=True)
        optimizer = shard(model, EditsInItsStep(model.parameters(), lr=0.02), stage=2, dtype="bfloat16", elementwise=True)
        for step in range(3):
            EditsInItsStep.weights = [parameter.data for parameter in model.parameters()] if edits else ()
            one_step(model, optimizer, 0, step)
        EditsInItsStep.weights = ()
        optimizer.check()
        found.append(weights(model))
    assert same(*found)


@pytest.mark.promise("U01", "U03")
@STAGES
@pytest.mark.parametrize("edit", ["clamp", "initialise", "assign_data"])
@pytest.mark.parametrize("world", [1, 3])
def test_an_edit_is_adopted_before_state_is_saved(stage, edit, world):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        EDITS[edit](model, 0)
        masters = optimizer.state_dict()["masters"]
        for name, weight in weights(model).items():
            assert torch.equal(masters[name].bfloat16(), weight)

    on_ranks(world, program, stage=stage, dtype="bfloat16", bucket_bytes=TINY)


@pytest.mark.promise("U02")
@STAGES
def test_weights_and_state_loaded_go_on_with_every_bit_of_the_masters(stage):
    """In whichever order they are loaded: a weight that is its master's rounded value is no edit."""
    model, optimizer = alone(make=adamw, stage=stage, dtype="bfloat16")
    for step in range(2):
        one_step(model, optimizer, step=step)
    saved, kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for step in range(2, 4):
        one_step(model, optimizer, step=step)
    expected, masters = weights(model), optimizer.state_dict()["masters"]
    for order in ("weights first", "state first"):
        other = real_mlp()
        again = shard(other, adamw(other), stage=stage, dtype="bfloat16", kernels="torch")
        loads = [lambda other=other: other.load_state_dict(kept), lambda again=again: again.load_state_dict(saved)]
        for each in loads if order == "weights first" else reversed(loads):
            each()
        for step in range(2, 4):
            one_step(other, again, step=step)
        assert same(weights(other), expected)
        assert same(again.state_dict()["masters"], masters)


@pytest.mark.promise("U02")
@STAGES
@pytest.mark.parametrize("world", [1, 2])
def test_loading_with_assign_is_an_error_at_the_next_step_that_names_the_parameter(stage, world):
    def program(model, optimizer, group):
        model.load_state_dict({name: value + 1 for name, value in weights(model).items()}, assign=True)
        backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))))
        with pytest.raises(RuntimeError, match=r"0\.weight.*loading with assign=True"):
            optimizer.step()

    on_ranks(world, program, stage=stage)


# U04: swapped in and out ------------------------------------------------------------------------------------------------


@pytest.mark.promise("U04")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("swap", ["copy_", "data", "load_state_dict"])
@pytest.mark.parametrize("world", [2])
def test_averaged_weights_swapped_in_and_out_leave_every_bit_as_it_was(stage, dtype, swap, world):
    def program(swapping):
        def run(model, optimizer, group):
            average = {name: weight.float() for name, weight in weights(model).items()}
            for step in range(4):
                one_step(model, optimizer, group.rank, step)
                for name, weight in weights(model).items():
                    average[name].lerp_(weight.float(), 0.5)
                if swapping:
                    put_in_and_out(model, average)
            return weights(model), optimizer.state_dict()

        return run

    def put_in_and_out(model, average):
        kept = weights(model)
        for values in (average, kept):
            if swap == "load_state_dict":
                model.load_state_dict(values)
                continue
            for name, parameter in model.named_parameters():
                if swap == "data":
                    parameter.data = values[name].to(parameter.dtype)
                else:
                    with torch.no_grad():
                        parameter.copy_(values[name])
            model(draw(model, (2, 4), 0, 0, real=True))

    options = {"stage": stage, "dtype": dtype, "bucket_bytes": TINY, "make": adamw}
    for mine, theirs in zip(on_ranks(world, program(True), **options), on_ranks(world, program(False), **options), strict=True):
        assert same(mine[0], theirs[0])
        assert same(mine[1]["masters"], theirs[1]["masters"])
        assert all(same(mine[1]["state"][name], theirs[1]["state"][name]) for name in mine[0])


# U05: copies ------------------------------------------------------------------------------------------------------------


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.promise("U05")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved_by_torch])
@pytest.mark.parametrize("when", ["between steps", "in a window"])
def test_a_copy_of_the_model_is_an_independent_plain_model(stage, dtype, how, when):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        if when == "in a window":
            backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 1, real=True))))
        other = how(model)
        before = weights(other)
        assert same(before, weights(model))
        flat = {chunk.untyped_storage().data_ptr() for chunk in inside.chunks(optimizer).values()}
        assert not any(parameter.untyped_storage().data_ptr() in flat for parameter in other.parameters())
        one_step(model, optimizer, group.rank, 1)
        assert same(before, weights(other)) and not same(before, weights(model))
        trained = weights(model)
        other.zero_grad()
        real_loss(other(draw(other, (3, 4), 0, 2, real=True))).backward()
        assert all(type(parameter.grad) is torch.Tensor for parameter in other.parameters())
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        plain.step()
        assert same(trained, weights(model)) and not same(before, weights(other))
        one_step(model, optimizer, group.rank, 3)

    on_ranks(2, program, stage=stage, dtype=dtype)


@pytest.mark.promise("U05")
def test_a_copy_can_be_sharded_by_itself():
    model, optimizer = alone()
    other = copy.deepcopy(model)
    again = shard(other, sgd()(other), stage=1)
    for step in range(2):
        one_step(model, optimizer, step=step)
        one_step(other, again, step=step)
    assert same(weights(model), weights(other))


# U06, U07, U08 ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("U06")
@STAGES
@DTYPES
def test_check_names_the_first_parameter_that_one_rank_edited(stage, dtype):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        optimizer.check()
        if group.rank == 1:
            model[2].bias.data[1] += 1e-2
            model[2].weight.data[0, 0] += 1e-2
        with pytest.raises(RanksDiffer, match=r"ranks 0 and 1 have different weights in 2\.weight"):
            optimizer.check()

    on_ranks(3, program, stage=stage, dtype=None if dtype == "fp32" else "bfloat16")


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.second, self.last = norm(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2)
        torch.nn.utils.parametrizations.orthogonal(self.second)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def spectral(layer):
    torch.manual_seed(3)  # its first vectors are drawn
    return nn.utils.parametrizations.spectral_norm(layer)


def seeded(norm):
    def build():
        torch.manual_seed(4)
        return Normed(norm)

    return build


@pytest.mark.promise("U07")
@STAGES
@pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])
@pytest.mark.parametrize("norm", [spectral, nn.utils.parametrizations.weight_norm], ids=["spectral", "weight"])
@WORLDS
def test_parametrizations_that_are_there_before_sharding_train_as_in_plain_torch(stage, bucket_bytes, norm, world):
    case = case_of(real_step, seeded(norm), sgd(0.1, momentum=0.5), steps=4)
    assert differs(case, world, stage=stage, bucket_bytes=bucket_bytes) is None


@pytest.mark.promise("U08")
@STAGES
@DTYPES
@WORLDS
def test_gradients_made_by_hand_on_each_rank_are_reduced_at_the_step(stage, dtype, world):
    def script(model, optimizer, rank, world, step):
        for name, parameter in model.named_parameters():
            parameter.grad = real_numbers(parameter.shape, "by hand", name, rank, step).to(parameter)
        yield "settle"
        finish(optimizer)

    assert differs(case_of(script), world, stage=stage, dtype=dtype, bucket_bytes=TINY) is None


class Two(nn.Module):
    """Weights of one bucket, whose gradients are the data."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))


@pytest.mark.promise("U08")
@STAGES
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("waits", ["in its bucket", "beside the gradient in place"])
def test_a_gradient_assigned_within_a_window_replaces_what_has_not_been_sent(stage, more, waits):
    def script(model, optimizer, rank, world, step):
        def use(weight, turn):
            backward(optimizer, (weight * real_numbers((4,), rank, step, turn).to(weight)).sum())

        if waits == "in its bucket":  # the bucket is not full
            use(model.other, 1)
        else:
            with no_sync(optimizer):
                use(model.other, 1)
            use(model.one, 2)
        model.other.grad = real_numbers((4,), "by hand", rank, step).to(model.other)
        if more:
            use(model.other, 3)
        yield "settle"
        finish(optimizer)

    assert differs(case_of(script, lambda: filled(Two(), real=True)), 2, stage=stage) is None


def test_a_filled_model_is_what_these_tests_begin_with():
    model = filled(real_mlp(), real=True)
    assert same(weights(model), reference(case_of(real_step, steps=1, optimizer=sgd(0.0)), 1)[0].steps[0].weights)
