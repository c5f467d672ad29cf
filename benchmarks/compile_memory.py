"""Measures memory and step time of a compiled GPT: gradients handed over inside the backward, and blocks with absent weights.

    python benchmarks/compile_memory.py
    python benchmarks/compile_memory.py --ways "fsdp2 blocks" "stage 3 blocks"

Ways in processes of their own, rounds in turn. At stage 1, on one rank, `torch.compile`, where all gradients come out at the
end of the backward and ordinary hooks take them, and `zero.compile`, which hands each over where it is made. The plot is what
one backward has made and nobody has taken yet. At stage 3, on two ranks that have the threads together, compiled blocks of
FSDP2, which frees weights after forward, and of `zero.compile`.

Peaks are resident bytes of the largest rank, of memory that ranks share its part (on a device allocated ones), with the mark
reset after the first steps. Times are those of the slowest rank, by the clock and by its processor.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peer_models import Block
from peer_systems import resident
from peers import free_port
from torch import nn

WARM_UP = 3
RANKS = {"ordinary": 1, "handed over": 1, "fsdp2 blocks": 2, "stage 3 blocks": 2}  # the number of ranks of each way
WIDE, HIGH = 72, 10  # the characters of the plot


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        return nn.functional.cross_entropy(self.head(self.norm(self.blocks(hidden))).flatten(0, 1), y.flatten())


def watch(live: list[int]) -> None:
    """Notes, whenever a gradient is taken, the bytes of those that were made and that nobody has taken."""
    from zero.window.window import Window

    made: list[tuple[weakref.ref[Any], int]] = []
    take = Window._take

    def taking(window: Any, index: int, grad: torch.Tensor, lent: bool = False, may_stay: bool = False) -> bool:
        made.append((weakref.ref(grad), grad.nbytes))
        if lent:  # the graph still holds the other gradients of this moment
            live.append(sum(size for ref, size in made if ref() is not None))
        return take(window, index, grad, lent, may_stay)

    Window._take = taking  # type: ignore[method-assign]


def shard_blocks(model: Gpt, device: torch.device) -> None:
    """Compiles the blocks and shards them, as FSDP2 has it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        block.compile(backend="inductor")
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


def serve(way: str, options: argparse.Namespace) -> None:
    """Runs a step for every line on stdin, in a process of its own."""
    import accelerators
    import zero

    torch.manual_seed(0)
    accelerator = accelerators.current()
    model = Gpt(options.vocabulary, options.width, options.layers, options.heads, options.length).to(accelerator.device())
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    run: Any = model
    optimizer: Any
    if way == "fsdp2 blocks":
        shard_blocks(model, accelerator.device())
        optimizer = adamw(model.parameters())
    else:
        stage = 3 if way == "stage 3 blocks" else 1
        optimizer = zero.shard(model, adamw(model.parameters()), stage=stage, kernels="fused")
        run = torch.compile(model) if way == "ordinary" else zero.compile(model, "inductor")
    x = torch.randint(options.vocabulary, (options.batch, options.length + 1), device=accelerator.device())

    def step() -> tuple[float, float]:
        begin = time.perf_counter(), time.process_time()
        run(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.synchronize()
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    for _ in range(WARM_UP):
        step()
    on_host = accelerator.device().type == "cpu"
    Path("/proc/self/clear_refs").write_text("5") if on_host else accelerator.reset_peak_memory()
    print("ready", sum(param.numel() for param in model.parameters()), flush=True)
    for line in sys.stdin:
        if line.strip() == "plot":
            live: list[int] = []
            watch(live)
            step()
            if way == "ordinary":  # all gradients are there when the first one is taken
                sizes = [param.nbytes for param in model.parameters()]
                live = [sum(sizes[number:]) for number in range(len(sizes))]
            print(json.dumps(live), flush=True)
        else:
            seconds = step()
            print(*seconds, resident()[0] if on_host else accelerator.memory().peak, flush=True)


def plot(curves: dict[str, list[int]]) -> None:
    """Draws each curve over the course of a backward, from its first gradient to its last."""
    most = max(max(curve) for curve in curves.values())
    for name, curve in curves.items():
        columns = [curve[number * len(curve) // WIDE] for number in range(WIDE)]
        print(f"\n{name}: at most {max(curve) / 2**20:.0f} MiB")
        for row in range(HIGH, 0, -1):
            print("  |" + "".join("#" if column * HIGH > most * (row - 1) and column else " " for column in columns))
        print("  +" + "-" * WIDE)


class Contestant:
    """The ranks of a way."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        names = ("vocabulary", "width", "layers", "heads", "length", "batch", "threads")
        given = [f"--{name}={getattr(options, name)}" for name in names]
        world = RANKS[way]
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, options.threads // world))}
        if world > 1:
            size, port = str(world), str(free_port())
            environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", way, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**environment, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})},
            )
            for rank in range(world)
        ]  # fmt: skip
        self.num_params = int(self._read()[0].split()[1])
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.peak = 0

    def _read(self) -> list[str]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit("Cannot measure a step: a process of it ended. See its own error above.")
        return lines

    def ask(self, what: str) -> list[str]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(what + "\n")
            rank.stdin.flush()
        return self._read()

    def run(self) -> None:
        seconds, processor, peaks = zip(*(map(float, line.split()) for line in self.ask("step")), strict=True)
        self.seconds.append(max(seconds))
        self.processor_seconds.append(max(processor))
        self.peak = int(max(peaks))

    def end(self) -> None:
        for rank in self._ranks:
            rank.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 32000), ("width", 768), ("layers", 12), ("heads", 12), ("length", 128), ("batch", 1),
                          ("threads", 2), ("rounds", 9)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=RANKS, default=["ordinary", "handed over"])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    contestants = {way: Contestant(way, options) for way in options.ways}
    for _ in range(options.rounds):
        for contestant in contestants.values():
            contestant.run()
    of_one_rank = {way: contestant for way, contestant in contestants.items() if RANKS[way] == 1}
    if of_one_rank:
        plot({way: json.loads(contestant.ask("plot")[0]) for way, contestant in of_one_rank.items()})
    for contestant in contestants.values():
        contestant.end()
    first = contestants[options.ways[0]]
    print(f"\ntorch {torch.__version__}, {first.num_params:,} parameters, {options.batch} x {options.length} tokens, "
          f"{options.threads} threads, {options.rounds} rounds")  # fmt: skip
    for way, contestant in contestants.items():
        times, processor = contestant.seconds, statistics.median(contestant.processor_seconds)
        print(f"{way:14} peak {contestant.peak / 2**20:7.0f} MiB   step {min(times):.3f} fastest, "
              f"{statistics.median(times):.3f} s median, processor {processor:.3f}")  # fmt: skip
    for way, contestant in list(contestants.items())[1:]:
        ratios = (statistics.median(each.seconds) for each in (contestant, first))
        processors = (statistics.median(each.processor_seconds) for each in (contestant, first))
        print(f"{way}: {contestant.peak / first.peak:.3f} of the peak of {options.ways[0]} at {operator.truediv(*ratios):.3f} "
              f"of its step time, {operator.truediv(*processors):.3f} of its processor time")  # fmt: skip


if __name__ == "__main__":
    main()
