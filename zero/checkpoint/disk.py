"""Writes files so that they are on the disk when a call returns: whole, synced, and renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Written = Callable[[int], None]  # told of every so many bytes

_replacing = threading.Lock()
_AT_ONCE = 2**20  # bytes that are read or written by one call, and stay in a processor's cache meanwhile
_SUMMED = 2**20  # bytes to each CRC; part of the format
_READERS = 3  # of one file
_BEGIN_EVERY = 32 * 2**20


class _Checksum:
    """CRC-32 of every MiB of what passes, and sha256 of those. A change of at most 32 bits in a row is always found, any other
    within one MiB is missed once in 2**32, and another file never. It is not against forgery; sha256 of all bytes takes
    three times as long, which is longer than a good disk takes."""

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
                checksum.take(piece)  # which leaves it in the processor's cache
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
            os.unlink(beside)  # of a process that was stopped
        write(beside, [text.encode()])
        os.replace(beside, path)
    sync_folder(path.parent)


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


def remove_folder(path: Path) -> None:
    """Removes a folder. It is renamed first, so that half of it is never taken for a checkpoint."""
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.saving-removed")
    if hidden != path:
        os.rename(path, hidden)
    shutil.rmtree(hidden)


def _parts_of(path: Path, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a file from one place to another, a part at a time; each part is of use until the next one is asked for."""
    buffer = memoryview(bytearray(_AT_ONCE))
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # more is read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        file.seek(start)
        while count := file.readinto(buffer[: stop - start]):
            yield buffer[:count]
            start += count


def checksum_of(path: Path, read: Written = lambda _: None) -> str:
    """Returns the checksum of a file as `write` does, with several threads, which a good disk has bandwidth for."""
    size = path.stat().st_size
    share = max(1, -(-size // (_READERS * _SUMMED))) * _SUMMED

    def sums_from(start: int) -> bytes:
        sums = _Checksum()
        for part in _parts_of(path, start, start + share):
            sums.take(part)
            read(len(part))
        return sums.sums()

    with ThreadPoolExecutor(_READERS) as readers:
        return hashlib.sha256(b"".join(readers.map(sums_from, range(0, size, share)))).hexdigest()
