"""Ranks of several hosts exchange tensors inside each host first: with the same bits as in one level, and in fewer bytes."""

import contextlib
import os
import random
import socket
import struct
from unittest import mock

import pytest
import torch
from torch import nn

import accelerators
import zero
from tests import hosts, ranks
from tests.instruments import Ledger
from tests.loopback import run_ranks
from tests.parity import by_host, judge, train_point
from tests.test_parity_hosts import CORE, points
from zero.comm.connect import connect
from zero.comm.levels import HostLevels

NUMEL = 2**20
TCP_INFO_RECEIVED = 128  # the offset of a socket's count of received bytes
WAYS = [(2, 2), (3, 2), (2, 3)]  # hosts, and ranks of each
on_hosts = pytest.mark.skipif(bool(hosts.reason()), reason=hosts.reason())


def numbers(rank, round_, numel, dtype):
    """Of magnitudes so different that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return (torch.randn(numel, generator=generator) * 10 ** torch.randint(-3, 4, (numel,), generator=generator)).to(dtype)


def expected(num_hosts, num_local, round_, numel, dtype):
    found = [numbers(rank, round_, numel, dtype).float() for rank in range(num_hosts * num_local)]
    of_hosts = []
    for host in range(num_hosts):
        first, *rest = found[host * num_local : (host + 1) * num_local]
        for each in rest:
            first = first + each
        of_hosts.append(first)
    total, *rest = of_hosts
    for each in rest:
        total = total + each
    return total


@pytest.mark.promise("N19")
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_hosts", "num_local"), WAYS)
def test_a_sum_adds_the_ranks_of_each_host_first_whatever_the_way(num_hosts, num_local, dtype, shares_memory):
    """Several are on their way, and each rank waits for them in an order of its own."""
    world, share, rounds = num_hosts * num_local, 33, 5

    def program(group):
        made = by_host(group, num_local, shares_memory)
        assert isinstance(made, HostLevels)
        buckets = []
        for round_ in range(rounds):
            buckets.append(made.staging(world * share, dtype, torch.device("cpu")))
            buckets[-1].copy_(numbers(group.rank, round_, world * share, dtype))
        pending = [made.reduce_scatter(bucket, torch.float32) for bucket in buckets]
        order = random.Random(group.rank).sample(range(rounds), rounds)
        waited = {round_: pending[round_].wait() for round_ in order}
        assert all(each.done() for each in pending)
        return [waited[round_].clone() for round_ in range(rounds)]

    found = run_ranks(world, program)
    for round_ in range(rounds):
        whole = torch.cat([of_rank[round_] for of_rank in found])
        assert torch.equal(whole, expected(num_hosts, num_local, round_, world * share, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("num_hosts", "num_local"), WAYS)
def test_weights_are_gathered_from_all_ranks_though_sums_are_still_on_their_way(num_hosts, num_local, dtype):
    world, share, rounds = num_hosts * num_local, 5, 4

    def program(group):
        made = by_host(group, num_local)
        buckets = [torch.zeros(world * share, dtype=dtype) for _ in range(rounds)]
        pending, sums = [], []
        for round_, bucket in enumerate(buckets):
            sums.append(made.reduce_scatter(torch.full((world,), 1.0), torch.float32))
            bucket.view(world, share)[group.rank] = 10 * round_ + group.rank
            pending.append(made.all_gather(bucket))
        for round_ in random.Random(group.rank).sample(range(rounds), rounds):
            assert pending[round_].wait() is buckets[round_]
            assert sums[round_].wait().tolist() == [world]
        return [bucket.view(world, share).unique(dim=1).flatten().tolist() for bucket in buckets]

    assert run_ranks(world, program) == [[[10 * round_ + rank for rank in range(world)] for round_ in range(rounds)]] * world


def test_across_hosts_one_stream_a_host_is_sent():
    def program(group):
        made, numel = by_host(group, 4), 8 * 16
        across = made._parts[1] = Ledger(made._parts[1])
        made.reduce_scatter(torch.ones(numel, dtype=torch.bfloat16), torch.float32).wait()
        made.all_gather(torch.ones(numel, dtype=torch.bfloat16)).wait()
        return [(entry.operation, entry.numel, entry.dtype) for entry in across.entries if not entry.is_message]

    found = run_ranks(8, program)
    assert found == [[("reduce_scatter", 32, "float32"), ("all_gather", 32, "bfloat16")]] * 8


@pytest.mark.parametrize(
    ("case", "num_hosts", "num_local"),
    [
        pytest.param(case, *way, marks=[] if index < 2 and (index + number) % 3 == 0 else pytest.mark.full)
        for index, case in enumerate(CORE)
        for number, way in enumerate(WAYS)
    ],
)
def test_trainings_in_two_levels_equal_the_oracle(case, num_hosts, num_local):
    """In all stages, dtypes in turns."""
    for point in points(num_hosts * num_local, [case]):
        carried = run_ranks(point.world, lambda group: train_point(point, group.rank, by_host(group, num_local)))  # noqa: B023
        assert judge(point, carried) is None


def named(rank, world, names):
    with mock.patch.object(socket, "gethostname", return_value=names[rank]):
        group = connect(accelerators.get("cpu"), shared_memory=False)
    group.close()
    return type(group).__name__


@pytest.mark.parametrize(
    ("names", "kind"),
    [("aaab", "TorchGroup"), ("abab", "TorchGroup"), ("abcd", "TorchGroup"), ("aaaa", "TorchGroup"), ("aabb", "HostLevels")],
)
def test_hosts_count_where_they_have_as_many_ranks_one_host_after_the_other(names, kind):
    assert ranks.run(4, named, names) == [kind] * 4


def rebuilt(rank, world):
    """Weights of a training, of one that is connected anew in a step, and of one that begins after that was closed."""
    found = []
    for when in (None, 2, None):
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01)
        with mock.patch.object(socket, "gethostname", return_value="aabb"[rank]):
            optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=2, bucket_bytes=512)
        assert type(optimizer.sharding.group).__name__ == "HostLevels"
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for again in range(1 + (step == when)):
                model(torch.randn(4, 16, generator=generator)).square().mean().backward()
                if not again and step == when:
                    generator.manual_seed(10 * step + rank)
                    optimizer.rebuild()  # it drops the gradients of this window
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        found.append([parameter.detach().tolist() for parameter in model.parameters()])
    return found


def test_groups_of_two_levels_that_are_connected_anew_train_on():
    found = ranks.run(4, rebuilt)
    assert found == [[found[0][0]] * 3] * 4


def come_from_other_hosts():
    """Bytes of what others sent this process so far, without headers and what was sent again."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as wire:
                if wire.family in (socket.AF_INET, socket.AF_INET6) and wire.getpeername()[0] != wire.getsockname()[0]:
                    info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, TCP_INFO_RECEIVED)[0]
    return total


def trained(rank, world, shared_memory, dtype):
    """The kind of its group, what came to this rank for one sum and for one gathering, in buckets, and its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = zero.shard(model, inner, stage=2, dtype=dtype, bucket_bytes=512, shared_memory=shared_memory)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(4, 16, generator=generator).to(next(model.parameters()).dtype)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    group = optimizer.sharding.group
    bucket, come = torch.ones(NUMEL, dtype=torch.float32 if dtype is None else torch.bfloat16), []
    for collective in (lambda: group.reduce_scatter(bucket, torch.float32), lambda: group.all_gather(bucket)):
        before = come_from_other_hosts()
        group.all_gather_bytes(b"")  # nobody begins before all have looked
        collective().wait()
        come.append((come_from_other_hosts() - before) / bucket.nbytes)
    optimizer.close()
    return type(group).__name__, come, [parameter.detach().view(torch.uint8).tolist() for parameter in model.parameters()]


def in_eight_bits(rank, world):
    """Bytes that come to this rank for a gradient in 8 bits, and the gradients' numbers."""
    model = nn.Linear(2048, 1024)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zero.shard(model, inner, stage=2, bucket_bytes=2**20, reduce_dtype="int8")
    come = []
    for _ in range(2):  # the second one knows the order
        before = come_from_other_hosts()
        optimizer.any_rank(False)  # nobody begins before all have looked
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.settle()
        optimizer.any_rank(False)
        come.append(come_from_other_hosts() - before)
        optimizer.zero_grad()
    optimizer.close()
    return come[-1], sum(param.numel() for param in model.parameters())


def trained_in_both(rank, world, dtype):
    return trained(rank, world, True, dtype), trained(rank, world, False, dtype), in_eight_bits(rank, world)


@on_hosts
@pytest.mark.promise("N18")
@pytest.mark.parametrize(("dtype", "num_sum"), [pytest.param(None, 0.5, marks=pytest.mark.full), ("bfloat16", 1.0)])
def test_two_hosts_of_two_ranks_send_less_and_have_the_bits_of_one_level(dtype, num_sum):
    """In one level both ranks of a host send the other one its half of a sum, and weights cross as gloo's broadcasts happen to;
    in two a half of each leaves either host once, sums as fp32, or in 8 bits."""
    with hosts.started(2, 2) as net:
        two, one, coded = zip(*net.run(trained_in_both, dtype), strict=True)
    (sums, weights), (sums_of_one, weights_of_one) = (
        [sum(each) for each in zip(*(come for _, come, _ in found), strict=True)] for found in (two, one)
    )
    assert [sums, weights, sums_of_one] == pytest.approx([2 * num_sum, 1.0, 2.0], rel=0.01)
    assert weights_of_one > 1.5
    (first, num), (second, _) = coded[:2]
    assert first + second == pytest.approx(num / 2 * (1 + 4 / 256), rel=0.03), "a byte a number, of a half of the host's sums"
    assert {kind for kind, *_ in (*two, *one)} == {"HostLevels"}
    assert [bits for *_, bits in two] == [bits for *_, bits in one]
