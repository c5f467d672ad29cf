"""A small GPT over bytes."""

from __future__ import annotations

import math
import os

import torch
from torch import nn
from torch.nn import functional

from zero.checkpoint.export import read_export

from .options import heads_of

VOCABULARY = 256


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        added: torch.Tensor = self.drop(self.wide(self.after(x)))
        return x + added


class Gpt(nn.Module):
    """A GPT over bytes. Called with samples, it returns their mean loss."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._begin)
        for name, param in self.blocks.named_parameters():  # the deeper the model is, the less each layer adds
            if name.endswith(("out.weight", "wide.2.weight")):
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Gpt:
        """The model whose weights `python -m zero export` wrote, ready to generate; its sizes are those of the weights."""
        weights = read_export(path)
        context, width = weights["places.weight"].shape
        layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        model = Gpt(layers, width, heads_of(width), context)
        model.load_state_dict(weights)
        return model.eval()

    @staticmethod
    def _begin(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def logits(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(text) + self.places.weight[: text.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return scores

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        scores = self.logits(samples[:, :-1])
        return functional.cross_entropy(scores.float().flatten(0, 1), samples[:, 1:].flatten())


@torch.no_grad()
def write(model: nn.Module, begin: bytes, num_bytes: int, seed: int = 0, temperature: float = 0.8) -> str:
    """Returns the text that the model generates after `begin`, until its scores are no numbers, as after a loss that is NaN."""
    assert isinstance(model, Gpt)
    device = next(model.parameters()).device
    generator, text = torch.Generator().manual_seed(seed), list(begin)
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_bytes):
            seen = torch.tensor([text[-model.context :]], device=device)
            scores = model.logits(seen)[0, -1].float().cpu() / temperature
            if not scores.isfinite().all():
                break
            text.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    finally:
        model.train(was_training)
    return bytes(text).decode("utf-8", errors="replace")
