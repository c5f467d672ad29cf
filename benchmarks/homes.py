"""One AdamW step whose masters and moments are on disk, beside plain threads that move the same bytes.

    python benchmarks/homes.py [--directory DIR] [--params 60e6] [--rounds 3]

A step reads and writes 12 bytes an element: its master and two moments. Beside it are the same step in memory, which says what
is computed, and threads with direct access that read and write as many bytes in stretches of the same size, reading one while
they write another. The three take turns, so that whatever else the machine does meets all of them. Shown are medians.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import zero
from zero.comm.levels import SoloGroup

LINES = 3  # a master and two moments
ITEM = 4  # bytes


class Training:
    """A window whose gradients are there, stepped again and again."""

    def __init__(self, num_params: int, homes: dict[str, str], kernels: str) -> None:
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(2**21)) for _ in range(num_params >> 21))
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.optimizer = zero.shard(
            self.model, inner, stage=2, dtype="bfloat16", homes=homes, kernels=kernels, group=SoloGroup()
        )  # fmt: skip
        self.step()

    def step(self) -> float:
        for param in self.model:
            param.sum().backward()
        self.optimizer.settle()
        began = time.perf_counter()
        self.optimizer.step()
        took = time.perf_counter() - began
        self.optimizer.zero_grad()
        return took

    @property
    def moved(self) -> int:
        """Bytes that were read and written so far."""
        disks = self.optimizer.sharding.masters.shard.homes.disks.values()
        return sum(disk.file.num_read + disk.file.num_written for disk in disks)


class Threads:
    """Plain threads that read and write as much of a file of their own."""

    def __init__(self, directory: str, num_bytes: int, stretch_bytes: int, threads: int, piece_bytes: int) -> None:
        handle, path = tempfile.mkstemp(dir=directory)
        os.close(handle)
        self.file = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.unlink(path)
        self.starts, self.stretch, self.piece = range(0, num_bytes, stretch_bytes), stretch_bytes, piece_bytes
        os.posix_fallocate(self.file, 0, len(self.starts) * stretch_bytes)
        self.pool, self.memory = ThreadPoolExecutor(2 * threads), [mmap.mmap(-1, stretch_bytes) for _ in range(3)]
        for start in self.starts:
            self._wait(self._move(os.pwritev, self.memory[0], start))

    def _move(self, move, memory, start):
        view = memoryview(memory)
        ats = range(0, self.stretch, self.piece)
        return [self.pool.submit(move, self.file, [view[at : at + self.piece]], start + at) for at in ats]

    def _wait(self, pieces) -> None:
        for piece in pieces:
            piece.result()

    def run(self) -> float:
        began, writing = time.perf_counter(), dict[int, list]()
        coming = self._move(os.preadv, self.memory[0], self.starts[0])
        for number, start in enumerate(self.starts):
            reading = coming
            if number + 1 < len(self.starts):
                self._wait(writing.pop(number - 2, ()))  # waits for what leaves the memory that is read to
                coming = self._move(os.preadv, self.memory[(number + 1) % 3], self.starts[number + 1])
            self._wait(reading)
            writing[number] = self._move(os.pwritev, self.memory[number % 3], start)
        for pieces in writing.values():
            self._wait(pieces)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--params", type=float, default=60e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", default="fused", choices=("torch", "fused", "compiled"))
    args = parser.parse_args()
    place = f"disk:{args.directory}"
    streamed = Training(int(args.params), {"masters": place, "moments": place}, args.kernels)
    memory = Training(int(args.params), {}, args.kernels)
    pace, before = streamed.optimizer.config.homes, streamed.moved
    times: dict[str, list[float]] = {"streamed": [], "in memory": [], "threads": []}
    times["streamed"].append(streamed.step())
    moved = streamed.moved - before
    layout = streamed.optimizer.sharding.layout_ref.layout
    stretch = LINES * ITEM * max(bucket.share_numel for bucket in layout.buckets)
    threads = Threads(args.directory, moved // 2, stretch, int(pace.threads), int(pace.piece_bytes))
    for _ in range(args.rounds):
        times["threads"].append(threads.run())
        times["in memory"].append(memory.step())
        times["streamed"].append(streamed.step())
    plain, own, computed = (statistics.median(times[name]) for name in ("threads", "streamed", "in memory"))
    load = os.getloadavg()[0]
    print(f"{moved / 1e9:.2f} GB a step, {stretch / 2**20:.0f} MiB at a time, {pace.threads} threads, load {load:.1f}")
    print(f"threads    {plain:7.3f} s  {moved / plain / 1e6:7.0f} MB/s")
    print(f"streamed   {own:7.3f} s  {moved / own / 1e6:7.0f} MB/s  {plain / own:.2f} of the threads")
    print(f"in memory  {computed:7.3f} s")


if __name__ == "__main__":
    main()
