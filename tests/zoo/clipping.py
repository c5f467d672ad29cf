"""What people do to gradients between backward and step, and gradients that are not finite."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.branches import real_branches
from tests.zoo.case import backward, case, draw, filled, finish, mlp, real_loss, real_mlp, sgd, whole_loss, whole_numbers
from tests.zoo.shapes import Three, three_shuffled_groups


def clipped(model, optimizer, rank, world, step, clip):
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
    backward(optimizer, loss)
    yield "settle"
    norm = clip(model)
    finish(optimizer)
    return loss, norm


@case(real_mlp, sgd(0.5), tags="clip", steps=4)
def clipped_by_the_two_norm(*args):
    return (yield from clipped(*args, clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))


@case(real_mlp, sgd(0.5), tags="clip", steps=3)
def clipped_by_the_largest_element(*args):
    clip = torch.nn.utils.clip_grad_norm_
    return (yield from clipped(*args, clip=lambda model: clip(model.parameters(), 0.05, norm_type=float("inf"))))


@case(real_mlp, sgd(0.5), tags="clip", steps=3)
def clipped_by_the_three_norm(*args):
    return (yield from clipped(*args, clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=3)))


@case(real_mlp, sgd(0.5), tags="clip", steps=3)
def clipped_one_by_one_without_foreach(*args):
    clip = torch.nn.utils.clip_grad_norm_
    return (yield from clipped(*args, clip=lambda model: clip(model.parameters(), 0.1, foreach=False)))


@case(mlp, sgd(0.25), tags="clip value", exact=("fp32", "bf16", "fp16"), steps=3)
def clipped_by_value(model, optimizer, rank, world, step):
    loss = whole_loss(model(draw(model, (2, 4), rank, step)), world, step)
    backward(optimizer, loss)
    yield "settle"
    torch.nn.utils.clip_grad_value_(model.parameters(), 3.0)
    finish(optimizer)
    return loss


@case(mlp, sgd(0.25), tags="edited gradients", exact=("fp32",), steps=3)
def gradients_halved_by_hand(model, optimizer, rank, world, step):
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    finish(optimizer)


@case(mlp, sgd(0.25, momentum=0.5), tags="edited gradients unused", exact=("fp32",), steps=3)
def gradient_of_one_layer_removed(model, optimizer, rank, world, step):
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step)), world, step))
    yield "settle"
    if step == 1:
        for parameter in model[2].parameters():
            parameter.grad = None
    finish(optimizer)


@case(real_mlp, sgd(0.1), tags="norms", steps=3)
def norm_of_every_gradient(model, optimizer, rank, world, step):
    """The norm that a user logs is that of the global gradient, the same on every rank."""
    backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True))))
    yield "settle"
    norms = [p.grad.norm() for p in model.parameters()]
    finish(optimizer)
    return norms


@case(lambda: filled(Three(), real=True), three_shuffled_groups, tags="clip groups backwards", steps=3)
def one_norm_over_three_groups_and_three_backwards(model, optimizer, rank, world, step):
    for micro in range(3):
        backward(optimizer, real_loss(model(draw(model, (2, 3), rank, step, micro, real=True))) / 3)
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    finish(optimizer)
    return norm


@case(real_branches(2), sgd(0.2), tags="clip unused divergent", dtypes=("fp32", "bf16"), steps=3)
def clipped_layer_by_layer(model, optimizer, rank, world, step):
    """Another set of parameters for each call, among them one that this rank did not use."""
    which = (0,) if rank == 0 else (0, 1)
    backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True), which)))
    yield "settle"
    norms = [torch.nn.utils.clip_grad_norm_(part.parameters(), 0.1) for part in (model.trunk, *model.branches)]
    finish(optimizer)
    return norms


def with_scaler():
    model = real_mlp()
    model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return model


def make_infinite(model, optimizer, rank, world, step, micro=0):
    # One element of one rank; a parameter that everybody has.
    return float("inf") if step == 1 and rank == world - 1 else 1.0


@case(with_scaler, sgd(0.1), tags="scaler overflow clip", dtypes=("fp32",), scaled=False, engine=False, host_only=True, steps=4)
def torchs_own_grad_scaler_with_one_overflow(model, optimizer, rank, world, step):
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        out = model(draw(model, (3, 4), rank, step, real=True))
    loss = real_loss(out) * make_infinite(model, optimizer, rank, world, step)
    model.scaler.scale(loss).backward()
    yield "settle"
    model.scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.scaler.step(optimizer)
    model.scaler.update()
    optimizer.zero_grad()
    return model.scaler.get_scale()


@case(mlp, sgd(2.0**-3, momentum=0.5), tags="overflow", dtypes=("fp16",), exact=("fp16",), steps=5)
def overflow_on_one_rank_skips_the_step_on_all(model, optimizer, rank, world, step):
    """Under a loss scale. Without one nobody asked for a skip, and infinity is what plain torch would write."""
    loss = whole_loss(model(draw(model, (2, 4), rank, step)), world, step)
    if hasattr(optimizer, "backward"):
        loss = loss * make_infinite(model, optimizer, rank, world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)


@case(real_mlp, sgd(0.05), tags="autocast", dtypes=("fp32",), host_only=True, steps=3)
def autocast_over_fp32_weights(model, optimizer, rank, world, step):
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = real_loss(model(draw(model, (3, 4), rank, step, real=True)))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.empty(3)) for _ in range(4))

    def forward(self, factors):
        return sum((item * factor).sum() for item, factor in zip(self.items, factors, strict=True))


@case(lambda: filled(Positions()), sgd(0.5), tags="overflow positions", dtypes=("fp16",), exact=("fp16",), steps=6)
def overflow_in_each_parameter_in_turn(model, optimizer, rank, world, step):
    """Also in the last one: a check of the first tensor only would let it through."""
    factors = [whole_numbers((3,), "factor", rank, step, index).to(item) for index, item in enumerate(model.items)]
    if hasattr(optimizer, "backward") and step % 2 and rank == step % world:
        factors[step % 4][2] = float("nan") if step == 3 else float("inf")
    backward(optimizer, model(factors) * world)
    yield "settle"
    finish(optimizer)
