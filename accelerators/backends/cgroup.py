"""The memory limits that the kernel sets for this process: those of its cgroup and of every ancestor, version 2 and version 1.

`root` is where the files are looked for: `/` on a machine, a folder of made-up files in a test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Files:
    """The names of the files of one version."""

    limit: str
    usage: str
    reclaimable: bytes  # the line of memory.stat with the page cache that is freed when memory is needed


V2 = Files("memory.max", "memory.current", b"inactive_file")
V1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")


@dataclass(frozen=True)
class Room:
    """What one cgroup allows, in bytes."""

    limit: int
    left: int


def rooms(root: str, host_total: int) -> Iterator[Room]:
    """The room in every cgroup around this process that limits it to less than the host has."""
    for folder, files in _folders(root, read(f"{root}/proc/self/cgroup")):
        limit = _number(read(f"{folder}/{files.limit}"))
        if limit is None or limit >= host_total:
            continue
        usage = _number(read(f"{folder}/{files.usage}")) or 0
        reclaimable = stat_value(read(f"{folder}/memory.stat"), files.reclaimable) or 0
        yield Room(limit, max(0, limit - max(0, usage - reclaimable)))


def read(path: str) -> bytes:
    """The content of a file, empty where there is none; without the layers of open(), as these files are read often."""
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


def stat_value(content: bytes, key: bytes) -> int | None:
    """The number after `key` at the start of a line, as memory.stat and /proc/meminfo write it."""
    match = re.search(rb"^" + re.escape(key) + rb":?\s+(\d+)", content, re.MULTILINE)
    return int(match[1]) if match else None


def _number(content: bytes) -> int | None:
    text = content.strip()
    return int(text) if text.isdigit() else None  # "max" is no number, and no limit


@lru_cache(maxsize=8)  # a process hardly ever moves; if it does, /proc/self/cgroup has another text
def _folders(root: str, own_groups: bytes) -> tuple[tuple[str, Files], ...]:
    """The folder of this process's memory cgroup in each version, and those of all its ancestors."""
    mounts = read(f"{root}/proc/self/mountinfo").decode(errors="replace")
    folders = []
    for line in own_groups.decode(errors="replace").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        files = V2 if hierarchy == "0" and not controllers else V1 if "memory" in controllers.split(",") else None
        mounted = _mounted_at(mounts, files, path) if files else None
        if files and mounted:
            base, inside = mounted
            parts = [part for part in inside.split("/") if part]
            for depth in range(len(parts), -1, -1):
                folders.append(("/".join([root.rstrip("/") + base.rstrip("/"), *parts[:depth]]), files))
    return tuple(folders)


def _mounted_at(mounts: str, files: Files, path: str) -> tuple[str, str] | None:
    """Where that version's hierarchy is mounted, and the path of the cgroup below that."""
    best = None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), [*right.split(), "", "", ""][:3]
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if len(fields) < 5 or not (is_v1 if files is V1 else kind == "cgroup2"):
            continue
        top, base = fields[3].rstrip("/"), re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if ".." not in path.split("/") and (path == top or path.startswith(f"{top}/")):
            return base, path[len(top) :]
        # A container sees its own cgroup mounted, while its path may be told from outside: then the mount is the place.
        best = best or (base, "")
    return best
