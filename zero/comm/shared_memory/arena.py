"""Memory of one process that others of the same host can read: a file without a name, mapped by all of them at the start.

[Note: arena] An arena is a memfd, sealed so that it never grows or shrinks. It has no name, is as large as it could ever be
needed, since only pages that were written take memory, and is freed with the last process that maps it. Only its owner writes.
Others open it through /proc/PID/fd once, when the group is made, so what a rank has sent can be read after its end. Where ranks
are in different containers that path may lead to another process. So before anything is sent this way every rank proves that it
finds, in the memory of every other, a random word that only that rank could have written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Iterable

import torch

from zero.comm.shared_memory.memfd import closing, memory_file, reach
from zero.plan.layout import round_up

LINES = 2  # of collectives, each counted by itself: what one leaves unread for long does not keep what another has read

_WORD_BYTES = 16
_INTRODUCTION = struct.Struct(f"<qqq{_WORD_BYTES}s")
INTRODUCTION_BYTES = _INTRODUCTION.size
_TIMES_MEMORY = 4  # addresses, beside what the host has of memory: stretches are never moved together
_SPARE = 8  # a stretch has an eighth more addresses than were asked for, and so serves what is nearly as large
_IDLE_STEPS = 2  # steps for which unused pages are kept: making a page costs more than filling it


class _Stretch:
    """A part of the arena, and who still uses it."""

    __slots__ = ("__weakref__", "held", "lent", "num_bytes", "sent", "start", "vacant")

    def __init__(self, start: int, num_bytes: int) -> None:
        self.start = start
        self.num_bytes = num_bytes
        self.held = False  # a tensor on this rank uses it
        self.vacant = True  # it has no pages
        self.lent = 0  # after how many steps it was last held
        self.sent = (0, -1)  # the last collective that others read it for, and of which line that is

    def release(self) -> None:
        self.held = False


class SharedArena:
    """The memory that this rank shares, in stretches. A free stretch that all have read is used again; after a while without
    use it gives its pages back."""

    def __init__(self) -> None:
        num_bytes = _TIMES_MEMORY * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        with closing(memory_file(num_bytes)) as descriptor:
            self._mapping = mmap.mmap(descriptor, num_bytes)  # which keeps a descriptor of its own
            self._descriptor = os.dup(descriptor)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._begin, self._counts = whole.data_ptr(), counts_of(whole)
        self._stretches: list[_Stretch] = []
        self._read = [0] * LINES  # collectives that all ranks have finished
        self._steps = 0  # since it was made
        self._process = os.getpid()

    def handshake(self) -> bytes:
        """What this rank says of itself, for `map_peer`."""
        word = secrets.token_bytes(_WORD_BYTES)
        self._mapping[:_WORD_BYTES] = word
        return _INTRODUCTION.pack(os.getpid(), self._descriptor, len(self._mapping), word)

    def introduced(self) -> None:
        """Removes the way by which others find the memory, as all have mapped it."""
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
        fitting = [one for one in self._stretches if self._is_idle(one) and num_bytes <= one.num_bytes]
        if fitting:
            return min(fitting, key=lambda one: (one.vacant, one.num_bytes, -one.lent))
        last = self._stretches[-1] if self._stretches else _Stretch(0, mmap.PAGESIZE)  # after what it says of itself
        start, size = last.start + last.num_bytes, round_up(max(1, num_bytes + num_bytes // _SPARE), mmap.PAGESIZE)
        if start + size > len(self._mapping):
            raise MemoryError(
                f"Cannot allocate {num_bytes} bytes of shared memory: all {len(self._mapping)} addresses are in use. "
                "Set shared_memory=False."
            )
        self._stretches.append(_Stretch(start, size))
        return self._stretches[-1]

    def _is_idle(self, stretch: _Stretch) -> bool:
        return not stretch.held and self._was_read(stretch)

    def _was_read(self, stretch: _Stretch) -> bool:
        line, collective = stretch.sent
        return collective < self._read[line]

    def stepped(self) -> None:
        """Counts a window: what this window and those before it did not use may be freed."""
        self._steps += 1
        for one in self._stretches:
            if one.held:
                one.lent = self._steps
        self.trim(_IDLE_STEPS)

    def trim(self, idle_steps: int = 0) -> None:
        """Frees the pages of what was not used for so many steps. Never in a process that was forked, to which they do not
        belong."""
        for one in self._stretches if os.getpid() == self._process else ():
            if self._is_idle(one) and not one.vacant and one.lent + idle_steps <= self._steps:
                with contextlib.suppress(OSError):  # where pages cannot be given back they are kept
                    self._mapping.madvise(mmap.MADV_REMOVE, one.start, one.num_bytes)
                one.vacant = True

    def _stretch_of(self, tensor: torch.Tensor) -> _Stretch | None:
        begin = tensor.data_ptr() - self._begin
        return next((one for one in self._stretches if one.start <= begin < one.start + one.num_bytes), None)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where others find this memory; None for memory that is not shared."""
        return None if self._stretch_of(tensor) is None else tensor.data_ptr() - self._begin

    def send(self, tensor: torch.Tensor, line: int, collective: int) -> None:
        """Others will read it, for this collective."""
        stretch = self._stretch_of(tensor)
        assert stretch is not None
        stretch.sent = line, collective

    def publish_progress(self, line: int, finished: int) -> None:
        """This rank has finished so many collectives of a line, for others to see."""
        self._counts[line] = finished

    def update_progress(self, finished: Iterable[int]) -> None:
        """All ranks have finished so many collectives of each line."""
        self._read = [max(known, reported) for known, reported in zip(self._read, finished, strict=True)]

    def restart(self) -> None:
        """Nobody reads anything any more, and collectives are counted anew."""
        self._read = [0] * LINES
        self._counts.zero_()
        for one in self._stretches:
            one.sent = 0, -1

    def is_reusable(self, tensor: torch.Tensor) -> bool:
        stretch = self._stretch_of(tensor)
        return stretch is None or self._was_read(stretch)


def counts_of(whole: torch.Tensor) -> torch.Tensor:
    """In an arena, how many collectives of each line its owner has finished."""
    return whole[_WORD_BYTES : _WORD_BYTES + 8 * LINES].view(torch.int64)


def map_peer(message: bytes) -> torch.Tensor:
    """Maps the whole arena that a handshake describes. Raises OSError where it is another one, or cannot be reached."""
    process, remote_fd, num_bytes, word = _INTRODUCTION.unpack(message)
    with closing(reach(process, remote_fd, num_bytes)) as descriptor:
        mapping = mmap.mmap(descriptor, num_bytes)
    if mapping[:_WORD_BYTES] != word:
        raise OSError(f"the memory of process {process} is another one's")
    return torch.frombuffer(mapping, dtype=torch.uint8)
