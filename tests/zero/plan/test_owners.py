"""Who owns which whole tensor: balance, padding and the largest bucket, on paper."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.layout import FlatLayout, ParamSpec
from zero.plan.owners import EVEN, Tensor, shelves_of

WORLDS = (2, 3, 4, 8, 16, 32, 64)


def layers(number, *shapes):
    return [shape for _ in range(number) for shape in shapes]


def gpt2(number, width):
    return layers(number, (3 * width, width), (width, width), (4 * width, width), (width, 4 * width))


def llama(number, width, hidden, heads):
    return experts(number, width, hidden, 1, heads)


def experts(number, width, hidden, num_experts, heads):
    of_one = [(hidden, width), (hidden, width), (width, hidden)]
    return layers(number, (width, width), (heads, width), (heads, width), (width, width), *num_experts * of_one)


MODELS = {
    "GPT-2": gpt2(12, 768),
    "GPT-2 XL": gpt2(48, 1600),
    "Llama-7B": llama(32, 4096, 11008, 4096),
    "Llama-3-8B": llama(32, 4096, 14336, 1024),
    "8 experts": experts(32, 4096, 14336, 8, 1024),
    "64 experts": experts(16, 2048, 1024, 64, 2048),
}


def work(shape):
    return min(shape) ** 2 * max(shape)


def busiest(works, num_ranks):
    """The least that the busiest of so many ranks can have to do, from below: of some of the largest tensors one rank has
    several."""
    most = [sum(works) / num_ranks]
    ordered = sorted(works, reverse=True)
    for number in range(1, 1 + len(ordered) // num_ranks + 1):
        first = (number - 1) * num_ranks + 1  # with so many tensors some rank has `number` of them
        if first <= len(ordered):
            most.append(sum(ordered[first - number : first]))
    return max(most)


@pytest.mark.promise("W02")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_busiest_rank_has_at_most_a_tenth_more_to_do_than_the_mean_or_as_little_as_can_be(name, world):
    specs = [ParamSpec(f"p{at}", shape, "bfloat16", work=work(shape)) for at, shape in enumerate(MODELS[name])]
    layout = FlatLayout.build(specs, world, 50 << 20)
    works = [layout.work_of(rank) for rank in range(world)]
    assert sum(works) == sum(spec.work for spec in specs)
    assert max(works) <= max(EVEN * sum(works) / world, busiest([spec.work for spec in specs], world))


@pytest.mark.promise("W02")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODELS)
def test_whole_tensors_take_hardly_more_memory_where_there_are_enough_of_them(name, world):
    shapes = MODELS[name]
    specs = [ParamSpec(f"p{at}", shape, "bfloat16", work=work(shape)) for at, shape in enumerate(shapes)]
    layout = FlatLayout.build(specs, world, 1)
    numel = sum(rows * columns for rows, columns in shapes)
    padding = sum(chunk.numel for chunk in layout.chunks) / numel - 1
    assert padding < (0.1 if len(shapes) >= 3 * world else 1.0)
    widest = max(rows * columns for rows, columns in shapes)
    assert max(bucket.span.numel for bucket in layout.buckets) <= 3 * world * widest


tensors = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=25)


@settings(max_examples=100, deadline=None)
@given(tensors, st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_every_tensor_has_one_owner_and_nothing_is_lost(sizes, loads):
    own = [Tensor(param, 16 * numel, work) for param, (numel, work) in enumerate(sizes)]
    shelves = shelves_of(own, loads)
    assert all(len(shelf) == len(loads) for shelf in shelves)
    found = [tensor for shelf in shelves for region in shelf for tensor in region]
    assert sorted(found) == own
    assert shelves == shelves_of(own, loads)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_equal_tensors_are_shared_out_evenly_and_without_padding(world, rows, work_of_one):
    own = [Tensor(param, 16, work_of_one) for param in range(world * rows)]
    shelves = shelves_of(own, [0] * world)
    assert [[len(region) for region in shelf] for shelf in shelves] == [[1] * world] * rows
    reached = [tensor.param for shelf in shelves for tensor in itertools.chain(*shelf)]
    assert sorted(reached) == list(range(world * rows))


def test_who_has_less_to_do_already_gets_more():
    [shelf] = shelves_of([Tensor(0, 16, 5), Tensor(1, 16, 3)], [4, 0])
    assert [[tensor.param for tensor in region] for region in shelf] == [[1], [0]]
