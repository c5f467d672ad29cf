"""Which pages of a private mapping of a file the process has for itself, as it does from its first write to them on.

[Note: two ways to know]
Linux has a table that says of each page whether it is the file's. To say so it looks at the page itself, and for every page of
all weights that takes a twentieth of a step. Since 6.7 it can also take notes: memory is registered for that (userfaultfd), the
first write to a page is noted as it comes, without anybody being asked, and which those were is told in a tenth of the time.
Many containers do not let a process do that, and there the table is read. What a device has pinned only to read it, for long,
becomes the process's own too, and notes do not say so; no step writes what was pinned like that.

Dropped are pages that were found for the last time. By then they are under watch again: so a write that comes between finding
and dropping is found the next time, wherever it went.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
from typing import Protocol

import torch

from accelerators.memory_file import closing

if sys.platform == "linux":
    import fcntl

_TABLE = "/proc/self/pagemap"

_ENTRY_BYTES = 8  # of the table, for a page
_KIND_SHIFT, _KIND_MASK = 61, 7  # the topmost bits of an entry: it is there, it is swapped out, it is the file's
_NOBODYS, _THE_FILES = 0b000, 0b101

# What Linux calls, and how it numbers, what is used of userfaultfd(2) and ioctl_pagemap_scan(2).
_CALL_NUMBERS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _REGISTER, _WRITEPROTECT, _SCAN = 0xC018AA3F, 0xC020AA00, 0xC018AA06, 0xC0606610
_VERSION, _FEATURES = 0xAA, 1 << 0 | 1 << 12 | 1 << 13 | 1 << 15  # of private mappings of files, untouched ones too; no faults
_WRITE_PROTECTED, _PROTECT = 2, 1
_ANEW, _NOTED_ONLY, _WRITTEN = 1, 2, 2
_MOST_RANGES = 512  # that one call gives


class OwnPages(Protocol):
    def find(self, last: bool = False) -> torch.Tensor:
        """The numbers of those there are by now, ascending. `last`: they are about to be dropped."""


class Table:
    """Read anew each time, whole."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._first, self._table_bytes = address // mmap.PAGESIZE, num_bytes // mmap.PAGESIZE * _ENTRY_BYTES

    def find(self, last: bool = False) -> torch.Tensor:
        table = bytearray(self._table_bytes)
        with closing(_open_table()) as descriptor:
            num_bytes = os.preadv(descriptor, [table], self._first * _ENTRY_BYTES)
        if num_bytes != len(table):
            raise OSError(f"{len(table)} bytes of the table of pages were asked for, and {num_bytes} came")
        kinds = torch.frombuffer(table, dtype=torch.int64).bitwise_right_shift(_KIND_SHIFT).bitwise_and(_KIND_MASK)
        return ((kinds != _THE_FILES) & (kinds != _NOBODYS)).nonzero()[:, 0]


class Notes:
    """Taken of memory that nobody wrote to yet, until it is unmapped."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._num_bytes = address, num_bytes
        taker = _note_taker(os.getpid())
        fcntl.ioctl(taker, _REGISTER, bytearray(struct.pack("4Q", address, num_bytes, _WRITE_PROTECTED, 0)))
        fcntl.ioctl(taker, _WRITEPROTECT, bytearray(struct.pack("3Q", address, num_bytes, _PROTECT)))

    def find(self, last: bool = False) -> torch.Tensor:
        found = self._tell(_NOTED_ONLY)
        return self._tell(_NOTED_ONLY | _ANEW) if last and found.numel() else found  # which takes longer, whatever there is

    def _tell(self, flags: int) -> torch.Tensor:
        begin, end = self._address, self._address + self._num_bytes
        ranges = torch.empty(_MOST_RANGES, 3, dtype=torch.int64)
        edges = torch.zeros(0, dtype=torch.int32)  # by page: how many ranges begin there less those that end
        with closing(_open_table()) as descriptor:
            while begin < end:
                asked = bytearray(
                    struct.pack("12Q", 96, flags, begin, end, 0, ranges.data_ptr(), len(ranges), 0, 0, _WRITTEN, 0, _WRITTEN)
                )
                found = ranges[: fcntl.ioctl(descriptor, _SCAN, asked)]
                begin = struct.unpack("12Q", asked)[4]
                if not len(found):
                    continue
                if not edges.numel():
                    edges = torch.zeros(self._num_bytes // mmap.PAGESIZE + 1, dtype=torch.int32)
                for column, change in ((0, 1), (1, -1)):
                    pages = (found[:, column] - self._address) // mmap.PAGESIZE
                    edges.index_add_(0, pages, torch.full((len(found),), change, dtype=torch.int32))
        return edges.cumsum(0)[:-1].nonzero()[:, 0]


def _open_table() -> int:
    return os.open(_TABLE, os.O_RDONLY | os.O_CLOEXEC)  # each time anew: a fork would read its parent's


@functools.cache
def _note_taker(process: int) -> int:
    """The descriptor by which this process registers memory, for as long as it lives."""
    number = _CALL_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise OSError("it is not known how this system is asked to take notes of writes")
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "no notes are taken of writes")
    try:
        fcntl.ioctl(descriptor, _API, bytearray(struct.pack("3Q", _VERSION, _FEATURES, 0)))
    except OSError:
        os.close(descriptor)
        raise
    return int(descriptor)
