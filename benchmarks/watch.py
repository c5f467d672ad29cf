"""Times the lines by which ranks tell each other where they are: those of one step, through the store that ranks meet in.

    python benchmarks/watch.py

Two ranks on one host. Between its lines each computes for ten milliseconds, as a rank that trains would. *wall* is what the
thread that trains waits; *CPU* is that of all threads of a rank beside its computing, on rank 0 with those of the store.
"""

from __future__ import annotations

import argparse
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

LINES = ("in a backward", "after a backward", "in the update", "before a backward")  # the lines of each step
COMPUTES_S = 0.01


def run(rank: int, port: int, steps: int) -> None:
    from zero.comm.health import RankMonitor, StoreClient

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    watch = RankMonitor(StoreClient(store), rank, 2, True)
    watch.wait_for_start(30.0, lambda rank: "")
    waited = computed = 0.0
    begin = time.process_time()
    for step in range(steps):
        end, mine = time.perf_counter() + COMPUTES_S, time.thread_time()
        while time.perf_counter() < end:
            pass
        computed += time.thread_time() - mine
        started = time.perf_counter()
        for line in LINES:
            watch.note(f"{line} of step {step}")
        waited += time.perf_counter() - started
    spent = time.process_time() - begin - computed
    wall_us, cpu_us = waited / steps * 1e6, spent / steps * 1e6
    print(f"rank {rank}: {len(LINES)} lines a step, {wall_us:.0f} us wall, {cpu_us:.0f} us CPU", flush=True)
    store.set(f"done/{rank}", "1")
    store.wait(["done/0", "done/1"])
    time.sleep(0.2)  # rank 0 holds the store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, options.steps), nprocs=2)


if __name__ == "__main__":
    main()
