"""A file of one rank that state lives in. Threads read and write regions of it, in pieces.

The file has no name once it is open, so nothing is left of it whatever happens to the process. Its space is reserved before
anything is written. If the file system has direct access, the system keeps no copy of it in memory; if it has not,
ordinary access is used, and that is logged once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from zero.errors import DiskFailed
from zero.plan.layout import round_up

logger = logging.getLogger("zero")

PAGE = 4096  # direct access requires multiples of this for addresses, places in the file and lengths
_SUMMED = 2**16  # the bytes of each checksum
_DIRECT = getattr(os, "O_DIRECT", 0)
_PROBED = 32 * 2**20  # the bytes that a probe writes and reads at each pace
_said: set[str] = set()


@dataclass(frozen=True)
class Pace:
    """The pace at which a file is read and written: by so many threads, each so many bytes at a time."""

    threads: int = 4
    piece_bytes: int = 2**20


@dataclass
class Region:
    """A stretch of the file, and the checksums of what was written to it."""

    start: int
    num_bytes: int
    sums: torch.Tensor | None = field(default=None, repr=False)


def page_aligned(num_bytes: int, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Returns whole pages of host memory. `allocate` makes bytes that may begin anywhere."""
    padded = round_up(num_bytes, PAGE)
    memory = allocate(padded + PAGE)
    skipped = -memory.data_ptr() % PAGE
    return memory[skipped : skipped + padded]


class StateFile:
    """No two regions that are in use overlap, and what is read from one is what was last written to it, or an error.

    Every failure is a `DiskFailed` that names the directory.
    """

    def __init__(self, directory: str, what: str, pace: Pace | None = None) -> None:
        self.directory = directory
        self.pace = pace or Pace()
        self.num_bytes = 0  # the bytes that are reserved
        self.is_reserved = True  # False if the file system cannot reserve space
        self.num_read = self.num_written = 0  # the bytes so far
        self.busy_s = self.waited_s = 0.0  # the seconds that threads read and wrote, and those that others waited for them
        self._what = what
        self._end = 0
        self._free: dict[int, list[int]] = {}  # by number of bytes: the starts of regions that are not used any more
        self._threads: ThreadPoolExecutor | None = None
        self._file = os.fdopen(self._open(), "r+b", buffering=0)  # the last reference to it closes it

    def _open(self) -> int:
        with self.explained("make a file in"):
            descriptor, path = tempfile.mkstemp(prefix=".zero-", dir=self.directory)
            try:
                direct = self._open_direct(path)
            finally:
                os.unlink(path)
            if direct is not None:
                os.close(descriptor)
                return direct
        if self.directory not in _said:
            _said.add(self.directory)
            logger.warning("The file system of %s has no direct access: states go through its memory.", self.directory)
        return descriptor

    def _open_direct(self, path: str) -> int | None:
        """Returns a descriptor with direct access; None if the file system has none, which some say only at a write."""
        if not _DIRECT:
            return None
        try:
            descriptor = os.open(path, os.O_RDWR | _DIRECT)
        except OSError:
            return None
        try:
            with mmap.mmap(-1, PAGE) as page:
                os.pwritev(descriptor, [page], 0)
            os.ftruncate(descriptor, 0)
            return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EINVAL:
                return None
            raise

    def reserve(self, num_bytes: int) -> None:
        """Makes sure that the file has space for `num_bytes` in all."""
        if num_bytes > self.num_bytes:
            with self.explained(f"reserve {num_bytes} bytes in"):
                try:
                    os.posix_fallocate(self._file.fileno(), 0, num_bytes)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    os.ftruncate(self._file.fileno(), num_bytes)  # this reserves nothing, so a full disk shows at a write
                    self.is_reserved = False
            self.num_bytes = num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Gives back the space beyond `num_bytes`, which was reserved and is not used yet."""
        with contextlib.suppress(OSError):  # if it fails, the space stays and serves later regions
            if num_bytes < self.num_bytes:
                os.ftruncate(self._file.fileno(), num_bytes)
                self.num_bytes = num_bytes

    def fileno(self) -> int:
        return self._file.fileno()

    def allocate(self, num_bytes: int) -> Region:
        """Returns a region with undefined contents."""
        padded = round_up(num_bytes, PAGE)
        free = self._free.get(padded)
        if free:
            return Region(free.pop(), padded)
        self.reserve(self._end + padded)
        self._end += padded
        return Region(self._end - padded, padded)

    def free(self, region: Region) -> None:
        self._free.setdefault(region.num_bytes, []).append(region.start)

    def write(self, memory: torch.Tensor, region: Region) -> FileTransfer:
        """Begins to write memory of `page_aligned`, which the transfer reads until it is waited for."""
        region.sums = _sums_of(memory)
        self.num_written += region.num_bytes
        return FileTransfer(self, self._begin(os.pwritev, memory, region), memory)

    def read(self, region: Region, memory: torch.Tensor) -> FileTransfer:
        """Begins to read into memory of `page_aligned`. The wait for the transfer raises if checksums differ from
        those of what was written."""
        assert region.sums is not None, "nothing was written to this region"
        self.num_read += region.num_bytes
        return FileTransfer(self, self._begin(os.preadv, memory, region), memory, region.sums)

    def _begin(self, move: Callable[..., int], memory: torch.Tensor, region: Region) -> list[Future[None]]:
        assert memory.nbytes == region.num_bytes and memory.data_ptr() % PAGE == 0
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.pace.threads, thread_name_prefix="zero.disk")
        size, whole = self.pace.piece_bytes, region.num_bytes
        cuts = [(offset, min(size, whole - offset)) for offset in range(0, whole, size)]
        return [
            self._threads.submit(self._move, move, memory[offset : offset + length], region.start + offset)
            for offset, length in cuts
        ]

    def _move(self, move: Callable[..., int], memory: torch.Tensor, start: int) -> None:
        """Moves all of a piece, however little each call moves. The caller keeps the memory until this is done, even if other
        pieces fail."""
        num_bytes = memory.nbytes
        piece = memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")
        began, done = time.perf_counter(), 0
        while done < num_bytes:
            count = move(self._file.fileno(), [piece[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, f"the file ends at {start + done}, where more was written")
            done += count
            if done < num_bytes and done % PAGE:
                done -= done % PAGE  # direct access goes on at a page
        self.busy_s += time.perf_counter() - began

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.failed(doing, error) from error

    def failed(self, doing: str, why: object) -> DiskFailed:
        hint = "Check the disk, and load the last checkpoint."
        if isinstance(why, OSError):
            why = f"{os.strerror(why.errno)} ({why})" if why.errno and why.errno not in (errno.EIO,) else why
            if isinstance(why, str) and doing.startswith(("make", "reserve")):
                hint = "Give a directory that every rank can write to, with space for its states."
        return DiskFailed(f"Cannot {doing} {self.directory} for {self._what}: {why}. {hint}")

    def settle(self) -> None:
        """Waits for all transfers, also for those whose `FileTransfer` is gone."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)

    def stop_threads(self) -> None:
        """Waits for all transfers and ends the threads. The next transfer starts others."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def close(self) -> None:
        """Closes the file, which frees it."""
        self.stop_threads()
        self._file.close()


class FileTransfer:
    """The `Transfer` of a region to memory or from it."""

    def __init__(
        self, file: StateFile, pieces: list[Future[None]], memory: torch.Tensor, expected: torch.Tensor | None = None
    ) -> None:
        self._file = file
        self._pieces: Sequence[Future[None]] = pieces
        self._memory: torch.Tensor | None = memory
        self._expected = expected  # the checksums of what is read; None for a write

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def finish(self) -> None:
        """Waits on the host. Raises DiskFailed if a piece failed, or is not what was written."""
        pieces, memory, self._pieces = self._pieces, self._memory, ()
        if memory is None:
            return
        doing = "write to" if self._expected is None else "read from"
        began = time.perf_counter()
        errors = [error for error in (piece.exception() for piece in pieces) if error is not None]  # waits for all of them
        self._file.waited_s += time.perf_counter() - began
        self._memory = None
        if errors:
            raise self._file.failed(doing, errors[0]) from errors[0]
        if self._expected is not None and not torch.equal(_sums_of(memory), self._expected):
            raise self._file.failed(doing, "the values are not those that were written")

    def wait(self) -> None:
        self.finish()

    def release_source(self) -> None:
        self.finish()


def _sums_of(memory: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of every `_SUMMED` bytes. A torn or foreign page changes it, as do pages that change places."""
    pages = memory.view(torch.int64).view(-1, PAGE // 8).sum(1)
    pages *= torch.arange(1, 2 * len(pages) + 1, 2, device="cpu")
    in_one = _SUMMED // PAGE
    return torch.nn.functional.pad(pages, (0, -len(pages) % in_one)).view(-1, in_one).sum(1)


def probe(directory: str, num_bytes: int = _PROBED) -> Pace:
    """Returns the pace at which this disk is fastest, of a few that are tried for a moment each."""
    best, least = Pace(), float("inf")
    file = StateFile(directory, "a probe of the disk")
    try:
        memory = page_aligned(num_bytes, lambda size: torch.zeros(size, dtype=torch.uint8, device="cpu"))
        region = file.allocate(num_bytes)
        file.write(memory, region).finish()
        for threads in (1, 2, 4, 8):
            for piece_bytes in (2**20, 4 * 2**20):
                file.pace, began = Pace(threads, piece_bytes), time.perf_counter()
                file.write(memory, region).finish()
                file.read(region, memory).finish()
                took = time.perf_counter() - began
                file.stop_threads()
                if took < 0.95 * least:
                    best, least = file.pace, took
    finally:
        file.close()
    return best
