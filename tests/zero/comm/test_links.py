"""What ranks of several hosts send each other, as their links carry it."""

import time
from pathlib import Path

import pytest
import torch

import accelerators
from tests import hosts
from zero.comm.connect import connect

pytestmark = pytest.mark.skipif(bool(hosts.reason()), reason=hosts.reason())

BITS_PER_S = 2e7
NUMEL = 2**20  # half of which goes each way, in 0.8 s


def carried():
    """Bytes that this host received and sent so far."""
    [line] = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in line)
    counts = line.split(":")[1].split()
    return torch.tensor([int(counts[0]), int(counts[8])])


def parts_on_the_way(rank, world, name, late):
    """What part of it had come and gone, time after time, in a collective that one rank comes late to; and its result."""
    group = connect(accelerators.get("cpu"))
    bucket = torch.full((NUMEL,), rank + 1.0)
    group.all_gather_bytes(b"")
    time.sleep(0.3 * (rank == late))
    before, seen = carried(), []
    pending = group.all_gather(bucket) if name == "all_gather" else group.reduce_scatter(bucket, torch.float32)
    while not pending.done():
        seen.append(((carried() - before) / (bucket.nbytes / world)).tolist())
        time.sleep(0.005)
    result = pending.wait().unique().tolist()
    group.all_gather_bytes(b"")
    group.close()
    return seen, result


@pytest.mark.parametrize(("name", "late", "result"), [("all_gather", 0, [1.0, 2.0]), ("reduce_scatter", 1, [3.0])])
def test_both_directions_of_a_link_carry_something_at_a_time_though_one_rank_is_late(name, late, result):
    with hosts.started(2, bits_per_s=BITS_PER_S) as net:
        for seen, found in net.run(parts_on_the_way, name, late):
            assert found == result
            assert any(0.1 < come < 0.9 and 0.1 < gone < 0.9 for come, gone in seen), seen[::10]
