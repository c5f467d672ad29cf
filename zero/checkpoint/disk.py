"""A file that was written is on the disk when the call returns, and a file that was opened stays the one that it was.

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
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from accelerators.tensor_bytes import host_bytes
from zero.checkpoint.progress import Written
from zero.errors import BadCheckpoint

_replacing = threading.Lock()
_AT_ONCE = 2**20  # the bytes that one call reads or writes; they stay in a processor's cache meanwhile
_SUMMED = 2**20  # the bytes of each CRC, which is part of the format
_READERS = 3  # the number of threads that read one file
_BEGIN_EVERY = 32 * 2**20


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
    """Writes a new file of these parts and syncs it; what cannot be written whole is removed, and its room is free again.
    Returns its size in bytes and its checksum."""
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
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return total, hashlib.sha256(checksum.sums()).hexdigest()


def _begin(descriptor: int, start: int, size: int) -> None:
    """Lets the disk begin with what is written so far, while the rest is made; otherwise it would begin at the sync."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def replace(path: Path, text: str) -> None:
    """Replaces the content of a small file: readers see the old one or the new one. The caller syncs the folder."""
    beside = path.with_name(f".{path.name}.saving")
    with _replacing:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # left by a process that was stopped
        write(beside, [text.encode()])
        os.replace(beside, path)


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
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(self.path))
        return about.st_size

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills memory with the bytes from `start` on."""
        while len(target):  # one call reads 2 GiB at most
            try:
                num_read = os.preadv(self._descriptor, [target], start)
            except OSError as error:
                if error.errno != errno.ESTALE:  # another machine removed the file
                    error.filename = os.fspath(self.path)  # the system does not say which file it was
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


def content(path: Path, most: int | None = None, within: int | None = None) -> bytes:
    """Returns the bytes of a small file, or its first `most` ones. What is no regular file is an error, and never waited for;
    `within` is the descriptor of the folder that its name is looked up in."""
    opened = OpenFile(path, within)
    try:
        size = opened.size()
        return bytes(host_bytes(opened.read(0, size if most is None else min(size, most))))
    finally:
        opened.close()
