"""What a proxy answers, what it forwards, and what it refuses by the name of the call that can."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn

from zero.window.grads import ShardedGrad


class Noted:
    """Shares that note what they were asked."""

    def __init__(self):
        self.asked = []

    def norm(self, param, order):
        self.asked.append(("norm", param, order))
        return torch.tensor(2.0 + param)

    def apply_inplace(self, param, operator, arguments, keywords):
        packet = getattr(operator, "overloadpacket", operator)
        self.asked.append((packet.__name__, param, arguments))

    def unscale(self, params, found_inf, inverse_scale):
        self.asked.append(("unscale", list(params)))


@pytest.fixture
def shares():
    return Noted()


@pytest.fixture
def params(shares):
    values = torch.ones(3, 4), torch.ones(5, dtype=torch.bfloat16), torch.ones(2, 2).t()
    made = [nn.Parameter(value) for value in values]
    for index, param in enumerate(made):
        param.grad = ShardedGrad(param, index, f"layer.{index}", shares)
    return made


def test_it_looks_like_the_gradient_and_has_no_memory(params):
    for param in params:
        assert param.grad is not None
        assert (param.grad.shape, param.grad.dtype, param.grad.device) == (param.shape, param.dtype, param.device)
        assert param.grad.stride() == param.stride()
        assert param.grad.data_ptr() == 0
    assert repr(params[0].grad) == (
        "ShardedGrad('layer.0', shape=(3, 4), dtype=torch.float32: each rank holds its share; "
        "optimizer.whole_grad(parameter) returns all of it)"
    )


@pytest.mark.parametrize("foreach", [True, False, None])
def test_torchs_clipping_asks_for_norms_and_scales(params, shares, foreach):
    norm = torch.nn.utils.clip_grad_norm_([params[0], params[2]], 1.0, foreach=foreach)
    assert norm.item() == pytest.approx((2.0**2 + 4.0**2) ** 0.5)
    assert [what[:2] for what in shares.asked] == [("norm", 0), ("norm", 2), ("mul_", 0), ("mul_", 2)]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf"), 0.0])
def test_norms_of_any_order(params, shares, order):
    params[1].grad.norm(order)
    torch.linalg.vector_norm(params[0].grad, order)
    torch._foreach_norm([params[0].grad], order)
    assert shares.asked == [("norm", 1, order), ("norm", 0, order), ("norm", 0, order)]


def test_a_norm_without_an_order_is_the_2_norm(params, shares):
    torch.linalg.vector_norm(params[0].grad)
    params[1].grad.norm()
    torch._foreach_norm([params[0].grad, params[2].grad])
    assert shares.asked == [("norm", index, 2.0) for index in (0, 1, 0, 2)]


def test_a_norm_in_a_dtype_that_was_asked_for(params, shares):
    found = torch.linalg.vector_norm(params[0].grad, dtype=torch.float64), params[2].grad.norm(1, dtype=torch.float64)
    assert [norm.dtype for norm in found] == [torch.float64] * 2
    assert shares.asked == [("norm", 0, 2.0), ("norm", 2, 1.0)]


def test_arithmetic_in_place_is_forwarded_with_its_operands(params, shares):
    grad, other = params[0].grad, torch.ones(3, 4)
    assert grad.mul_(2.0) is grad
    grad.add_(other, alpha=0.5)
    grad.clamp_(-1, 1)
    grad.zero_()
    grad.div_(torch.tensor(3.0))
    torch.nn.utils.clip_grad_value_([params[0]], 0.5)
    names = [what[0] for what in shares.asked]
    assert names[:5] == ["mul_", "add_", "clamp_", "zero_", "div_"]
    assert all(name.startswith("clamp") for name in names[5:])
    assert len(names) > 5
    assert all(what[1] == 0 for what in shares.asked)


def test_foreach_operators_are_one_operator_each(params, shares):
    torch._foreach_mul_([params[0].grad, params[2].grad], [2.0, 3.0])
    assert [(what[0], what[1], tuple(what[2])) for what in shares.asked] == [("mul_", 0, (2.0,)), ("mul_", 2, (3.0,))]


def test_a_grad_scalers_unscaling_is_one_call_for_all(params, shares):
    found, inverse = torch.zeros(1), torch.tensor(0.5)
    ordinary = torch.full((2,), 4.0)
    torch._amp_foreach_non_finite_check_and_unscale_([params[0].grad, ordinary, params[2].grad], found, inverse)
    assert shares.asked == [("unscale", [0, 2])]
    assert ordinary.tolist() == [2.0, 2.0]


def test_a_norm_over_dimensions_that_are_all_of_them_is_the_norm(params, shares):
    for dim in ((0, 1), (1, 0), (-1, -2), (0, -1), [], None):
        assert params[0].grad.norm(dim=dim).item() == torch.linalg.vector_norm(params[0].grad, dim=dim).item() == 2.0
    assert torch.linalg.vector_norm(params[1].grad, 1, 0).item() == params[1].grad.norm(1, dim=-1).item() == 3.0
    assert {what[1:] for what in shares.asked} == {(0, 2.0), (1, 1.0)}


def test_the_larger_and_the_smaller_of_two_are_clamping(params, shares):
    torch._foreach_maximum_([params[0].grad], 1.0)
    torch._foreach_minimum_([params[0].grad], [torch.ones(3, 4)])
    torch._foreach_clamp_min_([params[0].grad], 1.0)
    torch._foreach_clamp_max_([params[0].grad], [2.0])
    assert [what[0] for what in shares.asked] == ["clamp_min_", "clamp_max_", "clamp_min_", "clamp_max_"]


def test_every_foreach_operator_is_forwarded_or_refused(params):
    for name in (name for name in dir(torch) if name.startswith("_foreach_")):
        with contextlib.suppress(NotImplementedError, TypeError):  # TypeError: it takes more operands
            getattr(torch, name)([params[0].grad])
        with contextlib.suppress(NotImplementedError, TypeError):
            getattr(torch, name)([params[0].grad], [torch.ones(3, 4)])


@pytest.mark.parametrize("order", [-1.0, -2.0, float("-inf"), float("nan")])
def test_a_norm_of_an_order_that_nobody_joins_is_refused_by_name(params, shares, order):
    for use in (
        lambda: params[0].grad.norm(order),
        lambda: torch.linalg.vector_norm(params[0].grad, order),
        lambda: torch._foreach_norm([params[0].grad], order),
    ):
        with pytest.raises(NotImplementedError, match=rf"a norm of order {order:g} on the gradient of layer\.0.*whole_grad"):
            use()
    assert shares.asked == []


@pytest.mark.parametrize(
    "use",
    [
        lambda grad: grad + 1,
        lambda grad: grad.sum(),
        lambda grad: grad.clone(),
        lambda grad: grad.flatten(),
        lambda grad: grad[0],
        lambda grad: grad.cpu().numpy(),
        lambda grad: grad.tolist(),
        lambda grad: torch.ones(3, 4).add_(grad),
        lambda grad: torch.stack([grad, grad]),
        lambda grad: grad.norm(dim=0),
        lambda grad: grad.norm(dim=(0, 3)),
        lambda grad: torch.linalg.vector_norm(grad, keepdim=True),
        lambda grad: torch.maximum(grad, torch.ones(3, 4), out=grad),
        lambda grad: grad.share_memory_(),
        lambda grad: torch.from_dlpack(grad),
        lambda grad: pickle.dumps(grad),
        lambda grad: torch.save({"grad": grad}, io.BytesIO()),
        lambda grad: copy.deepcopy(grad),
        lambda grad: grad.sort(),
        lambda grad: grad.cumsum_(0),
        lambda grad: torch._foreach_add_([torch.ones(3, 4)], [grad]),
        lambda grad: bool((grad > 0).all()),
    ],
)
def test_what_needs_the_rest_of_it_names_the_call_that_can(params, shares, use):
    with pytest.raises((NotImplementedError, RuntimeError), match=r"layer\.0.*whole_grad\(parameter\)"):
        use(params[0].grad)
    assert shares.asked == []


def test_detaching_gives_the_same_proxy(params):
    assert params[0].grad.detach() is params[0].grad
    assert params[0].grad.data is not None
