"""Times the host's part of a step, in milliseconds: a GPT of 293 tiny tensors in 49 buckets, with next to nothing to compute.

    python benchmarks/host_time.py                          beside plain PyTorch, DDP and FSDP2
    python benchmarks/host_time.py --deepspeed PYTHON       and DeepSpeed, in an environment that has it (ci/setup --peers)
    python benchmarks/host_time.py --compile                plain PyTorch and stage 3 with compiled blocks, and without
    python benchmarks/host_time.py --compile --size tiny-8 --worlds 2

Shown for each number of ranks is the median over rounds of the median step, by the clock and by the processor of the busiest
rank. Rounds go over all systems in turn, so that what the machine does meanwhile meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from peers import run

BUCKET_BYTES = 4_500  # with this number, the tiny model has 49 of our buckets
ALONE = ("plain", "fsdp2", "ours-2", "fsdp2-3", "ours-3", "ours-3-regions")
COMPILED = " compiled"
TOGETHER = ("ddp", "fsdp2", "ours-2", "fsdp2-3", "ours-3", "ours-3-regions")


def options_of(given: argparse.Namespace, world: int) -> argparse.Namespace:
    """Returns the options for `peers.run`: the tiny model in its buckets."""
    return argparse.Namespace(
        model="gpt", length=8, batch=1, accumulation=1, dtype="bf16", world=world, threads=1, warm_up=10,
        their_bucket=5_000_000, our_bucket=BUCKET_BYTES, **{**vars(given), "compile": False},
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--systems", nargs="+", help="default: all there are")
    parser.add_argument("--size", choices=("tiny", "tiny-8"), default="tiny")
    parser.add_argument("--compile", action="store_true", help="compare compiled blocks with eager ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="timed ones of each round")
    parser.add_argument("--kernels", choices=("torch", "fused", "compiled"), default="fused", help="ours")
    given = parser.parse_args()
    for world in given.worlds:
        options = options_of(given, world)
        theirs = ("deepspeed-2", "deepspeed-3") if given.deepspeed and world > 1 else ()
        in_blocks = (*(name for name in ("plain",) if world == 1), "ours-3")
        both = tuple(f"{name}{how}" for name in in_blocks for how in ("", COMPILED)) if given.compile else ()
        systems = given.systems or both or ((ALONE if world == 1 else TOGETHER) + theirs)
        found = {name: list[float]() for name in systems}
        processor = {name: list[float]() for name in systems}
        for _ in range(given.rounds):
            for name in systems:
                options.compile = name.endswith(COMPILED)
                result = run(name.removesuffix(COMPILED), options)
                found[name].append(result["step"] * 1e3)
                processor[name].append(result["processor"] * 1e3)
        print(f"{world} rank{'s' if world > 1 else ''}, buckets of {BUCKET_BYTES} bytes, kernels={given.kernels}")
        for name, steps in found.items():
            busy = statistics.median(processor[name])
            clock = f"{statistics.median(steps):9.1f} ms   ({min(steps):.1f} to {max(steps):.1f})"
            print(f"{name:16}{clock}   processor {busy:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
