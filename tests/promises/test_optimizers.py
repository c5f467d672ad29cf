"""O: optimizers, their groups and state, and schedules."""

import copy
import json
import logging
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from tests import inside
from tests.loopback import run_ranks
from tests.oracle import reference
from tests.promises.loops import TINY, alone, case_of, differs, on_ranks, one_step, same, weights
from tests.promises.trainings import what_differs
from tests.zoo.case import backward, draw, filled, finish, real_loss, real_mlp, real_numbers, sgd
from tests.zoo.optimizers import Lion
from tests.zoo.steps import real_step
from zero import shard
from zero.errors import RanksDiffer, ZeroError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
BUCKETS = pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])
EPS = 1e-2
OPTIM = torch.optim
OPTIMIZERS = {
    "SGD": lambda params: OPTIM.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "plain SGD": lambda params: OPTIM.SGD(params, lr=0.05),
    "Adam": lambda params: OPTIM.Adam(params, lr=0.02, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda params: OPTIM.AdamW(params, lr=0.02, weight_decay=0.1),
    "RMSprop": lambda params: OPTIM.RMSprop(params, lr=0.02, weight_decay=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda params: OPTIM.Adagrad(params, lr=0.02, weight_decay=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Lion": lambda params: Lion(params, lr=0.02, weight_decay=0.1),
    "NAdam": lambda params: OPTIM.NAdam(params, lr=0.02, weight_decay=0.1),
    "RAdam": lambda params: OPTIM.RAdam(params, lr=0.02, weight_decay=0.1),
    "Adamax": lambda params: OPTIM.Adamax(params, lr=0.02, weight_decay=0.1),
    "Adadelta": lambda params: OPTIM.Adadelta(params, weight_decay=0.1),
    "ASGD": lambda params: OPTIM.ASGD(params, lr=0.02, weight_decay=0.1, t0=1),
    "Rprop": lambda params: OPTIM.Rprop(params, lr=0.02),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def make(name):
    return lambda model: OPTIMIZERS[name](model.parameters())


class Shapes(nn.Module):
    """A 0-dim parameter, one of one element, an odd matrix and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(1))
        self.odd, self.turned = nn.Parameter(torch.empty(4, 5)), nn.Parameter(torch.empty(3, 5).t())

    def forward(self, x):
        return self.scale * (x @ self.odd @ self.turned) + self.one


def shapes():
    return filled(Shapes(), real=True)


def adamw(model):
    return OPTIM.AdamW(model.parameters(), lr=0.02, eps=EPS)


# O01, O13, O15: what a step computes ------------------------------------------------------------------------------------


@pytest.mark.promise("O01")
@STAGES
@EACH
@pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])
def test_every_update_from_the_first_on_is_plain_torchs_in_every_bit(stage, name, bucket_bytes):
    """No step is counted that nobody took, and nothing decays before the first."""
    model, optimizer = alone(shapes, make(name), stage=stage, bucket_bytes=bucket_bytes, elementwise=True)
    assert not any(optimizer.state_dict()["state"].values()) or name in ("Adagrad",)
    plain = shapes()
    inner = make(name)(plain)
    for step in range(4):
        one_step(model, optimizer, step=step)
        one_step(plain, inner, step=step)
        assert same(weights(model), weights(plain)), f"step {step}"
    state = optimizer.state_dict()["state"]
    for parameter, tensor in plain.named_parameters():
        assert set(state.get(parameter, {})) == set(inner.state[tensor])
        for key, value in inner.state[tensor].items():
            mine = state[parameter][key]
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, (parameter, key)


class AddsOne(OPTIM.Optimizer):
    """Adds one to everything it is given, and to a state of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(1.0)
                    self.state[parameter].setdefault("sum", torch.ones_like(parameter)).add_(1.0)


@pytest.mark.promise("O13")
@STAGES
@BUCKETS
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("world", [1, 3])
def test_padding_is_never_seen_by_the_optimizer_in_norms_or_in_what_is_saved(stage, bucket_bytes, dtype, world):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        shares = inside.shares_of_masters(optimizer)
        held = sum(piece.in_param.numel for piece, _ in inside.pieces_and_masters(optimizer))
        assert sum(state["sum"].numel() for state in optimizer.state.values()) == held < sum(share.numel() for share in shares)
        saved = optimizer.state_dict()["state"]
        assert {name: tuple(entries["sum"].shape) for name, entries in saved.items()} == {
            name: tuple(parameter.shape) for name, parameter in model.named_parameters()
        }
        chunks, layout = inside.chunks(optimizer), inside.layout(optimizer)
        for bucket, gaps in zip(layout.buckets, layout.gaps, strict=True):
            for gap in gaps:
                start = bucket.span.start
                assert not chunks[bucket.chunk][start + gap.start : start + gap.stop].any()

    on_ranks(world, program, shapes, lambda model: AddsOne(model.parameters()), stage=stage, dtype=dtype,
             bucket_bytes=bucket_bytes, elementwise=True)  # fmt: skip


def adamw_of_the_list(params, settings, **more):
    return OPTIM.AdamW([{"params": params, **settings}], lr=0.01, **more)


SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}


@pytest.mark.promise("O15")
@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_200_steps_of_adamw_on_random_shapes_are_torchs_with_changing_rates_and_late_in_training(kernels, settings):
    """There is no kernel of our own: 'torch' is torch's default and 'fused' its fused one, in every bit, whatever the cuts."""
    chance = torch.Generator().manual_seed(5)
    numels = torch.randint(1, 60, (6,), generator=chance).tolist()

    def build():
        model = nn.Module()
        for index, numel in enumerate(numels):
            model.register_parameter(f"p{index}", nn.Parameter(real_numbers((numel,), index)))
        return model

    model, plain = build(), build()
    inner = adamw_of_the_list(list(model.parameters()), SETTINGS[settings])
    reference_ = adamw_of_the_list(list(plain.parameters()), SETTINGS[settings], fused=kernels == "fused" or None)
    optimizer = shard(model, inner, stage=2, kernels=kernels, bucket_bytes=256)
    assert all(bool(group.get("fused")) == (kernels == "fused") for group in optimizer.param_groups)
    for step in range(200):
        for index, (mine, theirs) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            grad = real_numbers(mine.shape, "grad", step, index)
            mine.grad, theirs.grad = grad.clone(), grad
        for each in (optimizer, reference_):
            each.param_groups[0]["lr"] = 0.01 / (1 + step % 7)
            if step == 100:
                for state in each.state.values():
                    state["step"].fill_(150_000.0)
            each.step()
            each.zero_grad()
        assert same(weights(model), weights(plain)), f"step {step}"


@pytest.mark.promise("O15")
def test_the_fused_kernel_is_within_one_unit_of_the_default_at_each_step():
    """From the same weights and state, as a share of what a step moves: both round where the other may not."""
    for step in range(50):
        grads = [real_numbers((37,), "g", step), real_numbers((5, 3), "h", step)]
        found = []
        for kernels in ("torch", "fused"):
            model = nn.Module()
            for index, grad in enumerate(grads):
                model.register_parameter(f"p{index}", nn.Parameter(real_numbers(grad.shape, "w", step, index)))
            optimizer = shard(model, OPTIM.AdamW(model.parameters(), lr=0.01), stage=1, kernels=kernels)
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
            found.append(torch.cat([weight.flatten() for weight in weights(model).values()]))
        largest = torch.maximum(found[0].abs(), torch.tensor(0.01))  # the added number is as large, and so is its last bit
        assert ((found[0] - found[1]).abs() <= torch.finfo(torch.float32).eps * largest).all()


@pytest.mark.promise("O15")
def test_a_kernel_that_there_is_none_of_is_refused_with_the_reason_and_nothing_is_changed():
    for kernels, kind, words in (
        ("compiled", OPTIM.NAdam, "only Adam and AdamW have a compiled step, and not NAdam"),
        ("fused", OPTIM.RMSprop, "RMSprop has no fused kernel"),
    ):
        model = real_mlp()
        inner = kind(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=words):
            shard(model, inner, stage=1, kernels=kernels)
        assert not any(group.get("fused") for group in inner.param_groups)


# O02 to O06: groups and rates -------------------------------------------------------------------------------------------


def three_groups(model):
    return OPTIM.AdamW(
        [
            {"params": [model[0].weight], "weight_decay": 0.2, "betas": (0.5, 0.9), "name": "first"},
            {"params": [model[2].bias, model[0].bias], "lr": 0.05, "maximize": True, "role": ["a", {"list": 1}]},
            {"params": [model[2].weight], "amsgrad": True, "eps": 0.1},
        ],
        lr=0.02,
        eps=EPS,
    )


def edited_groups(model, optimizer, rank, world, step):
    first, second, third = optimizer.param_groups
    assert (first["name"], second["role"], second["maximize"], third["amsgrad"]) == ("first", ["a", {"list": 1}], True, True)
    first["lr"] *= 0.5
    second["weight_decay"] = 0.1 * step
    third["betas"] = (0.8, 0.9 + 0.01 * step)
    third["custom"] = step
    yield from real_step(model, optimizer, rank, world, step)
    return [{key: value for key, value in group.items() if key not in ("params", "role")} for group in optimizer.param_groups]


@pytest.mark.promise("O02")
@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_three_groups_keep_all_their_settings_and_edits_take_effect_at_the_next_step(stage, dtype, world):
    case = case_of(edited_groups, optimizer=three_groups, steps=4)
    assert differs(case, world, stage=stage, dtype=dtype, bucket_bytes=64) is None


@pytest.mark.promise("O02")
def test_the_groups_are_the_users_own_dicts_with_the_models_own_parameters_in_his_order():
    model = real_mlp()
    inner = three_groups(model)
    groups, members = list(inner.param_groups), [list(group["params"]) for group in inner.param_groups]
    optimizer = shard(model, inner, stage=2)
    for _ in range(2):
        one_step(model, optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
        assert [[id(p) for p in group["params"]] for group in groups] == [[id(p) for p in each] for each in members]


@pytest.mark.promise("O02")
@STAGES
def test_a_step_that_fails_leaves_the_parameters_in_their_groups(stage):
    class Fails(OPTIM.SGD):
        def step(self, closure=None):
            raise KeyError("inside")

    model, optimizer = alone(make=lambda model: Fails(model.parameters(), lr=0.1), stage=stage, elementwise=True)
    kept = list(optimizer.param_groups[0]["params"])
    backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 0, real=True))))
    with pytest.raises(KeyError, match="inside"):
        optimizer.step()
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], kept, strict=True))
    assert [id(parameter) for parameter in kept] == [id(parameter) for parameter in model.parameters()]


SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n), lambda n: 1.0]),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.1, 0.2, 0.3], total_steps=10),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=5),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.9),
}


@pytest.mark.promise("O03", "O04")
@STAGES
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedules_made_before_or_after_sharding_drive_every_group(stage, schedule, when):
    def trace(model, optimizer, scheduler, rank):
        rates = []
        for step in range(5):
            loss = one_step(model, optimizer, rank, step)
            scheduler.step(*([0.5] if schedule == "ReduceLROnPlateau" else []))
            assert loss.isfinite()
            rates.append([group["lr"] for group in optimizer.param_groups])
        return rates, weights(model)

    plain = real_mlp()
    inner = three_groups_of_sgd(plain)
    expected_rates, _ = trace(plain, inner, SCHEDULES[schedule](inner), 0)
    assert len({tuple(rates) for rates in expected_rates}) > 1
    models = [real_mlp() for _ in range(2)]
    inners = [three_groups_of_sgd(model) for model in models]
    schedulers = [SCHEDULES[schedule](inner) for inner in inners] if when == "before" else None

    def program(model, optimizer, group):
        scheduler = SCHEDULES[schedule](optimizer) if schedulers is None else schedulers[group.rank]
        return trace(model, optimizer, scheduler, group.rank)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would warn of a scheduler that no optimizer's step was seen by
        built, made = iter(models), iter(inners)
        found = on_ranks(2, program, lambda: next(built), lambda model: next(made), stage=stage)
    assert all(rates == expected_rates for rates, _ in found)
    assert same(found[0][1], found[1][1])


def three_groups_of_sgd(model):
    groups = [{"params": [model[0].weight]}, {"params": [model[2].bias, model[0].bias]}, {"params": [model[2].weight]}]
    return OPTIM.SGD(groups, lr=0.1, momentum=0.5)


@pytest.mark.promise("O06")
@STAGES
@pytest.mark.parametrize("world", [1, 2])
def test_a_rate_that_is_a_tensor_stays_the_same_tensor_through_steps_schedules_and_loading(stage, world):
    def build(model):
        return OPTIM.Adam(model.parameters(), lr=torch.tensor(0.02), eps=EPS, foreach=False)

    def program(model, optimizer, group):
        rate = optimizer.param_groups[0]["lr"]
        scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
        for step in range(2):
            one_step(model, optimizer, group.rank, step)
            scheduler.step()
        saved = copy.deepcopy(optimizer.state_dict())
        assert rate.item() == pytest.approx(0.005)
        rate.fill_(7.0)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] is rate
        assert (rate.item(), rate.shape, rate.dtype) == (pytest.approx(0.005), torch.Size([]), torch.float32)

    on_ranks(world, program, make=build, stage=stage)
    assert what_differs("rate_that_is_a_tensor_edited_in_place", stages=(stage,), worlds=(world,)) == []


# O07 to O09: state ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("O07")
@STAGES
@EACH
def test_state_saved_before_the_first_step_can_be_loaded_and_training_is_plain_torchs(stage, name):
    """Ours, and a torch-made empty one."""

    def program(model, optimizer, group):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if name != "Adagrad":
            assert optimizer.state_dict()["state"] == {}
        optimizer.load_state_dict(OPTIMIZERS[name](shapes().parameters()).state_dict())
        for step in range(2):
            one_step(model, optimizer, group.rank, step)
        return weights(model)

    expected = reference(case_of(real_step, shapes, make(name), steps=2), 2)[0].steps[-1].weights
    for found in on_ranks(2, program, shapes, make(name), stage=stage, elementwise=True):
        for parameter, weight in expected.items():
            torch.testing.assert_close(found[parameter], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.promise("O07")
@EACH
def test_state_goes_to_plain_torch_and_back_in_the_middle_of_training(name):
    model, optimizer = alone(shapes, make(name), elementwise=True, bucket_bytes=TINY)
    for step in range(2):
        one_step(model, optimizer, step=step)
    saved, kept = copy.deepcopy(optimizer.state_dict()), weights(model)
    optimizer.close()
    plain = shapes()
    plain.load_state_dict(kept)
    inner = make(name)(plain)
    inner.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    one_step(plain, inner, step=2)
    back = shapes()
    back.load_state_dict(weights(plain))
    again = shard(back, make(name)(back), stage=2, elementwise=True, bucket_bytes=TINY, kernels="torch")
    again.load_state_dict(inner.state_dict())
    one_step(back, again, step=3)
    straight = shapes()
    whole = make(name)(straight)
    for step in range(4):
        one_step(straight, whole, step=step)
    assert same(weights(back), weights(straight))


@pytest.mark.promise("O07", "O08")
@STAGES
@pytest.mark.parametrize("worlds", [(1, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_state_saved_at_one_world_size_loads_at_another(stage, worlds, dtype):
    before, after = worlds

    def save(model, optimizer, group):
        for step in range(2):
            one_step(model, optimizer, 0, step)
        return copy.deepcopy(optimizer.state_dict()), weights(model)

    options = {"stage": stage, "dtype": dtype, "bucket_bytes": 64}
    saved = on_ranks(before, save, shapes, adamw, **options)
    assert all(same(each[0]["masters"], saved[0][0]["masters"]) for each in saved)

    def load(model, optimizer, group):
        model.load_state_dict(saved[0][1])
        optimizer.load_state_dict(saved[0][0])
        for step in range(2, 4):
            one_step(model, optimizer, 0, step)
        return weights(model)

    def straight(model, optimizer, group):
        for step in range(4):
            one_step(model, optimizer, 0, step)
        return weights(model)

    # every rank has the same data, so their mean is the same at every world size but for its rounding
    expected = on_ranks(1, straight, shapes, adamw, **options)[0]
    for found in on_ranks(after, load, shapes, adamw, **options):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=8e-3 if dtype else 1e-6, atol=8e-3 if dtype else 1e-6)


@pytest.mark.promise("O08")
@STAGES
@pytest.mark.parametrize("world", [1, 3])
def test_only_what_was_stepped_has_state_and_loading_keeps_it_so(stage, world):
    """Freeze half, step, save, thaw, load."""

    def program(model, optimizer, group):
        model[0].requires_grad_(False)
        one_step(model, optimizer, group.rank)
        saved = copy.deepcopy(optimizer.state_dict())
        assert set(saved["state"]) == {"2.weight", "2.bias"}
        model[0].requires_grad_(True)
        one_step(model, optimizer, group.rank, 1)
        assert set(optimizer.state_dict()["state"]) == set(weights(model))
        optimizer.load_state_dict(saved)
        assert set(optimizer.state_dict()["state"]) == {"2.weight", "2.bias"}
        one_step(model, optimizer, group.rank, 2)
        steps = {name: entries["step"].item() for name, entries in optimizer.state_dict()["state"].items()}
        assert steps == {"0.weight": 1, "0.bias": 1, "2.weight": 2, "2.bias": 2}

    on_ranks(world, program, make=adamw, stage=stage, bucket_bytes=64)


class Opaque(OPTIM.Optimizer):
    """Keeps whatever an optimizer may keep: a number, a list, nothing yet, a table that has nothing to do with elements."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["history"] = [*state.get("history", []), 0.5 * state["step"]]
                state.setdefault("momentum", None)
                state["table"] = torch.arange(12).view(3, 4) * state["step"]
                state["count"] = torch.tensor(state["step"], dtype=torch.int64)
                state["rate"] = math.inf
                state["average"] = parameter.grad.to(torch.float64) / state["step"]
                parameter.add_(parameter.grad, alpha=-group["lr"] / state["step"])


@pytest.mark.promise("O09")
@STAGES
@BUCKETS
@pytest.mark.parametrize("world", [1, 3])
def test_state_of_other_shapes_and_types_round_trips(stage, bucket_bytes, world):
    def program(model, optimizer, group):
        for step in range(2):
            one_step(model, optimizer, group.rank, step)
        saved = copy.deepcopy(optimizer.state_dict())
        for name, parameter in model.named_parameters():
            state = saved["state"][name]
            assert (state["step"], state["history"], state["momentum"], state["rate"]) == (2, [0.5, 1.0], None, math.inf)
            assert torch.equal(state["table"], 2 * torch.arange(12).view(3, 4))
            assert state["count"].item() == 2 and state["count"].dtype == torch.int64
            assert state["average"].shape == parameter.shape and state["average"].dtype == torch.float64
        optimizer.state.clear()
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()["state"]
        for name, state in saved["state"].items():
            assert repr(again[name]) == repr(state)
        one_step(model, optimizer, group.rank, 2)
        return weights(model)

    options = {"stage": stage, "bucket_bytes": bucket_bytes, "elementwise": True}
    found = on_ranks(world, program, shapes, lambda model: Opaque(model.parameters()), **options)
    expected = reference(case_of(real_step, shapes, lambda model: Opaque(model.parameters())), world)[0].steps[-1].weights
    for name, weight in expected.items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-6, atol=1e-6)


class Factored(OPTIM.Optimizer):
    """State that belongs to neither one element nor to all: what a share makes of it is not what the whole would."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["mean_square"] = parameter.grad.square().mean()
                self.state[parameter]["kept"] = {parameter.grad.sum()} if parameter.dim() else None


@pytest.mark.promise("O09")
@STAGES
def test_state_that_differs_between_ranks_is_an_error_and_never_one_ranks_guess(stage):
    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        with pytest.raises(ZeroError, match=r"Cannot gather (mean_square|kept) of 0\.weight"):
            optimizer.state_dict()

    on_ranks(2, program, make=lambda model: Factored(model.parameters()), stage=stage, elementwise=True, bucket_bytes=64)


@pytest.mark.promise("O09")
@STAGES
def test_sgd_before_it_has_a_momentum_saves_and_loads(stage):
    model, optimizer = alone(make=make("plain SGD"), stage=stage)
    one_step(model, optimizer)
    saved = optimizer.state_dict()
    assert all(entries.get("momentum_buffer") is None for entries in saved["state"].values())
    optimizer.load_state_dict(saved)
    one_step(model, optimizer, step=1)


@pytest.mark.promise("O09")
def test_state_that_does_not_fit_is_refused_before_anything_is_changed():
    model, optimizer = alone(make=adamw)
    one_step(model, optimizer)
    good = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(good)
    wrong["state"]["0.weight"]["exp_avg"] = torch.zeros(3, 3)
    unknown = {**good, "state": {**good["state"], "9.weight": good["state"]["0.weight"]}}
    groups = {**good, "param_groups": good["param_groups"] * 2}
    for bad, words in ((wrong, r"exp_avg of 0\.weight: .*\(3, 3\)"), (unknown, r"9\.weight"), (groups, "2 parameter groups")):
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(bad)
    now = optimizer.state_dict()
    assert all(same(good["state"][name], now["state"][name]) for name in good["state"])


# O10: closures ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("O10")
@STAGES
@pytest.mark.parametrize("world", [1, 2])
def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_is_returned(stage, world):
    def program(model, optimizer, group):
        calls = []

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = real_loss(model(draw(model, (3, 4), group.rank, len(calls), real=True)))
            backward(optimizer, loss)
            calls.append(loss)
            return loss

        for step in range(3):
            assert optimizer.step(closure) is calls[step]
        assert len(calls) == 3
        return weights(model)

    expected = reference(case_of(real_step), world)[0].steps[-1].weights
    for found in on_ranks(world, program, stage=stage):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)


def sharpness_aware(model, optimizer, rank, world, step):
    """Two steps a batch: uphill by the normalised global gradient, and down from where it was with the gradient found there."""
    x = draw(model, (3, 4), rank, step, real=True)
    backward(optimizer, real_loss(model(x)))
    yield "settle"
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    moves = [optimizer.whole_grad(parameter) * (0.05 / (norm + 1e-6)) for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    backward(optimizer, real_loss(model(x)))
    yield "settle"
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    finish(optimizer)


@pytest.mark.promise("O10")
@STAGES
@pytest.mark.parametrize("world", [1, 3])
def test_sharpness_aware_minimisation_equals_plain_torch(stage, world):
    assert differs(case_of(sharpness_aware, optimizer=sgd(0.1, momentum=0.5)), world, stage=stage, bucket_bytes=TINY) is None


@pytest.mark.promise("O10")
@STAGES
def test_an_optimizer_that_calls_its_closure_several_times_is_refused_by_name(stage):
    class Own(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, Own):
        model = real_mlp()
        with pytest.raises(ValueError, match=f"Cannot shard {kind.__name__}: it evaluates the loss several times a step"):
            shard(model, kind(model.parameters()), stage=stage)


# O11, O12: whole tensors ------------------------------------------------------------------------------------------------


class Lamb(OPTIM.SGD):
    """Scales by the norm of the whole weight."""


class LambOfAll(Lamb):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.param_groups[0]["max_grad_norm"] = 1.0


class Prodigy(OPTIM.SGD):
    """Adds up over all parameters."""


class Undeclared(OPTIM.SGD):
    """Nobody knows what it looks at."""

    def step(self, closure=None):
        return super().step(closure)


REFUSED = {
    "Prodigy": (Prodigy, {"elementwise": True}, r"Cannot shard Prodigy: it finds its rate from sums over all parameters"),
    "a norm of all": (LambOfAll, {"elementwise": True}, r"Cannot shard LambOfAll: it divides by .* with max_grad_norm=1.0"),
    "whole ones declared element-wise": (OPTIM.Adafactor, {"elementwise": True}, r"Adafactor looks at whole tensors"),
    "a subclass": (Lamb, {"elementwise": True}, r"Cannot shard Lamb element by element: Lamb looks at whole tensors"),
    "undeclared": (Undeclared, {}, r"Undeclared.*elementwise=True.*whole_tensors=True.*zero\.verify"),
}


@STAGES
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_that_cannot_be_given_shares_or_that_nobody_vouches_for_is_refused_by_name(stage, name, world):
    kind, options, message = REFUSED[name]

    def program(group):
        model = models[group.rank]
        before = [parameter.data_ptr() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=message):
            shard(model, kind(model.parameters(), lr=0.1), stage=stage, group=group, **options)
        assert [parameter.data_ptr() for parameter in model.parameters()] == before

    models = [real_mlp() for _ in range(world)]
    run_ranks(world, program, 10.0)


# O14: hooks -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("O14")
@STAGES
@pytest.mark.parametrize("on", ["inner before", "inner after", "sharded"])
def test_hooks_run_once_a_step_on_the_object_that_the_user_holds(stage, on):
    model = real_mlp()
    inner = adamw(model)
    seen = []

    def register(optimizer):
        optimizer.register_step_pre_hook(lambda which, args, kwargs: seen.append(("before step", which, kwargs)))
        optimizer.register_step_post_hook(lambda which, args, kwargs: seen.append(("after step", which, kwargs)))
        optimizer.register_state_dict_pre_hook(lambda which: seen.append(("before saving", which)))
        optimizer.register_state_dict_post_hook(lambda which, found: {**found, "mark": 1})
        optimizer.register_load_state_dict_pre_hook(lambda which, found: seen.append(("before loading", which)))
        optimizer.register_load_state_dict_post_hook(lambda which: seen.append(("after loading", which)))

    if on == "inner before":
        register(inner)
    optimizer = shard(model, inner, stage=stage)
    if on != "inner before":
        register(inner if on == "inner after" else optimizer)
    for step in range(2):
        one_step(model, optimizer, step=step)
    saved = optimizer.state_dict()
    assert saved["mark"] == 1
    optimizer.load_state_dict(saved)
    what = [entry[0] for entry in seen]
    assert what == ["before step", "after step"] * 2 + ["before saving", "before loading", "after loading"]
    assert all(entry[1] is optimizer for entry in seen)


@pytest.mark.promise("O14")
def test_hooks_for_all_optimizers_run_once_a_step_too():
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    model, optimizer = alone(make=adamw)
    seen = []
    handles = [register_optimizer_step_pre_hook(lambda which, *_: seen.append(which)),
               register_optimizer_step_post_hook(lambda which, *_: seen.append(which))]  # fmt: skip
    try:
        one_step(model, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 2 and all(which is optimizer for which in seen)


@pytest.mark.promise("O14")
def test_a_hook_before_the_step_sees_the_models_parameters_and_may_change_the_rate():
    model, optimizer = alone(make=sgd(1.0))

    def hook(which, args, kwargs):
        assert [id(p) for p in which.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        which.param_groups[0]["lr"] = 0.0

    optimizer.register_step_pre_hook(hook)
    before = weights(model)
    one_step(model, optimizer)
    assert same(before, weights(model))


# O16: members -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("O16")
@STAGES
@pytest.mark.parametrize("world", [1, 3])
def test_a_parameter_that_only_the_optimizer_knows_is_trained(stage, world):
    """Such as a learned temperature beside the model."""

    def build():
        model = real_mlp()
        object.__setattr__(model, "temperature", nn.Parameter(torch.tensor([1.5])))
        return model

    def both(model):
        return OPTIM.SGD([*model.parameters(), model.temperature], lr=0.1)

    def run(model, optimizer, rank):
        for step in range(3):
            loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)) * model.temperature)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.temperature.item(), weights(model)

    found = on_ranks(world, lambda model, optimizer, group: run(model, optimizer, 0), build, both, stage=stage)
    plain = build()
    temperature, expected = run(plain, both(plain), 0)
    for each, after in found:
        assert each == pytest.approx(temperature, rel=1e-6) and temperature != 1.5
        for name, weight in expected.items():
            torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.promise("O16")
def test_a_trainable_parameter_that_the_optimizer_lacks_is_named_once_and_left_alone(caplog):
    model = real_mlp()
    model[0].bias.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "zero"):
        optimizer = shard(model, OPTIM.SGD(model[0].parameters(), lr=0.1), stage=2)
        before = weights(model)
        for step in range(3):
            one_step(model, optimizer, step=step)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "2.weight, 2.bias" in told[0] and "0.bias" not in told[0]
    after = weights(model)
    assert torch.equal(before["2.weight"], after["2.weight"]) and not torch.equal(before["0.weight"], after["0.weight"])


@pytest.mark.promise("O02")
def test_ranks_whose_groups_have_other_settings_are_told_so():
    models = [real_mlp() for _ in range(2)]

    def program(group):
        inner = OPTIM.SGD(models[group.rank].parameters(), lr=0.1 + group.rank)
        with pytest.raises(RanksDiffer, match=r"rank 1 has .*lr=1\.1, rank 0 has .*lr=0\.1"):
            shard(models[group.rank], inner, stage=1, group=group)

    run_ranks(2, program, 10.0)


def overflowed(steps=3):
    """An fp16 training whose scale has come down and whose steps were skipped on the way."""
    model = real_mlp()
    optimizer = shard(model, sgd()(model), stage=2, dtype="float16")
    for step in range(steps):
        x = draw(model, (3, 4), 0, step, real=True)
        optimizer.backward(real_loss(model(x)) * (float("inf") if step else 2.0**-6))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_the_loss_scale_and_the_skipped_steps_go_on_after_loading_where_they_were():
    _, optimizer = overflowed()
    assert optimizer.skipped_steps == 2 and optimizer.loss_scale.value < 2.0**16
    saved = optimizer.state_dict()
    model, other = overflowed(steps=1)
    other.load_state_dict(saved)
    assert other.loss_scale == optimizer.loss_scale and other.skipped_steps == 2
    before = [p.detach().clone() for p in model.parameters()]
    other.backward(real_loss(model(draw(model, (3, 4), 0, 9, real=True))) * 2.0**-6)
    grad = other.whole_grad(model[0].weight)
    other.step()
    assert other.skipped_steps == 2 and not torch.equal(before[0], model[0].weight)
    torch.testing.assert_close(model[0].weight, (before[0].float() - other.param_groups[0]["lr"] * grad.float()).half())


def test_state_without_a_loss_scale_leaves_the_one_that_is_there():
    _, optimizer = overflowed()
    scale = optimizer.loss_scale
    optimizer.load_state_dict(sgd()(real_mlp()).state_dict())
    assert optimizer.loss_scale == scale and optimizer.skipped_steps == 2


def test_another_loss_scale_is_not_loaded_over_gradients_that_were_scaled():
    _, optimizer = overflowed()
    saved, (model, other) = optimizer.state_dict(), overflowed(steps=0)
    other.backward(real_loss(model(draw(model, (3, 4), 0, 9, real=True))))
    with pytest.raises(ValueError, match=r"scale of \d+: this window has gradients.* scaled by 65536\. Load it"):
        other.load_state_dict(saved)
    assert other.loss_scale.value == 2.0**16 and other.skipped_steps == 0
    other.zero_grad()
    other.load_state_dict(saved)
    assert other.loss_scale == optimizer.loss_scale


def test_a_saved_state_is_as_plain_as_torchs():
    model, optimizer = alone(make=adamw)
    one_step(model, optimizer)
    saved = optimizer.state_dict()
    assert list(saved) == ["state", "elementwise", "masters", "param_groups", "kernels", "skipped_steps"]
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert json.loads(json.dumps(saved["elementwise"])) == {name: ["exp_avg", "exp_avg_sq"] for name in names}
    assert saved["param_groups"][0]["params"] == names
