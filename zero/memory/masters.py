"""The shares as the optimizer sees them: one nn.Parameter a piece."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zero.memory.flat import FlatBuffer, Shard, sum_dtype
from zero.plan.layout import FlatLayout, Piece


class Masters:
    """This rank's shares in the dtype of sums, cut into parameters.

    Where the weights have that dtype themselves, a master is a view of them and costs nothing. Otherwise it is
    their exact value, of which the weight is the rounded copy.
    """

    def __init__(self, layout: FlatLayout, rank: int, weights: FlatBuffer, shard: Shard) -> None:
        self.shard = shard
        self._layout = layout
        self._rank = rank
        self._weights = weights
        self.pieces: list[list[tuple[Piece, torch.nn.Parameter]]] = []

    def take(self, bucket: int, source: torch.Tensor) -> None:
        """Makes the master of a bucket from what its weights were before they were cast; `source` is this rank's share."""
        weights = self._weights.share(bucket, self._rank)
        self.shard.shares[bucket] = weights if weights.dtype == sum_dtype(weights.dtype) else self.shard.share(bucket).copy_(source)

    def cut(self) -> None:
        """Makes the parameters, once every bucket has its master."""
        for param in range(len(self._layout.params)):
            pieces = self._layout.pieces(param, self._rank)
            self.pieces.append([(piece, torch.nn.Parameter(self.shard.piece(piece))) for piece in pieces])

    def of(self, param: int) -> Iterator[torch.nn.Parameter]:
        return (master for _, master in self.pieces[param])

    def is_copy(self, bucket: int) -> bool:
        return self._layout.chunks[self._layout.buckets[bucket].chunk].dtype in ("bfloat16", "float16")

    def adopt(self, bucket: int) -> None:
        """Takes over what was changed in the weights: wherever a weight is not its master's rounded value."""
        weights, masters = self._weights.share(bucket, self._rank), self.shard.share(bucket)
        changed = weights != masters.to(weights.dtype)
        masters.copy_(torch.where(changed, weights.to(masters.dtype), masters))

    def publish(self, bucket: int) -> None:
        """Rounds the masters of a bucket into this rank's share of the weights."""
        self._weights.share(bucket, self._rank).copy_(self.shard.share(bucket))
