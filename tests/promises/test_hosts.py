"""A host fails, or its link, in every phase of a training on several: all others end and say which rank and host it was."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from tests import hosts, ranks
from tests.faults import FailingSGD
from zero.errors import ZeroError

pytestmark = pytest.mark.skipif(bool(hosts.reason()), reason=hosts.reason())

ROOT = Path(__file__).parents[2]
LIMIT_S = 4.0  # the ranks' own
# The seconds in which ranks find out which rank failed: three answers of a store that may be lost, and time for other programs.
SLACK_S = 16.0
STEP = 3  # the one that it fails in
SEEN = {  # by place of the loss: the text that others read of the rank
    "forward": "rank 1 on node1 was last seen before a backward of step 3",
    "backward": "rank 1 on node1 was last seen in a backward of step 3",
    "settle": "rank 1 on node1 was last seen after a backward of step 3",
    "update": "rank 1 on node1 was last seen in the update of step 3",
    "save": "rank 1 on node1 was last seen before a backward of step 4",
    "load": "rank 1 on node1 was last seen before a backward of step 4",
}


def train(rank, world, where, folder, num_steps, clock_off_s=0.0):
    """The error that this rank saw and how long after it came to where it fails, or the weights."""
    if rank and clock_off_s:
        now = time.time
        time.time = lambda: now() + clock_off_s
    reached = [0.0]
    model, optimizer, inner = sharded(3 if where == "forward" else 2)
    step = 0

    def at(phase):
        if (phase, step) == (where, STEP) and not reached[0]:  # an update has several calls
            hosts.reached(phase)
            reached[0] = time.monotonic()

    model[0].register_forward_pre_hook(lambda *_: at("forward"))
    model[2].weight.register_hook(lambda _: at("backward"))
    inner.at = lambda: at("update")
    try:
        for step in range(1, num_steps + 1):
            model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
            at("settle")
            optimizer.settle()
            optimizer.step()
            optimizer.zero_grad()
            at("save")
            if step == STEP - 1 or (step, where) == (STEP, "save"):
                zero.save(folder / "checkpoints", optimizer)
            at("load")
            if (step, where) == (STEP, "load"):
                zero.load(folder / "checkpoints", optimizer)
    except ZeroError as error:
        return str(error), time.monotonic() - reached[0]
    return [param.detach().clone() for param in model.parameters()]


def sharded(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inner = FailingSGD(model.parameters(), lr=0.1)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0}
    return model, zero.shard(model, inner, stage=stage, bucket_bytes=64, elementwise=True, **limits), inner


def resume(rank, world, folder):
    model, optimizer, _ = sharded(2)
    zero.load(folder / "checkpoints", optimizer)
    return [param.detach().clone() for param in model.parameters()]


def trained(rank, world, num_steps):
    """The same on one host."""
    model, optimizer, _ = sharded(2)
    for _ in range(num_steps):
        model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(map(torch.equal, one, other))


def told_by_others(where, how, folder, count=2):
    """What ranks of other hosts say; how long it took them is bounded, and so is their end."""
    with hosts.started(count) as net:
        call = net.begin(train, where, folder, 6).wait_for(where)
        getattr(net, how)(1)
        others = [rank for rank in range(count) if rank != 1]
        found = call.go_on(others if how != "cut" else None).outcomes(60.0, ranks=others)
        assert all(outcome.ok for outcome in found), ranks.describe(found)
        for outcome in found:
            text, seconds = outcome.value
            assert seconds < LIMIT_S + SLACK_S, text
    [loaded] = ranks.run(1, resume, folder)
    assert same(loaded, ranks.run(count, trained, STEP - 1)[0]), "the last checkpoint"
    return [outcome.value[0] for outcome in found]


@pytest.mark.promise("N17")
@pytest.mark.parametrize(
    ("where", "how"),
    [
        (where, how) if (where, how) == ("backward", "cut") else pytest.param(where, how, marks=pytest.mark.full)
        for where in SEEN
        for how in ("cut", "pause", "kill")
    ],
)
def test_a_host_that_is_lost_is_named_with_its_rank_on_all_others(where, how, tmp_path):
    for text in told_by_others(where, how, tmp_path):
        assert SEEN[where] in text, text


@pytest.mark.full
@pytest.mark.parametrize("how", ["cut", "pause", "kill"])
def test_two_other_hosts_say_the_same_of_one(how, tmp_path):
    first, second = told_by_others("backward", how, tmp_path, count=3)
    assert SEEN["backward"] in first and SEEN["backward"] in second, (first, second)


@pytest.mark.full
def test_the_host_that_holds_the_store_is_named(tmp_path):
    with hosts.started(3) as net:
        call = net.begin(train, "backward", tmp_path, 6).wait_for("backward")
        net.kill(0)
        found = call.go_on([1, 2]).outcomes(60.0, ranks=[1, 2])
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    for outcome in found:
        assert "rank 0 on node0" in outcome.value[0], outcome.value


@pytest.mark.full
def test_a_pause_shorter_than_the_limit_and_a_clock_an_hour_off_change_nothing(tmp_path):
    with hosts.started(2) as net:
        call = net.begin(train, "backward", tmp_path, 6, 3600.0).wait_for("backward")
        net.pause(1)
        call.go_on()
        time.sleep(LIMIT_S / 4)
        net.resume(1)
        found = call.outcomes(60.0)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    expected = ranks.run(2, trained, 6)
    assert all(same(outcome.value, weights) for outcome, weights in zip(found, expected, strict=True))


def send_much(rank, world, numel):
    model = nn.Linear(numel, 1, bias=False)
    nn.init.zeros_(model.weight)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0, "bucket_bytes": 2**19}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=2, **limits)
    for _ in range(2):
        model(torch.ones(1, numel)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().unique().tolist()


@pytest.mark.full
def test_a_slow_link_is_no_failure():
    """Of 10 Mbit/s: a step takes longer than the limit, and each of its collectives takes less."""
    with hosts.started(2, bits_per_s=1e7) as net:
        assert net.run(send_much, 2**20 + 2**19, timeout=120.0) == [[-2.0], [-2.0]]


def connect_wrongly(rank, world):
    if rank:
        os.environ["MASTER_ADDR"] = hosts.address_of(9)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": LIMIT_S}
    model = nn.Linear(2, 2)
    try:
        zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, **limits)
    except ZeroError as error:
        return str(error)


@pytest.mark.promise("N17")
def test_a_wrong_rendezvous_address_is_told_with_the_rank_and_its_host():
    with hosts.started(2) as net:
        first, second = net.run(connect_wrongly, group_timeout=None)
    assert "rank 1 on node1" in second and hosts.address_of(9) in second and "MASTER_ADDR" in second, second
    assert "rank 0 on node0" in first and "MASTER_ADDR" in first, first


NUM_STEPS = 400  # the steps of the example, which would otherwise be over before a host is lost


def launched(net, folder, *further, shard_ranks=None):
    """The command of docs/multi-node.md on every host, in a folder that has the examples."""
    (folder / "examples").mkdir()
    program, few, stage = (ROOT / "examples" / "elastic.py").read_text(), "STEPS, SAVE_EVERY, SAMPLES = 12,", "stage=2,"
    assert few in program
    assert stage in program
    program = program.replace(few, few.replace("12", str(NUM_STEPS)))
    (folder / "examples" / "elastic.py").write_text(program.replace(stage, f"{stage} shard_ranks={shard_ranks!r},"))
    section = (ROOT / "docs" / "multi-node.md").read_text()
    command = re.search(r"`(torchrun .*?)`", section)[1].split()
    if further:
        assert " ".join(further) in section
        command[1:3] = further
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [net.execute(host, command, env, folder=str(folder)) for host in range(net.count)]


@pytest.mark.full
def test_the_line_of_the_page_trains_on_two_hosts(tmp_path):
    with hosts.started(2) as net:
        programs = launched(net, tmp_path)
        assert [program.wait(120.0) for program in programs] == [0, 0], programs[0].output
        assert f"step {NUM_STEPS} of {NUM_STEPS} with 4 ranks" in programs[0].output + programs[1].output


@pytest.mark.full
@pytest.mark.parametrize("shard_ranks", [None, "host"])
def test_torchrun_goes_on_with_two_hosts_when_it_loses_the_third(tmp_path, shard_ranks):
    with hosts.started(3) as net:
        programs = launched(net, tmp_path, "--nnodes", "2:3", "--max-restarts", "3", shard_ranks=shard_ranks)
        end = time.monotonic() + 120.0
        while not (tmp_path / "checkpoints").exists():
            assert time.monotonic() < end, programs[0].output
            time.sleep(0.05)
        net.kill(2)
        assert [program.wait(240.0) for program in programs[:2]] == [0, 0], programs[0].output
        assert f"step {NUM_STEPS} of {NUM_STEPS} with 4 ranks" in programs[0].output + programs[1].output


def train_on_two_of_two(rank, world, shard_ranks):
    """The error that this rank saw, and how long after it came to where another host is lost."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0}
    optimizer = zero.shard(model, inner, stage=2, bucket_bytes=64, shard_ranks=shard_ranks, **limits)
    step, begun = 0, 0.0

    def reach(_):
        nonlocal begun
        if step == STEP:
            hosts.reached("backward")
            begun = time.monotonic()

    model[2].weight.register_hook(reach)
    try:
        while step < 2 * STEP:
            step += 1
            model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except ZeroError as error:
        return str(error), time.monotonic() - begun
    return "nothing was wrong", 0.0


@pytest.mark.full
@pytest.mark.parametrize("shard_ranks", ["host", None])
@pytest.mark.parametrize("how", ["cut", "pause", "kill"])
def test_a_host_that_is_lost_is_named_where_two_have_two_ranks_each(how, shard_ranks):
    """Ranks of one host share memory. Where each has all shares they need no other for weights, and still go on with none."""
    with hosts.started(2, 2) as net:
        call = net.begin(train_on_two_of_two, shard_ranks).wait_for("backward")
        getattr(net, how)(1)
        found = call.go_on([0, 1] if how != "cut" else None).outcomes(60.0, ranks=[0, 1])
        assert all(outcome.ok for outcome in found), ranks.describe(found)
    for outcome in found:
        text, seconds = outcome.value
        assert re.search("rank [23] on node1 was last seen in a backward of step 3", text), text
        assert seconds < LIMIT_S + SLACK_S
