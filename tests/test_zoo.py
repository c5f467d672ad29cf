"""Every case of the zoo is worth running: finite, repeatable, moving what it says, and independent of the order of sums."""

from functools import cache

import pytest
import torch

from tests.oracle import StaticScale, compare, reference, weights_of
from tests.zoo import CASES

pytestmark = pytest.mark.of_tests

EACH = pytest.mark.parametrize("name", list(CASES))


@cache
def trained(name, world, dtype):
    """Returns what a case gives, to be looked at and not changed: several tests do."""
    return reference(CASES[name], world, dtype)


def test_there_are_as_many_cases_as_were_promised_and_each_has_a_tag():
    assert len(CASES) >= 45
    assert all(case.tags for case in CASES.values())


@pytest.mark.parametrize(
    "pair",
    [
        "shared reentrant",
        "tied reentrant",
        "tied clip",
        "shared backwards",
        "nested shared",
        "unused backwards",
        "unused decay",
        "unused clip",
        "divergent backwards",
        "divergent no_sync",
        "divergent clip",
        "divergent frozen",
        "divergent momentum",
        "frozen clip",
        "frozen checkpoint",
        "frozen momentum",
        "edit overflow",
        "edit divergent",
        "edit momentum",
        "empty shapes",
        "groups clip",
        "groups scheduler",
        "many strided",
        "buffers backwards",
    ],
)
def test_difficulties_are_paired(pair):
    assert any(case.tags >= set(pair.split()) for case in CASES.values())


@EACH
def test_a_case_is_finite_and_moves_what_it_says_at_every_world_size(name):
    case = CASES[name]
    dtype = case.dtypes[0]
    before = weights_of(case.build())
    for world in range(case.needs_world, 5):
        traces = trained(name, world, dtype)
        for trace in traces:
            for step in trace.steps:
                assert all(weight.isfinite().all() for weight in step.weights.values() if weight.is_floating_point())
        after = traces[0].steps[-1].weights
        moved = {name for name, weight in before.items() if not torch.equal(weight.to(after[name].dtype), after[name])}
        assert not {parameter for parameter in moved if not case.moves(parameter)}
        if world == 4:
            assert moved == {parameter for parameter in before if case.moves(parameter)}


@EACH
def test_a_case_gives_the_same_twice_and_whatever_the_order_of_the_sums(name):
    case = CASES[name]
    dtype = case.dtypes[0]
    expected = trained(name, 3, dtype)
    compare(reference(case, 3, dtype), expected, exact=True, state=True, name=name)
    # The place of the division is part of what fp32 masters mean: sum in fp32, times one over the number of ranks.
    turned = reference(case, 3, dtype, backwards_order=True, divide_late=dtype != "fp32")
    compare(turned, expected, exact=case.is_exact(dtype, 3), state=True, name=name)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "fp32" in case.exact])
def test_a_case_that_says_it_is_exact_rounds_nowhere(name):
    """In fp64 it gives the same numbers, so no sum of it depends on its order. Where the optimizer rounds within one tensor, as
    one of matrices does, its gradients do, which do not depend on the weights then."""
    case = CASES[name]
    for narrow, wide in zip(trained(name, 4, "fp32"), reference(case, 4, "fp64"), strict=True):
        for one, other in zip(narrow.steps, wide.steps, strict=True):
            found, wide_ones = (one.grads, other.grads) if "whole" in case.tags else (one.weights, other.weights)
            for parameter, values in found.items():
                assert values is None or torch.equal(values.double(), wide_ones[parameter].double()), parameter


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if len(name) % 2 == place or len(case.dtypes) == 2 else pytest.mark.full)
        for name, case in CASES.items()
        for place, dtype in enumerate(case.dtypes[1:])
    ],
)
def test_a_case_in_low_precision_does_not_depend_on_the_order_of_the_sums(name, dtype):
    case = CASES[name]
    scale = StaticScale(8.0) if dtype == "fp16" and case.scaled else None
    world = 3 if dtype == "bf16" else 4
    expected = reference(case, world, dtype, loss_scale=scale)
    assert any(step.masters for step in expected[0].steps)
    assert all(weight.isfinite().all() for weight in expected[0].steps[-1].weights.values() if weight.is_floating_point())
    turned = reference(case, world, dtype, loss_scale=scale, backwards_order=True)
    compare(turned, expected, exact=case.is_exact(dtype, world), state=True, name=name)
    if scale is not None:
        # The scale is small enough that nothing overflows: a skipped step has no gradients, and would compare nothing.
        unscaled = trained(name, world, case.dtypes[0])[0]
        for step, plain in zip(expected[0].steps, unscaled.steps, strict=True):
            assert has_gradients(step) == has_gradients(plain)


def has_gradients(step):
    return any(grad is not None for grad in step.grads.values())
