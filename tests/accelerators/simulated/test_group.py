"""Collectives of simulated devices: right, ordered by their own stream, and seen by the race detector.

Two ranks start once and run every check below; each test reports one.
"""

import time
import traceback

import pytest
import torch
import torch.distributed as dist

from tests import ranks

HERE = True  # the device comes up in the ranks only


def full(device, value, numel=4, **options):
    return torch.full((numel,), value, device=device, **options)


def sums_and_means(rank, device, group):
    x = full(device, rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 4
    x = full(device, rank + 1.0)
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
    assert x.tolist() == [1.5] * 4
    x = full(device, rank + 1.0)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    assert x.tolist() == [2.0] * 4


def gathers(rank, device, group):
    whole = torch.empty(8, device=device)
    dist.all_gather_into_tensor(whole, full(device, float(rank)), group=group)
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4
    parts = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(parts, full(device, float(rank)), group=group)
    assert [part[0].item() for part in parts] == [0.0, 1.0]
    received = [torch.empty(4, device=device) for _ in range(2)] if rank == 0 else None
    dist.gather(full(device, float(rank)), received, dst=0, group=group)
    assert rank or [part[0].item() for part in received] == [0.0, 1.0]


def scatters(rank, device, group):
    whole = torch.arange(8.0, device=device) + rank
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)):
        share = torch.empty(4, device=device)
        dist.reduce_scatter_tensor(share, whole, op=op, group=group)
        assert share.tolist() == [(2 * value + 1) / divisor for value in range(rank * 4, rank * 4 + 4)]
    share = torch.empty(4, device=device)
    dist.reduce_scatter(share, list(whole.view(2, 4)), group=group)
    assert share.tolist() == [2.0 * value + 1 for value in range(rank * 4, rank * 4 + 4)]
    dist.scatter(share, [full(device, 5.0), full(device, 6.0)] if rank == 0 else None, src=0, group=group)
    assert share.tolist() == [5.0 + rank] * 4


def exchanges(rank, device, group):
    received = torch.empty(4, device=device)
    dist.all_to_all_single(received, torch.arange(4.0, device=device) + 10 * rank, group=group)
    assert received.tolist() == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]
    parts = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_to_all(parts, [full(device, 2.0 * rank + to, 2) for to in range(2)], group=group)
    assert [part[0].item() for part in parts] == [float(rank), 2.0 + rank]


def messages(rank, device, group):
    x = full(device, float(rank))
    dist.broadcast(x, src=1, group=group)
    assert x.tolist() == [1.0] * 4
    if rank == 0:
        dist.send(x * 7, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
        assert x.tolist() == [7.0] * 4
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": 0}, {"rank": 1}]
    dist.barrier(group=group)


def host_tensors_and_views(rank, device, group):
    host = torch.full((3,), rank + 1.0)
    dist.all_reduce(host, group=group)
    assert host.tolist() == [3.0] * 3
    matrix = full(device, rank + 1.0, 6).view(2, 3)
    dist.all_reduce(matrix[1:], group=group)
    assert matrix.tolist() == [[rank + 1.0] * 3, [3.0] * 3]


def a_result_nobody_waited_for(rank, device, group):
    from accelerators_sim import RaceError

    mine, whole = full(device, float(rank)), torch.empty(8, device=device)
    work = dist.all_gather_into_tensor(whole, mine, group=group, async_op=True)
    with pytest.raises(RaceError, match="the collective all_gather_into_tensor on stream"):
        whole.sum()
    with pytest.raises(RaceError, match=r"writing bytes .* after reading them by the collective"):
        mine.zero_()
    work.wait()
    mine.zero_()
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4


def an_input_nobody_waited_for(rank, device, group):
    from accelerators_sim import RaceError

    side, x = torch.sim.Stream(device=device), torch.zeros(4, device=device)
    side.wait_stream(torch.sim.current_stream(device))
    with side:
        x.add_(1)
    with pytest.raises(RaceError):
        dist.all_reduce(x, group=group)
    torch.sim.current_stream(device).wait_stream(side)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 4


def an_input_that_is_dropped_before_the_wait(rank, device, group):
    """Torch's functional collectives drop theirs. The work keeps it."""
    whole, mine = torch.empty(8, device=device), full(device, float(rank))
    work = dist.all_gather_into_tensor(whole, mine, group=group, async_op=True)
    while not work.is_completed():  # from then on the group itself has forgotten it
        time.sleep(0.001)
    del mine
    full(device, 7.0)
    work.wait()
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4


def results_come_late(rank, device, group):
    from accelerators_sim import configure, without_races

    with without_races():
        x = full(device, 1.0)
        work = dist.all_reduce(x, group=group, async_op=True)
        early = x.tolist()
        work.wait()
        assert (early, x.tolist()) == ([1.0] * 4, [2.0] * 4)
    for order in ("eager", "random:3", "late"):
        configure(order=order)
        x = full(device, 1.0)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
        works[-1].wait()
        assert x.tolist() == [8.0] * 4


def what_is_taken_away(rank, device, group):
    from accelerators_sim import without

    x, whole = full(device, 1.0), torch.empty(8, device=device)
    calls = {
        "avg": lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole, group=group),
        "bf16_collectives": lambda: dist.all_reduce(x.bfloat16(), group=group),
        "int64_gather": lambda: dist.all_gather_into_tensor(whole.long(), x.long(), group=group),
        "coalesced": lambda: group.all_gather_single_coalesced([whole], [x]).wait(),
    }
    for capability, call in calls.items():
        with without(capability), pytest.raises(RuntimeError, match=f"SIM_WITHOUT={capability}"):
            call()
        call()


def torchs_own_data_parallel(rank, device, group):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(device)
    x = torch.arange(4.0, device=device) * (rank + 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)  # its reduction goes when it goes
    parallel(x).sum().backward()
    assert model.weight.grad[0].tolist() == [0.0, 1.5, 3.0, 4.5]


CHECKS = [
    sums_and_means,
    gathers,
    scatters,
    exchanges,
    messages,
    host_tensors_and_views,
    a_result_nobody_waited_for,
    an_input_nobody_waited_for,
    an_input_that_is_dropped_before_the_wait,
    results_come_late,
    what_is_taken_away,
    torchs_own_data_parallel,
]


def run_checks(rank, world):
    from accelerators_sim import SimulatedAccelerator, bring_up

    accelerator = SimulatedAccelerator()
    reason = accelerator.unavailable_reason()
    if reason is not None:
        return reason
    bring_up()
    group = dist.new_group([0, 1], backend=accelerator.communication_backend)
    outcomes = {}
    for check in CHECKS:
        try:
            check(rank, f"sim:{rank}", group)
        except BaseException:  # noqa: BLE001 - whatever it is, the other rank's checks and this one's go on
            outcomes[check.__name__] = traceback.format_exc()
        torch.sim.synchronize(rank)
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    environment = {"SIM_DEVICES": "2", "SIM_MEMORY": "1GiB", "SIM_ORDER": "late"}
    found = ranks.outcomes(2, run_checks, fresh=True, env=environment)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    if isinstance(found[0].value, str):
        pytest.skip(found[0].value)
    return [outcome.value for outcome in found]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_collectives(outcomes, check):
    failures = [f"rank {rank}: {outcome[check]}" for rank, outcome in enumerate(outcomes) if check in outcome]
    assert not failures, "\n".join(failures)
