"""Measures sharding on one accelerator, as one rank: step time beside plain bf16 with fp32 masters, bytes, offload, compile.

    python benchmarks/gpu.py                    on the accelerator of this machine; ACCELERATOR=... for another
    python benchmarks/gpu.py --size 300M --batch 8 --json out.json
    python benchmarks/gpu.py --nine-minutes FILE    all that a borrowed accelerator can tell in that time; see nine_minutes.py
    python benchmarks/gpu.py --table FILE           what it told, as a section of docs/performance.md

A training of a GPT, each way in a process of its own, rounds in turn. *plain* is what one would write: weights in bf16, fp32
masters, fused AdamW on them, clipping. Each of ours is to take at most 3 % more than that. *peak* is what the device held at
most in the timed steps, *states* what it holds between two, beside what the budget of the layout predicts. An offloaded step is
shown beside what its bytes need on the link (pinned copies, measured here) and in host memory. At stage 3 it has its weights
on the host too, and a quarter of them whole on the device. FSDP2 and DeepSpeed train beside it. The compiled way is stage 1
under `zero.compile`, whose peak is to be below that of the same without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nine_minutes
import torch
from gpu_ways import MIB, PEERS, WAYS, training_of
from host_step import bandwidth
from offload_step import LANDING_BYTES, LANDING_CROSSES, STEP_BYTES, STEP_CROSSES, crossing
from peer_models import SIZES, batch

import accelerators
from accelerators import Accelerator


def serve(way: str, options: argparse.Namespace) -> None:
    """Trains in one way, in a process of its own, and prints what was measured as JSON."""
    device = accelerators.current()
    before = device.memory().allocated or 0
    training = training_of(way, options)
    rows = [batch(options, 0, number).to(device.device()) for number in range(4)]
    for number in range(options.warm_up):
        training.step(rows[number % 4])
    device.synchronize()
    device.reset_peak_memory()
    seconds, losses = [], []
    for number in range(options.steps):
        begin = time.perf_counter()
        losses.append(training.step(rows[number % 4]))
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    memory = device.memory()
    found = {
        "seconds": statistics.median(seconds),
        "peak": (memory.peak or 0) - before,
        "states": (memory.allocated or 0) - before,
        "predicted": training.predicted,
        "num_params": training.num_params,
        "loss": losses[-1].item(),
    }
    print(json.dumps(found), flush=True)


def run(way: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measures a way once, in a process of its own; None if it does not run on this machine."""
    names = ("size", "length", "batch", "steps", "warm_up", "bucket")
    given = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    command = [sys.executable, __file__, "--serve", way, *given]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    if answer.returncode:
        print(f"Cannot time {way}: its process ended with {answer.returncode}. See what it said above.", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def report(device: Accelerator, found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    if not found:
        return
    num_params = next(iter(found.values()))[0]["num_params"]
    print(f"torch {torch.__version__}, {device.name}, {num_params / 1e6:.1f} M parameters, {options.batch} x {options.length} "
          f"tokens, {options.rounds} rounds of {options.steps} steps")  # fmt: skip
    print(f"{'':20}{'step ms':>10}{'to plain':>10}{'peak MiB':>10}{'states':>10}{'predicted':>10}{'loss':>9}")
    for way, runs in found.items():
        base = found.get("plain fp32" if "fp32" in way else "plain", [])
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs, base, strict=True)) if base else None
        first, step = runs[0], statistics.median(each["seconds"] for each in runs)
        predicted = f"{first['predicted']['states'] / MIB:10.0f}" if first["predicted"] else f"{'':10}"
        shown = f"{ratio:10.3f}" if ratio is not None else f"{'':10}"
        print(f"{way:20}{step * 1e3:10.2f}{shown}{first['peak'] / MIB:10.0f}{first['states'] / MIB:10.0f}{predicted}"
              f"{first['loss']:9.4f}")  # fmt: skip
    if "stage 2 offloaded" in found:
        down, up = crossing(device, 2**28)
        memory = bandwidth()
        link = num_params * (LANDING_CROSSES / down + STEP_CROSSES / 2 / down + STEP_CROSSES / 2 / up)
        host = num_params * (LANDING_BYTES + STEP_BYTES) / memory
        print(f"offloaded: the link needs at least {link * 1e3:.1f} ms ({down / 1e9:.1f} GB/s down, {up / 1e9:.1f} up), host "
              f"memory {host * 1e3:.1f} ms ({memory / 1e9:.1f} GB/s), of which what backward hides is not lost")  # fmt: skip
    losses = {way: runs[0]["loss"] for way, runs in found.items()}
    apart = max(losses.values()) - min(losses.values())
    print(f"last losses are at most {apart:.4f} apart")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="300M")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=0, metavar="BYTES")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--nine-minutes", metavar="FILE", help="append answers to this file, a line of JSON each")
    parser.add_argument("--table", metavar="FILE", help="make a Markdown section of the answers in this file")
    parser.add_argument("--sizes", nargs="+", default=["80M", "1B"], choices=SIZES, help="models of the nine minutes")
    parser.add_argument("--deepspeed", metavar="FOLDER", help="a folder of unpacked packages, for the nine minutes")
    parser.add_argument("--parts", nargs="+", help="of the nine minutes; default: all")
    parser.add_argument("--limit", nargs="+", default=[], metavar="PART=SECONDS", help="other limits of parts")
    parser.add_argument("--copied-mib", type=int, default=256, help="of the copies that time the link")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = "gpt"
    if options.serve:
        serve(options.serve, options)
        return 0
    if options.nine_minutes or options.table:
        return nine_minutes.main(options)
    device = accelerators.current()
    if device.device().type == "cpu":
        print(
            "Cannot train on an accelerator: the accelerator here is the host. Run it on a machine with "
            "another, or see python -m accelerators for why none was chosen; benchmarks/peers.py is for the host.",
            file=sys.stderr,
        )
        return 1
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    failed = set[str]()
    for _ in range(options.rounds):
        for way in options.ways:
            answer = None if way in failed else run(way, options)
            if answer is None:
                failed.add(way)
            else:
                print(f"{way}: {answer['seconds'] * 1e3:.2f} ms", file=sys.stderr, flush=True)
                found[way].append(answer)
    found = {way: runs for way, runs in found.items() if way not in failed}
    report(device, found, options)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    return int(any(way not in PEERS for way in failed))


if __name__ == "__main__":
    sys.exit(main())
