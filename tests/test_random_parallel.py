"""Random parallel models: a few by day, the others at night; and that those by day have all that can be drawn."""

import pytest

from tests import ranks
from tests.devices import needs_sim
from tests.experts import ALL_KINDS, COPIED, CUT
from tests.random_parallel import DEVICES, WORLD, Plan, train, wrong

BY_DAY, AT_NIGHT = [17, 23, 26, 25, 36, 60], range(200)


@pytest.mark.promise("Q01", "Q02", "Q07")
def test_random_parallel_models_train_as_in_one_process():
    assert wrong(BY_DAY) == []


@pytest.mark.full
@pytest.mark.parametrize("first", AT_NIGHT[::8])
def test_more_random_parallel_models_train_as_in_one_process(first):
    assert wrong(list(range(first, first + 8))) == []


@pytest.mark.full
@needs_sim
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("first", AT_NIGHT[:48:8])
def test_random_parallel_models_train_on_a_device_as_in_one_process(first, device):
    assert wrong(list(range(first, first + 8)), device) == []


def test_models_by_day_are_of_every_kind_and_stage():
    plans = [Plan.draw(seed) for seed in BY_DAY]
    assert {plan.kind for plan in plans} == {*ALL_KINDS, "layers"}
    assert {plan.options["stage"] for plan in plans} >= {2, 3}
    assert {plan.way for plan in plans} >= {"", COPIED, CUT}


@pytest.mark.of_tests
def test_a_model_with_another_gradient_is_found():
    assert all("the norm is" in said for said in ranks.run(WORLD, with_sums, 3))


def with_sums(rank, world, seed):
    plan = Plan.draw(seed)
    plan.options["reduce"] = "sum"
    return train(plan, rank, "")
