"""The shares as the optimizer sees them: one nn.Parameter a piece."""

from __future__ import annotations

import torch

from zero.memory.flat import FlatBuffer, Line, Shard, sum_dtype
from zero.plan.layout import Piece

_BLOCK_NUMEL = 2**16


class Masters:
    """This rank's shares in the dtype of sums, cut into parameters.

    Where the weights have that dtype themselves, a master is a view of them and costs nothing. Otherwise it is
    their exact value, of which the weight is the rounded copy.
    """

    def __init__(self, line: Line, rank: int, weights: FlatBuffer, shard: Shard) -> None:
        self.shard = shard
        self.pieces: dict[int, list[tuple[Piece, torch.nn.Parameter]]] = {}  # by parameter
        self._line = line
        self._rank = rank
        self._weights = weights

    def take(self, bucket: int, source: torch.Tensor) -> None:
        """Makes the master of a bucket from what its weights were before they were cast; `source` is this rank's share."""
        weights = self._weights.share(bucket, self._rank)
        self.shard.shares[bucket] = weights if not self.is_copy(bucket) else self.shard.share(bucket).copy_(source)

    def cut(self) -> None:
        """Makes the parameters of every slot that has none yet, once its buckets have their masters."""
        layout = self._line.layout
        for slot in layout.slots:
            if slot is not None and slot.param not in self.pieces:
                pieces = layout.pieces(slot.param, self._rank)
                self.pieces[slot.param] = [(piece, torch.nn.Parameter(self.shard.piece(piece))) for piece in pieces]

    def of(self, param: int) -> list[tuple[Piece, torch.nn.Parameter]]:
        return self.pieces.get(param, [])

    def is_copy(self, bucket: int) -> bool:
        dtype = self._line.dtype_of(bucket)
        return dtype != sum_dtype(dtype)

    def adopt(self, bucket: int) -> None:
        """Takes over what was changed in the weights: wherever a weight is not its master's rounded value."""
        whole = (self._weights.share(bucket, self._rank), self.shard.share(bucket))
        # block by block, since what a comparison needs beside the two is several times the weights
        for weights, masters in zip(*(torch.split(share, _BLOCK_NUMEL) for share in whole), strict=True):
            changed = weights != masters.to(weights.dtype)
            masters.copy_(torch.where(changed, weights.to(masters.dtype), masters))

    def release(self) -> None:
        """Lets go of everything."""
        self.pieces.clear()
        self.shard.clear()

    def publish(self, bucket: int) -> None:
        """Rounds the masters of a bucket into this rank's share of the weights."""
        self._weights.share(bucket, self._rank).copy_(self.shard.share(bucket))
