"""Memory limits of containers, from made-up kernel files and, where this machine permits, from a real cgroup."""

import json
import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from accelerators.backends.cpu import read_linux, rooms

MIB, GIB = 1 << 20, 1 << 30
V1_HUGE = str((1 << 63) - 4096)  # version 1 writes this for "no limit"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_MOUNT = "36 31 0:32 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"


class Machine:
    """A root folder with /proc and /sys of a machine of 64 GiB, 48 of them free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n")
        self.write("proc/self/status", "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, own_groups: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", own_groups)
        self.write("proc/self/mountinfo", "\n".join(["24 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts]) + "\n")

    def v2(self, folder: str, limit: str | None, usage: int = 0, cache: int = 0) -> None:
        base = f"sys/fs/cgroup/{folder}"
        if limit is not None:
            self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.current", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"anon 1\nfile {cache}\ninactive_anon 77\ninactive_file {cache}\nactive_file 5\n")

    def v1(self, folder: str, limit: str, usage: int = 0, cache: int = 0) -> None:
        base = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"inactive_file 5\ntotal_inactive_file {cache}\n")

    def seen(self) -> tuple[int, int]:
        reading = read_linux(str(self.root))
        return reading.total, reading.available


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


HOST = (64 * GIB, 48 * GIB)


def test_without_cgroups_the_host_is_what_there_is(machine):
    assert machine.seen() == HOST
    machine.process("", "")
    assert machine.seen() == HOST


@pytest.mark.promise("M08")
def test_a_limit_of_version_2_counts_without_the_page_cache_that_is_given_back(machine):
    machine.process("0::/job\n", V2_MOUNT)
    machine.v2("job", str(8 * GIB), usage=5 * GIB, cache=2 * GIB)
    assert machine.seen() == (8 * GIB, 5 * GIB)


@pytest.mark.promise("M08")
def test_every_ancestor_counts_and_the_least_room_wins(machine):
    machine.process("0::/kubepods/pod/container\n", V2_MOUNT)
    machine.v2("kubepods/pod/container", str(16 * GIB), usage=1 * GIB)
    machine.v2("kubepods/pod", str(8 * GIB), usage=6 * GIB)  # a neighbour in the same pod holds most of it
    machine.v2("kubepods", "max", usage=30 * GIB)
    assert machine.seen() == (8 * GIB, 2 * GIB)


@pytest.mark.promise("M08")
def test_max_and_the_huge_number_of_version_1_are_no_limits(machine):
    machine.process("0::/a\n", V2_MOUNT)
    machine.v2("a", "max", usage=60 * GIB)
    assert machine.seen() == HOST
    machine.process("4:memory:/b\n", V1_MOUNT)
    machine.v1("b", V1_HUGE, usage=60 * GIB)
    assert machine.seen() == HOST


@pytest.mark.promise("M08")
def test_version_1_with_other_controllers_beside_it_and_nested(machine):
    own_groups = "9:name=systemd:/\n5:cpu,memory:/docker/abc\n0::/\n"
    machine.process(own_groups, V1_MOUNT.replace("rw,memory", "rw,cpu,memory"), V2_MOUNT)
    machine.v1("docker/abc", V1_HUGE, usage=GIB)
    machine.v1("docker", str(4 * GIB), usage=3 * GIB, cache=GIB)
    machine.v1("", V1_HUGE, usage=40 * GIB)
    assert machine.seen() == (4 * GIB, 2 * GIB)


@pytest.mark.promise("M08")
def test_missing_and_empty_files_are_no_limits(machine):
    machine.process("0::/a/b/c\n", V2_MOUNT)
    machine.v2("a", None, usage=GIB)
    machine.write("sys/fs/cgroup/a/b/memory.max", "")
    machine.write("sys/fs/cgroup/a/b/c/memory.max", f"{2 * GIB}\n")  # and nothing beside it
    assert machine.seen() == (2 * GIB, 2 * GIB)


@pytest.mark.promise("M08")
@pytest.mark.parametrize(
    ("mount_top", "own_path", "folder"),
    [
        ("/docker/abc", "/docker/abc", ""),  # version 1 in a container without a namespace of its own
        ("/docker/abc", "/docker/abc/inner", "inner"),
        ("/", "/", ""),  # a namespace: the container's cgroup looks like the root
        ("/..", "/", ""),  # the mount was made outside the namespace
        ("/docker/abc", "/docker/abcdef", ""),  # a path told from elsewhere: only the mount can be trusted
        ("/", "/../sibling", ""),
    ],
)
def test_a_container_finds_its_own_limit_below_its_mount(machine, mount_top, own_path, folder):
    machine.process(f"0::{own_path}\n", V2_MOUNT.replace("0:26 / ", f"0:26 {mount_top} "))
    machine.v2(folder, str(3 * GIB), usage=GIB)
    assert machine.seen() == (3 * GIB, 2 * GIB)


def test_usage_above_the_limit_leaves_nothing_and_a_cache_above_usage_is_no_gain(machine):
    machine.process("0::/a\n", V2_MOUNT)
    machine.v2("a", str(GIB), usage=2 * GIB)
    assert machine.seen() == (GIB, 0)
    machine.v2("a", str(GIB), usage=GIB // 4, cache=GIB // 2)
    assert machine.seen() == (GIB, GIB)


def test_a_mount_point_with_a_space_is_found(machine):
    machine.process("0::/\n", V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/c\\040group "))
    machine.write("sys/fs/c group/memory.max", str(GIB))
    assert machine.seen()[0] == GIB


def test_a_process_that_was_moved_is_seen_in_its_new_cgroup(machine):
    machine.v2("a", str(GIB))
    machine.v2("b", str(2 * GIB))
    for group, limit in (("a", GIB), ("b", 2 * GIB), ("a", GIB)):
        machine.process(f"0::/{group}\n", V2_MOUNT)
        assert machine.seen()[0] == limit


def test_the_host_may_have_less_than_the_limit_leaves(machine):
    machine.process("0::/a\n", V2_MOUNT)
    machine.v2("a", str(60 * GIB), usage=GIB)
    assert machine.seen() == (60 * GIB, 48 * GIB)


def test_a_machine_that_tells_nothing_gives_no_figures(tmp_path):
    reading = read_linux(str(tmp_path))
    assert (reading.total, reading.available, reading.allocated, reading.peak) == (None, None, None, None)


LIMIT = 768 * MIB

IN_THE_CGROUP = """
    import json, os, torch
    import accelerators
    accelerator = accelerators.current()
    def figures():
        reading = accelerator.memory()
        return [reading.total, reading.available, reading.allocated]
    start = figures()
    with open("page_cache", "wb") as file:
        for _ in range(128):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    cached = figures()
    held = torch.ones(64 << 18)
    print(json.dumps([start, cached, figures()]))
"""


def make_cgroup():
    """A memory cgroup of this process's own, limited, and how it is called; skips with the reason where that cannot be."""
    if sys.platform != "linux":
        pytest.skip("cgroups are Linux's")
    name = f"zero-accelerators-test-{uuid.uuid4().hex[:8]}"
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        own["v2" if hierarchy == "0" else "v1" if "memory" in controllers.split(",") else ""] = path.lstrip("/")
    tried = []
    for base, path, limit_file in (
        (Path("/sys/fs/cgroup/memory"), own.get("v1"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), own.get("v2"), "memory.max"),
    ):
        if path is None:
            continue
        folder = base / path / name
        try:
            folder.mkdir()
        except OSError as error:
            tried.append(str(error))
            continue
        try:
            (folder / limit_file).write_text(str(LIMIT))
            return folder
        except OSError as error:
            tried.append(str(error))
            folder.rmdir()
    pytest.skip(f"this machine lets nobody make a memory cgroup here: {'; '.join(tried) or 'there is none'}")


@pytest.mark.promise("M08")
def test_in_a_real_cgroup_its_limit_is_the_memory_and_page_cache_does_not_count(tmp_path):
    folder = make_cgroup()
    try:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(IN_THE_CGROUP)],
            preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())),
            env={**os.environ, "ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "ACCELERATOR_MEMORY": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        folder.rmdir()
    assert result.returncode == 0, result.stderr
    start, cached, held = json.loads(result.stdout)
    assert start[0] == cached[0] == held[0] == LIMIT
    assert 0 < start[1] < LIMIT
    assert start[1] - cached[1] < 40 * MIB  # 128 MiB of page cache
    assert cached[1] - held[1] > 50 * MIB  # 64 MiB of tensor


def test_reading_limits_of_this_machine_fails_on_nothing():
    assert all(room.left <= room.limit for room in rooms("", 1 << 62))
