"""Times the host's part of a step, in milliseconds: a GPT of 293 tiny tensors in 49 buckets, with next to nothing to compute.

    python benchmarks/host_time.py                          beside plain PyTorch, DDP and FSDP2
    python benchmarks/host_time.py --deepspeed PYTHON       and DeepSpeed, in an environment that has it (ci/setup --peers)
    python benchmarks/host_time.py --compile                plain PyTorch and stage 3 with compiled blocks, and without
    python benchmarks/host_time.py --compile --size tiny-8 --worlds 2

All systems train beside each other, and one of them at a time takes some steps: a machine that is twice as slow a minute later
is so for all. Shown for each number of ranks is the median step, by the clock and by the processor of the busiest rank, and its
ratio to the first system's: the median of the ratios of all turns, with the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peers import Result, run

BUCKET_BYTES = 4_500  # with this number, the tiny model has 49 of our buckets
ALONE = ("plain", "fsdp2", "ours-2", "fsdp2-3", "ours-3", "ours-3-regions")
COMPILED = " compiled"
TOGETHER = ("ddp", "fsdp2", "ours-2", "fsdp2-3", "ours-3", "ours-3-regions")
_OVER = 10**9  # a turn after all others


def in_turn(given: argparse.Namespace, world: int, systems: Sequence[str]) -> list[Result]:
    """Returns what `peers.run` does for each of these systems, which train the tiny model in turn."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(systems)) as threads:
        turn = Path(folder, "turn")
        turn.write_text("0")

        def result(number: int) -> Result:
            turns = {"file": str(turn), "number": number, "of": len(systems), "turns": given.turns}
            options = argparse.Namespace(
                model="gpt", length=8, batch=1, accumulation=1, dtype="bf16", world=world, threads=1, warm_up=10,
                their_bucket=5_000_000, our_bucket=BUCKET_BYTES,
                **{**vars(given), "steps": given.turns * given.steps, "turns": turns, "compile": COMPILED in systems[number]},
            )  # fmt: skip
            try:
                return run(systems[number].removesuffix(COMPILED), options)
            except SystemExit:
                turn.write_text(str(_OVER))  # the others wait for this one no more
                raise

        return list(threads.map(result, range(len(systems))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--systems", nargs="+", help="default: all there are")
    parser.add_argument("--size", choices=("tiny", "tiny-8"), default="tiny")
    parser.add_argument("--compile", action="store_true", help="compare compiled blocks with eager ones")
    parser.add_argument("--turns", type=int, default=30, help="turns of each system")
    parser.add_argument("--steps", type=int, default=8, help="steps of each turn")
    parser.add_argument("--kernels", choices=("torch", "fused", "compiled"), default="fused", help="ours")
    given = parser.parse_args()
    for world in given.worlds:
        theirs = ("deepspeed-2", "deepspeed-3") if given.deepspeed and world > 1 else ()
        in_blocks = (*(name for name in ("plain",) if world == 1), "ours-3")
        both = tuple(f"{name}{how}" for name in in_blocks for how in ("", COMPILED)) if given.compile else ()
        systems = given.systems or both or ((ALONE if world == 1 else TOGETHER) + theirs)
        print(f"{world} rank{'s' if world > 1 else ''}, buckets of {BUCKET_BYTES} bytes, kernels={given.kernels}")
        results = in_turn(given, world, systems)
        of_turns = [[statistics.median(turn) for turn in _cut(each["steps"], given.steps)] for each in results]
        for name, result, medians in zip(systems, results, of_turns, strict=True):
            ratios = [one / other for one, other in zip(medians, of_turns[0], strict=True)]
            first, ratio, third = statistics.quantiles(ratios, n=4)
            step, busy = statistics.median(medians) * 1e3, result["processor"] * 1e3
            print(f"{name:16}{step:9.1f} ms   processor {busy:6.1f}   x {systems[0]} {ratio:.2f} ({first:.2f} to {third:.2f})")
    return 0


def _cut(steps: Sequence[float], length: int) -> list[Sequence[float]]:
    return [steps[begin : begin + length] for begin in range(0, len(steps), length)]


if __name__ == "__main__":
    sys.exit(main())
