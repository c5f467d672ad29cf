"""One AdamW step on the host: from the summed bf16 gradients of a window to new bf16 weights.

    python benchmarks/host_step.py                          the paths of this project, and what memory allows
    python benchmarks/host_step.py --deepspeed PYTHON       beside DeepSpeed's CPUAdam, in an environment that has it

Every path does the same work for the same elements: gradients are widened to fp32 and scaled, clipped, AdamW steps on fp32
masters and moments, and the weights are rounded to bf16. Rounds go over all paths in turn, so that a busy moment of the
machine meets all of them; shown are the fastest and the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

SCALE, CLIP = 2.0**-4, 0.5
# The bytes of an element that cross memory: the gradient is read in bf16, and in the step masters and two moments are read and
# written, and the weights are written. A gradient that is kept in fp32 in between is written once and read once more.
LEAST_BYTES = 2 + 3 * 8 + 2
KEPT_BYTES = LEAST_BYTES + 8


def shapes(num_params: int) -> list[tuple[int, ...]]:
    """A transformer of about so many parameters: wide matrices, and vectors between them."""
    width, layer = 512, [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,), (512,), (512,)]
    numel = sum(torch.Size(shape).numel() for shape in layer)
    layers, rest = divmod(num_params, numel)
    return [(max(1, rest // width), width), *(shape for _ in range(layers) for shape in layer)]


def ours(kernels: str, num_params: int) -> Iterator[Callable[[], None]]:
    """The landing of the gradients, and then the step, as a training on this machine runs them."""
    import zero
    from zero.sharding.step import update
    from zero.sharding.update import StepDecision
    from zero.window.records import Phase

    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes(num_params))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", clip=1e9, kernels=kernels)
    for param in model:  # one ordinary window, so that everything is there
        param.sum().backward()
    optimizer.step()
    sharding, used = optimizer.sharding, optimizer.sharding.window.used
    reducer, numels = sharding.window.reducer, [bucket.span.numel for bucket in sharding.layout_ref.layout.buckets]
    sharding.window.grad_ops.shard.clear()
    buffers = [reducer.staging.borrow(numel, torch.bfloat16).normal_() for numel in numels]
    for buffer in buffers:
        reducer.staging.give_back(buffer)
    sharding.window.scaling.loss_scale = 1.0 / SCALE

    def land() -> None:
        sharding.window.grad_ops.shard.clear()
        for index, numel in enumerate(numels):
            reducer.inflight.send(index, reducer.staging.borrow(numel, torch.bfloat16))  # with what was sent before
        reducer.inflight.retire(keep=True)

    @torch.no_grad()
    def step() -> None:
        optimizer.sharding.window.phase = Phase.SETTLED
        update(optimizer.sharding, used, StepDecision(True, 1.0, CLIP))  # an update alone, so that the sums stay

    yield land
    yield step


def deepspeeds(num_params: int) -> Iterator[Callable[[], None]]:
    """Yields DeepSpeed's landing and step: its CPUAdam, whole tensor by whole tensor."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = torch.randn(num_params).bfloat16()
    master, arrived = torch.nn.Parameter(weights.float()), torch.randn(num_params).bfloat16()
    master.grad = torch.zeros_like(master)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-4, adamw_mode=True)

    def land() -> None:
        master.grad.copy_(arrived)

    @torch.no_grad()
    def step() -> None:
        master.grad.mul_(SCALE * CLIP)
        optimizer.step()
        weights.copy_(master)

    yield land
    yield step


def bandwidth() -> float:
    """Bytes a second that two reads and a write come to here."""
    one, two, out = (torch.ones(2**25) for _ in range(3))
    return max(3 * out.nbytes / seconds(lambda: torch.add(one, two, out=out)) for _ in range(7))


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def serve(name: str, num_params: int, threads: int) -> None:
    """Runs, in a process of its own, two rounds for every line on stdin: one to wake up, and one that is timed."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    land, step = deepspeeds(num_params) if name == "deepspeed" else ours(name, num_params)
    land(), step()
    print("ready", flush=True)
    for _ in sys.stdin:
        land(), step()
        print(seconds(land), seconds(step), flush=True)


class Contestant:
    def __init__(self, name: str, python: str, options: argparse.Namespace) -> None:
        self.name = name
        self.rounds: list[tuple[float, float]] = []
        command = [python, __file__, "--serve", name, "--params", str(options.params), "--threads", str(options.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        while (line := self._line()).strip() != "ready":
            print(line, end="", file=sys.stderr)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} was asked to step, but its process ended. Its own words are above.")
        return line

    def run(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        landing, step = map(float, self._line().split())
        self.rounds.append((landing, step))

    def end(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--params", type=int, default=30_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.params, options.threads)
        return
    torch.set_num_threads(options.threads)
    contestants = [Contestant(name, sys.executable, options) for name in ("torch", "fused", "compiled")]
    contestants += [Contestant("deepspeed", options.deepspeed, options)] if options.deepspeed else []
    speeds = []
    for _ in range(options.rounds):
        speeds.append(bandwidth())
        for contestant in contestants:
            contestant.run()
    for contestant in contestants:
        contestant.end()
    report(contestants, max(speeds), options)


def report(contestants: list[Contestant], speed: float, options: argparse.Namespace) -> None:
    print(f"torch {torch.__version__}, {options.params:,} parameters, {options.threads} threads, {options.rounds} rounds, "
          f"memory {speed / 1e9:.1f} GB/s")  # fmt: skip
    print(f"{'':12}{'landing':>18}{'step':>18}{'together':>18}{'of bandwidth':>14}   ms, fastest and median")
    found = {}
    for contestant in contestants:
        landing, step = zip(*contestant.rounds, strict=True)
        whole = [sum(one) for one in contestant.rounds]
        found[contestant.name] = statistics.median(whole)
        cells = (f"{min(times) * 1e3:9.1f}{statistics.median(times) * 1e3:9.1f}" for times in (landing, step, whole))
        share = KEPT_BYTES * options.params / speed / found[contestant.name]
        print(f"{contestant.name:12}{''.join(cells)}{share:13.0%}")
    for bytes_each, words in ((KEPT_BYTES, "with the gradient kept in fp32"), (LEAST_BYTES, "and without")):
        print(f"{'memory':12}{bytes_each * options.params / speed * 1e3:54.1f}   at {bytes_each} bytes a parameter, {words}")
    if "deepspeed" in found:
        print(", ".join(f"{name} {found['deepspeed'] / found[name]:.2f}" for name in found), "times as fast as DeepSpeed's")


if __name__ == "__main__":
    main()
