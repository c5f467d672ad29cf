"""The host's memory as this process may use it: read from the kernel's files on Linux, through psutil elsewhere."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from accelerators.backends.cgroup import read, rooms, stat_value
from accelerators.memory import MemoryReading


def read_linux(root: str = "/", peak_was_reset: bool = False) -> MemoryReading:
    """What the machine and every cgroup around this process leave, and what this process holds (its resident pages)."""
    root = root.rstrip("/")
    meminfo, status = read(f"{root}/proc/meminfo"), read(f"{root}/proc/self/status")
    total, available = _kilobytes(meminfo, b"MemTotal"), _kilobytes(meminfo, b"MemAvailable")
    allocated, peak = _kilobytes(status, b"VmRSS"), _kilobytes(status, b"VmHWM")
    for room in rooms(root, total if total is not None else sys.maxsize):
        total = room.limit if total is None else min(total, room.limit)
        available = room.left if available is None else min(available, room.left)
    return MemoryReading(total, available, allocated, peak, "last reset" if peak_was_reset else "process start")


def reset_peak_linux(root: str = "/") -> bool:
    """Sets the kernel's high-water mark of this process to what it holds now; False where that is not allowed."""
    try:
        with open(f"{root.rstrip('/')}/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return True


def read_elsewhere() -> MemoryReading:
    """macOS and Windows, whose high-water mark cannot be reset."""
    import psutil

    host, process = psutil.virtual_memory(), psutil.Process().memory_info()
    return MemoryReading(host.total, host.available, process.rss, _peak_elsewhere(process), "process start")


def _peak_elsewhere(process: object) -> int | None:
    if sys.platform == "win32":
        peak: int | None = getattr(process, "peak_wset", None)
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kilobytes(content: bytes, key: bytes) -> int | None:
    value = stat_value(content, key)
    return None if value is None else value * 1024


def trim_heap() -> None:
    """Returns free pages to the system. Only glibc has a call for it, and keeps what was freed between two pieces that are in
    use."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache  # each look at the library makes classes that stay
def _malloc_trim() -> Callable[[int], int] | None:
    import ctypes  # imported when needed

    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
