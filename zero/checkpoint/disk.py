"""Files that are on the disk when they are said to be: written whole, synced, and renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Written = Callable[[int], None]  # told of every so many bytes

_replacing = threading.Lock()
_AT_ONCE = 8 * 2**20  # bytes that are read or written by one call
_AHEAD = 2  # such parts that wait to be hashed while the next one is written


class _Hash:
    """sha256 of what passes, made on a thread of its own: it takes as long as the disk.

    No executor: those refuse work while the interpreter waits for its last threads, one of which may be a save's.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._parts: queue.Queue[memoryview | None] = queue.Queue(_AHEAD)
        self._thread = threading.Thread(target=self._run, name="zero.hash")
        self._thread.start()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            self._hash.update(part)

    def take(self, part: memoryview) -> None:
        self._parts.put(part)

    def finish(self) -> str:
        self._parts.put(None)
        self._thread.join()
        return self._hash.hexdigest()


def write(path: Path, parts: Iterable[bytes | memoryview], written: Written = lambda _: None) -> tuple[int, str]:
    """Writes a new file of these parts and syncs it; how many bytes they are, and their hash."""
    total, hashing = 0, _Hash()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _AT_ONCE):
                piece = view[start : start + _AT_ONCE]
                hashing.take(piece)
                at = 0
                while at < len(piece):
                    at += os.write(descriptor, piece[at:])
                total += len(piece)
                written(len(piece))
        os.fsync(descriptor)
    finally:
        found = hashing.finish()
        os.close(descriptor)
    return total, found


def replace(path: Path, text: str) -> None:
    """Gives a small file another content: readers see the old one or the new one."""
    beside = path.with_name(f".{path.name}.saving")
    with _replacing:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # of somebody who was stopped
        write(beside, [text.encode()])
        os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes renames in it last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    sync_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Takes it out of sight first, so that half of it is never taken for a checkpoint."""
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.saving-removed")
    if hidden != path:
        os.rename(path, hidden)
    shutil.rmtree(hidden)


def parts_of(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, a part at a time; each part is of use until the next one is asked for."""
    buffers = [bytearray(_AT_ONCE) for _ in range(_AHEAD + 2)]
    with open(path, "rb", buffering=0) as file:
        turn = 0
        while count := file.readinto(buffers[turn]):
            yield memoryview(buffers[turn])[:count]
            turn = (turn + 1) % len(buffers)


def hash_of(path: Path, read: Written = lambda _: None) -> str:
    hashing = _Hash()
    try:
        for part in parts_of(path):
            hashing.take(part)
            read(len(part))
    finally:
        found = hashing.finish()
    return found
