"""The models and the data of `peers.py`, the same for all systems; each model returns its loss."""

from __future__ import annotations

import argparse

import torch
from torch import nn

VOCABULARY = 4096
# The width, layers, heads and vocabulary of a GPT of about this number of parameters. "tiny" has 293 tensors of a few elements
# each, and "tiny-8" a third of its blocks.
SIZES = {
    "tiny": (16, 24, 2, 64), "tiny-8": (16, 8, 2, 64), "2M": (128, 5, 4, VOCABULARY),
    "10M": (320, 6, 5, VOCABULARY), "29M": (512, 8, 8, VOCABULARY),
    "80M": (512, 24, 8, VOCABULARY), "110M": (896, 11, 14, VOCABULARY), "300M": (1280, 15, 20, VOCABULARY),
    "1B": (2048, 20, 16, VOCABULARY),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.after(x))


class Gpt(nn.Module):
    """Reads a row of tokens and predicts each from those before it."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x, y = rows[:, :-1], rows[:, 1:]
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), y.flatten())


class Small(nn.Module):
    """A model of many parameters with few elements each, so that the cost of each parameter shows."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(count))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.float().mean() / VOCABULARY
        return torch.stack([row.float().sum() for row in self.rows]).square().mean() * scale


class Huge(nn.Module):
    """A model that is nearly all one matrix."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, 512)
        self.huge = nn.Linear(512, max(1, (numel - 512 * VOCABULARY) // 512), bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.huge(self.first(rows)).float().square().mean()


def build(options: argparse.Namespace) -> nn.Module:
    """The model in fp32, with the same weights in every process."""
    torch.manual_seed(0)
    if options.model == "small":
        return Small(options.count, options.numel)
    if options.model == "huge":
        return Huge(options.count * options.numel)
    return Gpt(*SIZES[options.size], options.length)


def batch(options: argparse.Namespace, rank: int, number: int) -> torch.Tensor:
    """The `number`-th micro-batch of a rank; a few that come again and again, so that the loss falls."""
    generator = torch.Generator().manual_seed(1000 * rank + number % 4)
    vocabulary = SIZES[options.size][-1] if options.model == "gpt" else VOCABULARY
    return torch.randint(vocabulary, (options.batch, options.length + 1), generator=generator)
