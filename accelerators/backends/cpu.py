"""The CPU: one device, whose memory is what the machine and the cgroups around this process leave.

Work is done when a call returns. Memory is read from the kernel's files on Linux, through psutil elsewhere. `root` is where
these files are looked for: `/` on a machine, a folder of made-up files in a test.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from accelerators.interface import Accelerator
from accelerators.memory import MemoryReading


class CpuAccelerator(Accelerator):
    """The CPU as an accelerator."""

    name = "cpu"
    communication_backend = "gloo"
    compile_backend = "inductor"
    has_dlpack = True
    is_synchronous = True
    can_pin = False  # no transfer would be faster from pinned memory
    has_streams = False

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._peak_was_reset = False

    def unavailable_reason(self) -> str | None:
        return None

    def device_count(self) -> int:
        """Returns 1: sockets and NUMA nodes share one address space, so to torch they are one device."""
        return 1

    def num_cores(self) -> int:
        """Returns the number of cores that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def device(self, index: int | None = None) -> torch.device:
        self._index(index)
        return torch.device("cpu")  # tensors of the host have the device cpu, without an index

    def current_index(self) -> int:
        return 0

    def read_memory(self, index: int) -> MemoryReading:
        if sys.platform == "linux":
            return read_linux(peak_was_reset=self._peak_was_reset)
        return read_elsewhere()

    def reset_peak_memory(self, index: int | None = None) -> None:
        self._index(index)
        if sys.platform == "linux":
            self._peak_was_reset = reset_peak_linux()

    def empty_cache(self) -> None:
        """Returns free pages to the system. Only glibc has a call for it, and keeps what was freed between two pieces that are
        in use."""
        trim = _malloc_trim() if sys.platform == "linux" else None
        if trim is not None:
            trim(0)

    def synchronize(self, index: int | None = None) -> None:
        self._index(index)


def read_linux(root: str = "/", peak_was_reset: bool = False) -> MemoryReading:
    """Reads what the machine and every cgroup around this process leave, and the resident pages of this process."""
    root = root.rstrip("/")
    meminfo, status = _read(f"{root}/proc/meminfo"), _read(f"{root}/proc/self/status")
    total, available = _kilobytes(meminfo, b"MemTotal"), _kilobytes(meminfo, b"MemAvailable")
    allocated, peak = _kilobytes(status, b"VmRSS"), _kilobytes(status, b"VmHWM")
    for room in rooms(root, total if total is not None else sys.maxsize):
        total = room.limit if total is None else min(total, room.limit)
        available = room.left if available is None else min(available, room.left)
    return MemoryReading(total, available, allocated, peak, "last reset" if peak_was_reset else "process start")


def reset_peak_linux(root: str = "/") -> bool:
    """Sets the kernel's high-water mark of this process to what it holds now. Returns False if that is not allowed."""
    try:
        with open(f"{root.rstrip('/')}/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return True


def read_elsewhere() -> MemoryReading:
    """Reads through psutil, on macOS and Windows. Their high-water mark cannot be reset."""
    import psutil

    host, process = psutil.virtual_memory(), psutil.Process().memory_info()
    return MemoryReading(host.total, host.available, process.rss, _peak_elsewhere(process), "process start")


def _peak_elsewhere(process: object) -> int | None:
    if sys.platform == "win32":
        peak: int | None = getattr(process, "peak_wset", None)
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@functools.cache  # cached, as each CDLL makes classes that are never freed
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


@dataclass(frozen=True)
class _Files:
    """The names of a cgroup's files in one version of cgroups."""

    limit: str
    usage: str
    reclaimable: bytes  # the line of memory.stat that counts page cache which the kernel frees on demand


_V2 = _Files("memory.max", "memory.current", b"inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")


@dataclass(frozen=True)
class Room:
    """The memory that one cgroup allows, in bytes."""

    limit: int
    left: int


def rooms(root: str, host_total: int) -> Iterator[Room]:
    """Yields the room in each cgroup that limits this process to less than the host has."""
    for folder, files in _folders(root, _read(f"{root}/proc/self/cgroup")):
        limit = _number(_read(f"{folder}/{files.limit}"))
        if limit is None or limit >= host_total:
            continue
        usage = _number(_read(f"{folder}/{files.usage}")) or 0
        reclaimable = _stat_value(_read(f"{folder}/memory.stat"), files.reclaimable) or 0
        yield Room(limit, max(0, limit - max(0, usage - reclaimable)))


@functools.lru_cache(maxsize=8)  # a process that is moved has another text in /proc/self/cgroup, and so misses the cache
def _folders(root: str, own_groups: bytes) -> tuple[tuple[str, _Files], ...]:
    """Returns the folders of this process's memory cgroup and of all its ancestors, in both versions."""
    mounts = _read(f"{root}/proc/self/mountinfo").decode(errors="replace")
    folders = []
    for line in own_groups.decode(errors="replace").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        files = _V2 if hierarchy == "0" and not controllers else _V1 if "memory" in controllers.split(",") else None
        mounted = _mounted_at(mounts, files, path) if files else None
        if files and mounted:
            base, inside = mounted
            parts = [part for part in inside.split("/") if part]
            for depth in range(len(parts), -1, -1):
                folders.append(("/".join([root.rstrip("/") + base.rstrip("/"), *parts[:depth]]), files))
    return tuple(folders)


def _mounted_at(mounts: str, files: _Files, path: str) -> tuple[str, str] | None:
    """Returns where the hierarchy of that version is mounted, and the path of the cgroup below it."""
    best = None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), [*right.split(), "", "", ""][:3]
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if len(fields) < 5 or not (is_v1 if files is _V1 else kind == "cgroup2"):
            continue
        top, base = fields[3].rstrip("/"), re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if ".." not in path.split("/") and (path == top or path.startswith(f"{top}/")):
            return base, path[len(top) :]
        # The path may be one of the host, while a container sees its own cgroup as the mount. Then the mount is the cgroup.
        best = best or (base, "")
    return best


def _read(path: str) -> bytes:
    """Returns the content of a file, empty if there is none. os.read, as open() costs more, and these files are read often."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        content = b""
        while block := os.read(file, 1 << 16):
            content += block
        return content
    except OSError:
        return b""
    finally:
        os.close(file)


def _stat_value(content: bytes, key: bytes) -> int | None:
    """Returns the number after `key` at the start of a line, as memory.stat and /proc/meminfo write it."""
    match = re.search(rb"^" + re.escape(key) + rb":?\s+(\d+)", content, re.MULTILINE)
    return int(match[1]) if match else None


def _kilobytes(content: bytes, key: bytes) -> int | None:
    value = _stat_value(content, key)
    return None if value is None else value * 1024


def _number(content: bytes) -> int | None:
    text = content.strip()
    return int(text) if text.isdigit() else None  # "max" is no number, and no limit
