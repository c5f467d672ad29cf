"""Files that are on the disk when a call returns, locks that end with their process, files that stay readable, and a bar that
shows how far reading and writing are.

Writing: whole, synced, and renamed into place. Reading: through descriptors, so that a file which is replaced or removed
meanwhile is still the one that was opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from accelerators.tensor_bytes import host_bytes
from zero.errors import BadCheckpoint

if sys.platform != "win32":
    import fcntl

Written = Callable[[int], None]  # called with a number of bytes each time that so many are written

_replacing = threading.Lock()
_AT_ONCE = 2**20  # the bytes that one call reads or writes; they stay in a processor's cache meanwhile
_SUMMED = 2**20  # the bytes of each CRC, which is part of the format
_READERS = 3  # the number of threads that read one file
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # errors of a file system without locks
# The seconds that another process may take to change the directory, as it may have to remove a large checkpoint.
_LONGEST_WAIT_S = 600.0
_LOOK_EVERY_S = 0.005
_BEGIN_EVERY = 32 * 2**20
_AFTER_S = 2.0  # the seconds after which a bar is shown


class _Checksum:
    """A checksum: CRC-32 of every MiB of what passes, and sha256 of those. A change of at most 32 bits in a row is always
    found, any other within one MiB is missed once in 2**32, and another file never. It is not against forgery; sha256 of all
    bytes takes three times as long, which is longer than a good disk takes."""

    def __init__(self) -> None:
        self._sums = bytearray()
        self._sum, self._left = 0, _SUMMED

    def take(self, part: memoryview) -> None:
        while len(part):
            head = part[: self._left]
            self._sum, self._left, part = zlib.crc32(head, self._sum), self._left - len(head), part[len(head) :]
            if not self._left:
                self._end()

    def _end(self) -> None:
        self._sums += self._sum.to_bytes(4, "little")
        self._sum, self._left = 0, _SUMMED

    def sums(self) -> bytes:
        if self._left < _SUMMED:
            self._end()
        return bytes(self._sums)


def write(path: Path, parts: Iterable[bytes | memoryview], written: Written = lambda _: None) -> tuple[int, str]:
    """Writes a new file of these parts and syncs it. Returns its size in bytes and its checksum."""
    total, begun, checksum = 0, 0, _Checksum()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _AT_ONCE):
                piece = view[start : start + _AT_ONCE]
                checksum.take(piece)  # taken before it is written, which leaves it in the processor's cache
                num_written = 0
                while num_written < len(piece):
                    num_written += os.write(descriptor, piece[num_written:])
                total += len(piece)
                if total - begun >= _BEGIN_EVERY:
                    _begin(descriptor, begun, total - begun)
                    begun = total
                written(len(piece))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return total, hashlib.sha256(checksum.sums()).hexdigest()


def _begin(descriptor: int, start: int, size: int) -> None:
    """Lets the disk begin with what is written so far, while the rest is made; otherwise it would begin at the sync."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def replace(path: Path, text: str) -> None:
    """Replaces the content of a small file: readers see the old one or the new one."""
    beside = path.with_name(f".{path.name}.saving")
    with _replacing:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # left by a process that was stopped
        write(beside, [text.encode()])
        os.replace(beside, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Makes a folder, and those that it lies in, for a block that writes there. If nothing is in them at the end, they go."""
    lacking = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in lacking:
            with contextlib.suppress(OSError):  # the folder is not there, or something is in it
                each.rmdir()


@contextlib.contextmanager
def filled(folder: Path, last: str) -> Iterator[Path]:
    """Gives a block a hidden folder to write several files to, which have their names in `folder` if all of them are written,
    the one that names the others last. If the block fails, `folder` is as it was."""
    with made(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".saving-", ignore_cleanup_errors=True) as hidden:
        yield Path(hidden)
        for name in sorted(os.listdir(hidden), key=lambda name: name == last):
            os.replace(Path(hidden) / name, folder / name)
        sync_folder(folder)


def sync_folder(path: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    sync_folder(target.parent)


def remove_folder(path: Path, aside: Path) -> None:
    """Removes what can be removed of a folder; what is kept open elsewhere may stay. It has another name before, on the disk
    too, so that half of it is never taken for a checkpoint."""
    rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()  # the locks that are open in this process


class Lock:
    """A lock on a file, for one holder at a time among all processes that see the file, on shared file systems too. It ends
    with its process at the latest, also if one that was forked from it lives on. If the file system has no locks, `is_certain`
    is False, and taking it excludes nobody."""

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self.is_certain = sys.platform != "win32"
        try:
            self._descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
        except PermissionError:  # the file belongs to another user
            self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        _locks.add(self)

    def take(self) -> bool:
        """Takes the lock; False if another holder has it."""
        if sys.platform != "win32":
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    self.close()  # no caller has the object yet, so nobody else would close it
                    raise
                self.is_certain = False
        return True

    def is_of(self, path: Path) -> bool:
        """Returns True if the locked file is the one of this name, which another holder may have removed before."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            return False

    def release(self) -> None:
        """Gives the lock back if it was taken, for processes that were forked meanwhile too, and closes the file. If that is
        done before, as in those processes, nothing is done."""
        if sys.platform != "win32" and self.is_certain and self._close.alive:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Closes the file, which leaves the lock with the process that this one was forked from."""
        self._close()


def _leave_to_parent() -> None:
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Runs a block while no other process or thread is in such a block with the same file, which is removed at the end."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while True:
        lock = Lock(path)
        if lock.take() and (lock.is_of(path) or not lock.is_certain):
            break
        lock.release()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Cannot change what is in {path.parent}: another process has had {path.name} locked for "
                f"{_LONGEST_WAIT_S:g} s. End it, or use another directory."
            )
        time.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # removed while it is locked: a process that waits for it finds that this name has another file
        lock.release()


class OpenFile:
    """A file that is open until it is closed, or nothing refers to it any more."""

    def __init__(self, path: Path, within: int | None = None) -> None:
        """Opens a file; `within` is the descriptor of the folder that its name is looked up in."""
        self.path = path
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # without O_NONBLOCK, opening a pipe waits for its writer
        self._descriptor = os.open(path if within is None else path.name, flags, dir_fd=within)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def size(self) -> int:
        """Returns its bytes; a folder or a device is an error, as it has none."""
        about = os.fstat(self._descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return about.st_size

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills memory with the bytes from `start` on."""
        while len(target):  # one call reads 2 GiB at most
            try:
                num_read = os.preadv(self._descriptor, [target], start)
            except OSError as error:
                if error.errno != errno.ESTALE:  # another machine removed the file
                    raise
                raise BadCheckpoint(f"Cannot read {self.path}: it was removed while it was read. Read it again.") from error
            if not num_read:
                raise BadCheckpoint(f"Cannot read {self.path}: it became shorter while it was read. Fetch it again.")
            target, start = target[num_read:], start + num_read

    def read(self, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes that the file has."""
        values = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.read_into(start, host_bytes(values))
        return values

    def checksum(self, read: Written = lambda _: None) -> str:
        """Returns the checksum as `write` does, with several threads, which a good disk has bandwidth for."""
        size = self.size()
        share = max(1, -(-size // (_READERS * _SUMMED))) * _SUMMED

        def sums_from(start: int) -> bytes:
            sums, buffer = _Checksum(), memoryview(bytearray(_AT_ONCE))
            for position in range(start, min(start + share, size), _AT_ONCE):
                part = buffer[: min(_AT_ONCE, size - position)]
                self.read_into(position, part)
                sums.take(part)
                read(len(part))
            return sums.sums()

        if hasattr(os, "posix_fadvise"):  # asks the system to read more ahead
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        with ThreadPoolExecutor(_READERS) as readers:
            return hashlib.sha256(b"".join(readers.map(sums_from, range(0, size, share)))).hexdigest()


class ProgressBar:
    """Nothing is shown in the first seconds, and nothing at all unless it is wanted and there is a terminal.

    It is the progress of a save, a load or an export, whose `advance` is a `Written`.
    """

    def __init__(self, what: str, total: int, wanted: bool = True, unit: str = "bytes") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._wanted = wanted and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._so_far = 0
        self._lock = threading.Lock()
        self._shown: Any = None
        self._task: Any = None

    def advance(self, amount: int) -> None:
        if not self._wanted:
            return
        with self._lock:  # several threads read one file
            self._so_far += amount
            if self._shown is None and time.monotonic() - self._begun > _AFTER_S:
                self._show()
            if self._shown is not None:
                self._shown.update(self._task, completed=self._so_far)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        amount = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = ("{task.description}", BarColumn(), amount, TimeRemainingColumn())
        self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._shown.add_task(self._what, total=self._total)
        self._shown.start()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()
