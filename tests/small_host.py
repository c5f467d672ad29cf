"""A GPT of 300 M parameters from construction to export on a host with less memory than its states take.

    python -m tests.small_host RANK WORLD PORT FOLDER [HOMES]       # one rank; prints what it measured as JSON
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import zero
from tests import inside

WIDTH, LAYERS, WORDS, TOKENS = 1024, 23, 8192, 16
BUCKET_BYTES = 4 * 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 16, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.other_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = LAYERS, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


class Peak(threading.Thread):
    """The most memory of this process that is no file's, every few milliseconds; of what all ranks share its part."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(daemon=True)
        self.world = world
        self.bytes = self.shared = 0
        self.start()

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.005)

    def look(self) -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own, shared = (1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        now = own + shared // self.world
        self.bytes, self.shared = max(self.bytes, now), max(self.shared, shared)
        return now


def warm_up(homes: dict[str, str]) -> None:
    """What torch and the libraries keep whatever is trained is no part of a plan."""
    model = GPT(layers=1, words=64).bfloat16()
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=3, gathered_bytes=0, homes=homes)
    model(torch.zeros(1, TOKENS + 1, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.close()


def main(rank: int, world: int, port: int, folder: str, homes: str = "disk") -> None:
    torch.set_num_threads(1)
    if world > 1:
        store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=120))
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with torch.device("meta"):
        model = GPT().bfloat16()
    kinds = ("masters", "moments", "gradients", *(["weights"] if homes == "disk for all" else []))
    places = dict.fromkeys(kinds, "cpu" if homes == "cpu" else f"disk:{folder}")
    warm_up(places)
    peak = Peak(world)
    before, began = peak.look(), time.perf_counter()
    optimizer = zero.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        stage=3,
        bucket_bytes=BUCKET_BYTES,
        gathered_bytes=0,
        homes=places,
        timeout_s=600.0,
    )
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    text = torch.randint(WORDS, (1, TOKENS + 1))
    losses, times = [], {"shard": time.perf_counter() - began}
    for step in range(2):
        began = time.perf_counter()
        loss = model(text)
        loss.backward()
        times[f"backward {step}"], began = time.perf_counter() - began, time.perf_counter()
        optimizer.step()
        times[f"step {step}"] = time.perf_counter() - began
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    trained, began = peak.bytes - before, time.perf_counter()
    zero.save(f"{folder}/saved", optimizer)
    times["save"], began = time.perf_counter() - began, time.perf_counter()
    zero.load(f"{folder}/saved", optimizer)
    times["load"], began = time.perf_counter() - began, time.perf_counter()
    if rank == 0:
        zero.export(f"{folder}/saved", f"{folder}/model.safetensors")
    times["export"] = time.perf_counter() - began
    layout, moments = inside.layout(optimizer), inside.moments_of(optimizer)
    budget = inside.planned(optimizer, rank, moments, 1, world, shards_weights=True, on_host=True, one_host=True)
    told = {
        "rank": rank, "losses": losses, "before": before, "peak": peak.bytes - before, "trained": trained,
        "shared": peak.shared, "plan": budget.peak + budget.host.weights, "times": times,
        "disk": sum(inside.planned_of_disks(layout, rank, moments).values()) + budget.disk.weights,
        "numel": sum(spec.numel for spec in layout.params),
    }  # fmt: skip
    print(json.dumps(told), flush=True)
    optimizer.group.all_gather_bytes(b"")
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
