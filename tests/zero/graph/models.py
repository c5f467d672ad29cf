"""Models that compile to graphs of every kind, and their training, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero import shard

WIDTH, VOCABULARY, LENGTH = 8, 11, 5
STEPS = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.wide(x)


class Gpt(nn.Module):
    """With the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens((x.abs() * 10).long().clamp(max=VOCABULARY - 1)[:, :LENGTH]) + self.places))


class Broken(nn.Module):
    """Two breaks, and between them a graph that needs a backward and has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = torch.tanh(x) * 2
        torch._dynamo.graph_break()
        return self.last(x)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block()]), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Skipped(nn.Module):
    """A loop that breaks: the compiler leaves the frame to the interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if x.sum().item() > 1e6:
                break
        return x


MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp, "gpt": Gpt, "broken": Broken, "frozen": Frozen, "checkpointed": Checkpointed, "batches": Mlp,
    "skipped": Skipped,
}  # fmt: skip


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name]()


def batch(name: str, rank: int, step: int) -> torch.Tensor:
    rows = 2 + step % 3 if name == "batches" else 3
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


Compile = Callable[[nn.Module], Any]


def compiled(backend: str, **options: Any) -> Compile:
    return lambda model: zero.compile(model, backend, **options)


def train(
    name: str, compile_it: Compile | None, rank: int = 0, *, steps: int = STEPS, micro_steps: int = 1, group: Any = None,
    watch: Callable[[float], None] = lambda loss: None, **options: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The weights after so many steps; every loss is shown to `watch`."""
    model = build(name)
    optimizer = shard(model, adamw(model), group=group, bucket_bytes=256, clip=0.5, **options)
    if compile_it is not None:
        compile_it(model)
    for step in range(steps):
        for micro_step in range(micro_steps):
            x = batch(name, rank, step * micro_steps + micro_step).to(next(model.parameters()).dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            watch(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.close()
    torch.compiler.reset()
    return weights


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an eps that hides rounding: the gradient of a bias of keys is nothing else."""
    return torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2, eps=1e-2)
