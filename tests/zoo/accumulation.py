"""Windows of several backwards, and what may happen inside one."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.branches import real_branches, whole_branches
from tests.zoo.case import backward, case, draw, filled, finish, like, mlp, no_sync, real_loss, real_numbers, sgd, whole_loss


def micro_step(model, optimizer, rank, world, step, micro=0, rows=2):
    loss = whole_loss(model(draw(model, (rows, 4), rank, step, micro)), world, step, micro)
    backward(optimizer, loss)
    return loss


@case(mlp, sgd(0.125), tags="backwards", exact=("fp32",), steps=3)
def five_backwards_a_step(model, optimizer, rank, world, step):
    losses = [micro_step(model, optimizer, rank, world, step, micro) for micro in range(5)]
    yield "settle"
    finish(optimizer)
    return losses


@case(whole_branches(), sgd(0.125), tags="backwards unused", exact=("fp32",), steps=3)
def last_backward_leaves_a_branch_out(model, optimizer, rank, world, step):
    for micro, which in enumerate(((0,), (1,), (2,), ())):
        backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step, micro), which), world, step))
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="backwards window", exact=("fp32",), steps=3)
def window_whose_length_changes(model, optimizer, rank, world, step):
    losses = [micro_step(model, optimizer, rank, world, step, micro) for micro in range((2, 5, 1)[step])]
    yield "settle"
    finish(optimizer)
    return losses


@case(mlp, sgd(0.125), tags="backwards window divergent", exact=("fp32",), steps=3)
def windows_of_different_length_on_each_rank(model, optimizer, rank, world, step):
    for micro in range(1 + (rank + step) % 3):
        micro_step(model, optimizer, rank, world, step, micro)
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="backwards no_sync", exact=("fp32",), steps=3)
def all_but_the_last_backward_without_communication(model, optimizer, rank, world, step):
    for micro in range(3):
        with no_sync(optimizer, micro < 2):
            micro_step(model, optimizer, rank, world, step, micro)
    yield "settle"
    finish(optimizer)


@case(whole_branches(), sgd(0.125), tags="backwards no_sync unused divergent", exact=("fp32",), steps=3)
def branches_used_only_without_communication(model, optimizer, rank, world, step):
    """Every local gradient that `no_sync` left must still arrive, also where the last backward does not touch it."""
    with no_sync(optimizer):
        backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step, 0), (rank % 3,)), world, step))
    backward(optimizer, whole_loss(model(draw(model, (2, 4), rank, step, 1)), world, step))
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="backwards no_sync", exact=("fp32",), steps=3)
def everything_without_communication(model, optimizer, rank, world, step):
    with no_sync(optimizer):
        for micro in range(2):
            micro_step(model, optimizer, rank, world, step, micro)
    yield "settle"
    finish(optimizer)


def token_counts(rank, step):
    # Uneven, and none at all for one rank now and then.
    return [((7, 1, 5, 2)[(rank + step) % 4] + micro) * (not (rank == 1 and step == 1)) for micro in range(2)]


@case(mlp, sgd(0.05), tags="weights backwards", dtypes=("fp32", "bf16"), steps=3)
def mean_over_tokens_of_uneven_batches(model, optimizer, rank, world, step):
    for micro, tokens in enumerate(token_counts(rank, step)):
        optimizer.weight(tokens)
        loss = model(like(model, real_numbers((tokens, 4), "tokens", rank, step, micro))).float().square().mean()
        backward(optimizer, loss)
    yield "settle"
    finish(optimizer)


@case(whole_branches(1), sgd(0.125), tags="weights idle", exact=("fp32",), needs_world=2, steps=2)
def rank_without_valid_tokens(model, optimizer, rank, world, step):
    """Every rank's weight is a power of two and so is their sum; rank 0 has a NaN that counts nothing."""
    weight = 0 if rank == 0 else 2.0 if rank == 1 else 1.0
    total = sum(0 if r == 0 else 2.0 if r == 1 else 1.0 for r in range(world))
    optimizer.weight(weight)
    x = draw(model, (2, 4), rank, step)
    loss = whole_loss(model(x * float("nan") if rank == 0 else x, (0,)), 1, step) * total
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)


def adamw_with_decay(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5, eps=1e-2)


@case(real_branches(), adamw_with_decay, tags="zeros unused decay", still=("branches.1.*",), engine=False, steps=5)
def gradients_cleared_to_zeros(model, optimizer, rank, world, step):
    """Zeros count as a gradient, so that decay and momentum move what was used once; None does not."""
    which = (0,) if step == 0 else (2,)
    backward(optimizer, real_loss(model(draw(model, (2, 4), rank, step, real=True), which)))
    yield "settle"
    optimizer.step()
    optimizer.zero_grad(set_to_none=step >= 3)


@case(mlp, sgd(0.125), tags="cleared", exact=("fp32",), steps=3)
def model_clears_its_own_gradients(model, optimizer, rank, world, step):
    micro_step(model, optimizer, rank, world, step, 0)
    model.zero_grad()
    micro_step(model, optimizer, rank, world, step, 1)
    yield "settle"
    optimizer.step()
    model.zero_grad()


@case(mlp, sgd(0.125, momentum=0.5), tags="discard", exact=("fp32",), steps=4)
def window_that_is_thrown_away(model, optimizer, rank, world, step):
    micro_step(model, optimizer, rank, world, step, 0)
    if step % 2:
        optimizer.zero_grad()
        return
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125, momentum=0.5), tags="discard", exact=("fp32",), steps=4)
def window_that_is_discarded_after_it_settled(model, optimizer, rank, world, step):
    micro_step(model, optimizer, rank, world, step, 0)
    yield "settle"
    if step % 2:
        optimizer.discard()
    else:
        finish(optimizer)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x)
        return self.second(self.norm(h.to(self.norm.weight.dtype)).to(x.dtype))


@case(lambda: filled(Normed(), real=True), tags="buffers backwards", keep_fp32=("norm.*",), steps=3)
def batch_norm_statistics_of_each_rank(model, optimizer, rank, world, step):
    for micro in range(3):
        backward(optimizer, real_loss(model(draw(model, (5, 4), rank, step, micro, real=True))))
    yield "settle"
    finish(optimizer)


@case(mlp, adamw_with_decay, tags="empty decay", steps=4)
def step_without_any_backward(model, optimizer, rank, world, step):
    if step % 2 == 0:
        backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True))))
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="backwards long", exact=("fp32",), steps=2)
def twenty_small_backwards(model, optimizer, rank, world, step):
    for micro in range(20):
        micro_step(model, optimizer, rank, world, step, micro, rows=1)
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(2.0**-6), tags="sum backwards", exact=("fp32",), reduce="sum", engine=False, steps=3)
def summed_instead_of_averaged(model, optimizer, rank, world, step):
    for micro in range(2):
        micro_step(model, optimizer, rank, 1, step, micro)
    yield "settle"
    finish(optimizer)


@case(mlp, sgd(0.125), tags="divisor", exact=("fp32",), reduce=8.0, engine=False, steps=3)
def divided_by_a_number_of_the_users(model, optimizer, rank, world, step):
    micro_step(model, optimizer, rank, 1, step)
    yield "settle"
    finish(optimizer)
