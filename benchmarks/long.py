"""Peak memory and time of a step on one long sequence, of a small model of the Llama kind on two CPU ranks, by its length.

    python benchmarks/long.py --lengths 4096 16384

Ways, each in processes of its own: `plain`, torch alone, which has the whole sequence on a rank; `fsdp2`, with recomputation,
which has too; `parts`, `zero.ulysses` over two ranks with recomputation at stage 3; `chunks`, which computes the loss and MLPs
by chunks of tokens beside. Peaks are resident bytes above those after a short step (allocated ones on a device), of the rank
with the highest one. The slope is bytes a token, between the two longest sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import accelerators
import zero

WAYS = ("plain", "fsdp2", "parts", "chunks")
VOCABULARY, WIDTH, LAYERS, HEADS, GROUPED = 8192, 128, 2, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, GROUPED * size, bias=False) for _ in range(2))
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = (each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        z: torch.Tensor = self.mlp(self.after(x))
        return x + z


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
        x = self.norm(x)
        if chunk:
            return zero.linear_cross_entropy(x, self.head.weight, targets, tokens=chunk)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


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
    step = _trainer(way, model, mesh, options)
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    step({"input_ids": tokens[:, :512], "labels": tokens[:, :512]})  # what is made once is there then
    before = accelerator.memory()
    accelerator.reset_peak_memory()
    begun = time.perf_counter()
    loss = step({"input_ids": tokens, "labels": tokens})
    took = time.perf_counter() - begun
    peak = accelerator.memory().peak
    used = before.allocated
    if dist.is_initialized():
        dist.all_reduce(loss, op=dist.ReduceOp.SUM if way in ("parts", "chunks") else dist.ReduceOp.AVG)
    print(json.dumps({"rank": rank, "peak": (peak or 0) - (used or 0), "seconds": took, "loss": float(loss)}), flush=True)


def _trainer(way: str, model: Model, mesh: Any, options: argparse.Namespace) -> Any:
    """Returns a function that takes a step with a batch, and returns this rank's share of the loss."""
    chunk = options.chunk if way == "chunks" else 0
    if way in ("parts", "chunks"):
        zero.ulysses(mesh, model)
        for block in model.blocks if chunk else ():
            zero.in_chunks(block.mlp, chunk)
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
        total = batch["labels"][:, 1:].numel()  # of one sequence, which a rank has a part or all of
        loss = model(part["input_ids"], part["shift_labels"], chunk) / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(way: str, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the highest peak and longest time of the ranks, and the loss."""
    world = 1 if way == "plain" else 2
    environment = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port),
                   "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world)}  # fmt: skip
    command = [sys.executable, __file__, "--serve", way, "--lengths", str(length), "--chunk", str(options.chunk)]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                              text=True) for rank in range(world)]  # fmt: skip
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]
    options.port += 1
    return {"peak": max(each["peak"] for each in found), "seconds": max(each["seconds"] for each in found),
            "loss": found[0]["loss"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--port", type=int, default=29571)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.lengths[0], options)
        return
    for way in options.ways:
        found = {length: measure(way, length, options) for length in options.lengths}
        cells = [f"{length:>6} {each['peak'] / 2**20:7.0f} MiB {each['seconds']:6.1f} s" for length, each in found.items()]
        slope = ""
        if len(found) > 1:
            first, last = sorted(found)[-2:]
            slope = f"{(found[last]['peak'] - found[first]['peak']) / (last - first):8.0f} bytes a token"
        print(f"{way:8} {'   '.join(cells)} {slope}   loss {found[max(found)]['loss']:.5f}", flush=True)


if __name__ == "__main__":
    main()
