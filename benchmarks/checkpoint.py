"""Times saving and loading a checkpoint, beside plain writing and reading of the same bytes on the same disk.

    python benchmarks/checkpoint.py --folder DIR

Rounds in turn, on all ranks at once; every other round begins with the plain one. Plain writing is what each rank's file
consists of, in large pieces from memory, as a new file beside those of the round before, and a sync of it and of its folder.
Plain reading is those files into memory. Before each reading the system is told to forget the files.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for start in range(0, len(content), PIECE):
        os.write(descriptor, content[start : start + PIECE])
    os.fsync(descriptor)
    os.close(descriptor)
    descriptor = os.open(path.parent, os.O_RDONLY)
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
        optimizer.any_rank(False)  # all ranks begin together, and end when the last one does
        begin = time.perf_counter()
        act()
        optimizer.any_rank(False)
        seconds[what].append(time.perf_counter() - begin)

    content = memoryview(b"")
    for number in range(options.rounds + 1):
        ours, plain = place / f"round-{number}", place / f"plain-{number}" / str(rank)
        save = partial(timed, "save", partial(zero.save, place, optimizer, ours.name))
        write = partial(timed, "write", lambda: write_plain(plain, content))  # noqa: B023 - called before it changes
        load = partial(timed, "load", partial(zero.load, place, optimizer))
        read = partial(timed, "read", lambda: read_plain(plain, content))  # noqa: B023
        plain_first = number % 2 == 0 and number > 0
        if plain_first:
            write(), save()
        else:
            save()
            content = memoryview(bytearray((ours / f"rank-{rank:05}.safetensors").read_bytes()))
            write()
        forget(place)
        for act in (read, load) if plain_first else (load, read):
            optimizer.any_rank(False)
            act()
        if number == 0:  # the first one fills caches
            for times in seconds.values():
                times.clear()
        optimizer.any_rank(False)
        if rank == 0 and number > 0:  # the checkpoint that one replaces is there until the new one is complete
            shutil.rmtree(place / f"round-{number - 1}")
            shutil.rmtree(place / f"plain-{number - 1}")
        optimizer.any_rank(False)
    if rank == 0:
        files = [path.stat().st_size for path in ours.iterdir()]
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
