"""A stand-in for NCCL and CUDA's queues on the simulated device: it moves the right bytes, and blocks where they block.

    outcomes = nccl_like.outcomes(2, program, *args, queues=8)     # program(rank, world, *args) on each rank
    outcomes = nccl_like.outcomes(2, program, *args, crowd=7)      # the same, with other streams in one queue

It is the simulated device's process group with its lanes, where a stream waits for a collective and not the host. What it has
of NCCL and CUDA, and where these say so:

- A communicator runs its collectives one after the other, in the order in which its rank issued them. One ends when all ranks
  run it. Other kinds or sizes in one place never match (NCCL, "Collective Operations": else the behaviour is undefined).
- The first collective of a communicator is a meeting of hosts, as torch makes communicators then (`ncclCommInitRank` blocks
  until all ranks call it). So is the first of each kind and size class: peers are connected when an algorithm first needs them,
  since NCCL 2.22 (`NCCL_RUNTIME_CONNECT`; 0: when the communicator is made). All-to-all is sends and receives, which connect at
  their first use always.
- `wait()` puts a wait into the current stream. It neither blocks the host nor raises (torch, "Synchronous and asynchronous
  collective operations"), and a collective that has lost its peer runs until its communicator is aborted. After a barrier the
  host waits for that stream.
- Streams share K hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default), each of which hands its entries out in order:
  one that waits holds up what is behind it, whatever stream that is of. Only so many collectives are on the device at a time:
  each holds its blocks until it ends (NCCL, "Using multiple NCCL communicators concurrently").
- `synchronize` waits for collectives too, and so do `empty_cache` (`cudaFree`) and an allocation of pinned memory (CUDA
  programming guide, "Implicit Synchronization").
- A collective that is not done within its group's limit ends the process, after a report of who waits for what: exit status 86
  (torch, `TORCH_NCCL_ASYNC_ERROR_HANDLING`).
- A collective that has failed is completed, `wait()` does not raise, and its `get_future_result()` says so (torch, `Work`).
- To destroy a communicator waits for what is on its way (`ncclCommFinalize`); to abort it does not.

It has no messages of two ranks, and refuses them.

It is a model, and these are its own: what a size class is, which queue a stream has, kernels that end as soon as nothing before
them waits, and a host that blocks at 1,024 entries of a stream. Streams take queues in turns: of all, or of `used` ones, as if
other streams had the rest. With a `crowd`, the seed of a choice, each has any of a few, which are the same on all ranks or not.

It knows nothing of time, of the blocks of other kernels, and of copy engines. What the simulated device cannot put off, as
dropout, makes the host wait where it meets what a gate is before. CUDA would not wait there: a hang too many and none too few.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WorkResult

import accelerators
from accelerators.staged.pipeline import Queues, StagedWork, Transfer
from accelerators_sim.accelerator import SimulatedAccelerator
from accelerators_sim.current import current_lane
from accelerators_sim.group import SimulatedExchange, SimulatedGroup
from accelerators_sim.lanes import Lane, Task, lanes
from accelerators_sim.storage import block_of
from accelerators_sim.streams import lane_of, stream_of
from accelerators_sim.torch_private import NAME
from tests import ranks
from tests.faults import Part

BACKEND, LOST = "nccl_like", 86
PARTS = ("accelerators", "accelerators_sim", "zero", "tests")  # the packages whose lines are shown when a process ends
SMALL_BYTES = 65536
CROWDS = (1, 2, 2, 3, 4, 8)  # of so many queues streams have any, by a `crowd`
_POLL_S = 0.002
_FOREVER = datetime.timedelta(days=30)  # the limit of gloo, which carries the bytes


@dataclass
class Hardware:
    """This rank's device: what has been handed to its queues, in the order of issue."""

    num_queues: int = 8
    resident: int = 64  # the collectives that run at one time
    used: int | None = None  # the queues that streams take in turns; None: all
    crowd: int | None = None  # the seed by which each stream has any queue, and not the next one
    rank: int = 0
    running: int = 0
    # By queue: the collectives, and the waits for them.
    entries: dict[int, list[Collective | Task]] = field(default_factory=dict)
    communicators: list[Communicator] = field(default_factory=list)
    meetings: list[str] = field(default_factory=list)  # the meetings of hosts, in the order in which they happened

    def number_of(self, lane: Lane) -> int:
        """Returns the number of the queue that a stream has."""
        if self.crowd is None:
            return lane.stream_id % (self.used or self.num_queues)
        chance = random.Random(self.crowd)
        number, differs = chance.choice(CROWDS), chance.random() < 0.5
        return random.Random(f"{self.crowd} {lane.stream_id} {self.rank if differs else 'all'}").randrange(number)

    def queue_of(self, lane: Lane) -> list[Collective | Task]:
        return self.entries.setdefault(self.number_of(lane), [])

    def before(self, work: Collective) -> str:
        """What a queue has not handed out before a collective, in words."""
        queue = self.queue_of(work.lane)
        entries = queue[: queue.index(work)] if work in queue else []
        held = [each for each in entries if not has_left(each)]
        return "; ".join(f"work of {each.lane} that waits" if isinstance(each, Task) else str(each) for each in held)

    def enter(self, lane: Lane, entry: Collective | Task) -> None:
        queue = self.queue_of(lane)
        queue[:] = [each for each in queue if not has_left(each)]
        queue.append(entry)


hardware = Hardware()
_aborted: list[Communicator] = []  # kept, as the end of gloo below would wait for messages that never come


def has_left(entry: Collective | Task) -> bool:
    """Whether a queue has handed an entry out: a collective that is on the device, or a wait that is over."""
    if isinstance(entry, Task):
        gate = entry.after  # None once the wait is over
        return gate is None or gate.done or (gate.is_open is not None and gate.is_open())
    return entry.is_on_device or entry.finished.is_set()


class Collective(StagedWork):
    """A collective of a communicator, which a gate in the communicator's own lane stands for on the device."""

    def __init__(self, group: Communicator, name: str, result: Any, lane: Lane, num_bytes: int, transfer: Transfer) -> None:
        super().__init__(name, result)
        self.group, self.lane, self.num_bytes = group, lane, num_bytes
        self.number, self.since = group.num_issued, time.monotonic()
        self.is_on_device = self.is_waited_for_by_host = False
        self.outcome: torch.futures.Future[int] = torch.futures.Future()
        self.clock = lane.snapshot()
        self.gate = lanes.put_gate(lane, self.finished.is_set, memories(transfer.reads), memories(transfer.writes))

    @property
    def is_next(self) -> bool:
        return all(each.finished.is_set() for each in self.group.outstanding() if each.number < self.number)

    def wait(self, timeout: Any = None) -> bool:
        lane = current_lane(self.lane.index)
        with lanes.lock:
            lane.wait_for(self.lane, self.clock, self.gate)
            if not self.gate.done:
                hardware.enter(lane, lane.pending[-1])
        if self.is_waited_for_by_host:
            stream_of(lane).synchronize()
        return True

    def break_down(self) -> None:
        """As where a network fails: it counts as completed, and stays on the device until its communicator is aborted."""
        self.fail(RuntimeError(f"{self.group.label} broke down"))
        self.outcome.set_result(int(WorkResult.COMM_ERROR))

    def is_completed(self) -> bool:
        return super().is_completed() or self.outcome.done()

    def get_future_result(self) -> torch.futures.Future[int]:
        return self.outcome

    def finish(self) -> None:
        """What came has landed, before the gate opens. A collective that failed runs on until it is aborted."""
        if self._error is not None and not self.group.is_aborted:
            return
        with lanes.lock:
            if self._arrival is not None and self._arrival[2]._task is not None:
                lanes.run_to(self._arrival[2]._task)
            hardware.running -= self.is_on_device
            self.finished.set()
            while self.lane.pending and not lanes.is_blocked(self.lane, self.lane.pending[0]):
                lanes.run_to(self.lane.pending[0])
            lanes.changed.notify_all()

    def __str__(self) -> str:
        return f"{self.group.label}, number {self.number}: {self.what} of {self.num_bytes} bytes"


def memories(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {block.memory.data_ptr() for tensor in tensors if (block := block_of(tensor)) is not None}


class OnDevice(SimulatedExchange):
    """The bytes of a collective, from its turn in the hardware queue and once all ranks have issued it."""

    def starts(self) -> range:
        work = self.work
        assert isinstance(work, Collective)
        with lanes.lock:
            queue = hardware.queue_of(work.lane)
            before = queue[: queue.index(work)]
            while not (work.is_next and all(map(has_left, before)) and hardware.running < hardware.resident):
                work.group.check_aborted()
                lanes.changed.wait(_POLL_S)
        while not self._ready.query():  # waits for what the caller's stream had to do before
            work.group.check_aborted()
            time.sleep(_POLL_S)
        with lanes.lock:
            work.is_on_device, hardware.running = True, hardware.running + 1
        work.group.meet(work)
        return super().starts()


class Communicator(SimulatedGroup):
    """A process group whose streams wait."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta | None, devices: Any) -> None:
        super().__init__(store, rank, size, _FOREVER, devices)
        self.limit_s = (timeout or datetime.timedelta(minutes=10)).total_seconds()
        self.num_issued = 0
        self.is_aborted = False
        self.label = f"communicator {len(hardware.communicators)}"
        self._store, self._met, self._on_its_way = store, set[str](), list[Collective]()
        self._has_ended = False
        hardware.communicators.append(self)
        threading.Thread(target=self._watch, daemon=True, name=f"watchdog of {self.label}").start()

    def name(self) -> str:
        return BACKEND

    def outstanding(self) -> list[Collective]:
        self._on_its_way = [work for work in self._on_its_way if not work.finished.is_set()]
        return self._on_its_way

    def _start(self, name: str, on_host: Any, transfer: Transfer, result: Any, op: Any = ()) -> Any:
        tensors = [*transfer.reads, *transfer.writes]
        if not all(tensor.device.type == NAME for tensor in tensors):
            raise RuntimeError(f"No backend type associated with device type cpu, for {name}")
        if not tensors:  # a barrier is a collective of a small tensor
            work = self.allreduce([torch.zeros(1, device=NAME)])
            work.is_waited_for_by_host = True
            return work
        num_bytes = max(tensor.nbytes for tensor in tensors)
        self._connect(name, num_bytes)
        where = tensors[0].device
        device, queues = self._device(where), self._queues_of(self._device(where), where)
        if op == dist.ReduceOp.AVG:
            transfer = transfer._replace(divisor=self._size)
        with lanes.lock:  # enters the communicator and the hardware queue at one time
            self._announce(name, queues, transfer)
            work = Collective(self, name, result, self._lane, num_bytes, transfer)
            self._lane.clock |= lane_of(queues.incoming).snapshot()
            work.clock = self._lane.snapshot()
            hardware.enter(self._lane, work)
            self._on_its_way.append(work)
            self._store.set(f"issued {work.number} by {self._rank}", f"{name} of {num_bytes} bytes")
            self.num_issued += 1
            self._pipeline.put(OnDevice(device, where.index or 0, queues, transfer, work))
        return work

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        raise RuntimeError("Cannot send or receive over the stand-in for NCCL: it has no messages of two ranks. Use gloo.")

    recv = send

    def _queues_of(self, device: Any, where: torch.device) -> Queues:
        """Streams that no other has, as what waits there would wait for gates of those."""
        if where not in self._queues:
            self._lane = lanes.add(where.index or 0)
            self._queues[where] = Queues(*(stream_of(lanes.add(where.index or 0)) for _ in range(2)))
        return self._queues[where]

    def _connect(self, name: str, num_bytes: int) -> None:
        """Meets the hosts of all ranks where this is the first use of a connection."""
        kinds = ["the communicator"]
        if name.startswith("all_to_all"):
            kinds.append("sends and receives")
        elif os.environ.get("NCCL_RUNTIME_CONNECT") != "0":
            kinds.append(name if name == "broadcast" else f"{name}, {'small' if num_bytes <= SMALL_BYTES else 'large'}")
        for kind in kinds:
            if kind in self._met:
                continue
            self._met.add(kind)
            hardware.meetings.append(f"{self.label}: {kind}, in {threading.current_thread().name}")
            self._store.set(f"met for {kind} {self._rank}", "")
            keys, begun = [f"met for {kind} {rank}" for rank in range(self._size)], time.monotonic()
            while not self._store.check(keys):
                self.check_aborted()
                if time.monotonic() - begun > self.limit_s:
                    end_process(f"the host waited {self.limit_s:g} s for all ranks to connect for {kind} of {self.label}")
                time.sleep(_POLL_S)

    def meet(self, work: Collective) -> None:
        """Returns when all ranks have issued this; never where one issued something else."""
        keys = [f"issued {work.number} by {rank}" for rank in range(self._size)]
        while not self._store.check(keys):
            self.check_aborted()
            time.sleep(_POLL_S)
        # The sizes of one rank say nothing in these.
        sizes_differ = work.what.startswith("all_to_all") or work.what == "broadcast"
        while not sizes_differ and len({self._store.get(key) for key in keys}) > 1:
            self.check_aborted()
            time.sleep(_POLL_S)

    def check_aborted(self) -> None:
        if self.is_aborted:
            raise RuntimeError(f"{self.label} was aborted")

    def describe(self) -> list[str]:
        lines = []
        for work in self.outstanding():
            who = []
            for rank in range(self._size):
                key = f"issued {work.number} by {rank}"
                try:
                    issued = self._store.get(key).decode() if self._store.check([key]) else None
                except RuntimeError:
                    who.append(f"rank {rank} cannot be asked")
                    continue
                who.append(f"rank {rank} has not issued it" if issued is None else f"rank {rank} issued {issued}")
            behind = "" if work.is_on_device else f"; behind {hardware.before(work) or 'what its stream waits for'}"
            lines.append(f"  {work}, for {time.monotonic() - work.since:.1f} s: {', '.join(who)}{behind}")
        return lines

    def _watch(self) -> None:
        while not self._has_ended:
            time.sleep(0.05)
            late = [work for work in self.outstanding() if time.monotonic() - work.since > self.limit_s]
            if late and not self._has_ended:
                end_process(f"{late[0]} was not done within {self.limit_s:g} s")

    def _set_default_timeout(self, limit: datetime.timedelta) -> None:
        self.limit_s = limit.total_seconds()

    set_timeout = _set_default_timeout

    def abort(self) -> None:
        self.is_aborted = self._has_ended = True
        _aborted.append(self)
        self._pipeline.close()
        with lanes.lock:
            for work in self.outstanding():
                work.fail(RuntimeError(f"{self.label} was aborted"))
                work.finish()

    def shutdown(self) -> None:
        while self.outstanding():
            time.sleep(_POLL_S)
        self._has_ended = True
        super().shutdown()


STARTING = Part(Communicator, "_start")  # begins each collective of every communicator


def end_process(why: str) -> None:
    """Says who waits for what, and ends the process as NCCL's watchdog does."""
    lines = [f"rank {dist.get_rank() if dist.is_initialized() else '?'}: {why}"]
    for communicator in hardware.communicators:
        lines += communicator.describe()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # the threads of autograd, too
        name, stack = names.get(ident, "a thread of torch"), traceback.extract_stack(frame)
        ours = [each for each in stack if any(f"/{part}/" in each.filename for part in PARTS)]
        if ours and not name.startswith("watchdog"):
            where = " < ".join(f"{each.name} ({each.filename.rpartition('/')[2]}:{each.lineno})" for each in ours[:-12:-1])
            lines.append(f"  {name} is in {where}")
    print("\n".join(lines), flush=True)
    os._exit(LOST)


def install(
    num_queues: int = 8, resident: int = 64, used: int | None = None, crowd: int | None = None, rank: int = 0
) -> None:
    """Makes groups of the simulated device such communicators, with new hardware, and says how many queues it has."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(num_queues)
    accelerator = accelerators.use(NAME)
    assert accelerator.module is not None  # reading it brings the device up
    torch.empty(2, device="meta").mul(3).add(1)  # imports what takes a second
    hardware.__init__(num_queues, resident, used, crowd, rank)  # type: ignore[misc]
    SimulatedAccelerator.communication_backend = BACKEND  # type: ignore[assignment,method-assign]
    if BACKEND not in dist.Backend.backend_capability:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", NAME])


@contextlib.contextmanager
def installed(num_queues: int = 8, resident: int = 64) -> Iterator[None]:
    """Such communicators inside, in the process of a rank."""
    before, variables = vars(SimulatedAccelerator)["communication_backend"], dict(os.environ)
    install(num_queues, resident)
    try:
        yield
    finally:
        SimulatedAccelerator.communication_backend = before  # type: ignore[method-assign]
        os.environ.clear()
        os.environ.update(variables)


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Communicator:
    return Communicator(store, rank, size, timeout, {NAME: accelerators.get(NAME)})


def run_rank(rank: int, world: int, program: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    install(**options, rank=rank)
    torch.sim.set_device(rank % torch.sim.device_count())  # type: ignore[attr-defined]
    return program(rank, world, *args)


def outcomes(
    world: int,
    program: Callable[..., Any],
    *args: Any,
    queues: int = 8,
    resident: int = 64,
    used: int | None = None,
    crowd: int | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> list[ranks.Outcome]:
    """What `program(rank, world, *args)` came to on each rank: "died" where a watchdog ended it. Options as for tests.ranks."""
    how = {"num_queues": queues, "resident": resident, "used": used, "crowd": crowd}
    found = ranks.outcomes(world, run_rank, program, how, *args, timeout=timeout, **{"apart": "nccl", **options})
    for outcome in found:
        outcome.text += "" if outcome.ok else f"\nThis was with {how}."
    return found


def hangs(found: list[ranks.Outcome]) -> bool:
    """Whether a watchdog ended a rank, or time was up."""
    return any(outcome.kind in ("died", "hung") for outcome in found)
