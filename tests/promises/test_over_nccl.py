"""Over collectives for which a stream waits and not the host, as NCCL's: what would block ranks for good does not.

tests/nccl_like.py stands for NCCL. Each program is small, and hung before what it is about was mended.
"""

import contextlib
import gc
import os
import signal
import time
import traceback
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accelerators
import zero
from tests import divergence, faults, inside, nccl_like, ranks
from tests.devices import needs_sim
from zero.errors import GroupLost, RanksDiffer

pytestmark = needs_sim
LIMITS = {"first_step_timeout_s": 8.0, "timeout_s": 4.0}
WIDTH = 8


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, takes_branch):
        x = self.first(x)
        return self.last(torch.tanh(self.branch(x)) if takes_branch else x).mean()


class Training:
    def __init__(self, stage=2, dtype=None, **options):
        torch.manual_seed(0)
        device = torch.device("sim", torch.sim.current_device())
        self.model = Branching().to(device)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"bucket_bytes": 160, **LIMITS, **options}
        self.optimizer = zero.shard(self.model, inner, stage=stage, dtype=dtype, **options)
        self.x = torch.ones(4, WIDTH, device=device)

    def backward(self, takes_branch=True):
        self.model(self.x, takes_branch).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, times=1, takes_branch=True):
        for _ in range(times):
            self.backward(takes_branch)
            self.step()


def is_right(program, *args, world=2, **options):
    found = nccl_like.outcomes(world, program, *args, **options)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    return [outcome.value for outcome in found]


def apart_at_once(rank, world, stage, dtype):
    """The first round of all is in a hook of a backward, and the other rank's branch skips that bucket."""
    training = Training(stage, dtype)
    met = len(nccl_like.hardware.meetings)
    training.train(takes_branch=rank == 0)
    training.train(3, takes_branch=rank == 1)
    training.optimizer.close()
    return nccl_like.hardware.meetings[met:]


@pytest.mark.promise("V01")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_branch_that_one_rank_skips_at_its_first_step_keeps_no_host_waiting(stage, dtype, world):
    """All that a communicator connects is connected at build, where all ranks are."""
    assert is_right(apart_at_once, stage, dtype, world=world) == [[]] * world


def apart_for_a_device(rank, world, act):
    """In the third window rank 1 skips a bucket that rank 0 has sent when it waits for its device."""
    training = Training()
    training.train(2)
    training.backward(takes_branch=rank == 0)
    if rank == 0:
        act_on_device(act)
    training.step()
    training.optimizer.close()
    return [param.detach().cpu() for param in training.model.parameters()]


def act_on_device(act):
    if act == "synchronize":
        torch.sim.synchronize()
    elif act == "empty_cache":
        torch.sim.empty_cache()
    elif act == "pin":
        torch.empty(4, pin_memory=True)
    elif act == "item":
        torch.ones(3, device="sim").sum().item()


@pytest.fixture(scope="module")
def without_waiting():
    return is_right(apart_for_a_device, "")[0]


@pytest.mark.promise("V03")
@pytest.mark.parametrize(
    "act", ["synchronize", "pin", *(pytest.param(each, marks=pytest.mark.full) for each in ("empty_cache", "item"))]
)
def test_a_rank_may_wait_for_its_device_while_a_round_waits_for_another_rank(without_waiting, act):
    one, other = is_right(apart_for_a_device, act)
    assert all(map(torch.equal, one, other)) and all(map(torch.equal, one, without_waiting))


def kept_elsewhere(rank, world, place):
    """Rank 0 waits for its device, and rank 1 for a message of rank 0 that has nothing to do with the window."""
    training, other = Training(), Training()
    training.train(2)
    other.train(2)
    training.backward(takes_branch=rank == 0)
    other.backward()
    if rank == 0:
        torch.sim.synchronize()
    if place == "state_dict":
        training.optimizer.state_dict()
    for each in (other, training):
        each.step()
        each.optimizer.close()


@pytest.mark.promise("V03")
@pytest.mark.parametrize("place", ["state_dict", pytest.param("step of another training", marks=pytest.mark.full)])
def test_a_rank_that_waits_for_any_message_sends_what_another_ones_device_needs(place):
    is_right(kept_elsewhere, place)


def without_room(rank, world):
    """Rank 0 has room for all of its rounds on the device, and rank 1 keeps what it has on the host."""
    torch.manual_seed(0)
    device = torch.device("sim", torch.sim.current_device())
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12)).to(device)
    optimizer = zero.shard(layers, torch.optim.SGD(layers.parameters(), lr=0.1), stage=2, bucket_bytes=160, **LIMITS)
    faults.has_room_for_rounds(optimizer, 0.0 if rank else float("inf"))
    for step in range(3):
        x = torch.ones(4, WIDTH, device=device)
        for layer in layers[: 2 if rank and step == 2 else None]:
            x = torch.tanh(layer(x))
        x.mean().backward()
        if rank == 0:
            torch.sim.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.promise("V03")
def test_rounds_that_wait_on_the_host_are_sent_where_another_ones_device_needs_them():
    is_right(without_room)


def sends_what_waits(rank, world):
    """Rank 1 comes to its second backward when the host of rank 0, which has no room for its own, has sent all of that."""
    torch.manual_seed(0)
    device, store = torch.device("sim", torch.sim.current_device()), dist.distributed_c10d._get_default_store()
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).to(device)
    optimizer = zero.shard(layers, torch.optim.SGD(layers.parameters(), lr=0.1), stage=2, bucket_bytes=160, **LIMITS)
    x = torch.ones(4, WIDTH, device=device)
    layers(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    layers(x).mean().backward()
    torch.sim.synchronize()  # sums are there, and others are added to them
    while rank == 1 and not store.check(["sent"]):
        time.sleep(0.01)
    if rank == 0:
        faults.has_room_for_rounds(optimizer, 0.0)
    with faults.host_ahead_at_most(0):
        layers(x).mean().backward()
        if rank == 0:
            inside.send_needed(optimizer)  # its device waits for rank 1
            store.set("sent", "")
    optimizer.step()
    optimizer.close()
    return [param.detach().cpu() for param in layers.parameters()]


@pytest.mark.promise("V03")
def test_a_host_that_sends_what_others_need_waits_for_no_rank():
    """Else two that do so for one training each keep each other, where a third one needs both."""
    one, other = is_right(sends_what_waits)
    assert all(map(torch.equal, one, other))


class Reading:
    """Two layers that train, and four whose weights are read beside: by collectives from the third window on, each again."""

    def __init__(self):
        torch.manual_seed(0)
        device = torch.device("sim", torch.sim.current_device())
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)).to(device)
        inner = torch.optim.AdamW(self.layers.parameters(), lr=1e-2, fused=True)
        options = {"bucket_bytes": 160, "keep_whole_numel": 0, "gathered_bytes": 0, **LIMITS}
        self.optimizer = zero.shard(self.layers, inner, stage=3, **options)
        self.x = torch.ones(4, WIDTH, device=device)

    def read(self):
        for layer in self.layers[2:]:
            layer.weight.sum()

    def backward(self, between=lambda: None, number=2):
        """`between` is called between the layers."""
        x = torch.tanh(self.layers[0](self.x))
        x.register_hook(lambda grad: between())
        for layer in self.layers[1:number]:
            x = layer(x)
        x.mean().backward()


def reads_in_a_backward(training, is_apart):
    training.backward((lambda: None) if is_apart else training.read, 1)


def reads_before_a_backward(training, is_apart):
    if is_apart:
        training.read()
    training.backward((lambda: None) if is_apart else training.read)


def sleeps(training, is_apart):
    """Another rank tells it of gathers before which it has two rounds to send."""
    if is_apart:
        time.sleep(0.5)
    training.backward(training.read)


def asks_for_norms(training, is_apart):
    training.backward()
    training.optimizer.settle()
    if not is_apart:
        training.read()
    torch.nn.utils.clip_grad_norm_(training.layers.parameters(), 1.0)


def asks_for_a_gradient(training, is_apart):
    training.backward()
    training.optimizer.settle()
    if not is_apart:
        training.read()
    training.optimizer.whole_grad(training.layers[0].weight)


def asks_for_states(training, is_apart):
    training.backward()
    if not is_apart:
        training.read()
    training.optimizer.state_dict()


def apart_once(rank, world, window):
    """Rank 1 does something else in the fourth window. Returns the bytes that were gathered, and the weights."""
    training = Reading()
    with faults.late_ranks_told_after(0.05) if window is sleeps else contextlib.nullcontext():
        for number in range(5):
            window(training, number == 3 and rank == 1)
            training.optimizer.step()
            training.optimizer.zero_grad()
    weights = [param.detach().cpu().clone() for param in training.layers.parameters()]
    gathered = inside.fetched_bytes(training.optimizer) - inside.pulled_bytes(training.optimizer)
    training.optimizer.close()
    return gathered, weights


@pytest.mark.promise("V06")
@pytest.mark.parametrize(
    "window",
    [
        reads_in_a_backward, sleeps, asks_for_states,
        *(pytest.param(each, marks=pytest.mark.full)
          for each in (reads_before_a_backward, asks_for_norms, asks_for_a_gradient)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("used", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_gathers_and_other_collectives_have_one_order_though_all_streams_share_a_queue(window, used):
    """Each hung before: a rank's device waited for a collective, behind which it had what another rank waited for."""
    (gathered, one), (by_other, other) = is_right(apart_once, window, used=used)
    assert gathered > 0 < by_other
    assert all(map(torch.equal, one, other))


def close_apart(rank, world, num_ranks):
    """Rank 0 has a round on its device that rank 1 never sends, and both close, long before their limit. Then they train anew,
    on the same ranks."""
    group = dist.new_group(list(range(num_ranks)))
    if rank < num_ranks:
        training = Training(group=group, timeout_s=300.0, first_step_timeout_s=300.0)
        training.train(2)
        training.backward(takes_branch=rank == 0)
        training.optimizer.close()
        other = Training(group=group)
        other.train(2)
        other.optimizer.close()
    dist.barrier()


@pytest.mark.promise("V04")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_others_never_send_ends_with_the_training_and_not_with_the_process(world):
    is_right(close_apart, 2, world=world, timeout=40.0)


def closed_after_a_step(rank, world):
    """Ends a training whose shares of weights are on their way to the host, where nobody has waited for them."""
    training = Training(stage=3)
    training.train(4)
    served = [weakref.ref(memory) for memory in inside.served_shares(training.optimizer)]
    training.optimizer.close()
    torch.sim.synchronize()  # what the device has done, it holds no more
    gc.collect()
    return len(served), sum(memory() is not None for memory in served)


@pytest.mark.promise("V04")
def test_an_optimizer_that_is_closed_after_a_step_keeps_no_host_memory_of_weights():
    for served, left in is_right(closed_after_a_step):
        assert served > 0 == left


def rebuilt_beside(rank, world, stage):
    """A part of the ranks rebuilds right behind a step, whose weights are still on their way."""
    group = dist.new_group([0, 1])
    if rank < 2:
        training = Training(stage, group=group)
        for _ in range(2):
            training.train(2)
            training.optimizer.rebuild()
        training.train()
        training.optimizer.close()
    dist.barrier()


@pytest.mark.promise("V04")
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_part_of_the_ranks_rebuilds_without_the_others_and_keeps_the_update(stage):
    is_right(rebuilt_beside, stage, world=3)


def rebuilt_behind_a_slow_device(rank, world):
    """Rank 1 rebuilds right behind a step. The device of rank 0 comes to the update later, and its host goes on."""
    training, send, starts = Training(), faults.SENDING_WEIGHTS.now, nccl_like.OnDevice.starts
    training.train(2)
    torch.sim.synchronize()

    def slow_once(self):
        nccl_like.OnDevice.starts = starts
        time.sleep(0.85)
        return starts(self)

    def send_to_slow(self, batch):
        faults.SENDING_WEIGHTS.put(send)
        nccl_like.OnDevice.starts = slow_once
        return send(self, batch)

    if rank == 0:
        faults.SENDING_WEIGHTS.put(send_to_slow)
    try:
        training.train()
        if rank == 0:
            with pytest.raises(GroupLost):
                training.train()
        training.optimizer.rebuild()
    finally:
        faults.SENDING_WEIGHTS.put(send)
        nccl_like.OnDevice.starts = starts
    weights = [param.detach().cpu().clone() for param in training.model.parameters()]
    training.optimizer.close()
    return weights


@pytest.mark.promise("V04")
def test_a_loss_leaves_a_slow_device_the_time_for_an_update_that_all_ranks_have_issued():
    one, other = is_right(rebuilt_behind_a_slow_device)
    expected, _ = is_right(after_steps, 3, 2)
    assert all(map(torch.equal, one, other)) and all(map(torch.equal, one, expected))


def late(rank, world, stage):
    """Rank 1 is late for longer than the limit, while a round of rank 0 is on the device; both go on."""
    training = Training(stage)
    training.train(2)
    if rank == 0:
        training.backward()
    else:
        time.sleep(LIMITS["timeout_s"] + 2.0)
    with pytest.raises(GroupLost) as lost:
        training.step()
    training.optimizer.rebuild()
    training.train(2)
    training.optimizer.close()
    return str(lost.value)


@pytest.mark.promise("V04")
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_ranks_rebuild_while_a_collective_of_a_lost_one_is_on_the_device(stage):
    told, _ = is_right(late, stage)
    assert "rank 1" in told


def rebuilt_early(rank, world):
    plain = faults.DIAGNOSIS.now
    faults.DIAGNOSIS.put(_slow(plain))
    try:
        training = Training()
        training.train(2)
        if rank == 0:
            training.backward()
        else:
            time.sleep(LIMITS["timeout_s"] + 2.0)
        with pytest.raises(GroupLost):
            training.step()
        training.optimizer.rebuild()
        for _ in range(8):
            training.train()
            time.sleep(0.5)
        training.optimizer.close()
    finally:
        faults.DIAGNOSIS.put(plain)


def _slow(diagnose):
    def slow(self, *arguments):
        cause = diagnose(self, *arguments)
        if inside.on_the_thread_for_device_waits():
            time.sleep(3.0)
        return cause

    return slow


@pytest.mark.full
@pytest.mark.promise("V04")
def test_what_is_found_out_of_connections_of_before_does_not_end_the_new_ones():
    """The thread that looks after the device knows the cause when the ranks have been connected again."""
    is_right(rebuilt_early)


def late_in_an_update(rank, world):
    """Rank 1 is late while gathers of the next window are on the device of rank 0. Returns the weights after rebuild()."""
    training, send = Training(3), faults.SENDING_WEIGHTS.now
    training.train(2)

    def late_once(self, batch):
        faults.SENDING_WEIGHTS.put(send)
        time.sleep(LIMITS["timeout_s"] + 4.0)
        return send(self, batch)

    if rank == 1:
        faults.SENDING_WEIGHTS.put(late_once)
    with pytest.raises(GroupLost):
        training.train(3)
    training.optimizer.rebuild()
    weights = [param.detach().cpu().clone() for param in training.model.parameters()]
    training.optimizer.close()
    return weights


def after_steps(rank, world, number, stage=3):
    training = Training(stage)
    training.train(number)
    weights = [param.detach().cpu().clone() for param in training.model.parameters()]
    training.optimizer.close()
    return weights


@pytest.mark.promise("V04")
def test_ranks_rebuild_while_gathers_are_on_the_device_and_have_the_weights_of_the_step():
    one, other = is_right(late_in_an_update)
    expected, _ = is_right(after_steps, 3)
    assert all(map(torch.equal, one, other)) and all(map(torch.equal, one, expected))


def killed(rank, world, phase):
    """Rank 1 ends without a word."""
    training = Training()
    training.train(2)
    if rank == 1:
        ends_in(training, phase)
    begun = time.monotonic()
    with pytest.raises(GroupLost) as lost:
        for _ in range(2):  # the next window misses what a step left on the device
            training.train()
    took_s = time.monotonic() - begun
    training.optimizer.close()
    return str(lost.value), took_s


def ends_in(training, phase):
    if phase == "backward":
        training.model.branch.weight.register_hook(lambda grad: os._exit(7))
    elif phase == "publish":
        faults.SENDING_WEIGHTS.put(lambda *_: os._exit(7))
    elif phase == "forward":
        os._exit(7)
    training.backward()
    if phase == "settle":
        os._exit(7)
    training.step()


@pytest.mark.promise("V04")
@pytest.mark.parametrize(
    "phase", ["publish", *(pytest.param(each, marks=pytest.mark.full) for each in ("forward", "backward", "settle"))]
)
def test_a_rank_that_was_killed_is_named_before_the_watchdog_ends_the_others(phase):
    found = nccl_like.outcomes(2, killed, phase)
    assert found[0].ok and found[1].kind == "died", ranks.describe(found)
    told, took_s = found[0].value
    assert "rank 1 was last seen" in told and "its program ended or was killed" in told
    assert took_s < LIMITS["timeout_s"] + 8.0  # the watchdog has 15
    if phase == "publish":
        assert "weights may be written in part. Load a checkpoint." in found[0].output


def broken_down(rank, world, is_late):
    """The gathers of an update fail on the device of rank 0, and count as completed: as they are issued, or behind the step."""
    training, start, send, works = Training(), nccl_like.STARTING.now, faults.SENDING_WEIGHTS.now, []
    training.train(2)

    def noting(self, name, *arguments):
        works.append(start(self, name, *arguments))
        if not is_late:
            works[-1].break_down()
        return works[-1]

    def noted(self, batch):
        if rank == 0:
            nccl_like.STARTING.put(noting)
        else:
            time.sleep(0.5)  # by then, rank 0 has them on its device
        try:
            return send(self, batch)
        finally:
            nccl_like.STARTING.put(start)

    faults.SENDING_WEIGHTS.put(noted)
    try:
        with pytest.raises(GroupLost) as lost:
            training.train()
            for work in works:
                work.break_down()
            faults.SENDING_WEIGHTS.put(send)
            training.train(2)
    finally:
        faults.SENDING_WEIGHTS.put(send)
    with pytest.raises(RanksDiffer) as torn:
        training.optimizer.rebuild()
    training.optimizer.close()
    return str(lost.value), str(torn.value)


@pytest.mark.promise("V04")
@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_collective_that_failed_on_the_device_is_not_taken_for_one_that_is_done(is_late):
    for lost, torn in is_right(broken_down, is_late):
        assert "on its device" in lost and "all ranks are there" in lost
        assert "rank 0 was lost in the middle of a step" in torn


def stopped(rank, world, stage):
    """The whole process of rank 1, all threads of it, stands still in a backward, for longer than the limit."""
    training = Training(stage)
    training.train(2)
    torch.sim.synchronize()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(LIMITS["timeout_s"] + 5.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        hook = training.model.branch.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGSTOP))
    with pytest.raises(GroupLost) as lost:
        training.train()
    if rank == 1:
        hook.remove()
    training.optimizer.rebuild()
    training.train(2)
    training.optimizer.close()
    return str(lost.value)


@pytest.mark.full
@pytest.mark.promise("V04")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_stands_still_is_named_before_the_watchdog_ends_the_others(stage):
    told, _ = is_right(stopped, stage)
    assert "rank 1 was last seen in a backward of step 3, and did not come" in told


def two_optimizers(rank, stage):
    training = Training(stage)
    training.optimizer.close()
    params = list(training.model.parameters())
    halves = [zero.shard(training.model, torch.optim.AdamW(half), stage=stage, bucket_bytes=160, **LIMITS)
              for half in (params[:2], params[2:])]  # fmt: skip
    return training, halves


def of_kind(rank, world, kind, stage):
    """Ranks take turns in skipping a branch. Returns the weights."""
    options = {"fp16": {"dtype": torch.float16}, "offload": {"offload": "cpu"}, "hybrid": {"shard_ranks": 2}}.get(kind, {})
    training = Training(stage, **options)
    optimizers, streams = [training.optimizer], [torch.sim.current_stream()]
    if kind == "two optimizers":
        training, optimizers = two_optimizers(rank, stage)
    if kind == "streams":
        streams += [torch.sim.Stream(), torch.sim.Stream()]
    for step in range(4):
        stream, main = streams[(step + rank) % len(streams)], torch.sim.current_stream()
        stream.wait_stream(main)
        with torch.sim.stream(stream):
            made = training.x.repeat(16, 8) @ training.x.repeat(16, 8)  # and freed in another stream
            training.backward(takes_branch=(rank + step) % world != 0)
        main.wait_stream(stream)
        del made
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.close()
    return [param.detach().cpu() for param in training.model.parameters()]


KINDS = ("hybrid", "fp16", "offload", "two optimizers", "streams")


@pytest.mark.full
@pytest.mark.promise("V06")
@pytest.mark.parametrize(("kind", "stage"), [("hybrid", 3), *((kind, stage) for kind in KINDS[1:] for stage in (1, 2, 3))])
def test_ranks_that_take_branches_neither_hang_nor_differ_with_whatever_is_trained(kind, stage):
    first, *others = is_right(of_kind, kind, stage, world=4 if kind == "hybrid" else 3)
    for weights in others:
        assert all(map(torch.equal, first, weights))
    assert all(weight.isfinite().all() for weight in first)


def rebuilt_at_once(rank, world):
    """Rank 0 has a round on its device that rank 1 never sends, and nobody is lost yet."""
    training = Training()
    training.train(2)
    training.backward(takes_branch=rank == 0)
    training.optimizer.rebuild()
    training.train(2)
    training.optimizer.close()


@pytest.mark.promise("V04")
def test_a_rebuild_breaks_off_what_others_never_send():
    is_right(rebuilt_at_once)


def pins_in_backwards(rank, world, stage):
    """Returns where memory is pinned while a backward runs, in three windows."""
    kind = type(accelerators.get("sim"))
    pinned, pin = [], kind.pin

    def counted(self, tensor):
        if torch._C._current_graph_task_id() != -1:
            pinned.append("".join(traceback.format_stack(limit=8)))
        return pin(self, tensor)

    training = Training(stage=stage, offload="cpu")
    with mock.patch.object(kind, "pin", counted):
        training.train(3)
    training.optimizer.close()
    return pinned


@pytest.mark.promise("V06")
@pytest.mark.parametrize("stage", [2, 3])
def test_no_memory_for_sums_is_pinned_in_a_backward_as_a_driver_would_wait_there_for_ranks(stage):
    assert is_right(pins_in_backwards, stage) == [[], []]


def limits_of(rank, world):
    """The limit of a communicator is above ours, of the first step and later."""
    training = Training(first_step_timeout_s=300.0)
    limits = [max(group.limit_s for group in nccl_like.hardware.communicators)]
    training.train(2)
    limits.append(max(group.limit_s for group in nccl_like.hardware.communicators))
    training.optimizer.close()
    return limits


@pytest.mark.promise("V04")
def test_a_watchdog_comes_after_our_own_limits_and_not_long_after():
    for first, later in is_right(limits_of):
        assert 300.0 < first < 360.0 and LIMITS["timeout_s"] < later < LIMITS["timeout_s"] + 60.0


def limits_of_second(rank, world):
    """Of communicators of a part of the ranks, in one training and in the next."""
    part = dist.new_group([0, 1])
    limits = []
    if rank < 2:
        for _ in range(2):
            training = Training(group=part, first_step_timeout_s=300.0)
            limits.append(max(group.limit_s for group in nccl_like.hardware.communicators))
            training.train(2)
            training.optimizer.close()
    dist.barrier()
    return limits


@pytest.mark.promise("V04")
def test_the_limit_of_the_next_training_begins_anew():
    first, second, _ = is_right(limits_of_second, world=3)
    assert min(*first, *second) > 300.0


def where_it_watches(rank, world):
    seen, plain = set(), faults.DROPPING_GATHERS.now

    def noting(self):
        if inside.on_the_thread_for_gathers():
            seen.add(torch.sim.current_device())
        return plain(self)

    faults.DROPPING_GATHERS.put(noting)
    try:
        training = Training(3)
        for _ in range(4):
            training.train()
            time.sleep(0.2)
        training.optimizer.close()
    finally:
        faults.DROPPING_GATHERS.put(plain)
    return seen, torch.sim.current_device()


def test_the_thread_that_looks_after_gathers_is_on_the_device_of_its_rank():
    for seen, current in is_right(where_it_watches):
        assert seen <= {current}


def share_of_device(rank, world):
    return inside.ranks_that_share(torch.device("sim", 0))


@pytest.mark.promise("V05")
def test_ranks_that_are_shown_one_device_each_share_none():
    env = [{"SIM_VISIBLE_DEVICES": "0"}, {"SIM_VISIBLE_DEVICES": "1"}]
    assert is_right(share_of_device, env=env) == [1, 1]


@pytest.mark.promise("V02")
@pytest.mark.parametrize(("queues", "seed"), [(1, 13), pytest.param(2, 504, marks=pytest.mark.full)])
def test_with_few_hardware_queues_weights_come_by_messages_and_a_warning_says_so(queues, seed):
    found = nccl_like.outcomes(2, divergence.run_over_nccl, seed, queues=queues, fresh=True, timeout=120.0)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={queues}" in found[0].output
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found[1].output


@pytest.mark.full  # by day a program runs with streams that share a queue, and one with few queues
@pytest.mark.promise("V06")
@pytest.mark.parametrize("seed", [3, 10, *range(12, 30)])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("queues", [8, 2])
def test_ranks_that_do_different_things_at_stage_3_neither_hang_nor_differ(seed, world, queues):
    is_right(divergence.run_over_nccl, seed, world=world, queues=queues, timeout=120.0)


@pytest.mark.promise("V06")
@pytest.mark.parametrize("seed", [49, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(40, 80) if seed != 49)])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_that_do_different_things_at_stage_3_do_not_hang_whatever_streams_share_a_queue(seed, world):
    is_right(divergence.run_over_nccl, seed, world=world, crowd=seed, timeout=120.0)
