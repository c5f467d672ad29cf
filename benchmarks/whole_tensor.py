"""A step of Muon, with AdamW for the embedding, on two ranks: who orthogonalises which matrix, and how long all of it takes.

    python benchmarks/whole_tensor.py                          ours, beside one rank that does everything in plain PyTorch
    python benchmarks/whole_tensor.py --deepspeed PYTHON       and beside DeepSpeed's Muon, in an environment that has it

The model is the matrices of a GPT-2 and its embedding, 110 million parameters unless told otherwise. Every rank has one thread.
A step is from gradients that were sent backward on all ranks to new weights on all of them, and in DeepSpeed the backward too,
as its stage 2 may orthogonalise in it; ours is shown both ways, and with kernels="fused". Many processors compute in bf16 far
slower than in fp32, so Newton-Schulz runs in fp32 for all of them here, and in bf16, as torch's Muon has it, with --bf16.
Shown are the fastest rounds: seconds of the clock, and of the processor on the busiest rank.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

NAMES = {"plain": 1, "ours": 2, "fused": 2, "deepspeed": 2}  # the number of ranks of each way
COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}


class Matrices(nn.Module):
    """The matrices of several layers of one width; their loss is the sum of their squares."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        self.embed = nn.Parameter(torch.randn(32 * 1024, width) / 100)
        self.blocks = nn.ParameterList(nn.Parameter(torch.randn(shape) / 100) for _ in range(layers) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([param.square().sum() for param in self.parameters()]).sum()


def in_fp32(grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Runs Newton-Schulz as torch's Muon has it, in the dtype of the gradient."""
    a, b, c = coefficients
    wide = grad.T if grad.size(0) > grad.size(1) else grad
    x = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


Round = Callable[[], tuple[float, float, float]]


def both(backward: Callable[[], Any], step: Callable[[], Any], meet: Callable[[], Any]) -> Round:
    """Seconds of a backward, of the step after it, and of the processor in both."""

    def one() -> tuple[float, float, float]:
        meet()
        begin, busy = time.perf_counter(), time.process_time()
        backward()
        between = time.perf_counter()
        meet()
        after = time.perf_counter()
        step()
        end = time.perf_counter()
        return between - begin, end - after, time.process_time() - busy

    return one


def optimizers(model: Matrices) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(list(model.blocks), lr=RATES["muon_lr"], weight_decay=0.0)
    return [muon, torch.optim.AdamW([model.embed], lr=RATES["adam_lr"], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)]


def plain(model: Matrices, stage: int) -> Round:
    made = optimizers(model)

    def step() -> None:
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()

    return both(lambda: model().backward(), step, lambda: None)


def ours(model: Matrices, stage: int, kernels: str = "torch") -> Round:
    import zero

    optimizer = zero.shard(model, optimizers(model), stage=stage, kernels=kernels)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return both(lambda: model().backward(), step, lambda: optimizer.any_rank(False))


def fused(model: Matrices, stage: int) -> Round:
    return ours(model, stage, "fused")


def deepspeed(model: Matrices, stage: int) -> Round:
    import deepspeed as peer
    import torch.distributed as dist

    settings = {**RATES, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "standard"}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Muon", "params": settings}, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}  # fmt: skip
    engine, *_ = peer.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return both(lambda: engine.backward(engine()), engine.step, dist.barrier)


def serve(options: argparse.Namespace) -> None:
    """Runs rounds as one rank: one to wake up, and those that are timed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not options.bf16:
        _compute_in_fp32(options.serve)
    make = {"plain": plain, "ours": ours, "fused": fused, "deepspeed": deepspeed}[options.serve]
    run = make(Matrices(options.layers, options.width), options.stage)
    for number in range(1 + options.rounds):
        print("round", number, *run(), flush=True)


def _compute_in_fp32(name: str) -> None:
    if name == "deepspeed":
        from deepspeed.runtime.zero.muon import original_muon

        original_muon.ns_compute_dtype = lambda *_: torch.float32
        return
    import torch.optim._muon as torchs

    torchs._zeropower_via_newtonschulz = in_fp32
    if name == "fused":
        import zero.optim.muon

        zero.optim.muon.ROUNDED_TO = torch.float32


def rounds_of(name: str, options: argparse.Namespace) -> Iterator[tuple[float, float, float]]:
    """Yields the seconds that each round took the slowest rank."""
    world = NAMES[name]
    python = options.deepspeed if name == "deepspeed" else sys.executable
    more = ["--bf16"] if options.bf16 else []
    command = [python, __file__, "--serve", name, *more]
    for option in ("layers", "width", "rounds", "stage"):
        command += [f"--{option}", str(getattr(options, option))]
    ranks = []
    for rank in range(world):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": options.port + list(NAMES).index(name), "ACCELERATOR": "cpu",
                  "DS_ACCELERATOR": "cpu"}  # fmt: skip
        environment = {**os.environ, **{key: str(value) for key, value in {**own, **shared}.items()}}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    told = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{name} was asked to step, but a rank ended. Its own words are above.")
    lines = [[line.split() for line in each.splitlines() if line.startswith("round")][1:] for each in told]
    for each in zip(*lines, strict=True):
        backward, step, busy = (max(float(line[at]) for line in each) for at in (2, 3, 4))
        yield backward, step, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="some of these alone; the first is one")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="Newton-Schulz in bf16")
    parser.add_argument("--port", type=int, default=29650)
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    numel = sum(param.numel() for param in Matrices(options.layers, options.width).parameters())
    print(f"{numel:,} parameters, stage {options.stage}, one thread a rank")
    print(f"{'':10}  ranks  backward      step      both  of plain  processor")
    first = None
    for name in NAMES:
        if name not in options.only or (name == "deepspeed" and not options.deepspeed):
            continue
        found = list(rounds_of(name, options))
        backward, step, busy = (min(each[at] for each in found) for at in range(3))
        first = first or backward + step
        print(f"{name:10}  {NAMES[name]:5}  {backward:7.2f}s  {step:7.2f}s  {backward + step:7.2f}s  "
              f"{(backward + step) / first:8.2f}  {busy:8.2f}s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
