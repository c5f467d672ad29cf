"""What autograd can do beside one plain backward."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Mlp, backward, case, draw, filled, finish, mlp, real_loss, real_mlp, sgd, whole_loss, whole_numbers
from tests.zoo.steps import whole_step


class Critic(nn.Sequential):
    """Twice differentiable, as a gradient penalty needs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def real_critic():
    return filled(Critic(), real=True)


@case(real_critic, sgd(0.1), tags="double", dtypes=("fp32", "bf16"), steps=4)
def gradient_penalty(model, optimizer, rank, world, step):
    x = draw(model, (3, 4), rank, step, real=True).requires_grad_()
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    loss = real_loss(model(x)) + (slope.float().norm(dim=1) - 1).square().mean()
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(real_critic, sgd(0.1), tags="double", dtypes=("fp32",), steps=3)
def gradients_of_the_weights_taken_without_backward(model, optimizer, rank, world, step):
    """`autograd.grad` fills no `.grad` and marks nothing as ready, also when it differentiates by the parameters."""
    x = draw(model, (3, 4), rank, step, real=True)
    slopes = torch.autograd.grad(real_loss(model(x)), list(model.parameters()), create_graph=True)
    loss = real_loss(model(x)) + 0.125 * sum(slope.square().mean() for slope in slopes)
    backward(optimizer, loss)
    torch.autograd.grad(real_loss(model(x)), list(model.parameters()))
    yield "settle"
    finish(optimizer)
    return loss


@case(mlp, sgd(0.125), tags="partial backwards", exact=("fp32",), scaled=False, steps=3)
def backward_into_some_inputs_then_into_all(model, optimizer, rank, world, step):
    chosen = [model[0].weight] if step % 2 else [model[2].weight, model[2].bias]
    whole_loss(model(draw(model, (2, 4), rank, step, 0)), world, step).backward(inputs=chosen)
    whole_loss(model(draw(model, (3, 4), rank, step, 1)), world, step).backward()
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="partial", exact=("fp32",), scaled=False, still=("0.*",), steps=2)
def backward_into_some_inputs_only(model, optimizer, rank, world, step):
    whole_loss(model(draw(model, (2, 4), rank, step)), world, step).backward(inputs=[model[2].weight, model[2].bias])
    yield "settle"
    finish(optimizer)


class Tiled(torch.autograd.Function):
    """A loss over tiles that calls backward for each tile already in its forward, as tiled losses do to save memory."""

    @staticmethod
    def forward(ctx, h, head, num_tiles):
        total, grads = torch.zeros((), dtype=torch.float32, device=h.device), []
        for tile in h.detach().chunk(num_tiles):
            with torch.enable_grad():
                tile = tile.requires_grad_()
                loss = head(tile).float().square().mean()
            torch.autograd.backward(loss)
            total += loss.detach()
            grads.append(tile.grad)
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return saved * grad.to(saved.dtype), None, None


@case(real_mlp, sgd(0.05), tags="nested backwards", scaled=False, steps=3)
def nested_backwards_in_a_tiled_loss(model, optimizer, rank, world, step):
    hidden = model[1](model[0](draw(model, (8, 4), rank, step, real=True)))
    loss = Tiled.apply(hidden, model[2], 4)
    loss.backward()
    yield "settle"
    finish(optimizer)
    return loss


class BackwardInBackward(torch.autograd.Function):
    """Recomputes its part of the graph in backward and calls backward on it, what reentrant checkpointing does by hand."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.module(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


@case(real_mlp, sgd(0.05), tags="nested shared reentrant", steps=3)
def nested_backward_of_a_layer_that_is_also_used_outside(model, optimizer, rank, world, step):
    x = draw(model, (3, 4), rank, step, real=True).requires_grad_()
    inside = BackwardInBackward.apply(x, model[0])
    loss = real_loss(model[2](torch.tanh(inside + model[0](x))))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class OddGradients(torch.autograd.Function):
    """Multiplies by three weights; gives back a gradient that is None, one that is expanded and one that is transposed."""

    @staticmethod
    def forward(ctx, x, expanded, transposed, absent):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x @ transposed.t() + expanded.sum() + absent.sum()

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None
        (x,) = ctx.saved_tensors
        # x^T g is the transpose of what the weight's gradient should look like in memory.
        return None, grad.sum().expand(3, 4), (x.t() @ grad).t(), None


class OddFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expanded = nn.Parameter(torch.empty(3, 4))
        self.transposed = nn.Parameter(torch.empty(5, 4))
        self.absent = nn.Parameter(torch.empty(2))

    def forward(self, x):
        return OddGradients.apply(x, self.expanded, self.transposed, self.absent)


@case(lambda: filled(OddFunction()), tags="function strided", exact=("fp32", "bf16", "fp16"), still=("absent",))
def function_with_none_expanded_and_transposed_gradients(*args):
    return (yield from whole_step(*args))


def hooked():
    model = mlp()
    model.calls = []
    model[0].weight.register_hook(lambda grad: model.calls.append("tensor") or grad * 2)

    def halve(parameter):
        model.calls.append("accumulated")
        parameter.grad.mul_(0.5)

    model[2].bias.register_post_accumulate_grad_hook(halve)
    return model


@case(hooked, tags="hooks", exact=("fp32", "bf16", "fp16"), steps=3)
def hooks_of_the_user_change_gradients(model, optimizer, rank, world, step):
    model.calls.clear()
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    finish(optimizer)
    return sorted(model.calls)


@case(mlp, sgd(0.125), tags="hooks modules", exact=("fp32",), steps=3)
def module_hooks_that_come_and_go(model, optimizer, rank, world, step):
    seen = []
    handles = [
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[2].register_forward_pre_hook(lambda *_: seen.append("before forward")),
        model[2].register_full_backward_pre_hook(lambda *_: seen.append("before backward")),
    ]
    x = draw(model, (2, 4), rank, step).requires_grad_()
    backward(optimizer, whole_loss(model(x), world, step))
    for handle in handles[step % 2 :]:
        handle.remove()
    x = draw(model, (2, 4), rank, step, 1).requires_grad_()
    backward(optimizer, whole_loss(model(x), world, step))
    yield "settle"
    handles[0].remove()
    finish(optimizer)
    return seen


@case(mlp, sgd(0.125), tags="retain backwards", exact=("fp32",), steps=3)
def one_graph_sent_backward_twice(model, optimizer, rank, world, step):
    loss = whole_loss(model(draw(model, (2, 4), rank, step)), world, step)
    backward(optimizer, loss, retain_graph=True)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(mlp, sgd(0.125), tags="retain cleared", exact=("fp32",), steps=3)
def one_graph_sent_backward_twice_with_a_clearing_between(model, optimizer, rank, world, step):
    loss = whole_loss(model(draw(model, (2, 4), rank, step)), world, step)
    backward(optimizer, loss, retain_graph=True)
    optimizer.zero_grad()
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(mlp, tags="entry", exact=("fp32", "bf16", "fp16"), scaled=False)
def backward_of_an_output_with_its_own_gradient(model, optimizer, rank, world, step):
    out = model(draw(model, (3, 4), rank, step))
    out.backward(gradient=whole_numbers(out.shape, "gradient", rank, step).to(out) * world)
    yield "settle"
    finish(optimizer)
    return out


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(4, 6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h = self.body(x)
        return self.head(self.norm(h.to(self.norm.weight.dtype)).to(x.dtype))


@case(lambda: filled(WithDropout(), real=True), tags="eval backwards buffers", keep_fp32=("norm.*",), steps=3)
def evaluation_between_the_backwards(model, optimizer, rank, world, step):
    for micro in range(3):
        loss = real_loss(model(draw(model, (4, 4), rank, step, micro, real=True)))
        model.eval()
        with torch.inference_mode() if micro % 2 else torch.no_grad():
            model(draw(model, (2, 4), rank, step, 9, real=True))
        backward(optimizer, loss)
        with torch.no_grad():
            model(draw(model, (2, 4), rank, step, 9, real=True))
        model.train()
    yield "settle"
    finish(optimizer)


@case(mlp, tags="functional", exact=("fp32", "bf16", "fp16"), steps=3)
def functional_call_over_the_models_own_parameters(model, optimizer, rank, world, step):
    weights = dict(model.named_parameters())
    weights["2.bias"] = weights["2.bias"] * 2
    out = torch.func.functional_call(model, weights, (draw(model, (2, 4), rank, step),))
    loss = whole_loss(out, world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


@case(mlp, sgd(0.125), tags="anomaly", exact=("fp32",), steps=2)
def anomaly_detection(model, optimizer, rank, world, step):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="losses", exact=("fp32",), steps=3)
def several_losses_with_weights_of_their_own(model, optimizer, rank, world, step):
    out = model(draw(model, (3, 4), rank, step))
    parts = [whole_loss(out[:, index], world, step, index) for index in range(3)]
    loss = 2 * parts[0] - parts[1] + 0.5 * parts[2]
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return [loss, *parts]
