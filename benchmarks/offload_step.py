"""One AdamW step whose masters, moments and gradients live on the host, beside plain AdamW on the device.

    python benchmarks/offload_step.py                       on the accelerator of this machine; ACCELERATOR=... for another

The offloaded paths land the summed bf16 gradients of a window on the host, in fp32, and step there: weights come to be compared
with their masters, AdamW steps on fp32, and the new weights go back in bf16. What bounds them is measured in the same rounds:
how fast pinned memory crosses to the device and back, and how fast host memory is. Shown are the fastest and the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from host_step import CLIP, SCALE, bandwidth, seconds, shapes

import accelerators
import zero
from accelerators import Accelerator
from zero.sharding.step import update
from zero.sharding.update import StepDecision
from zero.window.records import Phase

# The bytes of an element that cross the link: its gradient goes down while backward goes on; then its weight goes down and up.
LANDING_CROSSES, STEP_CROSSES = 4, 2 + 2
# And those that host memory sees: the gradient written; then read, with masters and two moments read and written, the weight
# that came written and read, and the one that goes too.
LANDING_BYTES, STEP_BYTES = 4, 4 + 3 * 8 + 4 + 4

Phases = tuple[Callable[[], None], Callable[[], None]]


def plain(device: Accelerator, num_params: int) -> Phases:
    """Returns the phases of torch.optim.AdamW on the device's fp32 weights, fused if it can be; nothing has to land."""
    params = [torch.nn.Parameter(torch.randn(shape, device=device.device())) for shape in shapes(num_params)]
    for param in params:
        param.grad = torch.randn_like(param)
    try:
        optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
        optimizer.step()
    except (RuntimeError, NotImplementedError, ValueError):
        optimizer = torch.optim.AdamW(params, lr=1e-4)
    return (lambda: None), partial(_until_done, device, optimizer.step)


def ours(device: Accelerator, num_params: int, offload: str | None, kernels: str) -> Phases:
    """The landing of the gradients, and then the step, as a training runs them."""
    with device.device():
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes(num_params))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", clip=1e9, kernels=kernels, offload=offload)
    for param in model:  # one ordinary window, so that everything is there
        param.sum().backward()
    optimizer.step()
    sharding, used = optimizer.sharding, optimizer.sharding.window.used
    shard, layout = sharding.window.grad_ops.shard, sharding.layout_ref.layout
    arrived = [torch.randn(bucket.span.numel, device=device.device()).bfloat16() for bucket in layout.buckets]

    def land() -> None:
        shard.clear()
        for index, values in enumerate(arrived):  # the sum of a single rank is its own gradient, in fp32
            shard.add(index, sharding.group.reduce_scatter(values, torch.float32).wait(), SCALE)
        shard.present()  # everything has arrived

    @torch.no_grad()
    def step(_kept_alive: object = optimizer) -> None:
        sharding.window.phase = Phase.SETTLED
        update(sharding, used, StepDecision(True, 1.0, CLIP))

    return partial(_until_done, device, land), partial(_until_done, device, step)


def _until_done(device: Accelerator, call: Callable[[], object]) -> None:
    call()
    device.synchronize()


def crossing(device: Accelerator, num_bytes: int) -> tuple[float, float]:
    """Bytes a second from the device to pinned memory, and back."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device.device())
    here = device.pin(torch.empty(num_bytes, dtype=torch.uint8))
    copies = (partial(here.copy_, there, non_blocking=True), partial(there.copy_, here, non_blocking=True))
    down, up = (num_bytes / min(seconds(partial(_until_done, device, copy)) for _ in range(3)) for copy in copies)
    return down, up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=30_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernels", nargs="*", default=["torch", "fused", "compiled"])
    options = parser.parse_args()
    device = accelerators.current()
    if device.device().type == "cpu":
        print(
            "Cannot compare an offloaded step with one on the device: the accelerator here is the host, where both are one. "
            "Run it on a machine with another, or see python -m accelerators for why none was chosen.",
            file=sys.stderr,
        )
        return 1
    contestants = {"plain torch": plain(device, options.params), "ours, on device": ours(device, options.params, None, "torch")}
    for kernels in options.kernels:
        try:
            contestants[f"offloaded, {kernels}"] = ours(device, options.params, "cpu", kernels)
        except ValueError as error:
            print(f"without {kernels}: {error}")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    speeds = []
    for _ in range(options.rounds):
        speeds.append((*crossing(device, min(2**28, 8 * options.params)), bandwidth()))
        for name, (land, step) in contestants.items():
            land(), step()  # this wakes up the threads
            found[name].append((seconds(land), seconds(step)))
    report(device, found, tuple(map(max, zip(*speeds, strict=True))), options)
    return 0


def report(
    device: Accelerator, found: dict[str, list[tuple[float, float]]], speeds: tuple[float, ...], options: argparse.Namespace
) -> None:
    down, up, memory = speeds
    print(f"torch {torch.__version__}, {device.name}, {options.params:,} parameters, {torch.get_num_threads()} threads, "
          f"{options.rounds} rounds")  # fmt: skip
    print(f"down {down / 1e9:.1f}, up {up / 1e9:.1f}, host memory {memory / 1e9:.1f} GB/s")
    print(f"{'':20}{'landing':>18}{'step':>18}{'together':>18}   ms, fastest and median")
    for name, rounds in found.items():
        phases = (*zip(*rounds, strict=True), [sum(one) for one in rounds])
        print(f"{name:20}{''.join(f'{min(times) * 1e3:9.1f}{statistics.median(times) * 1e3:9.1f}' for times in phases)}")
    weight = STEP_CROSSES / 2
    crossings = (LANDING_CROSSES / down, weight / down + weight / up)
    for what, times in (("crossing takes", crossings), ("memory takes", (LANDING_BYTES / memory, STEP_BYTES / memory))):
        cells = "".join(f"{seconds_each * options.params * 1e3:18.1f}" for seconds_each in (*times, sum(times)))
        print(f"{what:20}{cells}   at least")
    base = statistics.median([sum(one) for one in found["plain torch"]])
    whole = {name: statistics.median([sum(one) for one in rounds]) for name, rounds in found.items()}
    print(", ".join(f"{name} {time_ / base:.1f}" for name, time_ in whole.items()), "times what plain torch takes")


if __name__ == "__main__":
    sys.exit(main())
