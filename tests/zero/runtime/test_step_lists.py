"""Small blocks that are stepped by lists have the bits of those that are stepped one by one, whatever is done in between."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.loopback import run_ranks
from tests.zoo.case import filled, real_numbers
from zero.runtime.kernels.adam_kernels import FusedAdam
from zero.runtime.kernels.adam_step import _Placed


def lr_of_a_group(model, optimizer):
    optimizer.param_groups[1]["lr"] = 0.05


def other_moments(model, optimizer):
    master = next(iter(optimizer.state))
    optimizer.state[master]["exp_avg"] = optimizer.state[master]["exp_avg"].clone().mul_(2.0)


def memory_of_moments(model, optimizer):
    for state in list(optimizer.state.values())[1:4]:
        state["exp_avg"].data = state["exp_avg"].data * 3.0
        state["step"].data = state["step"].data + 2.0


def moments_in_place(model, optimizer):
    for state in list(optimizer.state.values())[:3]:
        state["exp_avg_sq"].mul_(4.0)


def counters_apart(model, optimizer):
    for state in list(optimizer.state.values())[::2]:
        state["step"].fill_(40.0)


def amsgrad(model, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True


def loaded(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def edited(model, optimizer):
    with torch.no_grad():
        model[3].weight[0, 0] = 7.0
        model[4].bias.data = model[4].bias.data * 2.0


def a_group_more(model, optimizer):
    model.append(nn.Linear(8, 8).to(model[0].weight.dtype))
    with torch.no_grad():
        for param in model[-1].parameters():
            param.fill_(0.125)
    optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.03})


def frozen(model, optimizer):
    model[2].weight.requires_grad_(False)


def thawed(model, optimizer):
    model[2].weight.requires_grad_(True)


def rebuilt_groups(model, optimizer):
    optimizer.param_groups[0]["params"].reverse()


BETWEEN = (
    lr_of_a_group, other_moments, moments_in_place, edited, amsgrad, loaded, a_group_more, frozen, thawed, rebuilt_groups,
    memory_of_moments, counters_apart,
)  # fmt: skip


def training(group, dtype, stage):
    torch.manual_seed(0)
    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(7))), real=True)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    inner = torch.optim.AdamW(groups, lr=0.01)
    optimizer = zero.shard(model, inner, stage=stage, dtype=dtype, clip=0.5, kernels="fused", bucket_bytes=64, group=group)
    fused_step, norms = optimizer.sharding.updater._fused_step, []
    step_by_lists, taken = fused_step._step_by_lists, []
    fused_step._step_by_lists = lambda batch: taken.append(step_by_lists(batch)) or taken[-1]
    for number, act in enumerate((None, None, *(each for between in BETWEEN for each in (between, None)))):
        if act is not None:
            act(model, optimizer)
        hidden = real_numbers((2, 8), 10 * number + group.rank).to(model[0].weight.dtype)
        for layer in model if number % 4 else list(model)[:5]:  # in some steps not all are used
            hidden = layer(hidden)
        hidden.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    with optimizer.gathered():
        found = [param.detach().clone() for param in model.parameters()]
        optimizer.any_rank(False)
    return found, norms, taken


@pytest.mark.parametrize("halves", [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_an_edit_is_looked_for_in_the_dtype_of_each_weight(halves):
    """Gradients that were accumulated are float32, whatever the weights are."""
    model = nn.ModuleList(nn.Linear(4, 4).to(getattr(torch, half)) for half in halves)
    inner = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    optimizer = zero.shard(model, inner, stage=2, bucket_bytes=64, kernels="fused")
    edits = {"float16": 1.0009765625, "bfloat16": 1e30}  # neither is a number of the other dtype
    for step in range(3):
        for sync in (optimizer.no_sync, contextlib.nullcontext):
            with sync():
                sum(part(torch.ones(2, 4, dtype=part.weight.dtype)).float().mean() for part in model).backward()
        if step == 2:
            with torch.no_grad():
                for half, part in zip(halves, model, strict=True):
                    part.weight.fill_(edits[half])
        optimizer.step()
        optimizer.zero_grad()
    masters = optimizer.state_dict()["masters"]
    for number, half in enumerate(halves):
        assert torch.equal(masters[f"{number}.weight"].to(getattr(torch, half)), model[number].weight.detach())
        edit = torch.tensor(edits[half]).to(model[number].weight.dtype)
        assert masters[f"{number}.weight"][0, 0] == model[number].weight[0, 0] == edit


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "stage"), [(None, 2), pytest.param("bfloat16", 2, marks=pytest.mark.full), ("bfloat16", 3), ("float16", 1)]
)
def test_the_bits_are_those_of_one_block_after_the_other(dtype, stage, world):
    by_lists = run_ranks(world, lambda group: training(group, dtype, stage))
    # And without lists all state is looked through at each step.
    with mock.patch.object(FusedAdam, "step_lists", None), mock.patch.object(_Placed, "holds", lambda *_: False):
        one_by_one = run_ranks(world, lambda group: training(group, dtype, stage))
    for (found, norms, taken), (expected, expected_norms, never) in zip(by_lists, one_by_one, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert norms == expected_norms
        assert not any(never) and sum(taken) > len(taken) / 3


def training_of_uneven_buckets(rank, world, by_lists):
    """Returns weights, and of each step whether lists took it and what came: sums of small buckets, and rows of others."""
    torch.manual_seed(0)
    model = filled(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(3, 8)), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", clip=0.5, kernels="fused", bucket_bytes=256)
    fused_step, kinds = optimizer.sharding.updater._fused_step, []
    step_by_lists = fused_step._step_by_lists if by_lists else lambda batch: False

    def noted(batch):
        kinds.append((step_by_lists(batch), {(len(each.gradient.rows), each.gradient.rows[0].dtype) for each in batch}))
        return kinds[-1][0]

    fused_step._step_by_lists = noted
    for number in range(4):
        model(real_numbers((2, 8), "rows", number, rank).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], kinds


def test_blocks_whose_gradients_are_rows_and_others_whose_are_sums_are_stepped_by_the_same_lists():
    by_lists, one_by_one = ranks.run(2, training_of_uneven_buckets, True), ranks.run(2, training_of_uneven_buckets, False)
    for (found, kinds), (expected, _) in zip(by_lists, one_by_one, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert (True, {(1, torch.float32), (2, torch.bfloat16)}) in kinds


def test_steps_that_each_use_other_parameters_are_not_all_remembered():
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2, kernels="fused", bucket_bytes=64)
    for number in range(1, 2**5):
        torch.stack([part.weight.sum() for index, part in enumerate(model) if number >> index & 1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        remembered = optimizer.sharding.updater._fused_step._placed
        assert sum(map(len, remembered)) <= len(optimizer.sharding.layout_ref.layout.buckets)


@pytest.mark.parametrize("number", [1, 2])
def test_gradients_that_go_to_the_step_by_themselves_are_copied_like_several_though_they_lie_in_memory_of_the_user(number):
    layers = nn.ParameterList(nn.Parameter(torch.zeros(16, 8)) for _ in range(number))
    optimizer = zero.shard(layers, torch.optim.AdamW(layers.parameters(), lr=0.5), stage=2, bucket_bytes=512, kernels="fused")
    for _ in range(3):  # the step takes gradients as they came from the third window on
        before = [weight.detach().clone() for weight in layers]
        gradients = [torch.ones(128) for _ in layers]
        torch.autograd.backward([weight.view(-1) for weight in layers], gradients)
        for gradient in gradients:
            gradient.neg_()
        optimizer.step()
        optimizer.zero_grad()
        assert all(bool((weight < old).all()) for weight, old in zip(layers, before, strict=True))
