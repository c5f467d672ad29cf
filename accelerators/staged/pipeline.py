"""The pipeline of a group: it cuts collectives into chunks, copies them to the host, has gloo send them, and copies them back.

[Note: threads] The first thread copies a chunk to the host, waits for the copy and starts gloo on it. The second one waits for
gloo and issues the copy back. So three chunks are under way at a time, and a program waits for a collective only when it needs
the result. Collectives keep the order in which they were called, those on host tensors and barriers included: ranks match
gloo's collectives by their order.

A failure ends the group, as the ranks no longer agree on how many chunks were sent: the collective that failed and all later
ones raise it. A collective on host tensors that fails ends nothing: gloo itself knows whether the next one can run.

[Note: order] The copies to the host wait, by an event, for the work that the caller's stream had when the collective was
called. The thread that sends waits for each copy before gloo gets the chunk. The copies back wait for the same event, as
earlier work may still use the outputs. They end with an event, for which `wait` makes the current stream wait. A device without
streams has one queue: what was issued before the collective comes before its copies, and what is issued after `wait` comes
after them.
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

CHUNK_BYTES = 4 << 20  # the bytes that a rank sends or receives at a time; all ranks must cut alike
NUM_BUFFERS = 3  # one is copied out, one is on the wire, and one is copied in
MOST_RECENT = 16  # collectives whose writes are compared with a later one's reads; the later one has waited for all before them
TURN = datetime.timedelta(seconds=0.2)  # the time of a wait for gloo before asking whether the group was closed
_CLOSE_S = 2.0  # the seconds for which `close` waits for a thread, which may wait for another rank or the device
_LEAST_BYTES = 1 << 16  # the least size of a buffer

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()

# Any: torch's stubs give some methods several signatures, of which Python calls one.
_Work: Any = dist.Work


class StagedDevice(Protocol):
    """The members of an accelerator that the staged group uses."""

    name: str

    @property
    def has_streams(self) -> bool:
        """True if work can run beside other work of the same device."""

    def current_index(self) -> int: ...
    def set_index(self, index: int) -> None: ...
    def new_stream(self, index: int | None = None) -> Any: ...
    def current_stream(self, index: int | None = None) -> Any: ...
    def new_event(self, timing: bool = False) -> Any: ...
    def in_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor: ...


@contextlib.contextmanager
def on_index(device: StagedDevice, index: int) -> Iterator[None]:
    """Makes a device current inside a `with`, as an event is made on the current device."""
    before = device.current_index()
    if before != index:
        device.set_index(index)
    try:
        yield
    finally:
        if before != index:
            device.set_index(before)


class Chunk(NamedTuple):
    """A part of a collective in host memory: rows side by side, one for each tensor that it reads or writes."""

    given: torch.Tensor
    given_rows: list[torch.Tensor]
    out: torch.Tensor
    out_rows: list[torch.Tensor]


Carry = Callable[[Chunk], Any]  # starts gloo's collective on a chunk, and returns gloo's work


class Transfer(NamedTuple):
    """A collective as the process group states it: the tensors that it reads and writes, and what gloo does."""

    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    carry: Carry
    width: int = 1  # the most rows that a rank sends or receives, which is the same on all ranks
    in_place: bool = False  # what is read is overwritten in host memory by what is written
    divisor: int = 1  # the sum of gloo is divided by it before it is written, as for a mean
    longest: Callable[[], int] | None = None  # agrees with all ranks on the longest row; None if all have one length


class Queues(NamedTuple):
    """The streams of a group on one device; None if the device has no streams."""

    outgoing: Any
    incoming: Any


class StagedWork(_Work):  # type: ignore[misc]
    """A collective that is going on. In `wait`, the host waits until the last copy back was issued, and the current stream for
    that copy."""

    def __init__(self, name: str, result: Any) -> None:
        super().__init__()
        self.what = name
        self._result = result
        self.finished = threading.Event()
        self._error: BaseException | None = None
        self._arrival: tuple[StagedDevice, int, Any] | None = None
        self._kept: Sequence[torch.Tensor] = ()

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps tensors until the program has waited, or has let go of this work."""
        self._kept = tensors

    # called by the pipeline

    def arrive(self, device: StagedDevice, index: int, event: Any) -> None:
        """Notes that the results are there once `event` of that device has come."""
        self._arrival = device, index, event

    def fail(self, error: BaseException) -> None:
        """Notes that the results will not come. The first error counts."""
        self._error = self._error or error

    def finish(self) -> None:
        self.finished.set()

    # called by the program

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.finished.wait(timeout.total_seconds() if timeout else None):  # torch passes zero if there is no limit
            raise RuntimeError(f"Timed out: {self.what} did not end within {timeout}.")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self._arrival is not None:
            device, index, event = self._arrival
            device.current_stream(index).wait_event(event)
        self._kept = ()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Returns True if `wait` would not block the host."""
        return self.finished.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        """Returns a future that is done, after a wait: torch's futures do not know the streams of every device."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Pipeline:
    """All collectives reach gloo in the order of their calls, and none does once one on a device is known to have failed.

    It has the two threads of a group, which start with its first collective.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Exchange | HostCall | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._buffers = Buffers()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._closed = False
        self._recent: deque[Exchange] = deque()  # later ones may read the results of these although the program has not waited
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
        """Ends the threads. What has come is copied back; what has not come fails, and is no longer waited for."""
        with self._starting:
            was_closed, self._closed = self._closed, True
            self._jobs.put(None)
        if was_closed or self._process != os.getpid():
            return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        _open.discard(self)

    # on the thread that sends

    def _send(self) -> None:
        # [Note: works that outlive a profile] When a work of gloo ends that was begun under a profiler, torch 2.13 notes the
        # time in memory that was freed if the profiler has stopped meanwhile, and the process crashes later. So no profiler
        # sees the works of this thread.
        torch._C._autograd._enable_record_function(False)
        while (job := self._jobs.get()) is not None:
            error = _attempt(job, partial(self._start, job))
            if isinstance(job, Exchange):
                self._failed_to_send = self._failed_to_send or error
            self._under_way.put(Part(job, is_last=True))
            del job  # otherwise it would live until the next collective, with its tensors
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

    # on the thread that receives

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
        """Waits until gloo has done its part, or the group is closed."""
        while True:
            try:
                carried.wait(TURN)
                return
            except RuntimeError:
                if carried.is_completed():
                    carried.wait()  # raises the reason if it failed; returns if it was done just after the limit
                    return
                if self._closed:
                    raise RuntimeError("its group was destroyed while it waited for other ranks") from None


class HostCall(NamedTuple):
    """A collective on host tensors, which gloo runs alone, in its turn."""

    start: Callable[[], Any]
    work: StagedWork

    def fail(self, error: BaseException) -> None:
        self.work.fail(error)

    def finish(self) -> None:
        self.work.finish()


class Part(NamedTuple):
    """A message from the first thread to the second: a chunk on the wire, or the end of a collective."""

    job: Exchange | HostCall
    carried: Any = None
    chunk: Chunk | None = None
    buffer: Buffer | None = None
    start: int = 0
    is_last: bool = False


def _attempt(job: Exchange | HostCall, act: Callable[[], None]) -> Exception | None:
    """Does a part of a collective. Returns the error if it fails, which the collective then raises in `wait`."""
    try:
        act()
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, the program that waits for the collective gets it
        job.fail(error)
        return error


class Exchange:
    """A chunk is sent only when its copy to the host is done, and no tensor is kept once the collective has finished.

    It is a collective on a device, from its call to its end. The program makes it; the threads of the pipeline copy.
    """

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
        """Returns True if it reads what an earlier one writes."""
        pairs = product(self._read_spans, earlier._write_spans)
        return self.device is earlier.device and any(one[0] < other[1] and other[0] < one[1] for one, other in pairs)

    def wait_for(self, earlier: Exchange) -> None:
        """Orders what is copied out from now on after the results of an earlier collective."""
        earlier.finished.wait()
        with self._in_stream(self._queues.outgoing) as is_async:
            if is_async and earlier._arrival is not None:
                self._queues.outgoing.wait_event(earlier._arrival)

    def starts(self) -> range:
        """Returns where the chunks begin, in elements of a row. It is the same on all ranks."""
        longest = self._transfer.longest
        numel = longest() if longest else max(row.numel() for row in (*self._reads, *self._writes))
        return range(0, numel, self._step)

    @property
    def _step(self) -> int:
        return max(1, CHUNK_BYTES // (self._dtype.itemsize * self._transfer.width))

    def copy_out(self, buffer: Buffer, start: int) -> Chunk:
        """Returns the chunk that begins at `start`. The copy is done: gloo reads it at once."""
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
        """Issues the copy of the chunk to the device. `buffer` is not written again before the copy is done."""
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
        """Waits for the copies that are under way: a program that hears of a failure frees its tensors."""
        if self._arrival is not None:
            with on_index(self.device, self.index), contextlib.suppress(RuntimeError):  # the device may have failed as well
                self._arrival.synchronize()

    def finish(self) -> None:
        """Tells the program. The tensors are forgotten before, so that no thread keeps their memory."""
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
        """Issues the work inside to `stream`; yields whether copies may run while the host goes on."""
        with torch.no_grad(), on_index(self.device, self.index):
            if stream is None:
                yield False
                return
            with self.device.in_stream(stream):
                yield True


def _spans(rows: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns the first address of each row and that behind its last byte. The rows are on one device."""
    return [(row.data_ptr(), row.data_ptr() + row.nbytes) for row in rows]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all elements in the order of memory. Writes do not raise the version, as in torch's own collectives."""
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
    """A buffer in host memory, pinned if the device can pin, with the event after which the device no longer reads it."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None
        self._device: StagedDevice | None = None
        self._read: tuple[int, Any] | None = None

    def take(self, device: StagedDevice, num_bytes: int) -> torch.Tensor:
        """Returns `num_bytes` of it, to be written. It first waits until the device has read what the memory held."""
        self.wait()
        if self._bytes is None or self._device is not device or self._bytes.numel() < num_bytes:
            size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _LEAST_BYTES
            self._bytes, self._device = device.pin(torch.empty(size, dtype=torch.uint8, device="cpu")), device
        return self._bytes[:num_bytes]

    def read_until(self, index: int, event: Any) -> None:
        """Notes that device `index` reads it until `event`."""
        self._read = index, event

    def wait(self) -> None:
        if self._read is not None and self._device is not None:
            index, event = self._read
            with on_index(self._device, index):
                event.synchronize()
        self._read = None


class Buffers:
    """The buffers of a group. `take` waits while all of them are in use."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._free.put(Buffer())

    def take(self) -> Buffer:
        return self._free.get()

    def wait(self) -> None:
        """Waits until the device has read all of them; called last, as it keeps them."""
        for _ in range(NUM_BUFFERS):
            with contextlib.suppress(RuntimeError):  # the error of the device was raised by the copy that failed
                self.take().wait()

    def give_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)


def _close_all() -> None:
    """Closes all pipelines as the interpreter ends: a thread that waits in gloo would then abort the process."""
    for pipeline in list(_open):
        pipeline.close()


atexit.register(_close_all)
