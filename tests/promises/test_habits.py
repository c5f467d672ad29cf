"""What people do around a training loop that works in plain torch: it gives the same here, or an error that says what to do."""

import copy
import logging
import operator
from collections import defaultdict

import pytest
import torch
from torch import nn

from tests.loopback import run_ranks, solo
from tests.promises.loops import TINY, adamw, alone, on_ranks, one_step, same, weights
from tests.traces import copied
from tests.zoo.case import draw, filled, real_loss, real_mlp, real_numbers
from zero import Engine, ShardedOptimizer, shard
from zero.config.schema import ZeroConfig
from zero.errors import RankFailed, RanksDiffer

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.25)


def backward(model, rank, step=0):
    real_loss(model(draw(model, (3, 4), rank, step, real=True))).backward()


def near(found, expected):
    return all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def plain_step(world, before=lambda model: None):
    """A step of plain torch on the mean over `world` ranks."""
    model = real_mlp()
    before(model)
    for rank in range(world):
        backward(model, rank)
    for param in model.parameters():
        param.grad /= world
    sgd(model).step()
    return weights(model)


# the model, between steps -----------------------------------------------------------------------------------------------


@pytest.mark.promise("U04")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_who_exchanges_memory_to_evaluate_has_the_own_weights_back_whatever_was_saved_meanwhile(stage, dtype):
    model, optimizer = alone(stage=stage, dtype=dtype)
    averages = [torch.full_like(param, 7.0) for param in model.parameters()]

    def swap():
        for param, average in zip(model.parameters(), averages, strict=True):
            param.data, average.data = average.data, param.data

    before = weights(model)
    swap()
    optimizer.state_dict()
    optimizer.offload_states(["masters", "moments"])
    optimizer.reload_states()
    assert all((param == 7.0).all() for param in model.parameters())
    swap()
    assert same(weights(model), before)
    assert all((average == 7.0).all() for average in averages)
    one_step(model, optimizer)
    assert all((average == 7.0).all() for average in averages)


@STAGES
def test_a_parameter_that_becomes_trainable_in_a_window_has_a_stand_in_where_it_is_not_used(stage):
    def program(model, optimizer, group):
        model[0].weight.requires_grad_(False)
        backward(model, group.rank)
        model[0].weight.requires_grad_(True)
        if group.rank == 0:
            backward(model, group.rank, 1)
        else:
            model[2](real_numbers((3, 6), "hidden")).sum().backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()

    norms = on_ranks(2, program, stage=stage)
    assert norms[0] == norms[1]


def test_a_view_of_a_parameter_is_refused_since_the_parameter_moves():
    model = real_mlp()
    model.register_buffer("head", model[0].weight.data[:2])
    with pytest.raises(ValueError, match=r"head is a view of the memory of parameter 0\.weight"):
        shard(model, sgd(model), stage=2)
    del model.head
    optimizer = shard(model, sgd(model), stage=2)
    model.register_buffer("head", model[0].weight.data[:2])
    one_step(model, optimizer)
    assert torch.equal(model.head, model[0].weight[:2])  # a parameter that is registered afterwards looks at flat memory


def test_a_lazy_model_is_refused_by_the_name_of_what_has_no_shape():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet"):
        shard(model, torch.optim.SGD(model[0].parameters(), lr=0.1), stage=2)


KINDS = {
    "expanded": lambda number: torch.full((1,), float(number)).expand(3, 4),
    "conjugate": lambda number: torch.full((3,), complex(number, number)).conj(),
    "transposed": lambda number: torch.full((3, 4), float(number)).t(),
}
ODD = {
    "sparse": lambda number: torch.full((3, 3), float(number)).to_sparse(),
    "quantised": lambda number: torch.quantize_per_tensor(torch.full((4,), float(number)), 1.0, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", [*KINDS, *ODD])
def test_buffers_of_every_kind_come_from_rank_0_or_stay_with_a_word(kind, caplog):
    def build(number):
        model = real_mlp()
        model.register_buffer("odd", (KINDS | ODD)[kind](number))
        return model

    models = [build(1 + rank) for rank in range(2)]
    with caplog.at_level(logging.WARNING, "zero"):
        run_ranks(2, lambda group: shard(models[group.rank], sgd(models[group.rank]), stage=2, group=group).close(), 20.0)
    if kind in KINDS:
        assert torch.equal(models[1].odd, models[0].odd)
    else:
        assert "not plain dense tensors: odd" in caplog.text


# gradients --------------------------------------------------------------------------------------------------------------


def test_a_gradient_keeps_no_graph_of_what_is_done_to_it():
    model, optimizer = alone()
    twin = real_mlp()
    for number in range(2):
        for owner in (model, twin):
            backward(owner, 0, number)
            for param in owner.parameters():
                param.grad.add_(param, alpha=0.1)
                param.grad *= param.abs()
        assert not any(param.grad.requires_grad or param.grad.grad_fn for param in model.parameters())
        inner = sgd(twin)
        inner.step()
        inner.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert near(weights(model), weights(twin))


@STAGES
@pytest.mark.parametrize("deed", ["by other numbers", "by one that changes without a count", "on one rank only"])
def test_gradients_that_ranks_change_differently_are_an_error_on_all_before_anything_is_applied(stage, deed):
    def program(model, optimizer, group):
        backward(model, group.rank)
        optimizer.settle()
        before = weights(model)
        if deed == "by one that changes without a count":
            factor = torch.tensor(0.5)
            for param in model.parameters():
                param.grad.mul_(factor)
                factor.data.fill_(0.5 + group.rank)
        elif deed == "by other numbers" or group.rank == 0:
            for param in model.parameters():
                param.grad.mul_(torch.tensor(0.5 + group.rank))
        with pytest.raises(RanksDiffer, match="changed otherwise"):
            optimizer.step()
        optimizer.zero_grad()
        assert same(weights(model), before)
        one_step(model, optimizer, group.rank)
        return weights(model)

    expected = plain_step(2)
    for found in on_ranks(2, program, stage=stage):
        assert near(found, expected)


# weights of micro-batches ------------------------------------------------------------------------------------------------


def test_a_weight_that_comes_after_a_gradient_without_one_is_refused():
    model, optimizer = alone()
    backward(model, 0)
    with pytest.raises(ValueError, match="has a gradient without a weight"):
        optimizer.weight(2.0)


def test_what_comes_after_the_mean_was_taken_has_no_weight():
    model, optimizer = alone()
    optimizer.weight(4.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.settle()
    once = optimizer.whole_grad(model[2].bias)
    model(torch.ones(1, 4)).sum().backward()
    twice = optimizer.whole_grad(model[2].bias)
    assert torch.equal(twice, 2 * once)


def test_an_engine_wants_a_weight_for_every_micro_batch_of_a_window_that_has_any():
    model = real_mlp()
    engine = Engine(ShardedOptimizer(model, sgd(model), ZeroConfig(stage=2, accumulation=2)))
    engine.weight(4.0)
    engine.backward(real_loss(engine(torch.ones(1, 4))))
    engine.step()
    with pytest.raises(ValueError, match="without a weight"):
        engine.backward(real_loss(engine(torch.ones(1, 4))))
    with pytest.raises(TypeError, match="Cannot send a float backward"):
        engine.backward(3.0)


# failures ---------------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def boom(_):
    raise Boom


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_that_failed_unheard_is_named_at_the_step(where, world):
    """The exception is swallowed, and what arrived before it would be taken for all there is."""

    def program(model, optimizer, group):
        if group.rank == world - 1:
            weight = model[0].weight
            hook = weight.register_hook(boom) if where == "before" else weight.register_post_accumulate_grad_hook(boom)
            with pytest.raises(Boom):
                backward(model, group.rank)
            hook.remove()
        else:
            backward(model, group.rank)
        with pytest.raises(RankFailed, match=f"rank {world - 1} failed"):
            optimizer.step()
        optimizer.zero_grad()
        one_step(model, optimizer, group.rank)
        return weights(model)

    for found in on_ranks(world, program, bucket_bytes=TINY):
        assert near(found, plain_step(world))


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_step_that_fails_on_one_rank_is_told_to_the_others_and_all_go_on_with_equal_weights(offload, monkeypatch):
    def program(model, optimizer, group):
        backward(model, group.rank)
        if group.rank == 1:
            optimizer.inner.step = lambda: boom(None)
            with pytest.raises(Boom):
                optimizer.step()
            del optimizer.inner.step
        else:
            optimizer.step()
            optimizer.zero_grad()
            backward(model, group.rank)
            with pytest.raises(RankFailed, match="rank 1 failed"):
                optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="step 1 broke off"):
            optimizer.check()  # all have the same weights, or this would name a parameter
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)  # values for all parameters, as a checkpoint that is loaded gives them
        one_step(model, optimizer, group.rank)
        return weights(model)

    def fill(model):
        for param in model.parameters():
            param.data.fill_(0.25)

    expected = plain_step(2, before=fill)
    for found in on_ranks(2, program, offload=offload, bucket_bytes=TINY):
        assert near(found, expected)


@pytest.mark.parametrize("swallowed_by_all", [False, True])
def test_engines_are_at_the_same_micro_step_after_a_window_that_one_rank_lost(swallowed_by_all):
    models = [real_mlp() for _ in range(2)]

    def program(group):
        model = models[group.rank]
        config = ZeroConfig(stage=2, accumulation=2, timeout_s=20.0)
        engine = Engine(ShardedOptimizer(model, sgd(model), config, group))

        def micro(step):
            engine.backward(real_loss(engine(draw(model, (3, 4), group.rank, step, real=True))))
            engine.step()

        if group.rank == 0:
            micro(0)
            if not swallowed_by_all:
                with pytest.raises(RankFailed):
                    micro(1)
        engine.zero_grad()  # rank 1 failed in its first forward
        micro(0)
        micro(1)
        assert engine.global_steps == 1
        engine.optimizer.check()
        return weights(model)

    plain = real_mlp()
    for rank in range(2):
        for step in range(2):
            (real_loss(plain(draw(plain, (3, 4), rank, step, real=True))) / 4).backward()
    sgd(plain).step()
    for found in run_ranks(2, program, 20.0):
        assert near(found, weights(plain))


# the optimizer that was sharded, and copies -----------------------------------------------------------------------------


LOADED = torch.optim.Adam(real_mlp().parameters()).state_dict()
CHANGES = {
    "other state": lambda sharded, inner: setattr(sharded, "state", defaultdict(dict)),
    "other groups": lambda sharded, inner: setattr(sharded, "param_groups", copy.copy(sharded.param_groups)),
    "its own load_state_dict": lambda sharded, inner: inner.load_state_dict(LOADED),
    "its own add_param_group": lambda sharded, inner: inner.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "a longer list": lambda sharded, inner: inner.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_through_the_original_optimizer_alone_is_an_error_and_not_without_effect(change):
    model = real_mlp()
    inner = torch.optim.Adam(model.parameters())
    optimizer = shard(model, inner, stage=2)
    one_step(model, optimizer)
    CHANGES[change](optimizer, inner)
    backward(model, 0)
    with pytest.raises(ValueError, match="Use the sharded optimizer for load_state_dict and add_param_group"):
        optimizer.step()


def test_state_of_the_original_optimizer_is_asked_of_the_sharded_one_until_that_is_closed():
    model = real_mlp()
    inners = [torch.optim.Adam([model[0].weight]), torch.optim.SGD([model[0].bias], lr=0.1)]
    for given in (inners[0], inners):
        optimizer = shard(model, given, stage=2)
        one_step(model, optimizer)
        for inner in inners[: len(optimizer.param_groups)]:
            with pytest.raises(ValueError, match=r"Cannot take state_dict\(\) of .* Call it on the optimizer that zero\.shard"):
                inner.state_dict()
        assert len(optimizer.state_dict()["param_groups"]) == len(optimizer.param_groups)
        optimizer.close()
        assert inners[0].state_dict()["state"] == {}


@STAGES
def test_state_that_is_set_by_parameter_is_an_error_and_not_without_effect(stage):
    model, optimizer = alone(make=lambda model: torch.optim.Adam(model.parameters()), stage=stage)
    weight = model[0].weight
    one_step(model, optimizer)
    assert not optimizer.state[weight] and weight not in optimizer.state
    one_step(model, optimizer)
    state, value = optimizer.state[weight], torch.zeros_like(weight)
    for use in (
        lambda: state["exp_avg"], lambda: "step" in state, lambda: state.get("step"), lambda: state.update(exp_avg=value),
        lambda: operator.setitem(state, "exp_avg", value),
        lambda: operator.setitem(optimizer.state, weight, {"exp_avg": value}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^Cannot use the state of 0\.weight in optimizer\.state: .* Read it with"):
            use()
    optimizer.state.update({weight: {"exp_avg": value}})
    with pytest.raises(ValueError, match=r"^Cannot step: state of 0\.weight was set in optimizer\.state, .* load it by name"):
        optimizer.step()
    del optimizer.state[weight]
    one_step(model, optimizer)
    optimizer.close()


RESETS = {
    "by an empty one": lambda state, param: operator.setitem(state, param, {}),
    "by pop": lambda state, param: state.pop(param, None),
    "by del": lambda state, param: operator.delitem(state, param),
    "of all": lambda state, _: state.clear(),
}
ON_DISK = {"stage": 2, "homes": {"moments": "disk"}, "align_bytes": 4096}


def reset_in_training(model, optimizer, reset):
    for step in range(5):
        if step == 3:
            for param in (model[0].weight, model[2].bias):
                RESETS[reset](optimizer.state, param)
        one_step(model, optimizer, step=step)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.close()
    return weights(model)


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2, "kernels": "torch"}, {"stage": 3}, ON_DISK], ids=str)
def test_state_that_is_taken_away_by_parameter_begins_anew_as_in_plain_torch(tmp_path, options, reset):
    if "homes" in options:
        options = {**options, "homes": {"moments": f"disk:{tmp_path}"}}
    plain, anew = real_mlp(), real_mlp()
    expected = reset_in_training(plain, adamw(plain), reset)
    for step in range(5):
        one_step(anew, adamw(anew), step=step)
    assert not near(expected, weights(anew))
    program = lambda model, optimizer, _: reset_in_training(model, optimizer, reset)  # noqa: E731
    for found in on_ranks(2, program, make=adamw, bucket_bytes=TINY, **options):
        assert near(found, expected)


def test_a_sharded_optimizer_cannot_be_copied_and_says_what_can_be_kept():
    _, optimizer = alone()
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_ranks_that_added_different_numbers_of_parameters_are_told_so():
    def program(model, optimizer, group):
        if group.rank == 0:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3)) for _ in range(9)]})
        backward(model, group.rank)
        with pytest.raises(RanksDiffer, match=r"rank 1 has .*, rank 0 has parameter "):
            optimizer.step()

    on_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_after_a_backward_that_broke_off_at_its_first_gradient_is_that_of_plain_torch(stage):
    trained = []
    for is_ours in (True, False):
        model = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), real=True)
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer = shard(model, optimizer, stage=stage, group=solo()) if is_ours else optimizer

        def break_off(_):
            raise ArithmeticError("broken")

        hooks = [param.register_post_accumulate_grad_hook(break_off) for param in params]
        with pytest.raises(ArithmeticError, match="broken"):
            model(torch.ones(2, 4)).square().mean().backward()
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        optimizer.step()
        assert all(param.grad is None for param in params)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        trained.append(copied(params))
    assert all(map(torch.equal, *trained))
