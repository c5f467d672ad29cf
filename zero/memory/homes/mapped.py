"""Memory that is a file on a disk: the system reads its pages when they are used, and writes them when it wants theirs back.

So weights may live on a disk: operators and other ranks read them where they lie, at any time. Other states are read and
written once a step, in order, which files without a mapping are faster for; see file.py.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Sequence

import torch

from zero.memory.homes.file import PAGE, StateFile
from zero.plan.layout import round_up


class MappedFile:
    """A file without a name, and tensors that lie in it. After `close` the file stays until the last tensor is freed."""

    def __init__(self, directory: str, sizes: Sequence[int]) -> None:
        self._file = StateFile(directory, "weights")  # the last reference to it closes it
        self._file.reserve(_whole(sizes))
        if not self._file.is_reserved:  # a page that finds no space would end the process
            raise self._file.failed("reserve space in", "its file system cannot, and weights need that")
        with self._file.explained("map a file in"):
            self.tensors = _map(self._file.fileno(), sizes)

    def identity(self) -> str:
        """Returns a text by which `map_of` finds the file in another process, as long as it is open here."""
        number = self._file.fileno()
        status = os.fstat(number)
        return f"{os.getpid()} {number} {status.st_dev} {status.st_ino}"

    def close(self) -> None:
        self._file.close()


def map_of(identity: str, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Maps the file of another process of this host. Raises OSError if its descriptor is another file by now."""
    process, fd, *expected = map(int, identity.split())
    descriptor = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != expected:
            raise OSError(errno.ESTALE, f"descriptor {fd} of process {process} is another file")
        return _map(descriptor, sizes)
    finally:
        os.close(descriptor)


def _whole(sizes: Sequence[int]) -> int:
    return sum(round_up(size, PAGE) for size in sizes)


def _map(descriptor: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Maps a file and cuts tensors of it. Each tensor keeps the mapping, and the mapping keeps the file."""
    whole = _whole(sizes)
    if not whole:
        return [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in sizes]
    with torch.inference_mode(False):
        memory = torch.frombuffer(mmap.mmap(descriptor, whole), dtype=torch.uint8)
        starts = itertools.accumulate((round_up(size, PAGE) for size in sizes), initial=0)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
