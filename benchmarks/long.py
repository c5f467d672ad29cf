"""Measures peak memory and time of a step on one long sequence, by its length: a small Llama on two CPU ranks.

    python benchmarks/long.py --lengths 4096 16384
    python benchmarks/long.py --deepspeed PYTHON            and DeepSpeed, in an environment that has it (ci/setup --peers)

Ways, each in processes of its own: `plain`, torch alone, which has the whole sequence on a rank; `fsdp2`, with recomputation,
which has too; `deepspeed`, its Ulysses over two ranks with recomputation at stage 3; `tiles`, which computes the loss and MLPs
by its tiles beside; `parts`, `zero.ulysses` with recomputation at stage 3; `chunks`, which computes the loss and MLPs by chunks
of tokens beside. Peaks are resident bytes above those after a short step (allocated ones on a device), of the rank with the
highest one; freed memory goes back to the system at once. The slope is bytes a token, between the two longest sequences, and
beside it is the one that `zero plan --tokens` predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import accelerators

ROOT = Path(__file__).parent.parent
THEIRS = ("deepspeed", "tiles")
OURS = ("parts", "chunks")
WAYS = ("plain", "fsdp2", *THEIRS, *OURS)
CUT = (*THEIRS, *OURS)  # the ways whose ranks have parts of a sequence
VOCABULARY, WIDTH, LAYERS, HEADS, GROUPED = 8192, 128, 2, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, GROUPED * size, bias=False) for _ in range(2))
        self.mlp, self.attention = Mlp(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = (each(y).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.query, self.key, self.value))
        x = x + self.out(self.attention(*heads, 0).flatten(2))
        z: torch.Tensor = self.mlp(self.after(x))
        return x + z


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch_dim: int = 0) -> torch.Tensor:
        """Attends to `[samples, tokens, heads, width]`, as DeepSpeed has them."""
        heads = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Model(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        """Returns the sum of losses."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.loss(self.norm(x), targets, chunk)

    def loss(self, x: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        if chunk:
            import zero

            return zero.linear_cross_entropy(x, self.head.weight, targets, tokens=chunk)
        return F.cross_entropy(self.head(x).flatten(0, -2), targets.flatten(), reduction="sum")


def serve(way: str, length: int, options: argparse.Namespace) -> None:
    """Trains one way on this rank, and prints what it took."""
    rank = int(os.environ["RANK"])
    accelerator = accelerators.current()
    torch.manual_seed(0)
    model = Model(way != "plain").to(accelerator.device())
    mesh: Any = None
    if way != "plain":
        dist.init_process_group(accelerator.communication_backend)
        mesh = init_device_mesh(accelerator.device().type, (2,), mesh_dim_names=("sp",))["sp"]
    step = (with_deepspeed if way in THEIRS else trainer)(way, model, mesh, options)
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    step({"input_ids": tokens[:, :512], "labels": tokens[:, :512]})  # makes what is made only once
    before = accelerator.memory()
    accelerator.reset_peak_memory()
    begun = time.perf_counter()
    loss = step({"input_ids": tokens, "labels": tokens})
    took = time.perf_counter() - begun
    peak = accelerator.memory().peak
    used = before.allocated
    if dist.is_initialized():
        dist.all_reduce(loss, op=dist.ReduceOp.SUM if way in CUT else dist.ReduceOp.AVG)
    print(json.dumps({"rank": rank, "peak": (peak or 0) - (used or 0), "seconds": took, "loss": float(loss)}), flush=True)


Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def trainer(way: str, model: Model, mesh: Any, options: argparse.Namespace) -> Step:
    """Returns a function that takes a step with a batch, and returns this rank's share of the loss."""
    import zero

    chunk = options.chunk if way == "chunks" else 0
    if way in OURS:
        zero.ulysses(mesh, model)
        set_chunks(model, chunk)
        optimizer: Any = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=3, reduce="sum")
    else:
        if way == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer, mesh = torch.optim.AdamW(model.parameters()), None

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        part, _ = zero.sequence_batch(batch, mesh)
        total = batch["labels"][:, 1:].numel()  # the tokens of one sequence, of which a rank has a part or all
        loss = model(part["input_ids"], part["shift_labels"], chunk) / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def set_chunks(model: Model, chunk: int) -> None:
    import zero

    for block in model.blocks if chunk else ():
        for each in (block.norm, block.after, block.mlp):
            zero.in_chunks(each, chunk)


def with_deepspeed(way: str, model: Model, mesh: Any, options: argparse.Namespace) -> Step:
    """Returns a function as `trainer` does. Nothing of this project but the device's memory is read."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
    from deepspeed.sequence.layer import DistributedAttention

    for block in model.blocks:
        block.attention = DistributedAttention(block.attention, mesh.get_group(), scatter_idx=2, gather_idx=1)
    if way == "tiles":
        plain_mlp = Mlp.forward

        def mlp(self: Any, x: torch.Tensor) -> Any:
            weights = [self.gate.weight, self.up.weight, self.down.weight]
            return TiledMLP.apply(plain_mlp, self, x, -(-x.shape[1] // options.chunk), weights)

        Mlp.forward = mlp  # type: ignore[method-assign]

        def loss(x: torch.Tensor, targets: torch.Tensor, chunk: int) -> Any:
            def of_tile(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return Model.loss(model, x, y, 0) * model.factor

            shards = -(-x.shape[1] // options.chunk)
            return TiledFusedLogitsLoss.apply(of_tile, model, x, targets, None, shards, [model.head.weight], "sum")

        model.loss = loss  # type: ignore[method-assign]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9,
              "zero_allow_untested_optimizer": True}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens, size = batch["input_ids"], dist.get_world_size()
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
        part = slice(dist.get_rank() * (length := tokens.shape[1] // size), (dist.get_rank() + 1) * length)
        model.factor = size / (tokens.shape[1] - 1)  # type: ignore[assignment] # gradients are averaged
        loss = engine(tokens[:, part], targets[:, part], 0) * (1 if way == "tiles" else model.factor)
        engine.backward(loss)
        engine.step()
        return loss.detach() / size

    return step


def measure(way: str, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the highest peak and longest time of the ranks, and the loss."""
    world = 1 if way == "plain" else 2
    environment = {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": str(2**18), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    python = options.deepspeed if way in THEIRS else sys.executable
    command = [python, __file__, "--serve", way, "--lengths", str(length), "--chunk", str(options.chunk)]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                              text=True) for rank in range(world)]  # fmt: skip
    said = [process.communicate()[0].splitlines() for process in ranks]
    if not all(lines and lines[-1].startswith("{") for lines in said):  # DeepSpeed's threads may cut a line off
        raise SystemExit(f"Cannot measure {way} at {length} tokens: a rank ended early. Read above what it said.")
    found = [json.loads(lines[-1]) for lines in said]
    return {"peak": max(each["peak"] for each in found), "seconds": max(each["seconds"] for each in found),
            "loss": found[0]["loss"]}  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def planned(way: str, length: int, chunk: int) -> float:
    """Returns the bytes a token of whole sequences that `zero plan --tokens` predicts."""
    from zero.tools.activations import Sequences, activations_of, from_function

    def build(tokens: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, ids = Model(way != "plain"), torch.zeros(1, tokens, dtype=torch.int64)
        used = chunk if way == "chunks" else 0
        set_chunks(model, used)
        return model, lambda model: model(ids, ids, used) / tokens

    size = 2 if way in OURS else 1
    return activations_of(from_function(build), Sequences(length, size)).slope / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.lengths[0], options)
        return
    for way in options.ways or [each for each in WAYS if each not in THEIRS or options.deepspeed]:
        found = {length: measure(way, length, options) for length in options.lengths}
        cells = [f"{length:>6} {each['peak'] / 2**20:7.0f} MiB {each['seconds']:6.1f} s" for length, each in found.items()]
        slope = ""
        if len(found) > 1:
            first, last = sorted(found)[-2:]
            slope = f"{(found[last]['peak'] - found[first]['peak']) / (last - first):8.0f} bytes a token"
            slope += f", planned {planned(way, last, options.chunk):8.0f}" if way not in THEIRS else ""
        print(f"{way:8} {'   '.join(cells)} {slope}   loss {found[max(found)]['loss']:.5f}", flush=True)


if __name__ == "__main__":
    main()
