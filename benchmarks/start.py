"""Times `zero.initialize`, beside one copy of the model's weights.

    python benchmarks/start.py                      300 M parameters in fp32, to be bf16 with fp32 masters, two ranks
    python benchmarks/start.py --given bfloat16     that come in bf16 already, a copy of which is half as many bytes
    python benchmarks/start.py --dtype float32 --ranks 1

A round makes the model anew in fresh processes, copies every parameter once on all ranks at the same time, frees the
copies, and initializes. Both make new memory, whose pages the system has to find and clear.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import torch
import torch.multiprocessing

WIDTH = 2048


def run(rank: int, options: argparse.Namespace, port: int, found: torch.multiprocessing.SimpleQueue) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(options.ranks)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    import zero
    layers, given = max(1, options.params // (WIDTH * WIDTH)), getattr(torch, options.given)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=given) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "zero_optimization": {"stage": options.stage},
    }
    # Imports that only this measurement needs are not counted.
    zero.initialize(model=torch.nn.Linear(2, 2, dtype=given), config=config)[0].close()
    torch.distributed.barrier()
    begin = time.perf_counter()
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    torch.distributed.barrier()
    copying = time.perf_counter() - begin
    del copies
    torch.distributed.barrier()
    begin = time.perf_counter()
    engine, *_ = zero.initialize(model=model, config=config)
    torch.distributed.barrier()
    if rank == 0:
        found.put((copying, time.perf_counter() - begin, sum(parameter.numel() for parameter in engine.parameters())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("params", 300_000_000), ("ranks", 2), ("stage", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="that is trained in")
    parser.add_argument("--given", choices=("bfloat16", "float32"), default="float32", help="of the model before")
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        found = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(run, (options, port, found), nprocs=options.ranks)
        rounds.append(found.get())
    copying, starting = (statistics.median(one[at] for one in rounds) for at in (0, 1))
    model = f"{rounds[0][2]:,} parameters in {options.given}, trained in {options.dtype}"
    print(f"torch {torch.__version__}, {model}, stage {options.stage}, {options.ranks} ranks")
    print(f"initialize {starting:.2f} s, one copy {copying:.2f} s, so {starting / copying:.2f} times as long; in rounds: "
          f"{', '.join(f'{two / one:.2f}' for one, two, _ in rounds)}")  # fmt: skip


if __name__ == "__main__":
    main()
