"""N: gradients that are not finite, loss scales, norms and clipping."""

import itertools
import math

import pytest
import torch
from torch import nn

from tests import faults, inside, ranks
from tests.oracle import reference
from tests.promises.loops import TINY, adamw, alone, case_of, differs, on_ranks, one_step, same, weights
from tests.promises.trainings import gloo_group
from tests.zoo.case import backward, draw, filled, finish, real_loss, real_mlp, sgd, whole_numbers
from tests.zoo.steps import real_step
from zero import shard
from zero.config.schema import LossScale
from zero.errors import NonFinite

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
BUCKETS = pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])
NOT_FINITE = pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])


class Items(nn.Module):
    """Parameters whose gradients are their factors: one smaller than a bucket, one larger, one element, odd ones."""

    def __init__(self, sizes=(3, 40, 1, 7)):
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.empty(numel)) for numel in sizes)

    def forward(self, factors):
        return sum((item * factor).sum() for item, factor in zip(self.items, factors, strict=True))


def items():
    return filled(Items(), real=True)


def factors_of(model, rank, step):
    return [whole_numbers(item.shape, "factor", rank, step, i).to(item) for i, item in enumerate(model.items)]


# N01, N02: one element of one rank --------------------------------------------------------------------------------------


def skips_of(model, optimizer, rank, world, places):
    """Trains a good step, then one with `value` at each place in turn; what changed although it should not have."""
    backward(optimizer, model(factors_of(model, rank, 0)) * world)
    finish(optimizer)
    wrong = []
    for number, (bad_rank, index, element, value) in enumerate(places):
        before, state = weights(model), optimizer.state_dict()
        factors = factors_of(model, rank, 1)
        if rank == bad_rank:
            factors[index][element] = value
        backward(optimizer, model(factors) * world)
        finish(optimizer)
        after = optimizer.state_dict()
        unchanged = same(before, weights(model)) and same(state["masters"], after["masters"])
        for name, entries in state["state"].items():
            unchanged &= same(entries, after["state"][name])
        if not unchanged or optimizer.skipped_steps != number + 1:
            wrong.append((bad_rank, index, element, value))
    backward(optimizer, model(factors_of(model, rank, 2)) * world)
    finish(optimizer)
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.value
    return wrong, optimizer.skipped_steps, scale, {name: value.tolist() for name, value in weights(model).items()}


def places_of(world, elements=("last",)):
    model = Items()
    for rank, (index, item) in itertools.product(range(world), enumerate(model.items)):
        places = {"first": 0, "middle": item.numel() // 2, "last": item.numel() - 1}
        for element in elements:
            yield rank, index, places[element], math.inf if (rank + index) % 2 else math.nan


def sweep(rank, world, dtype, stages, places):
    return [skips_of(model, optimizer, rank, world, places) for model, optimizer in of_stages(dtype, stages)]


def of_stages(dtype, stages):
    for stage in stages:
        model = items()
        scale = LossScale(initial=64.0, hysteresis=1) if dtype == "float16" else None
        options = {"dtype": dtype, "loss_scale": scale, "on_nonfinite": "skip", "bucket_bytes": TINY}
        yield model, shard(model, adamw(model), stage=stage, group=gloo_group(), **options)


@pytest.mark.promise("N01")
@pytest.mark.parametrize(
    ("dtype", "stages"),
    [("float16", (1,)), *(pytest.param(each, (0, 1, 2), marks=pytest.mark.full) for each in (None, "bfloat16", "float16"))],
)
def test_infinity_on_any_rank_in_any_parameter_is_skipped_by_all_ranks_alike(dtype, stages):
    """With a process a rank: every rank and every parameter in turn."""
    found = ranks.run(2, sweep, dtype, stages, list(places_of(2)))
    assert all(of_rank == found[0] for of_rank in found)
    for wrong, skipped, scale, _ in found[0]:
        assert wrong == []
        assert skipped == 8
        assert scale == (1.0 if dtype == "float16" else None)  # 64, halved until its minimum


@pytest.mark.promise("N01", "N02")
@STAGES
@BUCKETS
@pytest.mark.parametrize(("world", "dtype"), [(1, "bfloat16"), (3, None)])
def test_infinity_at_the_first_middle_or_last_element_of_any_parameter_is_skipped(stage, bucket_bytes, dtype, world):
    places = list(places_of(world, ("first", "middle", "last")))

    def program(model, optimizer, group):
        return skips_of(model, optimizer, group.rank, world, places)

    options = {"stage": stage, "bucket_bytes": bucket_bytes, "dtype": dtype, "on_nonfinite": "skip"}
    found = on_ranks(world, program, items, adamw, **options)
    assert all(of_rank == found[0] for of_rank in found)
    assert found[0][0] == [] and found[0][1] == len(places)


@pytest.mark.promise("N02")
@STAGES
@pytest.mark.parametrize("world", [1, 3])
def test_what_is_not_finite_in_the_padding_skips_nothing(stage, world):
    """Whatever lies between the slots when a bucket is sent, it is not what is checked."""

    def program(model, optimizer, group):
        faults.poison_padding(optimizer)
        assert any(share.isnan().any() for share in inside.shares_of_masters(optimizer)) or world == 3
        backward(optimizer, model(factors_of(model, group.rank, 0)))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finish(optimizer)
        assert norm.isfinite() and optimizer.skipped_steps == 0
        assert all(weight.isfinite().all() for weight in weights(model).values())

    on_ranks(world, program, items, adamw, stage=stage, on_nonfinite="skip", bucket_bytes=64)


# N03, N04: policies -----------------------------------------------------------------------------------------------------


def bad_step(model, optimizer, rank, bad_rank, value):
    loss = real_loss(model(draw(model, (3, 4), rank, 1, real=True)))
    backward(optimizer, loss * value if rank == bad_rank else loss)
    optimizer.step()


@pytest.mark.promise("N03")
@STAGES
@NOT_FINITE
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_norm_that_is_not_finite_while_clipping_is_left_to_the_policy_and_never_written(stage, value, dtype, policy):
    scale = LossScale(dynamic=policy == "skip", initial=8.0, hysteresis=1) if dtype == "float16" else None

    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        before = weights(model)
        if policy == "raise":
            with pytest.raises(NonFinite, match=r"0\.weight"):
                bad_step(model, optimizer, group.rank, 1, value)
        else:
            bad_step(model, optimizer, group.rank, 1, value)
            assert not math.isfinite(optimizer.grad_norm)
        assert same(before, weights(model))
        optimizer.zero_grad()
        one_step(model, optimizer, group.rank, 2)
        assert all(weight.isfinite().all() for weight in weights(model).values())
        assert not same(before, weights(model))

    options = {"dtype": dtype, "clip": 0.1, "on_nonfinite": policy, "loss_scale": scale}
    on_ranks(2, program, make=adamw, stage=stage, **options)


@pytest.mark.promise("N04")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("policy", ["skip", "raise", "propagate", "default"])
def test_a_nan_loss_on_rank_1_does_what_the_policy_says_at_each_stage(stage, dtype, policy):
    options = {} if policy == "default" else {"on_nonfinite": policy}

    def program(model, optimizer, group):
        before = weights(model)
        if policy == "raise":
            with pytest.raises(NonFinite, match=r"norm of the gradients is nan: in .*, from rank 1\. Nothing was applied"):
                bad_step(model, optimizer, group.rank, 1, math.nan)
        else:
            bad_step(model, optimizer, group.rank, 1, math.nan)
        optimizer.zero_grad()
        if policy in ("skip", "raise"):
            assert same(before, weights(model))
            assert optimizer.skipped_steps == (policy == "skip")
        else:
            assert optimizer.skipped_steps == 0
        return optimizer.config.on_nonfinite, weights(model)

    found = on_ranks(2, program, stage=stage, dtype=dtype, **options)
    assert {effective for effective, _ in found} == {"propagate" if policy == "default" else policy}
    if policy in ("propagate", "default"):  # plain torch does this
        expected = reference(case_of(nan_step, steps=1), 2, "bf16" if dtype else "fp32")[0].steps[0].weights
        assert any(weight.isnan().any() for weight in expected.values())
        for _, after in found:
            assert all(torch.equal(after[name].isnan(), weight.isnan()) for name, weight in expected.items())


def nan_step(model, optimizer, rank, world, step):
    loss = real_loss(model(draw(model, (3, 4), rank, 1, real=True)))
    backward(optimizer, loss * math.nan if rank == 1 else loss)
    yield "settle"
    optimizer.step()


# N05 to N09: norms ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tied, frozen, and too small for every rank to own something."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.second.weight = self.first.weight
        self.scale, self.unused = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(3))

    def forward(self, x):
        return self.scale * self.second(self.frozen(torch.tanh(self.first(x))))


def norm_step(model, optimizer, rank, world, step):
    backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True))))
    yield "settle"
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    each = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    finish(optimizer)
    return norm, each


@pytest.mark.promise("N05")
@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "bucket_bytes"), [(1, TINY), (2, 1 << 20), (3, TINY), (4, 1 << 20)])
def test_the_global_norm_counts_every_parameter_once_and_has_the_same_bits_on_all_ranks(stage, bucket_bytes, dtype, world):
    case = case_of(norm_step, lambda: filled(Tied(), real=True))
    assert differs(case, world, stage=stage, bucket_bytes=bucket_bytes, dtype=dtype) is None

    def program(model, optimizer, group):
        backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return norm.item()

    options = {"stage": stage, "bucket_bytes": bucket_bytes, "dtype": None if dtype == "fp32" else "bfloat16"}
    assert len(set(on_ranks(world, program, lambda: filled(Tied(), real=True), **options))) == 1


@pytest.mark.promise("N05")
@STAGES
def test_the_norm_that_clip_reports_is_that_of_the_reduced_gradients(stage):
    case = case_of(norm_step, lambda: filled(Tied(), real=True), sgd(0.0))
    expected = reference(case, 3)[0].steps[0].observed[0]
    found = on_ranks(3, lambda model, optimizer, group: (one_step(model, optimizer, group.rank), optimizer.grad_norm)[1],
                     lambda: filled(Tied(), real=True), stage=stage, clip=0.5)  # fmt: skip
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.promise("N05")
@STAGES
def test_ranks_whose_processors_add_up_otherwise_clip_alike(stage):

    def program(model, optimizer, group):
        one_step(model, optimizer, group.rank)
        return weights(model)

    with faults.rank_1_adds_up_otherwise():
        one, other = on_ranks(2, program, stage=stage, clip=1e-3)
    assert same(one, other)


@pytest.mark.promise("N06")
@STAGES
@BUCKETS
@pytest.mark.parametrize("norm_type", [1, 2, 3, 0.5, math.inf])
@pytest.mark.parametrize("world", [3])
def test_clipping_by_any_norm_equals_torchs(stage, bucket_bytes, norm_type, world):
    def script(model, optimizer, rank, world, step):
        backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True))))
        yield "settle"
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type)
        finish(optimizer)
        return norm / max(1.0, norm.item())

    assert differs(case_of(script), world, stage=stage, bucket_bytes=bucket_bytes) is None


@pytest.mark.promise("N06")
@STAGES
def test_a_norm_as_small_as_what_torch_adds_to_it_is_clipped_as_torch_clips(stage):
    gradient = torch.tensor([3e-7, 4e-7])

    def program(model, optimizer, group):
        (model.items[0] * gradient).sum().backward()
        optimizer.step()
        return optimizer.whole_grad(model.items[0])

    plain = nn.Parameter(torch.zeros(2))
    plain.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([plain], 1e-6)  # two thirds, as it divides by the norm and 1e-6
    for clipped in on_ranks(2, program, lambda: filled(Items((2,)), real=True), stage=stage, clip=1e-6):
        torch.testing.assert_close(clipped, plain.grad, rtol=1e-5, atol=0)


@pytest.mark.promise("N07")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_rank_that_owns_nothing_joins_the_norm(stage, dtype):
    def build():
        return filled(Items((2,)), real=True)

    def program(model, optimizer, group):
        owned = sum(piece.in_param.numel for piece, _ in inside.masters_of(optimizer, 0))
        backward(optimizer, (model.items[0] * torch.tensor([3.0, 4.0]).to(model.items[0])).sum())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped = optimizer.whole_grad(model.items[0])
        finish(optimizer)
        return owned, norm.item(), clipped.float()

    found = on_ranks(4, program, build, stage=stage, dtype=dtype)
    assert [owned for owned, _, _ in found] == ([2, 0, 0, 0] if stage else [2, 2, 2, 2])
    for _, norm, clipped in found:
        assert norm == 5.0
        torch.testing.assert_close(clipped, torch.tensor([0.6, 0.8]), rtol=0, atol=4e-3 if dtype else 1e-6)


@pytest.mark.promise("N07")
@STAGES
def test_a_rank_without_gradients_joins_the_norm(stage):
    def program(model, optimizer, group):
        if group.rank == 2:
            optimizer.no_contribution()
        else:
            backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))))
        optimizer.settle()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        finish(optimizer)
        return norm.item()

    assert len(set(on_ranks(3, program, stage=stage))) == 1


def three_groups(model):
    groups = [[model[0].weight], [model[2].bias], [model[2].weight, model[0].bias]]
    return torch.optim.SGD([{"params": group, "lr": 0.1 / len(group)} for group in groups], lr=0.1, momentum=0.5)


@pytest.mark.promise("N08")
@STAGES
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("by", ["torch", "clip"])
def test_clip_loss_scale_accumulation_and_groups_together_equal_plain_torch(stage, scale, micro_batches, by):
    """One norm over all groups of what was unscaled once, and one coefficient. The weights are fp16, and so scaled ..."""

    def script(model, optimizer, rank, world, step):
        for micro in range(micro_batches):
            loss = real_loss(model(draw(model, (3, 4), rank, step, micro, real=True))) / micro_batches / 64
            backward(optimizer, loss)
        yield "settle"
        if by == "torch" or not hasattr(optimizer, "sharding"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.002)
        finish(optimizer)

    case = case_of(script, optimizer=three_groups)
    clip = 0.002 if by == "clip" else None
    assert differs(case, 3, stage=stage, dtype="fp16", scale=scale, clip=clip, accumulation=micro_batches) is None
    assert differs(case, 3, stage=stage, dtype="fp32", clip=clip, accumulation=micro_batches) is None


@pytest.mark.promise("N09")
@STAGES
@pytest.mark.parametrize("world", [1, 3])
def test_the_norm_is_of_the_very_gradients_that_are_applied(stage, world):
    """Edited after they were settled and after a norm was taken, and again after another backward."""

    def program(model, optimizer, group):
        backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))))
        first = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for parameter in model.parameters():
            parameter.grad.mul_(4.0)
        before = weights(model)
        norms = [first, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])]
        optimizer.step()
        norms.append(torch.tensor(optimizer.grad_norm))
        moved = torch.cat([(weights(model)[name] - value).flatten() for name, value in before.items()]).norm()
        optimizer.zero_grad()
        return norms, moved

    for norms, moved in on_ranks(world, program, make=sgd(1.0), stage=stage, clip=1e-3):
        torch.testing.assert_close(torch.stack(norms), norms[0] * torch.tensor([1.0, 4.0, 4.0]))
        assert moved.item() == pytest.approx(1e-3, rel=1e-2)


# N11, N12: through torch's own functions --------------------------------------------------------------------------------


def each(change):
    def of_all(model, optimizer):
        for parameter in model.parameters():
            change(parameter)

    return of_all


def assign_whole(model, optimizer):
    grads = [optimizer.whole_grad(parameter) for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = 0.5 * grad


def clip_to_half(model, optimizer):
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm.item() / 2)


def augmented(parameter):
    parameter.grad *= 0.5


HALVING = {
    "mul_": each(lambda p: p.grad.mul_(0.5)),
    "augmented": each(augmented),
    "div_": each(lambda p: p.grad.div_(2)),
    "by a tensor": each(lambda p: p.grad.mul_(torch.full_like(p, 0.5))),
    "by a number in a tensor": each(lambda p: p.grad.mul_(torch.tensor(0.5))),
    "data": each(lambda p: p.grad.data.mul_(0.5)),
    "detach": each(lambda p: p.grad.detach().mul_(0.5)),
    "subtracted": each(lambda p: p.grad.sub_(p.grad, alpha=0.5)),
    "copied": each(lambda p: p.grad.copy_(p.grad).mul_(0.5)),
    "foreach": lambda model, optimizer: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    "clip_grad_norm_": clip_to_half,
    "assigned": assign_whole,
}


@pytest.mark.promise("N11")
@STAGES
@pytest.mark.parametrize("route", HALVING)
def test_gradients_halved_by_any_route_halve_the_update(stage, route):
    def program(model, optimizer, group):
        before = weights(model)
        backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))))
        HALVING[route](model, optimizer)
        finish(optimizer)
        return {name: value - before[name] for name, value in weights(model).items()}

    case = case_of(real_step, steps=1)
    start, after = weights(case.build()), reference(case, 2)[0].steps[0].weights
    found = on_ranks(2, program, stage=stage)
    assert same(*found)
    for name, move in found[0].items():
        torch.testing.assert_close(move, 0.5 * (after[name] - start[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.promise("N11")
@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.grad + 1,
        lambda p: p.grad.sum(),
        lambda p: p.grad.flatten(),
        lambda p: torch.dot(p.grad.flatten(), p.grad.flatten()),
        lambda p: p.grad[0],
        lambda p: p.grad.clone(),
        lambda p: torch.randn_like(p.grad),
    ],
    ids=["add", "sum", "flatten", "dot", "index", "clone", "randn_like"],
)
def test_what_a_share_cannot_do_raises_with_the_call_that_can(use):
    model, optimizer = alone()
    backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 0, real=True))))
    with pytest.raises((NotImplementedError, RuntimeError), match=r"whole_grad\(parameter\)"):
        use(model[0].weight)
    optimizer.zero_grad()


@pytest.mark.promise("N12")
@STAGES
@NOT_FINITE
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_error_if_nonfinite_and_what_clipping_returns_are_torchs_on_all_ranks(stage, value, error_if_nonfinite):
    def program(model, optimizer, group):
        loss = real_loss(model(draw(model, (3, 4), group.rank, 0, real=True)))
        backward(optimizer, loss * value if group.rank == 1 else loss)
        clip = torch.nn.utils.clip_grad_norm_
        if error_if_nonfinite:
            with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
                clip(model.parameters(), 1.0, error_if_nonfinite=True)
            norm = None
        else:
            norm = clip(model.parameters(), 1.0)
            assert not norm.isfinite() and norm.dim() == 0
        optimizer.zero_grad()
        backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))))
        norm = clip(model.parameters(), 0.05, error_if_nonfinite=error_if_nonfinite)
        finish(optimizer)
        return norm

    def script(model, optimizer, rank, world, step):
        backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True))))
        yield "settle"
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        finish(optimizer)
        return norm

    found = on_ranks(3, program, stage=stage)
    expected = reference(case_of(script, steps=1), 3)[0].steps[0].observed
    assert all(torch.equal(norm, found[0]) for norm in found)
    assert found[0].dtype == expected.dtype
    torch.testing.assert_close(found[0], expected)


# N14, N16: scales that never end, and torch's own -----------------------------------------------------------------------


@pytest.mark.promise("N14")
@STAGES
@pytest.mark.parametrize("scale", [LossScale(initial=4.0, minimum=1.0, hysteresis=1, max_skips=3),
                                   LossScale(dynamic=False, initial=4.0, max_skips=3)])  # fmt: skip
def test_a_model_that_always_overflows_is_an_error_with_names_and_not_an_endless_skip(stage, scale):
    def program(model, optimizer, group):
        before, steps = weights(model), 0
        with pytest.raises(NonFinite, match=r"0\.weight"):
            for steps in range(50):  # noqa: B007 - how far it came
                bad_step(model, optimizer, group.rank, 1, math.inf)
                optimizer.zero_grad()
        assert same(before, weights(model))
        return steps, optimizer.skipped_steps, optimizer.loss_scale.value

    found = on_ranks(2, program, stage=stage, dtype="float16", loss_scale=scale)
    # 4, 2, 1 and then three more at the minimum
    assert found == [(5, 6, 1.0) if scale.dynamic else (2, 3, 4.0)] * 2 or found == [(4, 5, 1.0)] * 2


def train_with_scaler(rank, world, stage, bad_step_number):
    model = real_mlp()
    optimizer = shard(model, sgd(0.1, momentum=0.5)(model), stage=stage, group=gloo_group(), bucket_bytes=TINY)
    return scaled_training(model, optimizer, rank, world, bad_step_number, 4)


def scaled_training(model, optimizer, rank, world, bad_step_number, steps):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = []
    for step in range(steps):
        before = weights(model)
        loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
        scaler.scale(loss * math.inf if step == bad_step_number and rank == world - 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), same(before, weights(model))))
    return found, weights(model)


@pytest.mark.promise("N16")
def test_torchs_grad_scaler_is_told_of_an_infinity_on_one_rank_on_all_ranks():
    for stage in (0, 1, 2):
        found = ranks.run(2, train_with_scaler, stage, 1)
        for scales, final in found:
            assert scales == [(1024.0, False), (512.0, True), (512.0, False), (1024.0, False)]
            assert same(final, found[0][1])


@pytest.mark.promise("N16")
def test_torchs_grad_scaler_on_one_rank_is_every_bit_plain_torchs():
    plain = real_mlp()
    expected = scaled_training(plain, sgd(0.1, momentum=0.5)(plain), 0, 1, 1, 5)
    for stage in (0, 1, 2):
        found = scaled_training(*alone(make=sgd(0.1, momentum=0.5), stage=stage), 0, 1, 1, 5)
        assert found[0] == expected[0]
        assert same(found[1], expected[1])


def test_the_norm_that_is_told_is_of_what_the_step_was_given_before_its_own_clipping():
    """The norm before that is what clip_grad_norm_ by hand returns."""
    for by_hand, clip, expected in ((False, 0.5, "whole"), (True, None, 1.0), (True, 0.5, 1.0)):
        model, optimizer = alone(clip=clip)
        (1000 * real_loss(model(draw(model, (3, 4), 0, 0, real=True)))).backward()
        whole = float(torch.stack([param.grad.norm() for param in model.parameters()]).norm())
        if by_hand:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(whole, rel=1e-5)
        optimizer.step()
        assert whole > 1.0 and optimizer.grad_norm == pytest.approx(whole if expected == "whole" else expected, rel=1e-5)
        optimizer.close()
