"""What a save, a load and an export keep beside the training: a piece at a time, and not another model."""

import ctypes
import os

import psutil
import pytest
import torch
from torch import nn

import zero
from tests import faults, ranks

MIB = 2**20
NUM_LAYERS, WIDTH, LAYER_MIB = 16, 1024, 4  # and as much for each of the two entries of its state
MOST_MIB = 2 * LAYER_MIB


_MMAP_THRESHOLD = -3  # glibc's number of that setting


def anonymous_mib():
    """What this process has in memory that is no page of a file."""
    found = psutil.Process().memory_info()
    return (found.rss - found.shared) / MIB


def most_beside(act, monkeypatch):
    """The most that there was beyond what there was before, looked at whenever a piece has been written or read."""
    ctypes.CDLL(None).malloc_trim(0)
    before, most = anonymous_mib(), 0.0
    advance = faults.PROGRESS.now

    def looking(bar, amount):
        nonlocal most
        most = max(most, anonymous_mib() - before)
        advance(bar, amount)

    with monkeypatch.context() as patch:
        patch.setattr(*faults.PROGRESS, looking)
        act()
    return most


def let_go_at_once():
    """What is let go goes, in whichever thread; else some layers more stay by chance."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 2**16)


def memory_of_checkpoints(rank, world, folder, options):
    torch.set_num_threads(1)
    let_go_at_once()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), **options)
    example = torch.ones(1, WIDTH, dtype=next(model.parameters()).dtype)
    optimizer.backward(model(example).float().sum())
    optimizer.step()
    optimizer.zero_grad()
    zero.save(folder, optimizer, "a")
    zero.load(folder, optimizer)
    if rank == 0:
        zero.export(folder, f"{folder}/first.safetensors")  # makes what is made only once
    patch = pytest.MonkeyPatch()
    found = {
        "save": most_beside(lambda: zero.save(folder, optimizer, "b"), patch),
        "load": most_beside(lambda: zero.load(folder, optimizer), patch),
        "in the background": most_beside(lambda: zero.save(folder, optimizer, "c", async_save=True).wait(), patch),
    }
    if rank == 0:
        found["export"] = most_beside(lambda: zero.export(folder, f"{folder}/out.safetensors"), patch)
    optimizer.close()
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not say what a process shares")
@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {"stage": 1}), pytest.param(2, {"stage": 2, "dtype": "bfloat16"}, marks=pytest.mark.full)],
)
def test_a_save_and_a_load_need_a_piece_and_one_in_the_background_a_copy_of_what_it_writes(world, options, tmp_path):
    payload = NUM_LAYERS * 3 * LAYER_MIB / world
    for rank, found in enumerate(ranks.run(world, memory_of_checkpoints, str(tmp_path), options, fresh=True, timeout=120.0)):
        assert found["save"] <= MOST_MIB, (rank, found)
        assert found["load"] <= MOST_MIB, (rank, found)
        assert found.get("export", 0) <= 2 * LAYER_MIB, (rank, found)  # a layer, however many there are
        assert 0.9 * payload <= found["in the background"] <= payload + MOST_MIB, (rank, found)
