"""What handing gradients over inside the compiled backward saves: peak memory and step time of a compiled GPT, stage 1.

    python benchmarks/compile_memory.py

Two ways, each in a process of its own, rounds in turn: `torch.compile`, where all gradients come out at the end of the
backward and ordinary hooks take them, and `zero.compile`, which hands each over where it is made. Peaks are resident bytes
(allocated ones on a device), with the mark reset after the first steps. The plot is what one backward has made and nobody
has taken yet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import weakref
from typing import Any

import torch
from peer_models import Block
from torch import nn

WARM_UP = 3
WIDE, HIGH = 72, 10  # characters of the plot


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

    def taking(window: Any, index: int, grad: torch.Tensor, lent: bool = False) -> None:
        made.append((weakref.ref(grad), grad.nbytes))
        if lent:  # the others of this moment are those that the graph still holds
            live.append(sum(size for ref, size in made if ref() is not None))
        take(window, index, grad, lent)

    Window._take = taking  # type: ignore[method-assign]


def serve(way: str, options: argparse.Namespace) -> None:
    """In a process of its own: a step for every line that comes in."""
    import accelerators
    import zero

    torch.manual_seed(0)
    accelerator = accelerators.current()
    model = Gpt(options.vocabulary, options.width, options.layers, options.heads, options.length).to(accelerator.device())
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), stage=1, kernels="fused")
    run = torch.compile(model) if way == "ordinary" else zero.compile(model, "inductor")
    x = torch.randint(options.vocabulary, (options.batch, options.length + 1), device=accelerator.device())

    def step() -> float:
        begin = time.perf_counter()
        run(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.synchronize()
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        step()
    accelerator.reset_peak_memory()
    print("ready", sum(param.numel() for param in model.parameters()), flush=True)
    for line in sys.stdin:
        if line.strip() == "plot":
            live: list[int] = []
            watch(live)
            step()
            if way == "ordinary":  # all of them are there when the first is taken
                sizes = [param.nbytes for param in model.parameters()]
                live = [sum(sizes[number:]) for number in range(len(sizes))]
            print(json.dumps(live), flush=True)
        else:
            seconds = step()
            print(seconds, accelerator.memory().peak, flush=True)


def plot(curves: dict[str, list[int]]) -> None:
    """Both over the course of a backward, from its first gradient to its last."""
    most = max(max(curve) for curve in curves.values())
    for name, curve in curves.items():
        columns = [curve[number * len(curve) // WIDE] for number in range(WIDE)]
        print(f"\n{name}: at most {max(curve) / 2**20:.0f} MiB")
        for row in range(HIGH, 0, -1):
            print("  |" + "".join("#" if column * HIGH > most * (row - 1) and column else " " for column in columns))
        print("  +" + "-" * WIDE)


class Contestant:
    def __init__(self, way: str, options: argparse.Namespace) -> None:
        given = [f"--{name}={value}" for name, value in vars(options).items() if name != "serve"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", way, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self.num_params = int(self._read().split()[1])
        self.seconds: list[float] = []
        self.peak = 0

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("Cannot measure a step: its process ended. See its own error above.")
        return line

    def ask(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def run(self) -> None:
        seconds, peak = self.ask("step").split()
        self.seconds.append(float(seconds))
        self.peak = int(peak)

    def end(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 32000), ("width", 768), ("layers", 12), ("heads", 12), ("length", 128), ("batch", 1),
                          ("threads", 2), ("rounds", 9)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    contestants = {way: Contestant(way, options) for way in ("ordinary", "handed over")}
    for _ in range(options.rounds):
        for contestant in contestants.values():
            contestant.run()
    plot({way: json.loads(contestant.ask("plot")) for way, contestant in contestants.items()})
    for contestant in contestants.values():
        contestant.end()
    ordinary, handed = contestants.values()
    print(f"\ntorch {torch.__version__}, {ordinary.num_params:,} parameters, {options.batch} x {options.length} tokens, "
          f"{options.threads} threads, {options.rounds} rounds")  # fmt: skip
    for way, contestant in contestants.items():
        times = contestant.seconds
        print(f"{way:12} peak {contestant.peak / 2**20:7.0f} MiB   step {min(times):.3f} fastest, "
              f"{statistics.median(times):.3f} s median")  # fmt: skip
    time_ratio = statistics.median(handed.seconds) / statistics.median(ordinary.seconds)
    print(f"handed over is {handed.peak / ordinary.peak:.3f} of the peak at {time_ratio:.3f} of the step time")


if __name__ == "__main__":
    main()
