"""Times what a step pays for weights in shares if there are many small ones: stage 3 beside stage 2.

    python benchmarks/small_weights.py            100 to 10,000 parameters on two ranks
    python benchmarks/small_weights.py --ranks 1 --params 1000

Layers have 16 x 16 weights and a bias, so that nothing counts but the work a parameter and an operator. Steps of both stages
alternate in one process a rank; shown is the median.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import torch
from torch import nn

import zero

STEPS, WIDTH = 12, 16


def run(rank: int, port: int, num_ranks: int, numbers: list[int]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if rank == 0:
        print("parameters   stage 2 ms   stage 3 ms   us more a parameter")
    for number in numbers:
        two, three = steps([2, 3], number)
        if rank == 0:
            print(f"{number:10d} {two * 1e3:12.1f} {three * 1e3:12.1f} {(three - two) / number * 1e6:21.1f}", flush=True)


def steps(stages: list[int], num_params: int) -> list[float]:
    """Seconds of the median step of each stage."""
    trainings, seconds = [], [list[float]() for _ in stages]
    for stage in stages:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_params // 2)))
        trainings.append((model, zero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), stage=stage)))
    x = torch.randn(8, WIDTH)
    for _ in range(STEPS):
        for (model, optimizer), taken in zip(trainings, seconds, strict=True):
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - start)
    for _, optimizer in trainings:
        optimizer.close()
    return [statistics.median(taken[2:]) for taken in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params", type=int, nargs="+", default=[100, 1000, 10_000])
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, options.ranks, options.params), nprocs=options.ranks)


if __name__ == "__main__":
    main()
