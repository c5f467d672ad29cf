"""Parameters whose values are in files: what is done to them before sharding is done to what is read."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

import accelerators
import zero
from tests import ranks
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from zero.errors import RanksDiffer
from zero.memory.values import Cast, Held
from zero.plan.layout import Span
from zero.runtime.params.unread import Unread, become

BASE = [torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]


def unread(tensor):
    return Unread.of(Held(tensor.detach().clone()), "weight")


# The ways in which transformers converts weights of files: fused, split, stacked, transposed, cast.
REMEMBERED = {
    "select": lambda t: t[0][1],
    "cast": lambda t: t[0].to(torch.bfloat16),
    "cat": lambda t: torch.cat(t, 1),
    "stack": lambda t: torch.stack(t, 2),
    "experts": lambda t: torch.cat([torch.stack(t), torch.stack(t[::-1])], dim=1).to(torch.float16),
    "transpose": lambda t: torch.transpose(torch.stack(t), 1, 2).contiguous(),
    "strided": lambda t: torch.stack(t).transpose(1, 3),
    "matrix": lambda t: t[0][0].t(),
    "chunk": lambda t: torch.chunk(t[1], 3, 1)[1].contiguous(),
    "rows": lambda t: torch.split(t[1], [1, 3])[1],
    "interleave": lambda t: t[0].reshape(6, 2, 2, 3).transpose(1, 2).reshape(24, 3),
    "narrow": lambda t: t[0].permute(2, 0, 1)[1:].squeeze(),
    "cast of strided": lambda t: t[0].transpose(0, 1).to(torch.bfloat16),
    "joined with others": lambda t: torch.cat([t[0], torch.ones(2, 6, 3)]),
}


@pytest.mark.parametrize("convert", REMEMBERED.values(), ids=REMEMBERED)
def test_conversions_are_remembered_and_any_stretch_is_read_by_itself(convert):
    expected, found = convert([tensor.clone() for tensor in BASE]), convert(list(map(unread, BASE)))
    assert type(found) is Unread
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert torch.equal(found.whole(), expected) and torch.equal(copy.deepcopy(found).whole(), expected)
    line, numel = expected.reshape(-1), expected.numel()
    for start, stop in ((0, numel), (1, numel - 1), (numel // 3, numel // 2), (numel - 1, numel), (3, 3)):
        assert torch.equal(found.read(Span(start, stop)), line[start:stop])


def test_a_transposed_matrix_is_read_once_however_it_is_cut():
    reads = []

    class Counted(Held):
        def read(self, span):
            reads.append(span)
            return super().read(span)

    values = Unread.of(Counted(torch.arange(12.0).view(3, 4)), "weight").t().viewed()
    parts = [values.read(Span(start, start + 4)) for start in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), torch.arange(12.0).view(3, 4).t().reshape(-1)) and len(reads) == 1


def linear():
    model = nn.Linear(6, 4)
    weight = model.weight.detach().clone()
    model.weight = nn.Parameter(unread(weight))
    return model, weight


def test_it_is_a_parameter_that_says_what_to_do_where_a_training_would_use_it():
    model, weight = linear()
    assert isinstance(model.weight, nn.Parameter) and model.weight.requires_grad and "weight" in dict(model.named_parameters())
    shard = re.escape("its values are in files, and are read when the model is sharded. Shard the model first, with zero.shard")
    with pytest.raises(RuntimeError, match=f"Cannot run aten.addmm.default on weight: {shard}"):
        model(torch.ones(1, 6))
    with pytest.raises(RuntimeError, match=f"Cannot write to weight: {shard}"):
        nn.init.zeros_(model.weight)
    with pytest.raises(RuntimeError, match=f"Cannot take data_ptr\\(\\) of weight: {shard}"):
        model.weight.data_ptr()
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="weight is read from its file for aten.addmm"):
        found = model(torch.ones(1, 6))
    assert torch.equal(found, nn.functional.linear(torch.ones(1, 6), weight, model.bias))


def test_it_is_copied_cast_and_pickled_as_a_parameter_is():
    model, weight = linear()
    assert torch.equal(pickle.loads(pickle.dumps(model)).weight, weight)
    copied = copy.deepcopy(model)
    assert type(copied.weight) is Unread and copied.weight.requires_grad
    before = model.weight
    model.to(torch.bfloat16)
    assert model.weight.dtype == model.bias.dtype == torch.bfloat16 and type(model.weight) is Unread
    assert torch.equal(model.weight.whole(), weight.to(torch.bfloat16)) and torch.equal(copied.weight.whole(), weight)
    assert before is model.weight
    assert torch.equal(torch.empty(4, 6).copy_(copied.weight.detach()), weight)
    assert torch.zeros_like(copied.weight).equal(torch.zeros(4, 6)) and copied.weight.numpy().tolist() == weight.tolist()


def test_other_values_are_assigned_to_the_same_object_and_taken_back():
    model, weight = linear()
    before, model.weight.tag = model.weight, "mine"
    model.weight.data = torch.ones(3, 6)
    assert model.weight is before and type(before) is nn.Parameter and before.shape == (3, 6)
    assert before.requires_grad and before.tag == "mine"
    other = become(before, unread(weight))
    assert type(other) is nn.Parameter and type(before) is Unread and before.tag == "mine" and before.requires_grad
    assert torch.equal(before.whole(), weight) and torch.equal(other, torch.ones(3, 6))


def test_equal_tensors_are_compared_without_a_warning():
    one = unread(BASE[0])
    assert torch.equal(one, unread(BASE[0])) and not torch.equal(one, unread(BASE[1]))
    assert not torch.equal(one, unread(BASE[0][:2])) and torch.equal(one.to(torch.float64), unread(BASE[0].double()))
    assert torch.equal(Cast(Held(BASE[0]), torch.float64).read(Span(1, 3)), BASE[0].reshape(-1)[1:3].double())


def build(is_unread):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 16))
    model[1].requires_grad_(False)
    for module in model if is_unread else ():
        for name, param in module.named_parameters():
            setattr(module, name, nn.Parameter(unread(param), param.requires_grad))
    return model


def trained(rank, world, stage, dtype, is_unread, as_callable):
    model = build(is_unread)

    def adamw(params):
        return torch.optim.AdamW(params, lr=0.1)

    optimizer = adamw if as_callable else adamw(model.parameters())
    optimizer = zero.shard(model, optimizer, stage=stage, dtype=dtype, bucket_bytes=512)
    for step in range(2):
        model(torch.arange(8) + rank + step).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("stage", "world", "dtype"), [
    (3, 1, None), (3, 2, "bfloat16"), (2, 2, None), pytest.param(3, 3, None, marks=pytest.mark.full),
    pytest.param(0, 2, None, marks=pytest.mark.full), pytest.param(2, 2, "bfloat16", marks=pytest.mark.full),
])  # fmt: skip
def test_a_model_in_files_trains_as_the_plain_one_does(stage, world, dtype):
    expected, *_ = ranks.run(world, trained, stage, dtype, False, False)
    for found in ranks.run(world, trained, stage, dtype, True, True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


def on_another_device(rank, world):
    """Trained there, with and without shares on the host, from files and not."""
    place, found = place_of(rank, "sim"), []
    with accelerators.using("sim"):
        with pytest.raises(ValueError, match=r"weight would be read to cpu, and the accelerator is sim.* Move the model there"):
            zero.shard(build(True), lambda params: torch.optim.AdamW(params), stage=3)
        for is_unread, offload in ((True, None), (True, "cpu"), (False, None)):
            model = build(is_unread).to(place)
            assert (type(model[0].weight) is Unread) is is_unread and model[0].weight.device == place
            make = partial(torch.optim.AdamW, lr=0.1)
            optimizer = zero.shard(model, make, stage=3, bucket_bytes=512, offload=offload, kernels="torch")
            for step in range(2):
                model((torch.arange(8) + rank + step).to(place)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
            found.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, value in found[-1].items():
        assert torch.equal(found[0][name], value) and torch.equal(found[1][name], value), name


@needs_sim
def test_a_model_is_moved_to_a_device_before_it_is_read():
    ranks.run(2, on_another_device, apart="sim")


class Broken(Held):
    """A file that cannot be read to its end."""

    def read(self, span):
        raise OSError("the disk is gone")


def fails_on_one_rank(rank, world, stage):
    model = build(True)
    if rank == 1:
        model[2].weight = nn.Parameter(Unread.of(Broken(torch.ones(24)), "2.weight"))
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(Exception, match="the disk is gone") as error:
        zero.shard(model, optimizer, stage=stage, bucket_bytes=512)
    for name, param in model.named_parameters():
        assert param is before[name] and type(param) is Unread, name
    del model[2]
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    optimizer.close()
    return str(error.value)


@pytest.mark.parametrize("stage", [3, 2])
def test_a_read_that_fails_on_one_rank_is_named_on_all_at_once_and_nothing_is_changed(stage):
    here, there = ranks.run(2, fails_on_one_rank, stage)
    assert re.search("[Rr]ank 1", here) and "the disk is gone" in there


def differing(rank, world):
    model = build(rank == 0)
    with pytest.raises(RanksDiffer, match=r"Cannot shard: 7 parameters .* rank 0, and 0 on rank 1"):
        zero.shard(model, torch.optim.AdamW(model.parameters()), stage=3)


def test_ranks_that_loaded_in_different_ways_are_told():
    ranks.run(2, differing)
