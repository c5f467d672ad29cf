"""Hooks of parameters are called as in plain torch: the user's whenever they were registered, and those of the window."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from tests.loopback import solo
from tests.promises.loops import on_ranks, plain_sgd, weights
from tests.zoo.case import draw, real_loss, real_mlp
from zero import shard

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
# Events of a parameter's hooks and memory, in any possible order: sharded before closed, registered before removed.
EVENTS = ("register", "remove", "register late", "shard", "cast", "close")


def in_order(order):
    return order.index("shard") < order.index("close") and order.index("register") < order.index("remove")


ORDERS = [order for order in itertools.permutations(EVENTS) if in_order(order)]


class Life:
    """A model whose hooks note what they were called with."""

    def __init__(self, stage):
        self.stage = stage  # None for plain torch
        self.model = real_mlp()
        self.optimizer = None
        self.calls = []
        self._handles = []

    def happens(self, event):
        param = self.model[0].weight
        if event == "register":
            self._handles = [param.register_hook(self._note("hook")),
                             param.register_post_accumulate_grad_hook(self._note("post"))]  # fmt: skip
        elif event == "register late":
            param.register_hook(self._note("late hook"))
            param.register_post_accumulate_grad_hook(self._note("late post"))
        elif event == "remove":
            for handle in self._handles:
                handle.remove()
        elif event == "cast" and self.may_cast:
            self.model.double()
            self.model.float()
        elif self.stage is not None and event == "shard":
            self.optimizer = shard(self.model, plain_sgd(self.model), stage=self.stage, group=solo())
        elif self.stage is not None and event == "close":
            self.optimizer.close()
            self.optimizer = None

    @property
    def may_cast(self):
        """Absent weights keep their dtype: a cast is refused there, as another test says."""
        return self.stage != 3 or self.optimizer is None

    def _note(self, name):
        def called(tensor):
            self.calls.append((name, (tensor if tensor.grad is None else tensor.grad).detach().clone()))

        return called

    def backward(self):
        """Returns what the hooks were called with, and every gradient."""
        self.calls.clear()
        real_loss(self.model(draw(self.model, (3, 4), 0, 0, real=True))).backward()
        calls = list(self.calls)
        params = list(self.model.parameters())
        if self.optimizer is None:
            grads = [param.grad.clone() for param in params]
            self.model.zero_grad()
        else:
            grads = [self.optimizer.whole_grad(param) for param in params]
            self.optimizer.zero_grad()
        return [*calls, *zip(dict(self.model.named_parameters()), grads, strict=True)]


def different(found, expected):
    return [name for name, _ in found] != [name for name, _ in expected] or any(
        not torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True)
    )


def check(order, stage):
    life, plain = Life(stage), Life(None)
    for event in order:
        for each in (life, plain):
            each.happens(event)
        assert not different(life.backward(), plain.backward()), f"at stage {stage}, after {event!r} of {order}"


@pytest.mark.promise("T06")
@pytest.mark.parametrize(("stage", "every"), [*(pytest.param(stage, 1, marks=pytest.mark.full) for stage in range(4)), (3, 4)])
def test_hooks_are_called_as_in_plain_torch_in_any_order_of_register_remove_shard_cast_and_close(stage, every):
    for order in ORDERS[::every]:
        check(order, stage)


@pytest.mark.promise("T06")
def test_hooks_that_come_inside_gathered_are_called_after_it():
    model, calls = real_mlp(), []
    optimizer = shard(model, plain_sgd(model), stage=3, group=solo())
    param = model[0].weight
    with optimizer.gathered(param):
        param.register_hook(lambda grad: calls.append("gathered")).remove()
    param.register_hook(lambda grad: calls.append("after"))
    real_loss(model(draw(model, (3, 4), 0, 0, real=True))).backward()
    assert calls == ["after"]


def clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def to_double_and_back(model):
    model.double()
    model.float()


def to_half_and_the_same_memory(model):
    kept = [param.data for param in model.parameters()]
    model.half()
    for param, memory in zip(model.parameters(), kept, strict=True):
        param.data = memory


@pytest.mark.promise("T06")
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("cast", [to_double_and_back, to_half_and_the_same_memory])
@pytest.mark.parametrize("then", ["step without a gradient", "load", "nothing"])
def test_a_cast_there_and_back_leaves_gradients_global_whatever_restored_the_memory(stage, cast, then):
    """The node of a parameter is another one by then, and its memory may be the same."""

    def program(model, optimizer, group):
        saved = optimizer.state_dict()
        cast(model)
        if then == "load":
            optimizer.load_state_dict(saved)
        elif then == "step without a gradient":
            optimizer.no_contribution()
            optimizer.step()
        real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))).backward()
        norm = clip(model)
        optimizer.step()
        return float(norm), weights(model)

    plain = real_mlp()
    for rank in range(2):
        (real_loss(plain(draw(plain, (3, 4), rank, 0, real=True))) / 2).backward()
    norm = float(clip(plain))
    plain_sgd(plain).step()
    for other, values in on_ranks(2, program, stage=stage):
        assert other == pytest.approx(norm, rel=1e-5)
        assert all(torch.allclose(values[name], value, atol=1e-6) for name, value in weights(plain).items())


@pytest.mark.promise("T06")
def test_a_graph_from_before_a_cast_and_one_from_after_it_each_send_their_gradient():
    def program(model, optimizer, group):
        batch = draw(model, (3, 4), group.rank, 0, real=True)
        before = real_loss(nn.functional.linear(batch, model[0].weight))
        to_half_and_the_same_memory(model)
        after = real_loss(nn.functional.linear(batch, model[0].weight))
        (after + before).backward()
        return optimizer.whole_grad(model[0].weight)

    plain = real_mlp()
    for rank in range(2):
        batch = draw(plain, (3, 4), rank, 0, real=True)
        real_loss(nn.functional.linear(batch, plain[0].weight)).backward()
    for found in on_ranks(2, program, stage=2):
        assert torch.allclose(found, plain[0].weight.grad, atol=1e-6)


@STAGES
@pytest.mark.parametrize("synchronises", [True, False])
def test_a_hook_behind_accumulation_finds_the_gradient_of_this_backward_alone(stage, synchronises):
    """As docs/guide.md says: what earlier backwards left may be in shares by then."""
    model, found = nn.Linear(2, 1, bias=False), []
    optimizer = shard(model, plain_sgd(model), stage=stage, group=solo())
    model.weight.register_post_accumulate_grad_hook(lambda param: found.append(param.grad.tolist()))
    for factor in (1.0, 3.0):
        with contextlib.nullcontext() if synchronises else optimizer.no_sync():
            model(torch.full((1, 2), factor)).sum().backward()
    assert found == [[[1.0, 1.0]], [[3.0, 3.0]]]
    optimizer.settle()
    assert optimizer.whole_grad(model.weight).tolist() == [[4.0, 4.0]]


def _mul(model):
    with torch.no_grad():
        model[2].weight.grad.mul_(3.0)


def _replace(model):
    model[2].weight.grad = torch.ones_like(model[2].weight)


def _remove(model):
    model[2].weight.grad = None


def _clear(model):
    model.zero_grad()


def _fail(model):
    raise KeyError("a hook")


@STAGES
@pytest.mark.parametrize("does", [_mul, _replace, _remove, _clear, _fail])
def test_on_one_rank_a_hook_does_to_gradients_that_came_before_it_what_it_does_in_plain_torch(stage, does):
    """A rank that sends gradients to nobody leaves them in `.grad` up to the end of a backward."""

    def gradients(stage):
        model, steps = real_mlp(), []
        optimizer = plain_sgd(model)
        if stage is not None:
            optimizer = shard(model, optimizer, stage=stage, group=solo())
        for step in range(4):
            handle = model[0].weight.register_hook(lambda _: does(model)) if step in (1, 2) else None
            with contextlib.suppress(KeyError):
                real_loss(model(draw(model, (3, 4), step, 0, real=True))).backward()
            if handle is not None:
                handle.remove()
            if does is _fail and step in (1, 2):
                optimizer.zero_grad()
                continue
            read = (lambda param: param.grad) if stage is None else optimizer.whole_grad
            grads = [read(param) for param in model.parameters()]
            steps.append([None if grad is None else grad.clone() for grad in grads])
            optimizer.step()
            if step != 2:
                optimizer.zero_grad()
        return steps

    for found, expected in zip(gradients(stage), gradients(None), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other)
