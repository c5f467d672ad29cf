"""Weights and gradients that the user changes in the middle of training."""

from __future__ import annotations

import torch

from tests.zoo.branches import real_branches
from tests.zoo.case import backward, case, draw, finish, mlp, real_loss, real_mlp, real_numbers, sgd, whole_loss, whole_numbers
from tests.zoo.steps import real_step, whole_step


@case(mlp, sgd(0.25), tags="edit data", exact=("fp32",), steps=4)
def weights_clamped_through_data(model, optimizer, rank, world, step):
    """What `.data` does moves no version counter."""
    yield from whole_step(model, optimizer, rank, world, step)
    for parameter in model.parameters():
        parameter.data.clamp_(-1.0, 1.0)


@case(mlp, sgd(0.25, momentum=0.5), tags="edit momentum", exact=("fp32",), steps=4)
def weights_loaded_in_the_middle(model, optimizer, rank, world, step):
    if step == 2:
        weights = {name: whole_numbers(p.shape, "loaded", name) for name, p in model.named_parameters()}
        model.load_state_dict(weights)
    return (yield from whole_step(model, optimizer, rank, world, step))


@case(real_mlp, sgd(0.1, momentum=0.5), tags="edit init momentum", steps=4)
def one_layer_initialised_again(model, optimizer, rank, world, step):
    if step == 2:
        with torch.no_grad():
            torch.nn.init.constant_(model[2].bias, 0.25)
            model[2].weight.copy_(real_numbers(model[2].weight.shape, "again"))
    return (yield from real_step(model, optimizer, rank, world, step))


@case(mlp, sgd(0.25), tags="edit foreach", exact=("fp32",), steps=4)
def weights_scaled_by_foreach(model, optimizer, rank, world, step):
    yield from whole_step(model, optimizer, rank, world, step)
    if step % 2:
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)


@case(mlp, sgd(0.25), tags="edit backwards", exact=("fp32",), steps=3)
def weights_edited_between_forward_passes(model, optimizer, rank, world, step):
    """Edited before any graph of the window exists, and while gradients of the window are already there."""
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step, 0)), world, step))
    with torch.no_grad():
        model[0].bias.add_(1.0)
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step, 1)), world, step))
    yield "settle"
    finish(optimizer)


@case(real_mlp, sgd(0.1, momentum=0.5), tags="edit average", steps=4)
def averaged_weights_swapped_in_and_out(model, optimizer, rank, world, step):
    """Evaluation with averaged weights must leave no trace, in the masters either."""
    yield from real_step(model, optimizer, rank, world, step)
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        out = model(draw(model, (2, 4), 0, step, 7, real=True))
        for parameter, weight in zip(model.parameters(), kept, strict=True):
            parameter.copy_(weight)
    return out


@case(mlp, sgd(0.25), tags="gradient assigned", dtypes=("fp32", "bf16"), exact=("fp32", "bf16"), steps=3)
def gradients_assigned_by_hand(model, optimizer, rank, world, step):
    """Without any backward: every rank's own gradient, and their mean is what counts."""
    for name, parameter in model.named_parameters():
        parameter.grad = whole_numbers(parameter.shape, "gradient", name, rank, step).to(parameter) * world
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.25), tags="gradient assigned divergent unused", dtypes=("fp32",), exact=("fp32",), steps=3)
def gradients_assigned_by_some_ranks_for_some_parameters(model, optimizer, rank, world, step):
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if (rank + step + index) % 2 == 0:
            parameter.grad = whole_numbers(parameter.shape, "gradient", name, rank, step).to(parameter) * world
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(2.0**-3), tags="edit overflow", dtypes=("fp16",), exact=("fp16",), steps=4)
def weights_edited_before_a_step_that_is_skipped(model, optimizer, rank, world, step):
    if step == 1:
        with torch.no_grad():
            model[0].weight.fill_(1.0)
    loss = whole_loss(model(draw(model, (2, 4), rank, step)), world, step)
    if hasattr(optimizer, "backward") and step == 1 and rank == 0:
        loss = loss * float("inf")
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)


@case(real_mlp, sgd(0.1), tags="edit sharpness backwards", dtypes=("fp32",), steps=3)
def sharpness_aware_by_hand(model, optimizer, rank, world, step):
    """Two backwards, the first only to move the weights uphill by their global gradient."""
    x = draw(model, (3, 4), rank, step, real=True)
    backward(optimizer, real_loss(model(x)))
    yield "settle"
    uphill = [0.05 * optimizer.whole_grad(p) for p in model.parameters()]
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), uphill, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    loss = real_loss(model(x))
    backward(optimizer, loss)
    yield "settle"
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), uphill, strict=True):
            parameter.sub_(move)
    finish(optimizer)
    return loss


@case(real_branches(2), sgd(0.1, momentum=0.5), tags="edit data divergent unused", steps=4)
def clamped_weights_where_ranks_used_different_branches(model, optimizer, rank, world, step):
    loss = real_loss(model(draw(model, (3, 4), rank, step, real=True), ((rank + step) % 2,)))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    for parameter in model.branches.parameters():
        parameter.data.clamp_(-0.5, 0.5)
    return loss
