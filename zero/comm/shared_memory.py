"""Ranks of one host exchange tensors through memory that they share, ordered by small messages of the group.

[Note: who writes when]
For each collective every rank sends one small message, by the group's own all-reduce: where its part lies, and how many
collectives it has finished. A message arrives when all ranks have sent theirs, so whoever has it may read everybody's part,
and waiting, time limits and lost ranks are those of the group. A part is written again only after a later message has said
that all ranks finished the collective it was for. Nobody ever waits for that: who needs memory before takes more. What is to
be added may be read as late as in the step, and weights are read at once; so these are counted apart.

What travels is shared, and weights that lie in one file; see [Note: pages of one's own].
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from accelerators.memory_file import memory_file, reach
from zero.comm.arena import LINES, Arena, meet
from zero.comm.group import Added, Group, Pending, Ready

logger = logging.getLogger("zero")

Given = TypeVar("Given")

_SUMS, _WEIGHTS = range(LINES)
_FIELDS = 1 + LINES  # of a message: where its part lies, and how many collectives of each line are finished
_FILE = struct.Struct("<qq")  # whose it is, and its descriptor there
_PIECE_BYTES = 2 * 2**20  # of what is broadcast at a time: it stays in the cache from one rank's core to the next


def through_shared_memory(group: Group, wanted: bool = True) -> Group:
    """`group`, with tensors of the host going through memory where every rank proved that it reaches that of all others, and
    wants it; a collective."""
    if group.size == 1:
        return group
    reason = _Reason("" if wanted else "it was turned off")
    arena = reason.unless(Arena)
    told = group.exchange(b"" if arena is None else arena.introduce())
    if not all(told):
        reason.note("a rank shares none")
    others = [rank for rank in range(group.size) if rank != group.rank]
    arenas = reason.unless(lambda: {rank: meet(told[rank]) for rank in others})
    reasons = [message.decode() for message in group.exchange(reason.text.encode())]
    if arena is not None:
        arena.introduced()
    if arena is None or arenas is None or any(reasons):
        said = next(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)
        if wanted and group.rank == 0:
            logger.info("Tensors of %d ranks travel by ordinary collectives, not through shared memory (%s)", group.size, said)
        return group
    return SharedMemoryGroup(group, arena, arenas)


class _Reason:
    """Why not; empty while there is none."""

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
    """Another group whose tensors on the host do not travel."""

    def __init__(self, group: Group, arena: Arena, arenas: dict[int, torch.Tensor]) -> None:
        self.rank = group.rank
        self.size = group.size
        self.arenas = arenas  # of the other ranks
        self._group = group
        self._arena = arena
        self._lines = [_Line() for _ in range(LINES)]

    @property
    def owns_world(self) -> bool:
        return bool(getattr(self._group, "owns_world", False))

    # tensors -----------------------------------------------------------------------------------------------------

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if not bucket.is_cpu:
            return self._group.reduce_scatter(bucket, sum_dtype)
        share_bytes = bucket.nbytes // self.size
        return _Sum(self._tell(_SUMS, self._shared(bucket)), sum_dtype, bucket.dtype, self.rank * share_bytes, share_bytes)

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if not bucket.is_cpu:
            return self._group.all_reduce(bucket, sum_dtype)
        return _Sum(self._tell(_SUMS, self._shared(bucket)), sum_dtype, bucket.dtype, 0, bucket.nbytes)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        if not bucket.is_cpu:
            return self._group.all_gather(bucket)
        mine = _bytes(bucket).view(self.size, -1)[self.rank]
        return _Gathering(self, self._tell(_WEIGHTS, self._part(mine)), bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Waits for the others, a piece after the other: rank 0 fills the next one while they read."""
        if not tensor.is_cpu or not tensor.is_contiguous():
            return self._group.broadcast(tensor)
        for piece in torch.split(_bytes(tensor), _PIECE_BYTES):
            told = self._tell(_WEIGHTS, self._part(piece) if self.rank == 0 else None)
            if self.rank:
                piece.copy_(told.row(0, 0, piece.numel()))
            told.finish()
        return Ready(tensor)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return self._group.staging(numel, dtype, device)
        return self._arena.lend(numel * dtype.itemsize).view(dtype)

    def is_read(self, buffer: torch.Tensor) -> bool:
        return self._arena.is_read(buffer)

    def one_file(self, num_bytes: int, wanted: bool) -> int | None:
        """Rank 0's, as all others open it."""
        reason, descriptor = _Reason("" if wanted else "it is not wanted"), None
        if self.rank == 0:
            descriptor = reason.unless(lambda: memory_file(num_bytes))
        told = self.exchange(b"" if descriptor is None else _FILE.pack(os.getpid(), descriptor))
        if self.rank:
            descriptor = reason.unless(lambda: _opened(told[0], num_bytes))
        if any(self.exchange(reason.text.encode())):
            if descriptor is not None:
                os.close(descriptor)
            return None
        return descriptor

    # messages ----------------------------------------------------------------------------------------------------

    def exchange(self, message: bytes) -> list[bytes]:
        return self._group.exchange(message)

    @property
    def doing(self) -> str:
        return self._group.doing

    def note(self, doing: str, place: Callable[[], str] | None = None) -> None:
        self._group.note(doing, place)

    def hurry(self) -> None:
        self._group.hurry()

    def reconnect(self, base: Any) -> None:
        self._group.reconnect(base)
        self._lines = [_Line() for _ in range(LINES)]
        self._arena.restart()

    def close(self) -> None:
        self._arena.vacate()  # what some have not read yet goes with this object
        self._group.close()

    # inside ------------------------------------------------------------------------------------------------------

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies in shared memory, else a copy that does."""
        return tensor if self._arena.offset(tensor) is not None else self._part(_bytes(tensor))

    def _part(self, content: torch.Tensor) -> torch.Tensor:
        """A copy of some bytes that others can read."""
        return self._arena.lend(content.numel()).copy_(content)

    def _tell(self, line: int, part: torch.Tensor | None) -> _Told:
        counts, offset = self._lines[line], 0
        number = counts.begin()
        if part is not None and part.numel():  # what is empty lies nowhere
            found = self._arena.offset(part)
            assert found is not None
            offset = found
            self._arena.send(part, line, number)
        table = torch.zeros(self.size, _FIELDS, dtype=torch.int64, device="cpu")
        table[self.rank] = torch.tensor([offset, *(one.finished for one in self._lines)], dtype=torch.int64, device="cpu")
        return _Told(self, partial(counts.finish, number), part, self._group.all_reduce(table.view(-1), torch.int64))

    def heard(self, finished: Sequence[Sequence[int]]) -> None:
        """How many collectives of each line every rank has finished."""
        self._arena.heard(map(min, zip(*finished, strict=True)))


class _Line:
    """Collectives that are counted together, on this rank. Those of a connection that was lost count no more: their line is
    not the group's any more."""

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


class _Told:
    """The small message of one collective, on its way."""

    def __init__(
        self, group: SharedMemoryGroup, count: Callable[[], None], part: torch.Tensor | None, pending: Pending
    ) -> None:
        self.group = group
        self._count = count  # it as finished
        self._part = part
        self._pending = pending
        self._table: list[list[int]] | None = None

    def done(self) -> bool:
        return self._pending.done()

    def row(self, rank: int, begin: int, num_bytes: int) -> torch.Tensor:
        """So many bytes of what that rank has to offer; waits for the message of all ranks."""
        table = self._wait()
        if rank == self.group.rank and self._part is not None:
            return _bytes(self._part)[begin : begin + num_bytes]
        begin += table[rank][0]
        return self.group.arenas[rank][begin : begin + num_bytes]

    def _wait(self) -> list[list[int]]:
        if self._table is None:
            self._table = self._pending.wait().view(-1, _FIELDS).tolist()
            self.group.heard([finished for _, *finished in self._table])
        return self._table

    def finish(self) -> None:
        """This rank has read all that it wants of it; waits for the message of all ranks, in case it wants nothing."""
        self._wait()
        self._part = None
        self._count()


class _Sum(Added):
    """The sum of all ranks' stretches, read straight from their memory."""

    def __init__(self, told: _Told, sum_dtype: torch.dtype, dtype: torch.dtype, begin: int, num_bytes: int) -> None:
        super().__init__(sum_dtype)
        self._told = told
        self._dtype = dtype
        self._span = begin, num_bytes

    def done(self) -> bool:
        return self._told.done()

    def rows(self) -> Sequence[torch.Tensor]:
        return [self._told.row(rank, *self._span).view(self._dtype) for rank in range(self._told.group.size)]

    def finish(self) -> None:
        self._told.finish()


class _Gathering:
    """A bucket that other ranks' shares are to be copied into."""

    def __init__(self, group: SharedMemoryGroup, told: _Told, bucket: torch.Tensor) -> None:
        self._told = told
        self._bucket = bucket
        self._ranks = group.rank, group.size

    def done(self) -> bool:
        return self._told.done()

    def wait(self) -> torch.Tensor:
        own, size = self._ranks
        shares = _bytes(self._bucket).view(size, -1)
        for rank, share in enumerate(shares):
            if rank != own:
                share.copy_(self._told.row(rank, 0, share.numel()))
        self._told.finish()
        return self._bucket


def _opened(message: bytes, num_bytes: int) -> int:
    process, descriptor = _FILE.unpack(message)
    return reach(process, descriptor, num_bytes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
