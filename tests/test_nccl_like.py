"""The stand-in for NCCL is right where NCCL is, and hangs where it does."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import nccl_like, ranks
from tests.devices import needs_sim

pytestmark = [needs_sim, pytest.mark.of_tests]
LIMIT_S = 3.0  # the limit of programs that must hang, once ranks have met


def communicator(limit_s=LIMIT_S, members=None):
    """All of its ranks have used it, and all ranks are here."""
    group = dist.new_group(members, backend=nccl_like.BACKEND, timeout=timedelta(seconds=60.0))
    if is_member := dist.get_rank(group) >= 0:
        dist.all_reduce(on_device(1.0), group=group)
        torch.sim.synchronize()
    dist.barrier()
    if is_member:
        group.set_timeout(timedelta(seconds=limit_s))
    return group


def on_device(*values):
    return torch.tensor(values, dtype=torch.float32, device="sim")


def every_kind(rank, world):
    """Collectives of each kind, with kernels before and behind them; nobody waits on the host before the end."""
    group, x = communicator(60.0), on_device(1.0, 2.0) * (rank + 1)
    whole, share = torch.empty(2 * world, device="sim"), torch.empty(1, device="sim")
    works = [
        dist.all_gather_into_tensor(whole, x, group=group, async_op=True),
        dist.reduce_scatter_tensor(share, x.clone(), group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    total = share.repeat(2) * whole[:2] + x
    dist.all_reduce(total, group=group)
    exchanged = torch.empty(2, device="sim")
    dist.all_to_all_single(exchanged, total * (rank + 1), group=group)
    dist.broadcast(total, src=1, group=group)
    found = [tensor.tolist() for tensor in (whole, share, exchanged, total)]
    dist.destroy_process_group(group)
    return found


def test_bytes_and_sums_are_right_on_every_stream():
    found = nccl_like.outcomes(2, every_kind)
    assert [outcome.value for outcome in found] == [
        [[1.0, 2.0, 2.0, 4.0], [3.0], [12.0, 24.0], [12.0, 24.0]],
        [[1.0, 2.0, 2.0, 4.0], [6.0], [24.0, 48.0], [12.0, 24.0]],
    ], ranks.describe(found)


def waits(rank, world):
    """Rank 1 comes late. Rank 0 issues work behind the collective meanwhile, and its host waits at the end alone."""
    group, x = communicator(60.0), on_device(1.0)
    if rank == 1:
        time.sleep(1.0)
    begun = time.monotonic()
    for _ in range(3):
        dist.all_reduce(x, group=group)
        x += 1
    issued_s = time.monotonic() - begun
    event = torch.sim.Event()
    event.record()
    assert rank == 1 or not event.query()
    return issued_s < 0.5, x.item(), time.monotonic() - begun > (0.5 if rank == 0 else -1)


def test_a_stream_waits_and_the_host_does_not():
    found = nccl_like.outcomes(2, waits)
    assert [outcome.value for outcome in found] == [(True, 15.0, True)] * 2, ranks.describe(found)


def copies(rank, world, order):
    """Rank 1 comes late. The host of rank 0 does not wait for a copy on its device that is behind the collective."""
    from accelerators_sim import configure

    configure(order=order)
    try:
        group, x = communicator(60.0), on_device(1.0)
        if rank == 1:
            time.sleep(1.0)
        begun = time.monotonic()
        dist.all_reduce(x, group=group)
        copied = torch.empty_like(x).copy_(x)
        return time.monotonic() - begun < 0.5, copied.item()
    finally:
        configure(order="late")


@pytest.mark.parametrize("order", ["late", "eager"])
def test_a_host_does_not_wait_for_a_copy_behind_a_collective(order):
    found = nccl_like.outcomes(2, copies, order)
    assert [outcome.value for outcome in found] == [(True, 2.0)] * 2, ranks.describe(found)


def at_a_barrier(rank, world):
    """Rank 1 comes late to the second barrier. The host of rank 0 waits for it, and for what its stream had to do before."""
    group, x = communicator(60.0), on_device(1.0)
    dist.barrier(group=group)
    if rank == 1:
        time.sleep(0.5)
        dist.all_reduce(x, group=group)
        dist.distributed_c10d._get_default_store().set("came", "")
    else:
        dist.all_reduce(x, group=group)
    dist.barrier(group=group)
    event = torch.sim.Event()
    event.record()
    return event.query(), dist.distributed_c10d._get_default_store().check(["came"])


def test_a_host_waits_at_a_barrier():
    found = nccl_like.outcomes(2, at_a_barrier)
    assert [outcome.value for outcome in found] == [(True, True)] * 2, ranks.describe(found)


def two_orders(rank, world):
    """Two communicators in different orders."""
    groups, x = [communicator(), communicator()], on_device(1.0)
    first, second = groups if rank else groups[::-1]
    works = [dist.all_reduce(x.clone(), group=first, async_op=True)]
    while not works[0].is_on_device:  # streams that share no queue have no order
        time.sleep(0.001)
    works.append(dist.all_reduce(x.clone(), group=second, async_op=True))
    for work in works:
        work.wait()
    torch.sim.synchronize()


@pytest.mark.parametrize(("room", "is_right"), [({}, True), ({"resident": 1}, False), ({"queues": 1, "resident": 2}, True)])
def test_two_communicators_in_different_orders_need_room_for_both(room, is_right):
    found = nccl_like.outcomes(2, two_orders, **room)
    assert nccl_like.hangs(found) != is_right, ranks.describe(found)
    if not is_right:
        assert "communicator 0, number 1: all_reduce of 4 bytes" in found[0].output + found[1].output


def behind_a_wait(rank, world):
    """With one queue, a wait of the main stream for one communicator is before the other one's collective."""
    groups, x = [communicator(), communicator()], on_device(1.0)
    for group in groups if rank else groups[::-1]:
        dist.all_reduce(x, group=group)
    torch.sim.synchronize()


@pytest.mark.parametrize("queues", [pytest.param(1, marks=pytest.mark.full), 8])
def test_a_wait_holds_up_what_is_behind_it_in_its_queue(queues):
    """The second collective reads what the first one wrote, so that no number of queues helps."""
    assert nccl_like.hangs(nccl_like.outcomes(2, behind_a_wait, queues=queues))


def apart(rank, world):
    """The same for collectives that have nothing to do with each other but the queue."""
    groups, side = [communicator(), communicator()], torch.sim.Stream()
    x, y = on_device(1.0), on_device(1.0)
    for number in (0, 1) if rank else (1, 0):
        with torch.sim.stream(side if number else torch.sim.default_stream()):
            dist.all_reduce(y if number else x, group=groups[number])
    torch.sim.synchronize()


@pytest.mark.parametrize(("queues", "is_right"), [(1, False), (8, True)])
def test_streams_that_share_a_queue_wait_for_each_other(queues, is_right):
    found = nccl_like.outcomes(2, apart, queues=queues)
    assert nccl_like.hangs(found) != is_right, ranks.describe(found)


def first_use(rank, world, kind):
    """The first collective of a kind, where only one rank comes to it before both meet elsewhere."""
    group, x = communicator(), on_device(1.0, 2.0)
    if rank == 0:
        if kind == "all_to_all":
            dist.all_to_all_single(torch.empty_like(x), x, group=group)
        else:
            dist.all_reduce(x, group=group)
    dist.barrier()
    if rank == 1 and kind != "all_to_all":
        dist.all_reduce(x, group=group)
    torch.sim.synchronize()


@pytest.mark.parametrize(("kind", "is_right"), [("all_to_all", False), ("all_reduce", True)])
def test_the_first_of_a_kind_is_a_meeting_of_hosts(kind, is_right):
    found = nccl_like.outcomes(2, first_use, kind)
    assert nccl_like.hangs(found) != is_right, ranks.describe(found)


HANGS, GOES_ON = ("destroy", "synchronize", "empty_cache", "pin"), ("abort", "query")


def alone(rank, world, acts):
    """Each other rank has a communicator with rank 0, which does not come to the second collective, and ends it."""
    groups, x = [communicator(members=[0, each]) for each in range(1, world)], on_device(1.0)
    if rank == 0:
        for group in groups:
            dist.destroy_process_group(group)
        return
    act, group = acts[rank - 1], groups[rank - 1]
    dist.all_reduce(x, group=group)
    if act == "synchronize":
        torch.sim.synchronize()
    elif act == "empty_cache":
        torch.sim.empty_cache()
    elif act == "pin":
        torch.empty(4, pin_memory=True)
    elif act == "query":
        assert not torch.sim.current_stream().query()
        group.abort()
    elif act == "abort":
        group.abort()
        torch.sim.synchronize()
    if act != "destroy":
        print("it went on", flush=True)
    dist.destroy_process_group(group)


def test_what_waits_for_the_device_waits_for_collectives_and_to_abort_waits_for_nothing():
    acts = ("destroy", "synchronize", "empty_cache", "pin", "abort", "query")
    first, *found = nccl_like.outcomes(len(acts) + 1, alone, acts)
    for act, outcome in zip(acts, found, strict=True):
        goes_on = act in ("abort", "query")
        assert (outcome.kind == "died") != goes_on and outcome.ok == goes_on, f"{act}: {ranks.describe(found)}"
        assert ("it went on" in outcome.output) == goes_on, f"{act}: {outcome.output}"
        assert ("rank 0 has not issued it" in outcome.output) != goes_on, f"{act}: {outcome.output}"
    assert first.ok, ranks.describe([first])
