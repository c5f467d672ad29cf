"""Ranks on a device that torch.distributed has no backend for: the staged group, and training over it.

The device is the simulated one without its own group. Its copies come as late as the rules allow and its race detector watches
them, so a copy that waits for nothing is an error or gives old numbers.
"""

import contextlib
import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist

import zero
from tests import ranks
from tests.devices import needs_sim
from tests.loopback import run_ranks
from tests.zero.comm.test_groups import DTYPES, numbers
from zero.comm.connect import connect
from zero.comm.group import TimeLimits
from zero.errors import GroupLost

pytestmark = needs_sim


@contextlib.contextmanager
def stripped(*lacking):
    """The simulated device as one that nobody wrote a group for."""
    import accelerators
    import accelerators_sim as simulated
    from accelerators import staged

    simulated.bring_up()
    simulated.configure(order="late")
    staged._served.pop("sim", None)
    with simulated.without("group", *lacking):
        it = accelerators.get("sim")
        yield it
        if "synchronize" not in lacking:
            it.synchronize()
        it.set_index(0)  # restores the process's device


@contextlib.contextmanager
def chunks_of(num_bytes):
    from accelerators.staged import pipeline

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "CHUNK_BYTES", num_bytes)
        yield


# chosen by itself ---------------------------------------------------------------------------------------------------------


def which_group(rank, world):
    from accelerators.staged.group import StagedGroup

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("accelerators")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with stripped() as it:
        group = connect(it, None, TimeLimits(20.0, 20.0))
        wires = [type(pair.tensors) is StagedGroup for pair in (group._patient, group._prompt)]
        again = it.communication_backend, connect(it, None, TimeLimits(20.0, 20.0))
        again[1].close()
        group.close()
    logger.removeHandler(handler)
    own = it.communication_backend
    return again[0], wires, own, [text for text in records if "Collectives" in text]


def test_a_device_without_a_backend_gets_the_staged_group_and_the_log_says_so_once():
    said = ["Collectives of sim go through the host (staged): torch.distributed has no backend for that device"]
    assert ranks.run(2, which_group, apart="sim") == [("staged", [True, True], "simccl", said)] * 2


# the same results ---------------------------------------------------------------------------------------------------------


def collectives(group, device):
    """Everything that a group does with tensors, on data that follows from the rank."""
    found = []
    for dtype in DTYPES:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        bucket = numbers(group.rank, 30 * group.size, dtype)
        on_device = bucket.to(device)
        found.append(group.reduce_scatter(on_device.clone(), wide).wait().cpu())
        found.append(group.all_reduce(on_device.clone(), wide).wait().cpu())
        whole = torch.zeros(30 * group.size, dtype=dtype)
        whole[30 * group.rank : 30 * group.rank + 30] = numbers(group.rank, 30, dtype)
        found.append(group.all_gather(whole.to(device)).wait().cpu())
        found.append(group.broadcast(on_device.clone()).wait().cpu())
    buckets = [numbers(group.rank + 10 * index, 2 * group.size, torch.float32).to(device) for index in range(5)]
    pending = [group.reduce_scatter(bucket, torch.float32) for bucket in buckets]
    return found + [one.wait().cpu() for one in pending]


def collectives_over_staging(rank, world, num_bytes, lacking):
    with stripped(*lacking) as it, chunks_of(num_bytes):
        group = connect(it, None, TimeLimits(20.0, 20.0))
        found = collectives(group, it.device(0))
        group.close()
    return found


@pytest.mark.parametrize(
    ("world", "num_bytes", "lacking"),
    [(2, 1 << 22, ()), (3, 32, ()), (2, 32, ("streams", "pin"))],
    ids=["one chunk", "many chunks", "without streams and pinned memory"],
)
def test_it_gives_what_threads_give(world, num_bytes, lacking):
    expected = run_ranks(world, on_host, 30.0)
    found = ranks.run(world, collectives_over_staging, num_bytes, lacking, apart="sim")
    for one, other in zip(expected, found, strict=True):
        for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert mine.dtype == theirs.dtype
            if position % 4 == 1 and world > 2:  # gloo's all-reduce goes round a ring, in another order
                torch.testing.assert_close(mine, theirs)
            else:
                assert torch.equal(mine, theirs), position


def on_host(group):
    return collectives(group, "cpu")


def as_torch_calls_them(rank, world):
    """What users call themselves, with many chunks; the group is the world's own backend in their programs."""
    with stripped() as it, chunks_of(32):
        device = it.device(rank)
        it.set_index(rank)
        group = dist.new_group([0, 1], backend=it.communication_backend)
        full = lambda value, numel=20: torch.full((numel,), value, device=device)  # noqa: E731

        x = full(rank + 1.0)
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
        assert x.tolist() == [1.5] * 20
        x = torch.full((20,), rank + 2, device=device)
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)  # whole numbers stay whole
        assert x.tolist() == [2] * 20
        x = full(rank + 1.0)
        dist.reduce(x, 1, op=dist.ReduceOp.MAX, group=group)
        assert rank == 0 or x.tolist() == [2.0] * 20

        flags = [torch.empty(20, dtype=torch.bool, device=device) for _ in range(2)]
        dist.all_gather(flags, torch.full((20,), rank == 1, device=device), group=group)
        assert [flag.all().item() for flag in flags] == [False, True]
        received = [full(0.0) for _ in range(2)] if rank == 0 else None
        dist.gather(full(float(rank)), received, dst=0, group=group)
        assert rank or [part.mean().item() for part in received] == [0.0, 1.0]
        share = full(0.0)
        dist.scatter(share, [full(5.0), full(6.0)] if rank == 0 else None, src=0, group=group)
        assert share.tolist() == [5.0 + rank] * 20
        dist.reduce_scatter(share, [full(1.0), full(2.0)], group=group)
        assert share.tolist() == [2.0 * (rank + 1)] * 20

        sizes = [[1, 30], [2, 0]]  # the lengths that each rank sends to each
        taken = [sizes[other][rank] for other in range(2)]
        out = full(0.0, sum(taken))
        dist.all_to_all_single(out, full(rank + 1.0, sum(sizes[rank])), taken, sizes[rank], group=group)
        assert out.tolist() == [1.0] * taken[0] + [2.0] * taken[1]
        parts = [full(0.0, numel) for numel in taken]
        dist.all_to_all(parts, [full(rank + 1.0, numel) for numel in sizes[rank]], group=group)
        assert [part.tolist() for part in parts] == [[1.0] * taken[0], [2.0] * taken[1]]
        on_host = [torch.zeros(numel) for numel in taken]
        dist.all_to_all(on_host, [torch.full((numel,), rank + 1.0) for numel in sizes[rank]], group=group)
        assert [part.tolist() for part in on_host] == [[1.0] * taken[0], [2.0] * taken[1]]

        image = (torch.arange(16.0) + rank).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last).to(device)
        dist.all_reduce(image, group=group)
        assert torch.equal(image.cpu(), torch.arange(16.0).view(1, 2, 2, 4) * 2 + 1)
        dist.all_reduce(full(0.0, 0), group=group)

        matrix = full(1.0, 6).view(2, 3)
        refused = [
            (
                ValueError,
                r"Cannot run a collective: a tensor is not contiguous\. Call",
                lambda: dist.all_reduce(matrix.t(), group=group),
            ),
            (TypeError, r"adds no torch.int16\. Convert", lambda: dist.all_reduce(flags[0].short(), group=group)),
        ]
        dist.all_reduce(flags[0], op=dist.ReduceOp.MAX, group=group)
        assert not flags[0].any().item()
        for kind, text, call in refused:
            with pytest.raises(kind, match=text):
                call()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group)  # refused by gloo, and nothing was sent
        with torch.inference_mode():
            y = full(1.0)
            dist.all_reduce(y, group=group)
            assert y.tolist() == [2.0] * 20
        weight = torch.nn.Parameter(full(1.0))
        loss, version = (weight * weight).sum(), weight._version
        dist.all_reduce(weight.detach(), group=group)
        assert weight._version == version  # groups of torch leave the version alone, too

        if rank == 0:
            dist.send(full(7.0), 1, group=group)
        else:
            dist.recv(x := full(0.0), 0, group=group)
            assert x.tolist() == [7.0] * 20
        told = [None, None]
        dist.all_gather_object(told, {"rank": rank}, group=group)
        assert told == [{"rank": 0}, {"rank": 1}]
        works = [dist.all_reduce(x, group=group, async_op=True), dist.barrier(group=group, async_op=True)]
        for work in works:
            work.wait()
        del loss

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to(device)
        parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        parallel(torch.arange(4.0).to(device) * (rank + 1)).sum().backward()
        assert model.weight.grad[0].tolist() == [0.0, 1.5, 3.0, 4.5]
        it.synchronize(rank)
        dist.destroy_process_group(group)
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("staged")]


def test_all_collectives_of_torch_give_what_gloo_gives_and_what_it_cannot_do_is_refused_before_it_is_sent():
    assert ranks.run(2, as_torch_calls_them, apart="sim") == [[], []]


# order --------------------------------------------------------------------------------------------------------------------


def order_of_streams(rank, world):
    from accelerators_sim import RaceError, without_races

    with stripped() as it, chunks_of(64):
        device = it.device(0)
        group = dist.new_group([0, 1], backend=it.communication_backend)
        side, x = it.new_stream(), torch.zeros(64, device=device)
        side.wait_stream(it.current_stream())
        with it.in_stream(side):
            x.add_(1)
            work = dist.all_reduce(x, group=group, async_op=True)  # comes after the addition, of which nothing is done yet
        work.wait()  # on another stream than it was called on
        assert (x * 2).tolist() == [4.0] * 64

        chained = torch.ones(64, device=device)
        works = [dist.all_reduce(chained, group=group, async_op=True) for _ in range(3)]
        works[-1].wait()  # they follow each other
        assert chained.tolist() == [8.0] * 64

        forgotten = torch.ones(16, device=device)
        work = dist.all_reduce(forgotten, group=group, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        with pytest.raises(RaceError):
            forgotten.sum()
        with without_races():
            early = forgotten.tolist()
        work.wait()
        assert (early, forgotten.tolist()) == ([1.0] * 16, [2.0] * 16)

        before = it.memory(0).allocated
        freed = torch.ones(10_000, device=device)
        dist.all_reduce(freed, group=group)
        del freed, work, works
        assert it.memory(0).allocated == before  # no thread keeps what the program let go
        it.synchronize(0)
        dist.destroy_process_group(group)


def test_copies_wait_for_what_produces_and_results_come_before_what_consumes():
    ranks.run(2, order_of_streams, apart="sim")


# time limits and lost ranks -----------------------------------------------------------------------------------------------


def one_is_late(rank, world):
    with stripped() as it:
        group = connect(it, None, TimeLimits(20.0, 1.0))
        group.all_reduce(torch.ones(4, device=it.device(0)), torch.float32).wait()
        group.end_warmup()
        group.set_phase("in step 2")
        if rank == 1:
            time.sleep(4.0)
            group.close()
            return None
        said = []
        for _ in range(2):
            with pytest.raises(GroupLost) as lost:
                group.all_reduce(torch.ones(4, device=it.device(0)), torch.float32).wait()
            said.append(str(lost.value))
        group.close()
        return said


def test_a_rank_that_does_not_come_is_named_within_the_time_limit_and_the_group_stays_lost():
    [(first, later), none] = ranks.run(2, one_is_late, apart="sim")
    assert none is None
    assert "rank 1 was last seen in step 2, and did not come" in first
    assert "this group was lost before: rank 1 was last seen in step 2" in later


def one_is_killed(rank, world):
    import os

    with stripped() as it:
        group = connect(it, None, TimeLimits(20.0, 20.0))
        group.set_phase("in step 3")
        if rank == 1:
            os._exit(1)
        with pytest.raises(GroupLost) as lost:
            for _ in range(100):
                group.all_reduce(torch.ones(4, device=it.device(0)), torch.float32).wait()
        group.close()
        return str(lost.value)


@pytest.mark.full
def test_a_rank_that_was_killed_is_named():
    survivor, dead = ranks.outcomes(2, one_is_killed, fresh=True)
    assert dead.kind == "died"
    assert survivor.ok, survivor.text
    assert "rank 1 was last seen in step 3, and is gone: its program ended or was killed" in survivor.value


# training -----------------------------------------------------------------------------------------------------------------


def goes_on_from_a_checkpoint(rank, world, folder):
    def made(stage, offload):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, zero.shard(model, optimizer, stage=stage, offload=offload, bucket_bytes=64)

    def steps(model, optimizer, which):
        for step in which:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])

    found = []
    with stripped() as it, pytest.MonkeyPatch.context() as patched:
        import accelerators

        patched.setenv("ACCELERATOR", "sim")
        device = it.device(0)
        for stage, offload in ((0, None), (1, "cpu"), (2, None), (2, "cpu"), (3, None)):
            with accelerators.using("sim:0"):
                straight, optimizer = made(stage, offload)
                steps(straight, optimizer, range(2))
                zero.save(f"{folder}/{stage}{offload}", optimizer)
                expected = steps(straight, optimizer, range(2, 4))
                optimizer.close()
                resumed, optimizer = made(stage, offload)
                zero.load(f"{folder}/{stage}{offload}", optimizer)
                found.append(torch.equal(steps(resumed, optimizer, range(2, 4)), expected))
                optimizer.close()
    return found


@pytest.mark.full
def test_a_training_without_a_group_of_the_device_is_saved_and_goes_on_bit_by_bit(tmp_path):
    assert ranks.run(2, goes_on_from_a_checkpoint, str(tmp_path), apart="sim") == [[True] * 5] * 2
