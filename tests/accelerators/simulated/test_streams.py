"""Streams and events of the simulated device."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelerators_sim import configure, recorded_waits


def test_a_copy_to_the_host_reads_and_writes_only_when_it_must(sim):
    configure(races=False)
    x, host = torch.ones(4, device="sim"), torch.zeros(4, pin_memory=True)
    side = sim.Stream()
    with side:
        host.copy_(x, non_blocking=True)
    x.fill_(3)  # on another stream, which the copy does not wait for
    assert host.tolist() == [0.0] * 4
    side.synchronize()
    assert host.tolist() == [3.0] * 4


def test_a_copy_to_the_device_reads_the_host_only_when_it_must(sim):
    configure(races=False)
    x, host = torch.zeros(4, device="sim"), torch.ones(4, pin_memory=True)
    x.copy_(host, non_blocking=True)
    host.fill_(5)
    assert x.tolist() == [5.0] * 4


def test_later_work_of_the_same_stream_finds_the_copy_done(sim):
    x, host = torch.zeros(4, device="sim"), torch.ones(4, pin_memory=True)
    x.copy_(host, non_blocking=True)
    assert (x + 1).tolist() == [2.0] * 4


def test_kernels_off_the_default_stream_run_late_too(sim):
    configure(races=False)
    side, x = sim.Stream(), torch.ones(4, device="sim")
    with side:
        y = x + 1
    x.fill_(10)
    side.synchronize()
    assert y.tolist() == [11.0] * 4


def test_put_off_work_keeps_its_memory_though_it_counts_as_free(sim):
    side, host = sim.Stream(), torch.zeros(1000, pin_memory=True)
    before = sim.memory_allocated()
    x = torch.ones(1000, device="sim")
    side.wait_stream(sim.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    del x
    assert sim.memory_allocated() == before
    side.synchronize()
    assert host.sum().item() == 1000


def test_a_queue_has_an_end(sim):
    side = sim.Stream()
    with side:
        x = torch.zeros(1, device="sim")
        for _ in range(3000):
            x.add_(1)
    assert len(side.lane.pending) <= 1000
    side.synchronize()
    assert x.item() == 3000


def test_polling_comes_to_an_end(sim):
    side, x, host = sim.Stream(), torch.ones(4, device="sim"), torch.zeros(4, pin_memory=True)
    side.wait_stream(sim.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
        event = side.record_event()
    assert not event.query()
    polls = 1
    while not event.query():
        polls += 1
    assert polls < 10
    assert host.tolist() == [1.0] * 4
    assert side.query()


def test_an_event_that_was_never_recorded_is_over(sim):
    event = sim.Event()
    assert event.query()
    event.wait()
    event.synchronize()


def test_the_time_between_two_events_is_that_of_the_host(sim):
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 1000
    with pytest.raises(ValueError, match="enable_timing=True"):
        sim.Event().elapsed_time(end)
    with pytest.raises(ValueError, match="was not reached"):
        start.elapsed_time(sim.Event(enable_timing=True))


def test_entering_a_stream_ends_with_the_one_before(sim):
    outer, inner = sim.Stream(), sim.Stream()
    default = sim.current_stream()
    with outer:
        with sim.stream(inner):
            assert sim.current_stream() == inner
        assert sim.current_stream() == outer
    assert sim.current_stream() == default == sim.default_stream()


def test_each_thread_has_streams_and_devices_of_its_own(sim):
    seen = []
    with sim.Stream(), sim.device(1):
        thread = threading.Thread(target=lambda: seen.append((sim.current_stream().stream_id, sim.current_device())))
        thread.start()
        thread.join()
    assert seen == [(0, 0)]


def test_backward_runs_each_node_on_the_stream_of_its_forward_and_joins_them_at_the_end(sim):
    side, seen = sim.Stream(), {}

    def remember(name, grad):
        seen[name] = sim.current_stream().stream_id

    first, second = nn.Linear(4, 4).to("sim"), nn.Linear(4, 4).to("sim")
    x = torch.ones(2, 4, device="sim")
    middle = first(x)
    side.wait_stream(sim.current_stream())
    with side:
        y = second(middle)
        y.register_hook(partial(remember, "on the side"))
        loss = y.sum()
    sim.current_stream().wait_stream(side)
    middle.register_hook(partial(remember, "on the default"))
    loss.backward()
    assert seen == {"on the side": side.stream_id, "on the default": 0}
    for p in (*first.parameters(), *second.parameters()):
        p.grad.add_(1)  # on the caller's stream, which backward has joined


class CopiesBeside(TorchDispatchMode):
    """Each operator first does something on a side stream, as one does that gathers its weights."""

    def __init__(self, side):
        super().__init__()
        self.side = side

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with torch.sim.stream(self.side):
            torch.ones(2, device="sim")
        return function(*args, **kwargs or {})


def test_backward_runs_a_node_on_the_stream_of_its_forward_whatever_that_does_beside(sim):
    side, seen, x = sim.Stream(), [], torch.ones(2, 4, device="sim", requires_grad=True)
    with CopiesBeside(side):
        y = x * 2
    y.register_hook(lambda grad: seen.append(sim.current_stream().stream_id))
    y.sum().backward()
    assert seen == [0]


def test_threads_that_enter_a_stream_at_a_time_leave_it_each_to_where_it_was(sim):
    side, is_inside, may_leave, seen = sim.Stream(), threading.Event(), threading.Event(), []

    def enter():
        with sim.stream(side):
            is_inside.set()
            may_leave.wait()
        seen.append(sim.current_stream().stream_id)

    thread = threading.Thread(target=enter)
    with sim.stream(side):
        thread.start()
        is_inside.wait()
        with sim.stream(side):
            pass
        with sim.stream(side):
            may_leave.set()
            thread.join()
        assert sim.current_stream() == side
    assert seen == [0] and sim.current_stream().stream_id == 0


def test_the_33rd_stream_shares_a_lane_with_an_earlier_one(sim):
    streams = [sim.Stream() for _ in range(33)]
    assert streams[32].lane is streams[0].lane
    assert len({stream.lane for stream in streams}) == 32
    assert sim.default_stream().lane not in {stream.lane for stream in streams}


def test_torchs_own_synchronise_waits_for_the_device(sim):
    x, host = torch.ones(4, device="sim"), torch.zeros(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    assert host.tolist() == [1.0] * 4


def test_every_wait_can_be_listed_so_that_tests_find_those_too_many(sim):
    side, x = sim.Stream(), torch.ones(4, device="sim")
    with recorded_waits() as waits:
        side.wait_stream(sim.current_stream())
        event = side.record_event()
        event.wait()
        event.synchronize()
        x.sum().item()
    default = "the default stream of sim:0"
    name = f"stream {side.stream_id} of sim:0"
    assert [wait[:2] for wait in waits] == [(name, default), (default, name), ("the host", name), ("the host", default)]
    assert all(wait.place.startswith(f"{__file__}:") for wait in waits)
    sim.synchronize()
    assert len(waits) == 4
