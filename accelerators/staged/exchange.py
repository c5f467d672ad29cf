"""One collective on device tensors, cut into chunks.

[Note: order] The copies to the host wait for the work that the caller's stream had when the collective was called, by an
event. The thread that sends waits for each copy before gloo gets the chunk. The copies back wait for the same event, as earlier
work may still use the outputs, and end with an event that `wait` makes the current stream wait for. A device without them has
one queue: what was issued before the collective comes before its copies, and what is issued after `wait` comes after them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from accelerators.staged.device import StagedDevice, on_index
from accelerators.staged.memory import Buffer
from accelerators.staged.work import StagedWork

CHUNK_BYTES = 4 << 20  # of what a rank sends or receives; the same on all ranks, as they cut alike


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
        self._read_spans, self._write_spans = spans(self._reads), spans(self._writes)
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
            divide(chunk.out, self._transfer.divisor)
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


def spans(rows: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The addresses from the first to behind the last byte of each row, which lie on one device."""
    return [(row.data_ptr(), row.data_ptr() + row.nbytes) for row in rows]


def _ended(chunk: Chunk) -> Any:
    raise AssertionError(f"a collective that had ended was given a chunk of {chunk.out.numel()} elements")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory. Without the version counter, which collectives of torch leave alone too."""
    bare = tensor.data
    if bare.is_contiguous():
        return bare.view(-1)
    if any(is_dense(bare, layout) for layout in (torch.channels_last, torch.channels_last_3d)):
        return bare.as_strided((bare.numel(),), (1,))
    raise ValueError("Cannot run a collective: a tensor is not contiguous. Call contiguous() on it first.")


def is_dense(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    return tensor.dim() == (4 if layout is torch.channels_last else 5) and tensor.is_contiguous(memory_format=layout)


def divide(tensor: torch.Tensor, divisor: int) -> None:
    tensor.div_(divisor, rounding_mode=None if tensor.is_floating_point() else "trunc")
