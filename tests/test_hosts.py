"""The hosts that tests/hosts.py starts are hosts: apart, joined by links, and gone afterwards."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests import hosts

pytestmark = [pytest.mark.of_tests, pytest.mark.skipif(bool(hosts.reason()), reason=hosts.reason())]


def what_it_is(rank, world):
    total = torch.tensor([rank])
    dist.all_reduce(total)
    with open(f"/dev/shm/of rank {rank}", "w"):
        pass
    hosts.reached("written")
    return socket.gethostname(), os.getpid(), sorted(os.listdir("/dev/shm")), total.item()


def exchange(rank, world, num_bytes):
    begin = time.monotonic()
    if rank:
        dist.send(torch.ones(num_bytes, dtype=torch.uint8), 0)
    else:
        dist.recv(torch.empty(num_bytes, dtype=torch.uint8), 1)
    hosts.reached("sent")
    return time.monotonic() - begin


def num_there(namespaces):
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return len(found & set(namespaces))


def test_hosts_have_names_processes_and_memory_of_their_own_and_reach_each_other():
    with hosts.started(2, ranks=2) as net:
        made = net.namespaces
        assert num_there(made) == 3
        found = net.begin(what_it_is).wait_for("written").go_on().outcomes()
    assert [outcome.value[0] for outcome in found] == ["node0", "node0", "node1", "node1"]
    written = [["hosts", "of rank 0", "of rank 1"], ["hosts", "of rank 2", "of rank 3"]]
    assert [outcome.value[2] for outcome in found[1:3]] == written
    assert all(outcome.value[1] < 100 and outcome.value[3] == 6 for outcome in found)
    assert not num_there(made)


def test_what_crosses_a_link_is_counted_and_a_cut_one_carries_nothing():
    with hosts.started(2, bits_per_s=1e9) as net:
        call = net.begin(exchange, 2**20).wait_for("sent")
        sent, received = net.num_bytes(1)
        assert 2**20 < sent < 1.2 * 2**20
        assert received < 0.2 * 2**20
        call.go_on().outcomes()
        net.cut(1)
        [first, _] = net.begin(exchange, 8, group_timeout=2.0).outcomes(10.0)
        assert not first.ok
        assert net.num_bytes(1)[0] - sent < 2**16


def test_a_killed_host_is_gone_and_a_paused_one_comes_back():
    with hosts.started(2) as net:
        call = net.begin(exchange, 8).wait_for("sent")
        net.pause(1)
        call.go_on()
        assert call.outcomes(5.0, ranks=[0])[0].ok
        net.resume(1)
        assert call.outcomes(5.0)[1].ok
        call = net.begin(exchange, 8).wait_for("sent")
        net.kill(1)
        assert call.go_on([0]).outcomes(5.0)[1].kind == "killed"


@pytest.mark.full
def test_a_test_that_is_killed_leaves_nothing():
    script = (
        "from tests import hosts, test_hosts\n"
        "if __name__ == '__main__':\n"
        "    with hosts.started(2) as net:\n"
        "        net.begin(test_hosts.exchange, 8).wait_for('sent')\n"
        "        print(*net.namespaces, flush=True)\n"
        "        input()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as running:
        made = running.stdout.readline().decode().split()
        assert num_there(made) == 3
        running.kill()
    deadline = time.monotonic() + 20
    while num_there(made) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not num_there(made)
