"""What `.grad` is between backward and step (CONTRACT.md section 1), and a graph from before the step (section 5)."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests import ranks
from tests.instruments import Ledger
from tests.promises.trainings import STAGES, gloo_group, on_loopback, sgd
from tests.zoo.branches import Branches
from tests.zoo.case import draw, filled, mlp, real_loss, real_mlp, whole_loss, whole_numbers
from zero import shard
from zero.errors import RanksDiffer


def backward(model: Any, rank: int, step: int = 0) -> None:
    real_loss(model(draw(model, (2, 4), rank, step, real=True))).backward()


def plain_gradients(world: int, step: int = 0) -> nn.Module:
    model = real_mlp()
    for rank in range(world):
        backward(model, rank, step)
    for p in model.parameters():
        p.grad /= world
    return model


def each(deed: Any) -> Any:
    def do(model: nn.Module) -> None:
        for p in model.parameters():
            deed(p)

    return do


def grads_of(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def clamp_with_foreach(model: nn.Module) -> None:
    torch._foreach_maximum_(grads_of(model), -0.01)
    torch._foreach_minimum_(grads_of(model), [torch.full_like(p, 0.02) for p in model.parameters()])


def norms_in_fp64(model: nn.Module) -> list[torch.Tensor]:
    norms = [norm for p in model.parameters() for norm in (torch.linalg.vector_norm(p.grad, dtype=torch.float64),
                                                           p.grad.norm(1, dtype=torch.float64))]  # fmt: skip
    assert {norm.dtype for norm in norms} == {torch.float64}
    return norms


def unscale_beside_another(model: nn.Module) -> list[torch.Tensor]:
    found, other = torch.zeros(1), torch.full((2,), 4.0)
    torch._amp_foreach_non_finite_check_and_unscale_([*grads_of(model), other], found, torch.tensor(0.5))
    return [found, *other]


def add_products(model: nn.Module) -> None:
    ones = [torch.ones_like(p) for p in model.parameters()]
    torch._foreach_addcmul_(grads_of(model), ones, ones, 0.5)
    torch._foreach_addcdiv_(grads_of(model), ones, ones, [1.0, 2.0, 3.0, 4.0])


def clamp_by_two(model: nn.Module) -> None:
    torch._foreach_clamp_min_(grads_of(model), -0.01)
    torch._foreach_clamp_max_(grads_of(model), [0.02] * len(list(model.parameters())))


# By name: a use of the gradients, which returns the numbers that it computed.
DEEDS = {
    "clip_grad_norm_": lambda model: [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)],
    "clip_grad_norm_ one by one": lambda model: [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)],
    "clip_grad_norm_ with foreach": lambda model: [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)],
    "clip_grad_norm_ of infinity": lambda model: [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, float("inf"))],
    "clip_grad_norm_ of one": lambda model: [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, 1.0)],
    "get_total_norm": lambda model: [torch.nn.utils.get_total_norm(grads_of(model))],
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "clip_grad_value_ one by one": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=False),
    "norm": lambda model: [p.grad.norm() for p in model.parameters()],
    "norm over all dimensions": lambda model: [p.grad.norm(dim=tuple(range(p.dim()))) for p in model.parameters()],
    "norms of many orders": lambda model: [p.grad.norm(order) for p in model.parameters() for order in (0, 0.5, 1, 3, 7)],
    "norm of data": lambda model: [p.grad.data.norm(2) for p in model.parameters()],
    "norm of detached": lambda model: [p.grad.detach().norm(1) for p in model.parameters()],
    "linalg norm": lambda model: [torch.linalg.vector_norm(p.grad) for p in model.parameters()],
    "linalg norm of dimensions": lambda model: [
        torch.linalg.vector_norm(model[0].weight.grad, 1, dim) for dim in ((0, 1), (1, 0), (-1, -2), (0, -1), [], None)
    ],
    "norms in fp64": norms_in_fp64,
    "foreach norm": lambda model: torch._foreach_norm(grads_of(model)),
    "foreach norm of one": lambda model: torch._foreach_norm(grads_of(model), 1.0),
    "mul_": each(lambda p: p.grad.mul_(0.5)),
    "mul_ by a tensor": each(lambda p: p.grad.mul_(torch.tensor(0.5))),
    "div_ and add_": each(lambda p: p.grad.div_(3).add_(1.0)),
    "add_ of weights": each(lambda p: p.grad.add_(p.detach(), alpha=0.1)),
    "clamp_": each(lambda p: p.grad.clamp_(-0.01, 0.02)),
    "copy_": each(lambda p: p.grad.copy_(torch.full_like(p, 2.0))),
    "zero_": each(lambda p: p.grad.zero_()),
    "foreach": lambda model: torch._foreach_mul_(grads_of(model), 0.5) and None,
    "foreach by a number each": lambda model: torch._foreach_mul_(grads_of(model), [0.5, 2, 3, 4]) and None,
    "foreach maximum and minimum": clamp_with_foreach,
    "foreach clamping": clamp_by_two,
    "foreach products": add_products,
    "unscaled beside another": unscale_beside_another,
    "nan_to_num_": each(lambda p: p.grad.nan_to_num_(0.0)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_done_to_gradients_is_done_to_the_global_ones(stage, deed):
    def act(model):
        numbers = DEEDS[deed](model)
        return [float(number) for number in numbers or ()]

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=64, group=group)
        backward(model, group.rank)
        numbers = act(model)
        optimizer.step()
        return numbers, [p.detach().clone() for p in model.parameters()]

    plain = plain_gradients(3)
    numbers = act(plain)
    sgd(plain).step()
    found = on_loopback(3, real_mlp, program)
    for ours, weights in found:
        assert ours == found[0][0]  # every rank has the same number, to the last bit
        assert ours == pytest.approx(numbers, rel=1e-5)
        assert all(torch.allclose(mine, p, atol=1e-6) for mine, p in zip(weights, plain.parameters(), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_high_order_overflows_no_sooner_than_in_torch(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=64, group=group)
        (model.weight.sum() * 5.0).backward()
        norm = model.weight.grad.norm(1000).item()
        optimizer.close()  # a model without its optimizer is a plain one
        return norm

    assert torch.tensor([5.0]).norm(1000).item() == 5.0
    assert on_loopback(2, lambda: nn.Linear(1, 1, bias=False), program) == [5.0, 5.0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_grad_scaler_unscales_the_global_gradients_and_all_ranks_skip_together(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        scales, norms = [], []
        for step in range(3):
            loss = real_loss(model(draw(model, (2, 4), group.rank, step, real=True)))
            loss = loss * float("inf") if step == 1 and group.rank == 2 else loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            moved = any(not torch.equal(mine, p) for mine, p in zip(before, model.parameters(), strict=True))
            assert moved == (step != 1)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        return scales, norms[0]

    plain = plain_gradients(3)
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for scales, first in on_loopback(3, real_mlp, program):
        assert scales == [2.0**9, 2.0**8, 2.0**9]
        assert first == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_every_trainable_parameter_has_a_stand_in_until_settling_says_which_were_used(stage):
    """A list of gradients made before any operator runs must have the same members on every rank."""

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        whole_loss(model(draw(model, (2, 4), group.rank, 0), (group.rank,)), 1, 0).backward()
        assert all(p.grad is not None for p in model.parameters())
        assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters())
        model.trunk.weight.grad.norm()  # the first operation on any of them
        used = [name for name, p in model.named_parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return used

    expected = [f"{part}.{kind}" for part in ("trunk", "branches.0", "branches.1") for kind in ("weight", "bias")]
    assert on_loopback(2, lambda: filled(Branches(4), high=1), program) == [expected, expected]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_thousand_norms_cost_one_collective(stage):
    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, group=ledger)
        sum((p * (group.rank + 1)).sum() for p in model).backward()
        optimizer.settle()
        ledger.section = "norms"
        norms = [p.grad.norm().item() for p in model]
        assert len(ledger.of("norms")) == 1
        ledger.section = "again"
        assert [p.grad.norm().item() for p in model] == norms
        assert ledger.of("again") == []
        ledger.section = "of another kind"
        assert all(p.grad.norm(float("inf")).item() == 1.5 for p in model)
        assert len(ledger.of("of another kind")) == 1
        ledger.section = "after a change"
        model[7].grad.mul_(2)
        assert model[7].grad.norm().item() == pytest.approx(2 * norms[7])
        assert model[8].grad.norm().item() == norms[8]
        assert len(ledger.of("after a change")) == 1
        return norms

    build = lambda: nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(1000))  # noqa: E731
    assert on_loopback(2, build, program) == [[3.0] * 1000] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_that_is_changed_is_that_of_who_asked_for_it_alone(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        backward(model, group.rank)
        grad = next(model.parameters()).grad
        before = grad.norm().mul_(3.0).item()
        found = grad.norm().item()
        optimizer.close()
        return before, found

    for before, found in on_loopback(2, real_mlp, program):
        assert found > 0.0 and before == pytest.approx(3 * found)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_asked_for_again_after_another_backward_is_that_of_the_sum(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        found = []
        for _ in range(3):
            backward(model, group.rank)
            found.append([p.grad.norm().item() for p in model.parameters()])
        optimizer.close()
        return found

    for once, twice, thrice in on_loopback(2, real_mlp, program):
        assert twice == pytest.approx([2 * norm for norm in once], rel=1e-5)
        assert thrice == pytest.approx([3 * norm for norm in once], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_deleting_and_assigning_gradients_works_on_all_ranks_alike(stage):
    """None is no gradient; a tensor of one's own is this rank's local gradient, and takes the place of ours."""

    def edit(model, rank):
        model[0].weight.grad = None
        del model[0].bias.grad
        model[2].bias.grad = whole_numbers((3,), "assigned", rank)

    def program(group, model):
        optimizer = shard(model, sgd(model, 1.0, momentum=0.5), stage=stage, group=group)
        for settle in (False, True):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            backward(model, group.rank)
            if settle:
                optimizer.settle()
            edit(model, group.rank)
            optimizer.step()
            moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
            assert not moved["0.weight"].any()
            assert not moved["0.bias"].any()
            assert moved["2.weight"].any()
            assert "0.weight" not in optimizer.state_dict()["state"]
            optimizer.zero_grad()
        return optimizer.whole_state(model[2].bias)["momentum_buffer"]

    mean = sum(whole_numbers((3,), "assigned", rank) for rank in range(2)) / 2
    for momentum in on_loopback(2, real_mlp, program):
        assert torch.allclose(momentum, 1.5 * mean)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_was_assigned_and_then_removed_is_none(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        before = model[0].weight.detach().clone()
        backward(model, group.rank)
        model[0].weight.grad = torch.ones(model[0].weight.shape)
        backward(model, group.rank, 1)  # this backward notices what was assigned
        model[0].weight.grad = None
        optimizer.step()
        return before, model[0].weight.detach().clone(), model[0].bias.detach().clone()

    for before, weight, bias in on_loopback(2, real_mlp, program):
        assert torch.equal(weight, before) and not torch.equal(bias, real_mlp()[0].bias)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_only_one_rank_removed_is_named_on_all(stage):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        backward(model, group.rank)
        if group.rank == 1:
            model[2].weight.grad = None
        with pytest.raises(RanksDiffer, match=r"rank 1 removed or replaced the gradient of 2\.weight, rank 0 kept it"):
            optimizer.step()
        optimizer.zero_grad()
        backward(model, group.rank)
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain = plain_gradients(2)
    sgd(plain).step()
    for weights in on_loopback(2, real_mlp, program):
        assert all(torch.allclose(mine, p, atol=1e-6) for mine, p in zip(weights, plain.parameters(), strict=True))


@pytest.mark.parametrize(("stage", "settled_before"), [(0, False), (1, False), (1, True), (2, False), (2, True)])
def test_an_operation_on_gradients_by_one_rank_alone_is_an_error_on_all(stage, settled_before):
    """Rank 0 logs a norm where rank 1 steps. At stage 0 every rank has the settled gradient whole, and answers alone."""

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        backward(model, group.rank)
        if settled_before:
            optimizer.settle()
        with pytest.raises(RanksDiffer, match="step"):
            if group.rank == 0:
                model[0].weight.grad.norm()
                backward(model, group.rank, 1)
            optimizer.step()
        return True

    assert all(on_loopback(2, real_mlp, program))


def norm_of_one_rank(rank: int, world: int, stage: int) -> str:
    model = real_mlp()
    optimizer = shard(model, sgd(model), stage=stage, group=gloo_group(time_limit_s=5.0))
    backward(model, rank)
    optimizer.settle()
    with pytest.raises(RanksDiffer) as told:
        if rank == 0:
            model[0].weight.grad.norm()
        optimizer.step()
    return str(told.value)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_norm_that_one_process_alone_asks_for_is_an_error_on_all_with_the_places(stage):
    for words in ranks.run(2, norm_of_one_rank, stage, timeout=30.0):
        assert "rank 1" in words
        assert "step" in words


# The calls that a proxy refuses, each with the words of the error that must name it.
REFUSED = {
    "read": lambda grad: grad.sum(),
    "clone": lambda grad: grad.clone(),
    "arithmetic": lambda grad: grad + 1,
    "comparison": lambda grad: (grad == 0).any(),
    "to another dtype": lambda grad: grad.to(torch.float64),
    "item": lambda grad: grad[0, 0].item(),
    "deepcopy": lambda grad: copy.deepcopy(grad),
    "into another": lambda grad: torch.zeros(grad.shape).add_(grad),
    "into another with foreach": lambda grad: torch._foreach_add_([torch.ones(grad.shape)], [grad]),
    "flatten": lambda grad: grad.flatten(),
    "stack": lambda grad: torch.stack([grad, grad]),
    "tolist": lambda grad: grad.tolist(),
    "numpy": lambda grad: grad.cpu().numpy(),
    "dlpack": lambda grad: torch.from_dlpack(grad),
    "pickle": lambda grad: pickle.dumps(grad),
    "save": lambda grad: torch.save({"grad": grad}, io.BytesIO()),
    "shared memory": lambda grad: grad.share_memory_(),
    "sort": lambda grad: grad.sort(),
    "sums along a dimension": lambda grad: grad.cumsum_(0),
    "larger of two": lambda grad: torch.maximum(grad, torch.ones(grad.shape), out=grad),
    "norm of rows": lambda grad: grad.norm(dim=0),
    "norm of a dimension too many": lambda grad: grad.norm(dim=(0, 3)),
    "norm that keeps dimensions": lambda grad: torch.linalg.vector_norm(grad, keepdim=True),
    "norm of order -1": lambda grad: grad.norm(-1.0),
    "norm of order -infinity": lambda grad: torch.linalg.vector_norm(grad, float("-inf")),
    "norm of order nan": lambda grad: torch._foreach_norm([grad], float("nan")),
}


def test_what_needs_the_whole_gradient_is_refused_with_the_call_that_has_it():
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=2, group=group)
        backward(model, group.rank)
        for name, use in REFUSED.items():
            with pytest.raises((NotImplementedError, RuntimeError), match=r"0\.weight.*whole_grad\(parameter\)"):
                raise AssertionError(name, use(model[0].weight.grad))
        return optimizer.whole_grad(model[0].weight)

    plain = plain_gradients(2)
    for whole in on_loopback(2, real_mlp, program):
        assert torch.allclose(whole, plain[0].weight.grad, atol=1e-6)


def test_every_foreach_operator_is_forwarded_or_refused():
    model = real_mlp()
    optimizer = shard(model, sgd(model), stage=2)
    backward(model, 0)
    grad = model[0].weight.grad
    for name in (name for name in dir(torch) if name.startswith("_foreach_")):
        for others in ((), ([torch.ones(grad.shape)],)):
            with contextlib.suppress(NotImplementedError, TypeError):  # TypeError: it takes other operands
                getattr(torch, name)([grad], *others)
    optimizer.step()


def test_a_gradient_looks_like_its_parameter_without_memory_and_can_be_printed_at_any_time():
    model = nn.Linear(4, 3)
    model.weight.data = torch.ones(4, 3).t()
    optimizer = shard(model, sgd(model), stage=2)
    backward(model, 0)
    for p in model.parameters():
        assert (p.grad.shape, p.grad.dtype, p.grad.device, p.grad.stride()) == (p.shape, p.dtype, p.device, p.stride())
        assert p.grad.data_ptr() == 0 and p.grad.detach() is p.grad
    assert repr(model.weight.grad) == (
        "ShardedGrad('weight', shape=(3, 4), dtype=torch.float32: each rank holds its share; "
        "optimizer.whole_grad(parameter) returns all of it)"
    )
    optimizer.step()
    assert f"{model.weight.grad}".startswith("ShardedGrad('weight'")


# A graph from before the step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_backward_through_a_graph_from_before_the_step_raises_as_in_plain_torch(stage, dtype, world):
    plain = mlp()
    old = plain(torch.ones(1, 4)).sum()
    plain(torch.ones(1, 4)).sum().backward()
    sgd(plain).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, dtype=dtype, group=group)
        x = torch.ones(1, 4, dtype=dtype)
        old = model(x).sum()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return True

    assert all(on_loopback(world, mlp, program))


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_through_what_the_step_did_not_touch_still_goes_backward(stage):
    """In the bucket of others that were stepped; plain torch changes neither its values nor its version."""

    def program(group, model):
        optimizer = shard(model, sgd(model, 1.0), stage=stage, group=group)
        old = (model.branches[0].weight * model.branches[0].weight).sum()
        whole_loss(model(draw(model, (2, 4), group.rank, 0), (1,)), group.size, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = model.branches[0].weight.detach().clone()
        old.backward()
        optimizer.step()
        return torch.equal(model.branches[0].weight, before - 2 * before)

    assert all(on_loopback(2, lambda: filled(Branches(2), high=1), program))
