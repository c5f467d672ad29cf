"""Ranks on several hosts train to the bits of the oracle, as those on one host do. See tests/test_parity.py."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import zero
from tests import grid, hosts, inside, parity
from tests.random_training import point_of
from tests.zoo import CASES

pytestmark = pytest.mark.skipif(bool(hosts.reason()), reason=hosts.reason())

CORE = ("two_layers", "clipped_by_the_two_norm", "tied_embedding_and_head", "experts_routed_by_data")
MORE = list(CASES)[::8]
RANDOM = range(1000, 1012)
DTYPES = ("fp32", "bf16")


def points(world, cases):
    """Each case at each stage; the dtype, the bucket and the entry take turns."""
    turns = [(case, stage, index + stage) for index, case in enumerate(cases) for stage in range(4)]
    chosen = [
        grid.Point(
            stage, world, DTYPES[turn % 2], ("tiny", "huge")[turn // 2 % 2], ("plain", "engine")[turn % 3 == 0 and stage < 3],
            "cpu", case,
        )
        for case, stage, turn in turns
    ]  # fmt: skip
    return list(filter(grid.can_be, chosen))


def failures_on(net, chosen):
    carried = net.run(parity.train_points, chosen, timeout=60.0 + 3 * len(chosen))
    assert all(len(each) == len(chosen) for each in carried), [each[-1] for each in carried]
    return parity.judged(dict(zip(chosen, map(list, zip(*carried, strict=True)), strict=True)))


def way_between(rank, world, shared):
    model = nn.Linear(4, 4)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, shared_memory=shared)
    return os.getpid(), not inside.share_host_memory(optimizer)[0], inside.layout(optimizer).bucket_bytes


def test_two_hosts_train_as_one():
    with hosts.started(2) as net:
        (here, *of_here), (there, *of_there) = net.run(way_between, True)
        assert here == there, "the same process ids, which are others' on the other host"
        assert of_here == of_there == [True, 3 * 2**20], "memory apart, and buckets for a network"
        failures = failures_on(net, points(2, CORE))
    assert not failures, str(failures)


@pytest.mark.full
@pytest.mark.parametrize(("count", "ranks"), [(2, 1), (2, 2), (3, 1)])
def test_more_cases_on_more_hosts(count, ranks):
    with hosts.started(count, ranks) as net:
        chosen = points(net.world, MORE) + [replace(point_of(seed), world=net.world) for seed in RANDOM]
        for start in range(0, len(chosen), parity.CHUNK):
            failures = failures_on(net, chosen[start : start + parity.CHUNK])
            assert not failures, str(failures)


def ways_inside_and_across(rank, world):
    model = nn.Linear(4, 4)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, shard_ranks="host")
    return [*inside.sizes_of_groups(optimizer)], [*inside.share_host_memory(optimizer)]


@pytest.mark.full
@pytest.mark.promise("R15")
def test_states_in_shares_of_the_ranks_of_each_host_equal_the_oracle():
    """Ranks of a host share memory then, though not all ranks do."""
    with hosts.started(2, 2) as net:
        assert net.run(ways_inside_and_across) == [([4, 2, 2], [False, True, False])] * 4
        chosen = [replace(point, shard_ranks="host") for point in points(4, MORE) if point.stage]
        for start in range(0, len(chosen), parity.CHUNK):
            failures = failures_on(net, chosen[start : start + parity.CHUNK])
            assert not failures, str(failures)
