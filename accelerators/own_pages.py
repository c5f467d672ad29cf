"""Which pages of a private mapping of a file the process has for itself, as it does from its first write to them on.

[Note: two ways to know]
Linux has a table that says of each page whether it is the file's. To say so it looks at the page itself, and for every page of
all weights that takes a twentieth of a step. Since 6.7 it can also take notes: memory is registered for that (userfaultfd), the
first write to a page is noted as it comes, without anybody being asked, and which those were is told in a tenth of the time.
Many containers do not let a process do that, and there the table is read. One thing notes do not say: what a device has pinned
for long, and only to read it, becomes the process's own without having been written, and is seen as it was then.

Pages that are about to be dropped are under watch again before they are: so a write that comes between finding and dropping is
found the next time, wherever it went.
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

# Of userfaultfd(2) and ioctl_userfaultfd(2); names of Linux behind those of ours.
_CALL_NUMBERS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # UFFD_USER_MODE_ONLY
_API, _REGISTER, _WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06  # UFFDIO_...
_VERSION = 0xAA
_FEATURES = 1 << 0 | 1 << 12 | 1 << 13 | 1 << 15  # UFFD_FEATURE_PAGEFAULT_FLAG_WP, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED, WP_ASYNC
_WRITE_PROTECTED, _PROTECT = 2, 1  # UFFDIO_REGISTER_MODE_WP, UFFDIO_WRITEPROTECT_MODE_WP
# Of ioctl_pagemap_scan(2).
_SCAN = 0xC0606610  # PAGEMAP_SCAN
_ANEW, _NOTED_ONLY, _WRITTEN = 1, 2, 2  # PM_SCAN_WP_MATCHING, PM_SCAN_CHECK_WPASYNC, PAGE_IS_WRITTEN
_MOST_RANGES = 512  # that one call gives


class OwnPages(Protocol):
    def find(self, to_drop: bool = False) -> torch.Tensor:
        """The numbers of those there are by now, ascending. `to_drop`: and so they are about to be."""


class Table:
    """Read anew each time, whole."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._first, self._table_bytes = address // mmap.PAGESIZE, num_bytes // mmap.PAGESIZE * _ENTRY_BYTES

    def find(self, to_drop: bool = False) -> torch.Tensor:
        table = bytearray(self._table_bytes)
        with closing(_open_table()) as descriptor:
            num_bytes = os.preadv(descriptor, [table], self._first * _ENTRY_BYTES)
        if num_bytes != len(table):
            raise OSError(f"{len(table)} bytes of the table of pages were asked for, and {num_bytes} came")
        kinds = torch.frombuffer(table, dtype=torch.int64).bitwise_right_shift(_KIND_SHIFT).bitwise_and(_KIND_MASK)
        return ((kinds != _THE_FILES) & (kinds != _NOBODYS)).nonzero()[:, 0]


class Notes:
    """Taken from now on, until the memory is unmapped; an OSError where some of it was written before."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._num_bytes = address, num_bytes
        if Table(address, num_bytes).find().numel():  # as in a process that locks all that it will map
            raise OSError("pages are the process's own that were not noted")
        taker = _note_taker(os.getpid())
        fcntl.ioctl(taker, _REGISTER, bytearray(struct.pack("4Q", address, num_bytes, _WRITE_PROTECTED, 0)))
        fcntl.ioctl(taker, _WRITEPROTECT, bytearray(struct.pack("3Q", address, num_bytes, _PROTECT)))

    def find(self, to_drop: bool = False) -> torch.Tensor:
        found = self._tell(_NOTED_ONLY)
        return self._tell(_NOTED_ONLY | _ANEW) if to_drop and found.numel() else found  # which takes longer, whatever there is

    def _tell(self, flags: int) -> torch.Tensor:
        begin, end = self._address, self._address + self._num_bytes
        room = torch.empty(_MOST_RANGES, 3, dtype=torch.int64, device="cpu")  # for ranges: from, to, and of what kind
        edges = torch.zeros(0, dtype=torch.int32, device="cpu")  # by page: how many ranges begin there less those that end
        with closing(_open_table()) as descriptor:
            while begin < end:
                asked = bytearray(
                    struct.pack("12Q", 96, flags, begin, end, 0, room.data_ptr(), _MOST_RANGES, 0, 0, _WRITTEN, 0, _WRITTEN)
                )
                found = room[: fcntl.ioctl(descriptor, _SCAN, asked)]
                begin = struct.unpack("12Q", asked)[4]
                if not len(found):
                    continue
                if not edges.numel():
                    edges = torch.zeros(self._num_bytes // mmap.PAGESIZE + 1, dtype=torch.int32, device="cpu")
                for column, change in ((0, 1), (1, -1)):
                    pages = (found[:, column] - self._address) // mmap.PAGESIZE
                    edges.index_add_(0, pages, torch.full((len(found),), change, dtype=torch.int32, device="cpu"))
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_taker.cache_clear)  # whose number may be its parent's, in a namespace of its own
