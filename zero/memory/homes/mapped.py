"""Memory that is a file on a disk: the system reads its pages when they are used, and writes them when it wants theirs back.

So weights may live on a disk: operators and other ranks read them where they lie, at any time. Other states are read and
written once a step, in order, which files without a mapping are faster for; see file.py.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Sequence

import torch

from zero.memory.homes.file import PAGE, StateFile
from zero.plan.spans import round_up


def map_new(directory: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """Makes a file without a name that has space for tensors of so many bytes. Returns them and a descriptor of the file, by
    which another process of this host may find it while it is open."""
    file = StateFile(directory, "weights")
    try:
        file.reserve(_whole(sizes))
        with file.explained("map a file in"):
            descriptor = os.dup(file.fileno())
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(os.close, descriptor)
                found = _map(descriptor, sizes)
                on_failure.pop_all()
            return found, descriptor
    finally:
        file.close()


def identity(descriptor: int) -> str:
    """What `map_of` finds the file by."""
    status = os.fstat(descriptor)
    return f"{os.getpid()} {descriptor} {status.st_dev} {status.st_ino}"


def map_of(told: str, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Maps the file of another process of this host. Raises OSError where it is another one."""
    process, theirs, *expected = map(int, told.split())
    descriptor = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != expected:
            raise OSError(errno.ESTALE, f"descriptor {theirs} of process {process} is another file")
        return _map(descriptor, sizes)
    finally:
        os.close(descriptor)


def _whole(sizes: Sequence[int]) -> int:
    return sum(round_up(size, PAGE) for size in sizes)


def _map(descriptor: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Each tensor keeps the mapping, and that the file."""
    whole = _whole(sizes)
    if not whole:
        return [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in sizes]
    with torch.inference_mode(False):
        memory = torch.frombuffer(mmap.mmap(descriptor, whole), dtype=torch.uint8)
        starts = itertools.accumulate((round_up(size, PAGE) for size in sizes), initial=0)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
