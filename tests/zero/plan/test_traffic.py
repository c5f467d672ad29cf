"""The model of docs/scaling.md: what ranks send is what it says, and this page and docs/internals.md have its numbers."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

from tests.instruments import Ledger
from tests.loopback import run_ranks
from tests.parity import hybrid
from tests.zoo.case import backward, draw, real_loss, real_mlp
from zero import shard
from zero.comm.levels import HybridGroup
from zero.plan.budget import PlannedTraining, Traffic, budget_of, default_bucket_bytes, traffic_of
from zero.plan.families import Family, Seat
from zero.plan.layout import FlatLayout, ParamSpec

PAGE, INTERNALS = ((Path(__file__).parents[3] / "docs" / f"{name}.md").read_text() for name in ("scaling", "internals"))


def sent(entries, world):
    """Bytes that a rank sends for what it issued, and how often that goes round."""
    total = passes = 0
    for entry in entries:
        part = entry.numel * (world - 1) // world
        item = getattr(torch, entry.dtype).itemsize
        total += part * 2 * max(4, item) if entry.operation == "all_reduce" else part * item
        passes += 2 if entry.operation == "all_reduce" else 1
    return total, passes


SIZES = [
    (0, 2, False, 16),
    (2**31, 2, False, 32),
    (2**40, 2, False, 64),
    (2**40, 2, True, 16),
    (2**27, 2, True, 8),
    (0, 2, True, 3),
    (0, 16, True, 4),
]


@pytest.mark.parametrize(("weight_bytes", "world", "on_network", "mib"), SIZES)
def test_a_network_has_more_and_smaller_buckets_and_a_large_model_larger_ones(weight_bytes, world, on_network, mib):
    assert default_bucket_bytes(weight_bytes, world, on_network) == mib * 2**20


def test_one_rank_on_a_device_has_the_largest_buckets():
    assert default_bucket_bytes(2**27, 1, False, is_host=False) == 64 * 2**20
    assert default_bucket_bytes(2**27, 2, False, is_host=False) == default_bucket_bytes(2**27, 1, False) == 16 * 2**20


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_sends_what_the_model_says(stage, num_backwards, dtype, world):
    def program(group):
        ledger, model = Ledger(group), real_mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"dtype": dtype, "accumulation": num_backwards, "bucket_bytes": 256}
        optimizer = shard(model, inner, stage=stage, group=ledger, **options)
        for step in range(2):  # the first one learns the order
            ledger.section = f"step {step}"
            for micro in range(num_backwards):
                backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, step, micro, real=True))))
            optimizer.step()
            optimizer.zero_grad()
        entries = [entry for entry in ledger.of("step 1") if not entry.is_message]
        return sent(entries, world), traffic_of(optimizer.sharding.layout_ref.layout, stage, world, num_backwards)

    for (num_bytes, passes), traffic in run_ranks(world, program):
        assert (traffic.total, traffic.passes) == (num_bytes, passes)
        assert traffic.total > 0


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_so_does_one_in_groups_that_replicate_states(stage, num_backwards, dtype):
    def program(everyone):
        group = hybrid(everyone, 2)
        inside, across = Ledger(group.inner), Ledger(group.outer)
        model, group = real_mlp(), HybridGroup(group, inside, across)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"dtype": dtype, "accumulation": num_backwards, "bucket_bytes": 256}
        optimizer = shard(model, inner, stage=stage, group=group, **options)
        for step in range(2):
            inside.section = across.section = f"step {step}"
            for micro in range(num_backwards):
                backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, step, micro, real=True))))
            optimizer.step()
            optimizer.zero_grad()
        entries = [[entry for entry in ledger.of("step 1") if not entry.is_message] for ledger in (inside, across)]
        return [sent(each, 2) for each in entries], traffic_of(optimizer.sharding.layout_ref.layout, stage, 4, num_backwards)

    for ((inside, passes), (across, more)), traffic in run_ranks(4, program):
        assert (traffic.gradients + traffic.weights, traffic.across, traffic.passes) == (inside, across, passes + more)
        assert traffic.across > 0


def rows(*head, page=PAGE):
    """The cells of the table that begins with these columns, without its head."""
    _, _, below = page.partition(f"| {' | '.join(head)} |")
    lines = itertools.takewhile(lambda line: line.startswith("|"), below.splitlines()[1:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def test_the_page_has_the_numbers_of_the_model():
    layer = [ParamSpec(f"layer {number}", (7_000_000_000 // 32,), "bfloat16") for number in range(32)]
    found = rows("ranks", "stage")
    assert len(found) == 6
    for world, stages, num_bytes, *seconds in found:
        for stage in map(int, stages.split(", ")):
            traffic = traffic_of(FlatLayout.build(layer, int(world) if stage else 1, 256 * 2**20), stage, int(world))
            assert num_bytes == f"{traffic.gradients / 1e9:.1f} + {traffic.weights / 1e9:.1f}"
            assert seconds == [f"{traffic.seconds(int(world), speed * 1e9, 5e-6):.2f}" for speed in (12.5, 50, 450)]


def host_seconds(hosts, way):
    """What leaves a host of eight ranks in a step, and the seconds that it takes at each speed, as the page says it."""
    layer = [ParamSpec(f"layer {number}", (7_000_000_000 // 32,), "bfloat16") for number in range(32)]
    replicates, of_gradients = way == "replicas", (1 + 4 / 256) / 2 if way.endswith("8 bits") else 1.0
    layout = FlatLayout.build(layer, 8 if replicates else 8 * hosts, 256 * 2**20)
    traffic = traffic_of(layout, 2, 8 * hosts)
    sent = traffic.gradients * of_gradients + traffic.weights
    outside = 8 * traffic.across if replicates else sent
    inside = traffic.gradients + traffic.weights if replicates else sent if way.startswith("two") else 0
    passed = 2 * len(layout.buckets) * (8 * hosts - 1 if way.startswith("flat") else 7 + hosts - 1)
    return outside, [outside / (speed * 1e9) + inside / 450e9 + passed * 5e-6 for speed in (1.25, 12.5, 50)]


def test_the_page_has_the_numbers_of_hosts_with_several_ranks():
    found = rows("hosts", "way", page=INTERNALS)
    assert len(found) == 15
    for hosts, way, num_bytes, *seconds in found:
        outside, expected = host_seconds(int(hosts), way)
        assert [num_bytes, *seconds] == [f"{outside / 1e9:.1f}", *(f"{each:.2f}" for each in expected)]


def test_the_page_has_the_tokens_whose_backward_hides_the_gradients():
    found = re.findall(r"^\| ([\d.]+) GB/s.*?\| ([\d,]+) +\|", PAGE, re.MULTILINE)
    assert len(found) == 4 and "b F / (4 L)" in PAGE and "At 400 Tflop/s in bf16" in PAGE
    for speed, tokens in found:
        assert int(tokens.replace(",", "")) == int(2 * 400e12 / (4 * float(speed) * 1e9))


def test_time_is_bytes_over_the_link_and_a_delay_a_rank_and_collective():
    assert Traffic(6, 4, 3).seconds(world=5, link_bytes_per_s=2.0, latency_s=0.5) == pytest.approx(5.0 + 3 * 4 * 0.5)


def test_the_page_speaks_of_the_stages_that_there_are():
    assert re.search(r"\| 0 .*\| 1 .*\| 2 ", PAGE, re.DOTALL)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", [0, 1])
def test_a_rank_needs_what_one_needs_in_a_group_without_parts(family, shards, fused_step, waits):
    specs = [ParamSpec(name, (64, 48), "bfloat16", family=family) for name in "abc"]
    seats = [(part, number) for number in range(shards) for part in range(2)]  # two ranks have the layers together
    parted = (Family(shards, tuple(Seat(part, number) for part, number in seats), 2),)
    copies = tuple(Seat(0, number, copy) for copy, number in seats)
    training = PlannedTraining(num_ranks=shards, waits=waits, fused_step=fused_step)
    alone = FlatLayout.build([dataclasses.replace(spec, family=0) for spec in specs], shards, 8192)
    beside = FlatLayout.build(specs, shards, 8192, parted=parted, copies=copies)
    for rank, (_, number) in enumerate(seats):
        assert budget_of(beside, rank, training) == budget_of(alone, number, training)
