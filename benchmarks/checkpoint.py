"""How fast a checkpoint is saved and loaded, beside plain writing and reading of the same bytes on the same disk.

    python benchmarks/checkpoint.py --folder DIR

Rounds in turn, on all ranks at once. Plain writing is what each rank's file consists of, in large pieces from memory, and
one sync; plain reading is those files into memory. Before each reading the system is told to forget the files.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing

PIECE = 8 * 2**20
WIDTH = 1024


def forget(folder: Path) -> None:
    """Takes files out of the system's memory, once they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_plain(path: Path, content: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, len(content), PIECE):
        os.write(descriptor, content[start : start + PIECE])
    os.fsync(descriptor)
    os.close(descriptor)


def read_plain(path: Path, into: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        at = 0
        while count := file.readinto(into[at : at + PIECE]):
            at += count


def run(rank: int, options: argparse.Namespace, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    import accelerators
    import zero

    layers = max(1, options.params // (WIDTH * WIDTH))
    device = accelerators.current().device()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = zero.shard(model, inner, stage=2, dtype=torch.bfloat16)
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds: dict[str, list[float]] = {"save": [], "write": [], "load": [], "read": []}
    place = Path(folder)

    def timed(what: str, act: Callable[[], object]) -> None:
        optimizer.any_rank(False)  # all begin together, and end when the last one does
        begin = time.perf_counter()
        act()
        optimizer.any_rank(False)
        seconds[what].append(time.perf_counter() - begin)

    for number in range(options.rounds + 1):
        timed("save", lambda: zero.save(place, optimizer, "checkpoint"))
        own = place / "checkpoint" / f"rank-{rank:05}.safetensors"
        content = memoryview(bytearray(own.read_bytes()))
        timed("write", partial(write_plain, place / f"plain-{rank}", content))
        forget(place)
        timed("load", lambda: zero.load(place, optimizer))
        forget(place)
        timed("read", partial(read_plain, place / f"plain-{rank}", content))
        if number == 0:  # the first one fills caches
            for times in seconds.values():
                times.clear()
    if rank == 0:
        files = [path.stat().st_size for path in (place / "checkpoint").iterdir()]
        payload = 12 * layers * WIDTH * WIDTH
        part = sum(files) / payload
        print(f"torch {torch.__version__}, {options.ranks} ranks, {payload:,} bytes, {part:.4f} of that on the disk")
        for ours, plain in (("save", "write"), ("load", "read")):
            one, other = statistics.median(seconds[ours]), statistics.median(seconds[plain])
            print(f"{ours} {one:6.2f} s ({payload / one / 2**20:5.0f} MiB/s), plain {plain} {other:6.2f} s, "
                  f"so at {other / one:.2f} of its speed")  # fmt: skip
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("params", 100_000_000), ("ranks", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="a directory on the disk to be measured (default: the temporary one)")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torch.multiprocessing.spawn(run, (options, port, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
