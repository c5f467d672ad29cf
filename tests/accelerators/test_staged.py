"""The parts of the staged group, with a device that writes down what it is asked and a wire that answers when it is told to."""

import contextlib
import datetime
import logging
import threading

import pytest
import torch
import torch.distributed as dist

import accelerators
from accelerators import staged
from accelerators.staged import pipeline as staged_pipeline
from accelerators.staged.pipeline import NUM_BUFFERS, Exchange, HostCall, Pipeline, Queues, StagedWork, Transfer

LIMIT_S = 20.0


class Recorded:
    """A stream or an event, by name."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record(self, stream):
        self.log.append(f"{self.name} recorded on {stream.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self):
        self.log.append(f"the host waits for {self.name}")


class Device:
    """Host memory that is called a device."""

    name = "recorded"

    def __init__(self, has_streams=True):
        self.has_streams, self.log, self.pinned = has_streams, [], []
        self.num_events = 0

    def current_index(self):
        return 0

    def current_stream(self, index=None):
        return Recorded("the program", self.log)

    def new_event(self, timing=False):
        self.num_events += 1
        return Recorded(f"event {self.num_events}", self.log)

    @contextlib.contextmanager
    def in_stream(self, stream):
        self.log.append(f"in {stream.name}")
        yield stream

    def pin(self, tensor):
        self.pinned.append(tensor.numel())
        return tensor

    def queues(self):
        return (
            Queues(Recorded("outgoing", self.log), Recorded("incoming", self.log)) if self.has_streams else Queues(None, None)
        )


class Carried:
    """A collective of gloo that ends when it is told to."""

    def __init__(self):
        self.done, self.error = threading.Event(), None

    def wait(self, timeout=datetime.timedelta(seconds=LIMIT_S)):
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.done.is_set()


class Wire:
    """What was sent, in order."""

    def __init__(self):
        self.sent, self.begun = [], threading.Condition()

    def __call__(self, chunk):
        with self.begun:
            self.sent.append((chunk, Carried()))
            self.begun.notify_all()
        return self.sent[-1][1]

    def wait_until_sent(self, number):
        with self.begun:
            assert self.begun.wait_for(lambda: len(self.sent) >= number, LIMIT_S)


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.setattr(staged_pipeline, "CHUNK_BYTES", 16)  # four elements of fp32
    made = Pipeline()
    yield made
    made.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("staged")]


def doubled(device, x, wire):
    work = StagedWork("a sum", [x])
    return Exchange(device, 0, device.queues(), Transfer([x], [x], wire, in_place=True), work), work


def test_chunks_are_copied_while_others_are_on_the_wire_and_no_more_than_there_are_buffers(pipeline):
    device, wire, x = Device(has_streams=False), Wire(), torch.arange(20.0)
    job, work = doubled(device, x, wire)
    pipeline.put(job)
    wire.wait_until_sent(NUM_BUFFERS)  # though none of them has come back
    with wire.begun:
        assert not wire.begun.wait_for(lambda: len(wire.sent) > NUM_BUFFERS, 0.05)
    for number in range(5):
        wire.wait_until_sent(number + 1)
        chunk, carried = wire.sent[number]
        chunk.out.mul_(2)
        carried.done.set()
    work.wait()
    assert x.tolist() == [2.0 * value for value in range(20)]
    assert len(device.pinned) == NUM_BUFFERS  # the same ones served again
    assert work.is_success()


def test_a_copy_waits_for_the_program_the_wire_for_the_copy_and_the_program_for_the_result(pipeline):
    device, wire, x = Device(), Wire(), torch.ones(4)
    job, work = doubled(device, x, wire)
    pipeline.put(job)
    wire.wait_until_sent(1)
    sent = list(device.log)
    wire.sent[0][1].done.set()
    work.wait()
    assert sent == [
        "event 1 recorded on the program",
        *("in outgoing", "outgoing waits for event 1", "event 2 recorded on outgoing", "the host waits for event 2"),
    ]
    assert device.log[len(sent) :] == [
        *("in incoming", "incoming waits for event 1", "event 3 recorded on incoming"),
        "the program waits for event 3",
    ]


def test_what_an_earlier_collective_writes_is_read_by_a_later_one_after_it_came(pipeline):
    device, wire, x = Device(), Wire(), torch.ones(4)
    jobs = [doubled(device, x, wire) for _ in range(2)]
    for job, _ in jobs:
        pipeline.put(job)
    wire.wait_until_sent(1)
    with wire.begun:
        assert not wire.begun.wait_for(lambda: len(wire.sent) > 1, 0.05)
    wire.sent[0][0].out.fill_(5.0)
    wire.sent[0][1].done.set()
    wire.wait_until_sent(2)
    assert wire.sent[1][0].given.tolist() == [5.0] * 4
    assert "outgoing waits for event 4" in device.log  # the event of the first result, as two were recorded at the calls
    wire.sent[1][1].done.set()
    jobs[1][1].wait()


def test_what_fails_fails_all_that_comes_later_and_a_wait_may_end_before_it(pipeline):
    device, wire = Device(has_streams=False), Wire()
    jobs = [doubled(device, torch.ones(4), wire) for _ in range(2)]
    for job, _ in jobs:
        pipeline.put(job)
    with pytest.raises(RuntimeError, match=r"Timed out: a sum did not end within 0:00:00\.010000"):
        jobs[0][1].wait(datetime.timedelta(seconds=0.01))
    assert not jobs[0][1].is_completed()
    wire.wait_until_sent(2)
    wire.sent[0][1].error = RuntimeError("Connection closed by peer")
    for _, carried in wire.sent:
        carried.done.set()
    later = HostCall(lambda: pytest.fail("it was started"), StagedWork("a barrier", None))
    for work in (jobs[0][1], jobs[1][1]):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            work.wait()
        assert work.is_completed() and not work.is_success()
    pipeline.put(later)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        later.work.wait()


def test_a_group_that_is_destroyed_waits_for_no_rank(pipeline):
    job, work = doubled(Device(has_streams=False), torch.ones(4), Wire())
    pipeline.put(job)
    pipeline.close()
    with pytest.raises(RuntimeError, match="its group was destroyed while it waited for other ranks"):
        work.wait()
    with pytest.raises(RuntimeError, match=r"its group was destroyed\. Make another group"):
        pipeline.put(job)


# which backend ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch):
    """Torch's tables, put back when the test is over."""
    for table in ("backend_capability", "default_device_backend_map", "backend_type_map", "_plugins"):
        monkeypatch.setattr(dist.Backend, table, dict(getattr(dist.Backend, table)))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    monkeypatch.setattr(staged, "_served", {})


def test_a_backend_that_a_plug_in_registered_is_found_by_itself(known):
    dist.Backend.register_backend("acmeccl", lambda *_: None, devices=["acme"])
    assert accelerators.Accelerator("acme").communication_backend == "acmeccl"


def test_a_device_without_one_gets_the_staged_group_and_one_line_in_the_log(known, caplog):
    with caplog.at_level(logging.INFO, "accelerators"):
        it = accelerators.Accelerator("acme")
        assert it.communication_backend == it.communication_backend == "staged"
        assert accelerators.Accelerator("acme").communication_backend == "staged"
    assert caplog.messages == [
        "Collectives of acme go through the host (staged): torch.distributed has no backend for that device"
    ]
    assert "acme" in dist.Backend.backend_capability["staged"]


def test_what_torch_only_lists_does_not_count(known):
    assert staged.own_backend("cpu") == "gloo"
    assert staged.own_backend("mps") is None  # torch's table names gloo for it, which carries none of its tensors
    assert staged.own_backend("hpu") is None  # the fake backend lists it
    if not dist.is_xccl_available():
        assert staged.own_backend("xpu") is None


def test_a_subclass_that_names_its_backend_is_believed():
    assert accelerators.get("cpu").communication_backend == "gloo"

    class Acme(accelerators.Accelerator):
        name, communication_backend = "acme", "acmeccl"

    assert Acme().communication_backend == "acmeccl"
