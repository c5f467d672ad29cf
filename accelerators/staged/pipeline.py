"""The path of one collective through the host: cut into chunks, copied out, carried by gloo and copied back, on two threads.

[Note: threads] The first thread copies a chunk to the host, waits for the copy and starts gloo on it. The second one waits for
gloo and issues the copy back. So three chunks are under way at a time, and a program waits for a collective only where it needs
the result. Collectives keep the order in which they were called, those on host tensors and barriers included: ranks match
gloo's collectives by their order.

A failure ends the group, as the ranks no longer agree on how many chunks were sent: the collective that failed and all later
ones raise it. Where one on host tensors fails, it is gloo that knows what can go on.

[Note: order] The copies to the host wait for the work that the caller's stream had when the collective was called, by an
event. The thread that sends waits for each copy before gloo gets the chunk. The copies back wait for the same event, as earlier
work may still use the outputs, and end with an event that `wait` makes the current stream wait for. A device without them has
one queue: what was issued before the collective comes before its copies, and what is issued after `wait` comes after them.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

CHUNK_BYTES = 4 << 20  # of what a rank sends or receives; the same on all ranks, as they cut alike
NUM_BUFFERS = 3  # one is copied out, one is on the wire, one is copied in
MOST_RECENT = 16
TURN = datetime.timedelta(seconds=0.2)  # of waiting for gloo, between two looks whether the group was closed
_CLOSE_S = 2.0  # for a thread to end that waits for another rank or for the device
_LEAST_BYTES = 1 << 16

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()

# Any: torch's stubs give some methods several signatures, of which Python calls one.
_Work: Any = dist.Work


class StagedDevice(Protocol):
    """The members of an accelerator that the staged group uses."""

    name: str

    @property
    def has_streams(self) -> bool:
        """Whether work can run beside other work of the same device."""

    def current_index(self) -> int: ...
    def set_index(self, index: int) -> None: ...
    def new_stream(self, index: int | None = None) -> Any: ...
    def current_stream(self, index: int | None = None) -> Any: ...
    def new_event(self, timing: bool = False) -> Any: ...
    def in_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor: ...


@contextlib.contextmanager
def on_index(device: StagedDevice, index: int) -> Iterator[None]:
    """Makes a device current for the length of a `with`; an event is made on the current one."""
    before = device.current_index()
    if before != index:
        device.set_index(index)
    try:
        yield
    finally:
        if before != index:
            device.set_index(before)


class Chunk(NamedTuple):
    """A part of a collective in host memory: rows side by side, one for each tensor that is read or written."""

    given: torch.Tensor
    given_rows: list[torch.Tensor]
    out: torch.Tensor
    out_rows: list[torch.Tensor]


Carry = Callable[[Chunk], Any]  # starts a collective of gloo on a chunk


class Transfer(NamedTuple):
    """What a collective reads, writes and does, as the process group says it."""

    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    carry: Carry
    width: int = 1  # how many rows a rank sends or receives at most; the same on all ranks
    in_place: bool = False  # what is read is overwritten in host memory by what is written
    divisor: int = 1  # of what is written
    longest: Callable[[], int] | None = None  # where rows differ in length: the longest one of all ranks, found out together


class Queues(NamedTuple):
    """Streams of a group on one device; None where the device has no streams."""

    outgoing: Any
    incoming: Any


class StagedWork(_Work):  # type: ignore[misc]
    """A collective that is going on. The host waits until the last copy back was issued, and the current stream waits for the
    copy."""

    def __init__(self, name: str, result: Any) -> None:
        super().__init__()
        self.what = name
        self._result = result
        self.finished = threading.Event()
        self._error: BaseException | None = None
        self._arrival: tuple[StagedDevice, int, Any] | None = None

    # the pipeline says

    def arrive(self, device: StagedDevice, index: int, event: Any) -> None:
        """The results are there once `event` of that device has come."""
        self._arrival = device, index, event

    def fail(self, error: BaseException) -> None:
        """The results will not come. The first error counts."""
        self._error = self._error or error

    def finish(self) -> None:
        self.finished.set()

    # the caller asks

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.finished.wait(timeout.total_seconds() if timeout else None):  # torch passes zero for no limit
            raise RuntimeError(f"Timed out: {self.what} did not end within {timeout}.")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self._arrival is not None:
            device, index, event = self._arrival
            device.current_stream(index).wait_event(event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """True when `wait` would not block the host."""
        return self.finished.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        """Waits first: a future of torch knows nothing of the streams of every device."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Pipeline:
    """Starts its threads with the first collective."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Exchange | HostCall | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._buffers = Buffers()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._closed = False
        self._recent: deque[Exchange] = deque()  # whose results later ones may read without a wait of the program in between
        self._failed_to_send: BaseException | None = None
        self._failed_to_land: BaseException | None = None

    def put(self, job: Exchange | HostCall) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"Cannot run a collective in process {os.getpid()}: its group belongs to process {self._process}, from which "
                "this one was forked. Make a group in this process."
            )
        with self._starting:
            if self._closed:
                raise RuntimeError("Cannot run a collective: its group was destroyed. Make another group.")
            if not self._threads:
                loops = {"staged-send": self._send, "staged-receive": self._receive}
                self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]
                for thread in self._threads:
                    thread.start()
                _open.add(self)
            self._jobs.put(job)

    def close(self) -> None:
        """Ends the threads. What has come lands; what has not fails, and is waited for no longer."""
        with self._starting:
            was_closed, self._closed = self._closed, True
            self._jobs.put(None)
        if was_closed or self._process != os.getpid():
            return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        _open.discard(self)

    # the thread that sends

    def _send(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = _attempt(job, partial(self._start, job))
            if isinstance(job, Exchange):
                self._failed_to_send = self._failed_to_send or error
            self._under_way.put(Part(job, is_last=True))
            del job  # or it would stay until the next one
        self._under_way.put(None)

    def _start(self, job: Exchange | HostCall) -> None:
        self._check()
        if isinstance(job, HostCall):
            self._under_way.put(Part(job, job.start()))
            return
        for earlier in filter(job.follows, self._recent):
            job.wait_for(earlier)
        if len(self._recent) == MOST_RECENT:
            job.wait_for(self._recent.popleft())
        self._recent.append(job)
        for start in job.starts():
            buffer = self._buffers.take()
            carried = None
            try:
                self._check()
                chunk = job.copy_out(buffer, start)
                carried = job.carry(chunk)
            finally:
                if carried is None:
                    self._buffers.give_back(buffer)
            self._under_way.put(Part(job, carried, chunk, buffer, start))

    def _check(self) -> None:
        failure = self._failed_to_send or self._failed_to_land
        if failure is not None:
            raise failure

    # the thread that receives

    def _receive(self) -> None:
        while (part := self._under_way.get()) is not None:
            if not part.is_last:
                error = _attempt(part.job, partial(self._land, part))
                if isinstance(part.job, Exchange):
                    self._failed_to_land = self._failed_to_land or error
            else:
                part.job.finish()
            del part
        self._buffers.wait()

    def _land(self, part: Part) -> None:
        try:
            if self._failed_to_land is not None:
                raise self._failed_to_land
            self.wait_for(part.carried)
            if isinstance(part.job, Exchange) and part.buffer is not None and part.chunk is not None:
                part.job.copy_in(part.buffer, part.chunk, part.start)
        finally:
            if part.buffer is not None:
                self._buffers.give_back(part.buffer)

    def wait_for(self, carried: Any) -> None:
        """Until gloo has done its part, or the group is closed."""
        while True:
            try:
                carried.wait(TURN)
                return
            except RuntimeError:
                if carried.is_completed():
                    carried.wait()  # it failed, and says why; or it was done just now
                    return
                if self._closed:
                    raise RuntimeError("its group was destroyed while it waited for other ranks") from None


class HostCall(NamedTuple):
    """A collective on host tensors."""

    start: Callable[[], Any]
    work: StagedWork

    def fail(self, error: BaseException) -> None:
        self.work.fail(error)

    def finish(self) -> None:
        self.work.finish()


class Part(NamedTuple):
    """A chunk on the wire, or the end of a collective."""

    job: Exchange | HostCall
    carried: Any = None
    chunk: Chunk | None = None
    buffer: Buffer | None = None
    start: int = 0
    is_last: bool = False


def _attempt(job: Exchange | HostCall, act: Callable[[], None]) -> Exception | None:
    """Does a part of a collective; returns what it raised, which the collective raises too."""
    try:
        act()
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, the program that waits for the collective gets it
        job.fail(error)
        return error


class Exchange:
    """A collective from its call to its end. Made by the caller; the copies are made by the threads of the pipeline."""

    def __init__(self, device: StagedDevice, index: int, queues: Queues, transfer: Transfer, work: StagedWork) -> None:
        self.device, self.index = device, index
        self.work: StagedWork | None = work
        self.finished = work.finished
        self._arrival: Any = None
        self._failed = False
        self._queues, self._transfer = queues, transfer
        self._reads = [flat(tensor) for tensor in transfer.reads]
        self._writes = [flat(tensor) for tensor in transfer.writes]
        self._read_spans, self._write_spans = _spans(self._reads), _spans(self._writes)
        self._dtype = (*self._reads, *self._writes)[0].dtype
        self._ready: Any = None
        if device.has_streams:
            with on_index(device, index):
                self._ready = device.new_event()
                self._ready.record(device.current_stream(index))

    def follows(self, earlier: Exchange) -> bool:
        """Whether it reads what an earlier one writes."""
        pairs = product(self._read_spans, earlier._write_spans)
        return self.device is earlier.device and any(one[0] < other[1] and other[0] < one[1] for one, other in pairs)

    def wait_for(self, earlier: Exchange) -> None:
        """What is copied out from now on comes after the results of an earlier collective."""
        earlier.finished.wait()
        with self._in_stream(self._queues.outgoing) as is_async:
            if is_async and earlier._arrival is not None:
                self._queues.outgoing.wait_event(earlier._arrival)

    def starts(self) -> range:
        """Where the chunks begin, counted in elements of a row. The same on all ranks."""
        longest = self._transfer.longest
        numel = longest() if longest else max(row.numel() for row in (*self._reads, *self._writes))
        return range(0, numel, self._step)

    @property
    def _step(self) -> int:
        return max(1, CHUNK_BYTES // (self._dtype.itemsize * self._transfer.width))

    def copy_out(self, buffer: Buffer, start: int) -> Chunk:
        """The chunk that begins at `start`, in host memory once this returns."""
        with self._in_stream(self._queues.outgoing) as is_async:
            reads, writes = self._cut(self._reads, start), [] if self._transfer.in_place else self._cut(self._writes, start)
            sizes = [row.numel() for row in (*reads, *writes)]
            host = buffer.take(self.device, sum(sizes) * self._dtype.itemsize).view(self._dtype)
            rows = list(torch.split(host, sizes)) if sizes else []
            if is_async:
                self._queues.outgoing.wait_event(self._ready)
            for source, target in zip(reads, rows, strict=False):
                if source.numel():
                    target.copy_(source, non_blocking=is_async)
            if is_async and reads:
                copied = self.device.new_event()
                copied.record(self._queues.outgoing)
                copied.synchronize()
        sent = sum(sizes[: len(reads)])
        if self._transfer.in_place:
            return Chunk(host, rows, host, rows)
        return Chunk(host[:sent], rows[: len(reads)], host[sent:], rows[len(reads) :])

    def carry(self, chunk: Chunk) -> Any:
        return self._transfer.carry(chunk)

    def copy_in(self, buffer: Buffer, chunk: Chunk, start: int) -> None:
        """What gloo left in the chunk goes to the device; `buffer` may be written again when that is done."""
        if self._transfer.divisor > 1:
            whole = None if chunk.out.is_floating_point() else "trunc"
            chunk.out.div_(self._transfer.divisor, rounding_mode=whole)
        with self._in_stream(self._queues.incoming) as is_async:
            if is_async:
                self._queues.incoming.wait_event(self._ready)
            for target, source in zip(self._cut(self._writes, start), chunk.out_rows, strict=not self._transfer.in_place):
                if target.numel():
                    target.copy_(source, non_blocking=is_async)
            if is_async:
                landed = self.device.new_event()
                landed.record(self._queues.incoming)
                buffer.read_until(self.index, landed)
                self._arrival = landed

    def fail(self, error: BaseException) -> None:
        self._failed = True
        if self.work is not None:
            self.work.fail(error)

    def _abandon(self) -> None:
        """The program gives its tensors up when it hears of a failure, so no copy may be under way then."""
        if self._arrival is not None:
            with on_index(self.device, self.index), contextlib.suppress(RuntimeError):  # of a device that failed as well
                self._arrival.synchronize()

    def finish(self) -> None:
        """Tells the caller, and forgets the tensors before, so that no thread keeps their memory."""
        work, self.work = self.work, None
        self._reads, self._writes = [], []
        self._transfer = Transfer((), (), _ended)
        assert work is not None
        if self._failed:
            self._abandon()
        if self._arrival is not None:
            work.arrive(self.device, self.index, self._arrival)
        work.finish()

    def _cut(self, rows: list[torch.Tensor], start: int) -> list[torch.Tensor]:
        return [row[start : start + self._step] for row in rows]

    @contextlib.contextmanager
    def _in_stream(self, stream: Any) -> Any:
        """Issues to `stream`, and says whether copies may run behind the host."""
        with torch.no_grad(), on_index(self.device, self.index):
            if stream is None:
                yield False
                return
            with self.device.in_stream(stream):
                yield True


def _spans(rows: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The addresses from the first to behind the last byte of each row, which lie on one device."""
    return [(row.data_ptr(), row.data_ptr() + row.nbytes) for row in rows]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory. Without the version counter, which collectives of torch leave alone too."""
    bare = tensor.data
    if bare.is_contiguous():
        return bare.view(-1)
    dense = {4: torch.channels_last, 5: torch.channels_last_3d}.get(bare.dim())
    if dense is not None and bare.is_contiguous(memory_format=dense):
        return bare.as_strided((bare.numel(),), (1,))
    raise ValueError("Cannot run a collective: a tensor is not contiguous. Call contiguous() on it first.")


def _ended(chunk: Chunk) -> Any:
    raise AssertionError(f"a collective that had ended was given a chunk of {chunk.out.numel()} elements")


class Buffer:
    """Pinned host memory where the device can pin, and the event after which the device no longer reads it."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None
        self._device: StagedDevice | None = None
        self._read: tuple[int, Any] | None = None

    def take(self, device: StagedDevice, num_bytes: int) -> torch.Tensor:
        """`num_bytes` of it, to be written by the host or by a copy; waits until the device has read what it held."""
        self.wait()
        if self._bytes is None or self._device is not device or self._bytes.numel() < num_bytes:
            size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _LEAST_BYTES
            self._bytes, self._device = device.pin(torch.empty(size, dtype=torch.uint8, device="cpu")), device
        return self._bytes[:num_bytes]

    def read_until(self, index: int, event: Any) -> None:
        """A copy from it is under way on device `index`, and ends with `event`."""
        self._read = index, event

    def wait(self) -> None:
        if self._read is not None and self._device is not None:
            index, event = self._read
            with on_index(self._device, index):
                event.synchronize()
        self._read = None


class Buffers:
    """The buffers of a group. Who takes one waits while all of them are in use."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._free.put(Buffer())

    def take(self) -> Buffer:
        return self._free.get()

    def wait(self) -> None:
        """Until the device has read all of them. Nobody uses them any more."""
        for _ in range(NUM_BUFFERS):
            with contextlib.suppress(RuntimeError):  # a device that failed was told about where it did
                self.take().wait()

    def give_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)


def _close_all() -> None:
    """The interpreter ends. A thread that waits in gloo then would take the process down."""
    for pipeline in list(_open):
        pipeline.close()


atexit.register(_close_all)
