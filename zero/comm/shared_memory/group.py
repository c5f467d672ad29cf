"""Ranks of one host exchange tensors through memory that they share, ordered by small messages of the group.

[Note: who writes when] For each collective every rank sends one small message, which says where its part lies. When the
messages of all ranks have arrived, a rank may read all parts. Waiting, time limits and lost ranks are those of the group. In
memory that all see, every rank counts the collectives that it has finished; a part is written again only when all ranks have
finished the collective that it was for. No rank waits for that: if it needs memory earlier, it takes more. Gradients may be
read as late as in the step, and weights are read at once, so these are counted apart.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from zero.comm.group import Group, GroupBeside, Pending, SharedHostMemory, Wire
from zero.comm.results import CompletedResult, SideBySide, UnreducedResult
from zero.comm.shared_memory.arena import INTRODUCTION_BYTES, LINES, SharedArena, counts_of, map_peer
from zero.comm.shared_memory.control import Messages, Numbers

logger = logging.getLogger("zero")

Given = TypeVar("Given")

_SUMS, _WEIGHTS = range(LINES)
_ANOTHERS = "a rank shares none"  # which says why


def through_shared_memory(group: Group, wanted: bool = True, make_messages: Callable[[], Messages] | None = None) -> Group:
    """`group`, with tensors of the host going through memory where every rank proved that it reaches that of all others, and
    wants it; a collective. `make_messages`: how small messages travel, if not as the group's own."""
    if group.size == 1:
        return group
    reason = _Reason("" if wanted else "it was turned off")
    arena, messages = reason.unless(SharedArena), reason.unless(make_messages or partial(Messages, group))
    handshakes = group.all_gather_bytes(b"" if arena is None or messages is None else arena.handshake() + messages.handshake())
    if not all(handshakes):
        reason.note(_ANOTHERS)
    others = [rank for rank in range(group.size) if rank != group.rank]
    arenas = reason.unless(lambda: {rank: map_peer(handshakes[rank][:INTRODUCTION_BYTES]) for rank in others})
    if messages is not None:
        reason.unless(partial(messages.meet, [handshake[INTRODUCTION_BYTES:] for handshake in handshakes]))
    reasons = [message.decode() for message in group.all_gather_bytes(reason.text.encode())]
    if arena is not None:
        arena.introduced()
    if messages is not None:
        messages.introduced()
    if arena is None or arenas is None or messages is None or any(reasons):
        if messages is not None:
            messages.close()
        _, said = min((text == _ANOTHERS, f"rank {rank}: {text}") for rank, text in enumerate(reasons) if text)
        if wanted and group.rank == 0:
            logger.info("Tensors of %d ranks travel by ordinary collectives, not through shared memory (%s)", group.size, said)
        return group
    return SharedMemoryGroup(group, arena, arenas, messages)


class _Reason:
    """A reason not to use shared memory; empty while there is none."""

    def __init__(self, text: str) -> None:
        self.text = text

    def note(self, text: str) -> None:
        self.text = self.text or text

    def unless(self, act: Callable[[], Given]) -> Given | None:
        """What `act` gives, unless there is a reason against it, or it is one."""
        if self.text:
            return None
        try:
            return act()
        except (OSError, AttributeError, struct.error) as error:  # AttributeError: a system without memory files
            self.note(f"{type(error).__name__}: {error}")
            return None


class SharedMemoryGroup:
    """A group whose host tensors are exchanged through shared memory; everything else goes by the group that it was made
    from."""

    outer = levels = needs = None  # the host waits

    def __init__(self, group: Group, arena: SharedArena, arenas: dict[int, torch.Tensor], messages: Messages) -> None:
        self.rank = group.rank
        self.size = group.size
        self.arenas = arenas  # of the other ranks
        self._group = group
        self._arena = arena
        self._messages = messages
        self._lines = [_Line() for _ in range(LINES)]
        self._counts = [counts_of(memory) for memory in arenas.values()]

    @property
    def inner(self) -> Group:
        return self

    @property
    def shared_host_memory(self) -> SharedHostMemory:
        return self

    # tensors -----------------------------------------------------------------------------------------------------

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if not bucket.is_cpu:
            return self._group.reduce_scatter(bucket, sum_dtype)
        share_bytes = bucket.nbytes // self.size
        return _Sum(self._tell(_SUMS, self._shared(bucket)), sum_dtype, bucket.dtype, self.rank * share_bytes, share_bytes)

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        if not bucket.is_cpu:
            return self._group.all_to_all(bucket)
        share_bytes = bucket.nbytes // self.size
        message = self._tell(_SUMS, self._shared(bucket))
        return SideBySide(_Sum(message, bucket.dtype, bucket.dtype, self.rank * share_bytes, share_bytes))

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if not bucket.is_cpu:
            return self._group.all_reduce(bucket, sum_dtype)
        return _Sum(self._tell(_SUMS, self._shared(bucket)), sum_dtype, bucket.dtype, 0, bucket.nbytes)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        if not bucket.is_cpu:
            return self._group.all_gather(bucket)
        share = _bytes(bucket).view(self.size, -1)[self.rank]
        return _Gathering(self, self._tell(_WEIGHTS, self._part(share)), bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        if not tensor.is_cpu or not tensor.is_contiguous():
            return self._group.broadcast(tensor)
        with self.rank0_view(tensor) as seen:
            if self.rank:
                tensor.copy_(seen)
        return CompletedResult(tensor)

    @contextlib.contextmanager
    def rank0_view(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        message = self._tell(_WEIGHTS, self._shared(memory) if self.rank == 0 else None)
        seen = message.row(0, 0, memory.nbytes).view(memory.dtype).view(memory.shape)
        try:
            yield seen
        finally:
            message.finish()

    def common(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        lent = [self._lend(size) for size in sizes] if self.rank == 0 else []
        message = self.all_gather_bytes(json.dumps([self._arena.offset(each) or 0 for each in lent]).encode())[0]
        if self.rank == 0:
            return lent
        return [self.arenas[0][offset : offset + size] for offset, size in zip(json.loads(message), sizes, strict=True)]

    def beside(self) -> GroupBeside | None:
        return None

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return self._group.staging(numel, dtype, device)
        return self._lend(numel * dtype.itemsize).view(dtype)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        self._hear()
        return self._arena.is_reusable(buffer)

    def trim(self) -> None:
        self._hear()
        self._arena.trim()

    # messages ----------------------------------------------------------------------------------------------------

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return self._messages.exchange(message)

    def new_wire(self) -> Wire:
        return self._group.new_wire()

    @property
    def phase(self) -> str:
        return self._group.phase

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        self._group.set_phase(phase, location)

    def end_warmup(self) -> None:
        self._hear()
        self._arena.stepped()  # as every step says this
        self._group.end_warmup()

    def reconnect(self, base: Any) -> None:
        self._lines = [_Line() for _ in range(LINES)]
        self._arena.restart()  # first: once they are connected others may look
        self._group.reconnect(base)
        self._messages.reconnect()

    def close(self) -> None:
        self._arena.trim()  # what some have not read yet goes with this object
        self._messages.close()
        self._group.close()

    # inside ------------------------------------------------------------------------------------------------------

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies in shared memory, else a copy that does."""
        return tensor if self._arena.offset(tensor) is not None else self._part(_bytes(tensor))

    def _part(self, content: torch.Tensor) -> torch.Tensor:
        """A copy of some bytes that others can read."""
        return self._lend(content.numel()).copy_(content)

    def _lend(self, num_bytes: int) -> torch.Tensor:
        self._hear()
        return self._arena.lend(num_bytes)

    def _hear(self) -> None:
        """How many collectives of each line all ranks have finished by now."""
        finished = [[line.finished for line in self._lines], *(counts.tolist() for counts in self._counts)]
        self._arena.update_progress(map(min, zip(*finished, strict=True)))

    def _tell(self, line: int, part: torch.Tensor | None) -> _Message:
        counted, offset = self._lines[line], 0
        number = counted.begin()
        if part is not None and part.numel():  # what is empty lies nowhere
            position = self._arena.offset(part)
            assert position is not None
            offset = position
            self._arena.send(part, line, number)
        return _Message(self, partial(self._finish, line, counted, number), part, self._messages.tell(offset))

    def _finish(self, line: int, counted: _Line, number: int) -> None:
        counted.finish(number)
        if counted is self._lines[line]:
            self._arena.publish_progress(line, counted.finished)


class _Line:
    """Collectives that are counted together, on this rank. Those of a connection that was lost are counted no more: the group
    has another line then."""

    def __init__(self) -> None:
        self.finished = 0  # all before this one
        self._started = 0
        self._early: set[int] = set()  # finished after it

    def begin(self) -> int:
        self._started += 1
        return self._started - 1

    def finish(self, number: int) -> None:
        """This rank reads nothing of that collective any more."""
        self._early.add(number)
        while self.finished in self._early:
            self._early.remove(self.finished)
            self.finished += 1


class _Message:
    """The small message of one collective that is going on."""

    def __init__(
        self, group: SharedMemoryGroup, count: Callable[[], None], part: torch.Tensor | None, offsets: Numbers
    ) -> None:
        self.group = group
        self._count = count  # it as finished
        self._part = part
        self._coming = offsets
        self._offsets: list[int] | None = None

    def done(self) -> bool:
        return self._offsets is not None or self._coming.done()

    def row(self, rank: int, begin: int, num_bytes: int) -> torch.Tensor:
        """So many bytes of what that rank has to offer; waits for the message of all ranks."""
        offsets = self.wait()
        if rank == self.group.rank and self._part is not None:
            return _bytes(self._part)[begin : begin + num_bytes]
        begin += offsets[rank]
        return self.group.arenas[rank][begin : begin + num_bytes]

    def wait(self) -> list[int]:
        """Where the parts of all ranks lie, once all have said so."""
        if self._offsets is None:
            self._offsets = self._coming.wait()
        return self._offsets

    def finish(self) -> None:
        """This rank has read all that it wants of it; waits for the message of all ranks, in case it wants nothing."""
        self.wait()
        self._part = None
        self._count()


class _Sum(UnreducedResult):
    """The sum of all ranks' stretches, read straight from their memory."""

    def __init__(self, message: _Message, sum_dtype: torch.dtype, dtype: torch.dtype, begin: int, num_bytes: int) -> None:
        super().__init__(sum_dtype)
        self._message = message
        self._dtype = dtype
        self._span = begin, num_bytes

    def done(self) -> bool:
        return self._message.done()

    def addends(self) -> Sequence[torch.Tensor]:
        return [self._message.row(rank, *self._span).view(self._dtype) for rank in range(self._message.group.size)]

    def release(self) -> None:
        self._message.finish()


class _Gathering:
    """A bucket that other ranks' shares are to be copied into."""

    def __init__(self, group: SharedMemoryGroup, message: _Message, bucket: torch.Tensor) -> None:
        self._message = message
        self._bucket = bucket
        self._ranks = group.rank, group.size

    def done(self) -> bool:
        return self._message.done()

    def wait(self) -> torch.Tensor:
        this_rank, size = self._ranks
        shares = _bytes(self._bucket).view(size, -1)
        self._message.wait()
        try:
            for rank, share in enumerate(shares):
                if rank != this_rank:
                    share.copy_(self._message.row(rank, 0, share.numel()))
        finally:
            self._message.finish()  # or no part sent after it would be free again
        return self._bucket


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
