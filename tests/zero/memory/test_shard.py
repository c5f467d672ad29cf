"""Forms, flat buffers, shards and masters: views that go where their parameters go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelerators
from zero.memory.formats import ParamFormat, sum_dtype
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.registry import Homes
from zero.memory.masters import Masters
from zero.memory.shard import LayoutRef
from zero.memory.weights import FlatBuffer
from zero.plan.layout import FlatLayout, ParamSpec

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@settings(deadline=None, max_examples=60)
@given(shapes, st.randoms(use_true_random=False), st.booleans())
def test_a_form_goes_to_a_line_and_back(shape, chance, sliced):
    order = list(range(len(shape)))
    chance.shuffle(order)
    doubled = [size * 2 for size in shape] if sliced else shape
    tensor = torch.randn([doubled[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    tensor = tensor[tuple(slice(0, size) for size in shape)]
    form = ParamFormat.of(tensor)
    line = form.flatten(tensor)
    assert line.shape == (tensor.numel(),)
    assert torch.equal(form.unflatten(line), tensor)


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 3, 1, 1), (4, 1, 3, 3), (1, 3, 2, 2), (1, 1, 1, 1)], ids=str)
def test_a_channels_last_weight_stays_so_and_its_line_is_a_view(shape):
    weight = torch.randn(shape).to(memory_format=torch.channels_last)
    form = ParamFormat.of(weight)
    assert form.flatten(weight).data_ptr() == weight.data_ptr()
    assert form.unflatten(torch.empty(weight.numel())).stride() == weight.stride()


def test_a_transposed_weight_keeps_its_strides_and_a_slice_becomes_contiguous():
    transposed = torch.randn(3, 5).t()
    assert ParamFormat.of(transposed).unflatten(torch.empty(15)).stride() == transposed.stride()
    sliced = torch.randn(6, 4)[::2]
    assert ParamFormat.of(sliced).order is None
    assert ParamFormat.of(sliced).unflatten(torch.empty(12)).is_contiguous()
    assert torch.equal(ParamFormat.of(sliced).flatten(sliced), sliced.reshape(-1))


def test_sums_are_never_narrower_than_fp32():
    found = [sum_dtype(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    assert found == [torch.float32, torch.float32, torch.float32, torch.float64]


@pytest.fixture
def line():
    specs = [ParamSpec("a", (5, 3), "bfloat16"), ParamSpec("b", (40,), "float32"), ParamSpec("c", (2,), "bfloat16")]
    return LayoutRef(FlatLayout.build(specs, 2, 64))


def test_what_came_first_is_not_the_senders_own_memory(line):
    shard = GradientShard(line, Homes(accelerators.get("cpu"), torch.device("cpu")))
    values = torch.ones(line.layout.buckets[0].share_numel)
    shard.add(0, values, 1.0)
    values.fill_(7.0)
    assert shard.share(0).max() == 1.0


def test_narrow_buckets_are_those_whose_sums_are_wider(line):
    narrow = line.narrow_buckets
    for index in range(len(line.layout.buckets)):
        assert bool(narrow >> index & 1) == (line.dtype_of(index) == torch.bfloat16)


@pytest.fixture
def masters(line):
    weights = FlatBuffer(line)
    for at, chunk in enumerate(line.layout.chunks):
        weights.chunks[at] = torch.arange(chunk.numel, dtype=torch.float32).to(getattr(torch, chunk.dtype))
    formats = [ParamFormat(spec.shape, None) for spec in line.layout.params]
    made = Masters(line, 1, weights, GradientShard(line, Homes(accelerators.get("cpu"), torch.device("cpu"))), formats, {})
    for index, _ in enumerate(line.layout.buckets):
        made.adopt_source(index, weights.share(index, 1).float() + 2.0**-12)
    made.make_params()
    return made, weights


def test_the_memory_of_what_was_read_becomes_that_of_a_master_that_may_have_it_and_needs_a_copy(line, masters):
    made, weights = masters
    for index, _ in enumerate(line.layout.buckets):
        source = weights.share(index, 1).to(torch.float64 if index == 0 else torch.float32, copy=True)
        kept = made.adopt_source(index, source, given=True)
        assert kept == (made.shard.share(index).data_ptr() == source.data_ptr())
        assert kept == (made.is_copy(index) and source.dtype != torch.float64)
        assert torch.equal(made.shard.share(index), source.float())
