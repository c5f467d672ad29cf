"""Ranks of one host exchange tensors through memory that they share, ordered by small messages of the group.

[Note: who writes when] For each collective every rank sends one small message, which says where its part lies. When the
messages of all ranks have arrived, a rank may read all parts. Waiting, time limits and lost ranks are those of the group. In
memory that all see, every rank counts the collectives that it has finished; a part is written again only when all ranks have
finished the collective that it was for. No rank waits for that: if it needs memory earlier, it takes more. Collectives of
gradients and of weights are counted apart, as gradients may be read as late as in the step, and weights are read at once.

[Note: arena] An arena is a memfd, sealed so that it never grows or shrinks. It has no name, and is freed with the last process
that maps it. It is as large as could ever be needed, since only pages that were written take memory. Only its owner writes.
Others open it through /proc/PID/fd once, when the group is made, so what a rank has sent can be read after its end. If ranks
are in different containers that path may lead to another process. So before anything is sent this way every rank proves that it
finds, in the memory of every other, a random word that only that rank could have written.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import json
import logging
import mmap
import os
import secrets
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from accelerators.tensor_bytes import as_bytes, host_bytes
from zero.comm.group import Group, GroupBeside, Pending, SharedHostMemory, Wire
from zero.comm.health import Phases
from zero.comm.pipes import Messages, Numbers
from zero.comm.results import CompletedResult, SideBySide, UnreducedResult
from zero.plan.layout import round_up

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

LINES = 2  # the sequences of collectives that are counted apart, so that unread memory of one keeps no memory of the other

_WORD_BYTES = 16
_PHASE = slice(512, 1024)  # bytes of the first page that say what the owner does
_INTRODUCTION = struct.Struct(f"<qqq{_WORD_BYTES}s")
INTRODUCTION_BYTES = _INTRODUCTION.size
_TIMES_MEMORY = 4  # the addresses for each byte of the host's memory, as stretches are never moved to close gaps
_SPARE = 8  # a stretch has an eighth more addresses than were asked for, so that it also serves a slightly larger tensor
_IDLE_STEPS = 2  # the steps for which unused pages are kept, as making a page costs more than filling it

logger = logging.getLogger("zero")

Given = TypeVar("Given")

_SUMS, _WEIGHTS = range(LINES)
_ANOTHERS = "a rank shares none"  # said by the other ranks; the one that shares none says why


def memory_file(num_bytes: int) -> int:
    """Returns the descriptor of a file that never grows or shrinks. Only pages that were written take memory."""
    if sys.platform != "linux":
        raise OSError("only Linux has memory files that can be sealed and reached by others")
    descriptor = os.memfd_create("zero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reach(process: int, remote_fd: int, num_bytes: int) -> int:
    """Returns a descriptor of a memory file of `num_bytes` that another process has open as `remote_fd`. Raises OSError if that
    is another file."""
    descriptor = os.open(f"/proc/{process}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, descriptor)
        size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if size != num_bytes or seals != _SEALS:
            raise OSError(f"process {process} has {size} bytes there with seals {seals}, and told of {num_bytes}")
        on_failure.pop_all()
    return descriptor


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Stretch:
    """A stretch of the arena, and the notes by which it is known whether anybody still uses it."""

    __slots__ = ("__weakref__", "held", "lent", "num_bytes", "sent", "start", "vacant")

    def __init__(self, start: int, num_bytes: int) -> None:
        self.start = start
        self.num_bytes = num_bytes
        self.held = False  # a tensor of this rank uses it
        self.vacant = True  # the stretch has no pages
        self.lent = 0  # the step in which it was last held
        self.sent = (0, -1)  # the last collective for which others read it, and its line

    def release(self) -> None:
        self.held = False


_start_of, _size_of = attrgetter("start"), attrgetter("num_bytes")


class SharedArena:
    """A stretch of the memory that this rank shares is lent again only once all ranks have read what it sent.

    After a while without use a stretch gives its pages back.
    """

    def __init__(self) -> None:
        num_bytes = _TIMES_MEMORY * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        with closing(memory_file(num_bytes)) as descriptor:
            self._mapping = mmap.mmap(descriptor, num_bytes)  # mmap duplicates the descriptor, which is closed here
            self._descriptor = os.dup(descriptor)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._begin, self._counts = whole.data_ptr(), counts_of(whole)
        self._stretches: list[_Stretch] = []  # in the order of their addresses, without gaps
        self._by_size: list[_Stretch] = []
        self._read = [0] * LINES  # by line: the collectives that all ranks have finished
        self._steps = 0  # the number of steps since the arena was made
        self._process = os.getpid()

    def handshake(self) -> bytes:
        """Writes a new random word into the arena. Returns what `map_peer` needs to find the arena, and to recognize it by the
        word."""
        word = secrets.token_bytes(_WORD_BYTES)
        self._mapping[:_WORD_BYTES] = word
        return _INTRODUCTION.pack(os.getpid(), self._descriptor, len(self._mapping), word)

    def introduced(self) -> None:
        """Closes the descriptor by which others open the arena, as all of them have mapped it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Lends memory for as long as the tensor, or another with its storage, is alive."""
        stretch = self._free(num_bytes)
        stretch.held, stretch.vacant, stretch.sent, stretch.lent = True, False, (0, -1), self._steps
        view = memoryview(self._mapping)[stretch.start : stretch.start + max(1, num_bytes)]
        weakref.finalize(view, stretch.release).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)[:num_bytes]

    def _free(self, num_bytes: int) -> _Stretch:
        vacant = None
        for index in range(bisect.bisect_left(self._by_size, num_bytes, key=_size_of), len(self._by_size)):
            one = self._by_size[index]
            if self._is_idle(one):
                if not one.vacant:
                    return one
                vacant = vacant or one
        if vacant is not None:
            return vacant
        # The first stretch begins after the word and the counts.
        last = self._stretches[-1] if self._stretches else _Stretch(0, mmap.PAGESIZE)
        start, size = last.start + last.num_bytes, round_up(max(1, num_bytes + num_bytes // _SPARE), mmap.PAGESIZE)
        if start + size > len(self._mapping):
            raise MemoryError(
                f"Cannot allocate {num_bytes} bytes of shared memory: all {len(self._mapping)} addresses are in use. "
                "Set shared_memory=False."
            )
        self._stretches.append(_Stretch(start, size))
        # Inserted behind those of its size, so that older ones are taken first.
        bisect.insort(self._by_size, self._stretches[-1], key=_size_of)
        return self._stretches[-1]

    def _is_idle(self, stretch: _Stretch) -> bool:
        return not stretch.held and self._was_read(stretch)

    def _was_read(self, stretch: _Stretch) -> bool:
        line, collective = stretch.sent
        return collective < self._read[line]

    def stepped(self) -> None:
        """Counts a step. Pages that no tensor has used for some steps may be freed then."""
        self._steps += 1
        for one in self._stretches:
            if one.held:
                one.lent = self._steps
        self.trim(_IDLE_STEPS)

    def trim(self, idle_steps: int = 0) -> None:
        """Frees the pages of stretches that were not used for `idle_steps`. A forked process frees none, as the pages belong to
        the process that it was forked from."""
        for one in self._stretches if os.getpid() == self._process else ():
            if self._is_idle(one) and not one.vacant and one.lent + idle_steps <= self._steps:
                with contextlib.suppress(OSError):  # pages that the system does not take back are kept
                    self._mapping.madvise(mmap.MADV_REMOVE, one.start, one.num_bytes)
                one.vacant = True

    def _stretch_of(self, tensor: torch.Tensor) -> _Stretch | None:
        begin = tensor.data_ptr() - self._begin
        index = bisect.bisect_right(self._stretches, begin, key=_start_of) - 1
        one = self._stretches[index] if index >= 0 else None
        return one if one is not None and begin < one.start + one.num_bytes else None

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Returns the place of a tensor in the arena, at which others read it; None if it is not in the arena."""
        return None if self._stretch_of(tensor) is None else tensor.data_ptr() - self._begin

    def send(self, tensor: torch.Tensor, line: int, collective: int) -> int:
        """Notes that others will read a tensor in this collective, and returns its place in the arena."""
        stretch = self._stretch_of(tensor)
        assert stretch is not None
        stretch.sent = line, collective
        return tensor.data_ptr() - self._begin

    def publish_progress(self, line: int, finished: int) -> None:
        """Shows others how many collectives of a line this rank has finished."""
        self._counts[line] = finished

    def update_progress(self, finished: Iterable[int]) -> None:
        """Notes how many collectives of each line all ranks have finished."""
        self._read = [max(known, reported) for known, reported in zip(self._read, finished, strict=True)]

    def write_phase(self, phase: bytes) -> None:
        """Writes what this rank does. Others may read it at any time, also after this process has ended."""
        num_bytes = _PHASE.stop - _PHASE.start
        self._mapping[_PHASE] = phase[:num_bytes].ljust(num_bytes, b"\0")

    def restart(self) -> None:
        """Counts collectives anew on new connections: nobody reads what was sent before."""
        self._read = [0] * LINES
        self._counts[:] = [0] * LINES
        for one in self._stretches:
            one.sent = 0, -1

    def is_reusable(self, tensor: torch.Tensor) -> bool:
        stretch = self._stretch_of(tensor)
        return stretch is None or self._was_read(stretch)


def counts_of(whole: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Returns the counters in an arena of the collectives that its owner has finished, by line, as a ctypes array; they may be
    used while the arena is mapped. Each collective reads them, and elements of a tensor take twenty times as long to read."""
    return (ctypes.c_int64 * LINES).from_address(whole.data_ptr() + _WORD_BYTES)


def map_peer(message: bytes) -> torch.Tensor:
    """Maps the arena that a handshake describes. Raises OSError if it cannot be reached, or if another file is found."""
    process, remote_fd, num_bytes, word = _INTRODUCTION.unpack(message)
    with closing(reach(process, remote_fd, num_bytes)) as descriptor:
        mapping = mmap.mmap(descriptor, num_bytes)
    if mapping[:_WORD_BYTES] != word:
        raise OSError(f"the memory of process {process} is another one's")
    return torch.frombuffer(mapping, dtype=torch.uint8)


def through_shared_memory(group: Group, wanted: bool = True, make_messages: Callable[[], Messages] | None = None) -> Group:
    """Returns a group like `group` that passes host tensors through shared memory. Returns `group` itself unless every rank
    wants that and has proved that it reaches the memory of all others. `make_messages` makes the way of small messages, if not
    the group's own. A collective."""
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
        """Returns what `act` returns. Returns None if there is a reason already, or if `act` fails, which then is the
        reason."""
        if self.text:
            return None
        try:
            return act()
        except (OSError, AttributeError, struct.error) as error:  # AttributeError is raised by a system without memory files
            self.note(f"{type(error).__name__}: {error}")
            return None


class SharedMemoryGroup:
    """A group whose host tensors are exchanged through shared memory; everything else goes by the group that it was made
    from."""

    outer = levels = needs = None  # None, as the host waits for every collective

    def __init__(self, group: Group, arena: SharedArena, arenas: dict[int, torch.Tensor], messages: Messages) -> None:
        self.rank = group.rank
        self.size = group.size
        self.arenas = arenas  # by rank, without this one
        self._group = group
        self._arena = arena
        self._messages = messages
        self._lines = [_Line() for _ in range(LINES)]
        self._counts = [counts_of(memory) for memory in arenas.values()]

    @property
    def inner(self) -> Group:
        return self

    @property
    def phases(self) -> Phases:
        """The memory in which every rank writes what it does."""
        return _PhasesInArenas(self._arena, self.arenas)

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
        share = as_bytes(bucket).view(self.size, -1)[self.rank]
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
        if self._arena.is_reusable(buffer):
            return True
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
        self._arena.stepped()  # a step calls this once
        self._group.end_warmup()

    def reconnect(self, base: Any) -> None:
        self._lines = [_Line() for _ in range(LINES)]
        self._arena.restart()  # before ranks are connected, as others may read its counters from then on
        self._group.reconnect(base)
        self._messages.reconnect()

    def close(self) -> None:
        self._arena.trim()  # other ranks keep what they have mapped
        self._messages.close()
        self._group.close()

    # inside ------------------------------------------------------------------------------------------------------

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself if it lies in shared memory, else a copy that does."""
        return tensor if self._arena.offset(tensor) is not None else self._part(as_bytes(tensor))

    def _part(self, content: torch.Tensor) -> torch.Tensor:
        """Returns a copy of some bytes that others can read."""
        return self._lend(content.numel()).copy_(content)

    def _lend(self, num_bytes: int) -> torch.Tensor:
        self._hear()
        return self._arena.lend(num_bytes)

    def _hear(self) -> None:
        """Notes how many collectives of each line all ranks have finished by now."""
        counted: list[Iterable[int]] = [[line.finished for line in self._lines], *self._counts]
        self._arena.update_progress(map(min, *counted))

    def _tell(self, line: int, part: torch.Tensor | None) -> _Message:
        counted, offset = self._lines[line], 0
        number = counted.begin()
        if part is not None and part.numel():  # an empty part has no place
            offset = self._arena.send(part, line, number)
        return _Message(self, partial(self._finish, line, counted, number), part, self._messages.tell(offset))

    def _finish(self, line: int, counted: _Line, number: int) -> None:
        counted.finish(number)
        if counted is self._lines[line]:
            self._arena.publish_progress(line, counted.finished)


class _PhasesInArenas:
    """The phases of all ranks, in the arena of each. They are written several times a step, and read after a failure."""

    def __init__(self, arena: SharedArena, arenas: Mapping[int, torch.Tensor]) -> None:
        self._arena = arena
        self._arenas = arenas  # other ranks' arenas, by rank
        self._phase = ""  # the phase that this rank wrote last

    def write(self, phase: str) -> None:
        self._phase = phase
        self._arena.write_phase(phase.encode())

    def read(self, rank: int) -> str:
        if rank not in self._arenas:
            return self._phase
        return bytes(host_bytes(self._arenas[rank][_PHASE])).rstrip(b"\0").decode(errors="replace")


class _Line:
    """The count of this rank's collectives of one line. If a connection is lost, the group makes another one, so that late ends
    of old collectives are not counted as new ones."""

    def __init__(self) -> None:
        self.finished = 0  # the number of the first collective that is not finished
        self._started = 0
        self._early: set[int] = set()  # the collectives after that one that are finished already

    def begin(self) -> int:
        self._started += 1
        return self._started - 1

    def finish(self, number: int) -> None:
        """Counts a collective as finished: this rank reads no more of what others sent for it."""
        self._early.add(number)
        while self.finished in self._early:
            self._early.remove(self.finished)
            self.finished += 1


class _Message:
    """The small message of a collective that is under way, and the reader of what the message tells of."""

    def __init__(
        self, group: SharedMemoryGroup, count: Callable[[], None], part: torch.Tensor | None, offsets: Numbers
    ) -> None:
        self.group = group
        self._count = count  # counts the collective as finished
        self._part = part
        self._coming = offsets
        self._offsets: list[int] | None = None

    def done(self) -> bool:
        return self._offsets is not None or self._coming.done()

    def row(self, rank: int, begin: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes of the part that a rank sent, from `begin` on. Waits for the messages of all ranks."""
        offsets = self.wait()
        if rank == self.group.rank and self._part is not None:
            return as_bytes(self._part)[begin : begin + num_bytes]
        begin += offsets[rank]
        return self.group.arenas[rank][begin : begin + num_bytes]

    def wait(self) -> list[int]:
        """Returns where the parts of all ranks lie, once all have said so."""
        if self._offsets is None:
            self._offsets = self._coming.wait()
        return self._offsets

    def finish(self) -> None:
        """Counts the collective as finished, as this rank has read all that it wants. Waits for the messages of all ranks
        first, as a rank that wants nothing has not waited yet."""
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
    """A gathering: the other ranks' shares are copied into a bucket once all ranks have said where theirs lie."""

    def __init__(self, group: SharedMemoryGroup, message: _Message, bucket: torch.Tensor) -> None:
        self._message = message
        self._bucket = bucket
        self._ranks = group.rank, group.size

    def done(self) -> bool:
        return self._message.done()

    def wait(self) -> torch.Tensor:
        this_rank, size = self._ranks
        shares = as_bytes(self._bucket).view(size, -1)
        self._message.wait()
        try:
            for rank, share in enumerate(shares):
                if rank != this_rank:
                    share.copy_(self._message.row(rank, 0, share.numel()))
        finally:
            self._message.finish()  # otherwise this line's count would stop here, and memory sent later never be free again
        return self._bucket
