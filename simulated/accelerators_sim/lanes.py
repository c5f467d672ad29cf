"""The order of work: lanes are the device's queues, one behind every stream.

[Note: as late as the rules allow] Work that is put off sits in its lane and runs when something makes it run: a wait of the
host, or later work that touches the same memory and is ordered after it. What nothing orders stays undone, so a forgotten
wait shows as old data even with the race detector off. In random order, lanes also move on by themselves.

Put off are copies between host and device, and kernels off the default stream; in random order half of all kernels. A kernel on
the default stream runs when it is issued, which is as legal and costs less.

A task may be a gate, which opens from outside of the device, as where a stream waits for a collective. What is behind it is put
off on every stream, and whatever makes it run waits until the gate is open.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

from accelerators_sim import torch_private, waits
from accelerators_sim.race import Access, Grave, History
from accelerators_sim.settings import settings
from accelerators_sim.waits import Place, here

LANES_A_DEVICE = 32  # torch keeps as many streams on real devices; the next new stream shares the first one's lane

MOST_PENDING = 256  # put-off work keeps memory alive, and each kernel looks through it
MOST_BLOCKED = 1024  # the tasks behind a gate; a real device's queue has such an end too, at which the host waits

_LOOK_S = 0.05  # the seconds between two looks at a gate, as the process that would open it may have gone

Memories = frozenset[int] | set[int]  # by address, which cannot be given out again while put-off work holds the memory


class Host:
    """The work that the host knows to be done."""

    def __init__(self) -> None:
        self.clock: dict[int, int] = {}
        self.version = 0  # lanes compare it, so that the clock is taken over only after a wait

    def learn(self, clock: dict[int, int]) -> None:
        merge(self.clock, clock)
        self.version += 1

    def access(self, operator: str) -> Access:
        return Access(HOST_LABEL, HOST_NUMBER, 0, self.clock, operator, here())


HOST_NUMBER = -1
HOST_LABEL = "the host"
host = Host()


class Task:
    """A piece of work that was put off, or a wait for one."""

    __slots__ = ("action", "after", "done", "is_open", "lane", "reads", "writes")

    def __init__(
        self, lane: Lane, action: Callable[[], object] | None, reads: Memories, writes: Memories, after: Task | None = None
    ) -> None:
        self.lane = lane
        self.action = action
        self.reads = reads
        self.writes = writes
        self.after = after  # a task that another lane must have done first
        self.is_open: Callable[[], bool] | None = None  # returns whether a gate is open; None for other tasks
        self.done = False

    def meets(self, reads: Memories, writes: Memories) -> bool:
        return not (self.writes.isdisjoint(reads) and self.writes.isdisjoint(writes) and self.reads.isdisjoint(writes))


class Lane:
    """All put-off work of a lane is done in the order in which it was issued."""

    __slots__ = ("clock", "count", "graves", "heard", "index", "label", "number", "pending", "stream_id")

    def __init__(self, index: int, stream_id: int, number: int) -> None:
        self.index = index
        self.stream_id = stream_id
        self.label = f"stream {stream_id} of sim:{index}" if stream_id else f"the default stream of sim:{index}"
        self.number = number  # the number among all lanes
        self.count = 0
        self.clock: dict[int, int] = {}
        self.heard = 0
        self.pending: deque[Task] = deque()
        self.graves: list[Grave] = []

    def __repr__(self) -> str:
        return self.label

    # knowledge

    def issue(self, operator: str, place: Place) -> Access:
        """Counts one more piece of work, which comes after all that the host has waited for."""
        self.hear()
        self.count += 1
        if not operator.startswith("aten::empty"):  # such an operator only takes memory
            waits.note_launch(operator, self.label)
        return Access(self.label, self.number, self.count, self.clock, operator, place)

    def hear(self) -> None:
        if self.heard != host.version:
            merge(self.clock, host.clock)
            self.heard = host.version

    def snapshot(self) -> dict[int, int]:
        self.hear()
        return {**self.clock, self.number: self.count}

    def wait_for(self, awaited: Lane, clock: dict[int, int], task: Task | None) -> None:
        """Orders work issued from now on after the work of `awaited` in `clock`, whose put-off part ends with `task`."""
        waits.note(self.label, awaited.label)
        merge(self.clock, clock)
        if task is not None and not task.done and task.lane is not self:
            self.pending.append(Task(self, None, frozenset(), frozenset(), after=task))

    def wait_lane(self, other: Lane) -> None:
        self.wait_for(other, other.snapshot(), other.pending[-1] if other.pending else None)

    # memory

    def allocate(self) -> None:
        """Gives memory that was freed before out again; raises if other lanes may still use some of it."""
        if not self.graves:
            return
        self.hear()
        graves, self.graves = self.graves, []
        for grave in graves:
            race = grave.settle(self.label, self.clock)
            if race is not None and settings.races:
                raise race

    def bury(self, history: History) -> None:
        """Notes that memory of this lane was freed."""
        self.hear()
        excused = history.excused | {self.number}
        uses = [
            use
            for use in history.accesses()
            if use[0].number not in excused and self.clock.get(use[0].number, 0) < use[0].count
        ]
        if uses:
            self.graves.append(Grave(uses, here()))


class Lanes:
    """The lanes of the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # notified when a gate may be open
        self._by_device: list[list[Lane]] = []
        self._count = 0
        self._num_gates = 0  # the gates that no lane has passed
        self._taken: list[int] = []
        self._random = random.Random(0)

    def start(self, device_count: int, seed: int) -> None:
        self._by_device, self._count = [[] for _ in range(device_count)], 0
        self._taken = [0] * device_count
        for index in range(device_count):
            for _ in range(LANES_A_DEVICE + 1):
                self.add(index)
        self.reseed(seed)

    def add(self, index: int) -> Lane:
        """Makes one more lane of device `index`, which no stream of the program shares."""
        lane = Lane(index, len(self._by_device[index]), self._count)
        self._by_device[index].append(lane)
        self._count += 1
        return lane

    def reseed(self, seed: int) -> None:
        self._random = random.Random(seed)

    def default(self, index: int) -> Lane:
        return self._by_device[index][0]

    def find(self, index: int, stream_id: int) -> Lane:
        return self._by_device[index][stream_id]

    def take(self, index: int) -> Lane:
        """Returns a side lane of device `index`, each in turn."""
        self._taken[index] += 1
        return self._by_device[index][(self._taken[index] - 1) % LANES_A_DEVICE + 1]

    def of(self, index: int | None) -> list[Lane]:
        return [lane for device, lanes in enumerate(self._by_device) for lane in lanes if index is None or device == index]

    # running

    def put_off(self, lane: Lane, action: Callable[[], object], reads: Memories, writes: Memories) -> Task:
        """Queues work. It runs at once where nothing is to be put off, unless a closed gate is before it, for which no host
        waits."""
        task = Task(lane, action, reads, writes)
        lane.pending.append(task)
        if settings.order == "eager" and not self.is_blocked(lane):
            self.run_to(task)
        elif len(lane.pending) > (MOST_BLOCKED if self.is_blocked(lane) else MOST_PENDING):
            self._run_first(lane)
        return task

    def put_gate(self, lane: Lane, is_open: Callable[[], bool], reads: Memories, writes: Memories) -> Task:
        """Queues what waits for something outside of the device, which uses memory until then; `changed` is to be notified when
        that has come."""
        task = Task(lane, None, reads, writes)
        task.is_open = is_open
        lane.pending.append(task)
        self._num_gates += 1
        return task

    def is_blocked(self, lane: Lane, last: Task | None = None) -> bool:
        """Returns whether a closed gate lies before the end of a lane's work, or before `last`."""
        if not self._num_gates:
            return False
        seen: set[int] = set()
        queues = [(lane, last)]
        while queues:
            queue, last = queues.pop()
            for task in queue.pending:
                if task.is_open is not None and not task.is_open():
                    return True
                if task.after is not None and not task.after.done and id(task.after) not in seen:
                    seen.add(id(task.after))
                    queues.append((task.after.lane, task.after))
                if task is last:
                    break
        return False

    def run_to(self, task: Task) -> None:
        """Runs put-off work up to and including `task`, and whatever that waits for on other lanes."""
        with self.lock:
            goals = [task]  # a list, as a chain of waits may be longer than Python's stack
            while goals:
                if goals[-1].done:
                    goals.pop()
                    continue
                first = goals[-1].lane.pending[0]
                if first.is_open is not None and not first.is_open():
                    self.changed.wait(_LOOK_S)  # this gives up all of the lock
                elif first.after is not None and not first.after.done:
                    # Its work may in turn run this lane on, never past `first`: nothing waits for later work.
                    goals.append(first.after)
                else:
                    self._run(first)

    def run_lane(self, lane: Lane) -> None:
        with self.lock:
            while lane.pending:
                self._run_first(lane)

    def run_all(self, index: int | None = None) -> None:
        for lane in self.of(index):
            if lane.pending:
                self.run_lane(lane)

    def run_blocked(self) -> None:
        """Waits until no gate is closed, as a driver does that takes memory while the device is at work."""
        if any(self.is_blocked(lane) for lane in self.of(None)):
            self.run_all()

    def settle(self, lane: Lane, reads: Memories, writes: Memories) -> None:
        """Runs the put-off work that comes before work on `reads` and `writes` issued to `lane` now, and no other."""
        if settings.order == "random":
            self._move_on()
        if lane.pending:
            for task in _collect(lane, reads, writes):
                self.run_to(task)

    def wait_host(self, awaited: Lane, clock: dict[int, int]) -> None:
        """Notes that the host waited for the work of `awaited` in `clock`, which has been run."""
        waits.note(HOST_LABEL, awaited.label)
        with self.lock:
            host.learn(clock)

    def may_put_off(self, lane: Lane) -> bool:
        """Returns whether a kernel issued to `lane` waits for its turn."""
        if lane.pending and self.is_blocked(lane):
            return True
        if settings.order == "random":
            return self._random.random() < 0.5
        return settings.order == "late" and lane.stream_id != 0

    def _run_first(self, lane: Lane) -> None:
        self.run_to(lane.pending[0])

    def _run(self, task: Task) -> None:
        task.lane.pending.popleft()
        task.done = True
        self._num_gates -= task.is_open is not None
        if task.action is not None:
            with torch_private.below_autograd(), torch_private.excluding(torch_private.WATCH_KEY):
                task.action()
        task.action = task.after = None  # frees the memory

    def _move_on(self) -> None:
        while self._random.random() < 0.5:
            busy = [lane for lane in self.of(None) if lane.pending and not self.is_blocked(lane, lane.pending[0])]
            if not busy:
                return
            self._run_first(self._random.choice(busy))


def _collect(lane: Lane, reads: Memories, writes: Memories) -> list[Task]:
    """Returns what `lane` will have done before its next work: its own queue, and those of others up to where it waits."""
    tasks: list[Task] = []
    seen: set[int] = set()
    queues: list[tuple[Lane, Task | None]] = [(lane, None)]
    while queues:
        queue, last = queues.pop()  # the latest first: whoever has come to it has come to all work before it
        if id(last) in seen:
            continue
        for task in queue.pending:
            if id(task) not in seen:
                seen.add(id(task))
                if task.after is not None and not task.after.done:
                    queues.append((task.after.lane, task.after))
                elif task.after is None and task.meets(reads, writes):
                    tasks.append(task)
            if task is last:
                break
    return tasks


def merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for number, count in other.items():
        if clock.get(number, 0) < count:
            clock[number] = count


lanes = Lanes()
