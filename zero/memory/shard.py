"""One rank's shares of the buckets, and the layout in force."""

from __future__ import annotations

import torch

from zero.memory.formats import DTYPES, sum_dtype
from zero.memory.homes.home import MemoryHome
from zero.memory.homes.registry import Homes
from zero.plan.layout import FlatLayout, Piece


class LayoutRef:
    """The layout in force. It is replaced when parameters are added to it; nothing else of it ever changes."""

    def __init__(self, layout: FlatLayout) -> None:
        self.replace(layout)

    def replace(self, layout: FlatLayout) -> None:
        self.layout = layout
        self._dtypes: list[torch.dtype] = []  # by bucket, of the buckets at the last call

    def dtype_of(self, bucket: int) -> torch.dtype:
        if bucket >= len(self._dtypes):
            self._dtypes = [DTYPES[self.layout.chunks[each.chunk].dtype] for each in self.layout.buckets]
        return self._dtypes[bucket]

    @property
    def narrow_buckets(self) -> int:
        """Those whose parameters are narrower than their sums, as bits."""
        dtypes = (self.dtype_of(bucket) for bucket in range(len(self.layout.buckets)))
        return sum(1 << bucket for bucket, dtype in enumerate(dtypes) if dtype != sum_dtype(dtype))


class Shard:
    """One rank's shares: for each bucket a 1-D tensor in the dtype of sums, made when it is first needed, each in its home."""

    def __init__(self, layout_ref: LayoutRef, homes: Homes) -> None:
        self.homes = homes
        self.shares: dict[int, torch.Tensor] = {}
        self.layout_ref = layout_ref

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.homes.device.device

    def home_of(self, bucket: int) -> MemoryHome:
        return self.homes.host if self.layout_ref.layout.buckets[bucket].offloaded else self.homes.device

    def share(self, bucket: int) -> torch.Tensor:
        """The share of a bucket; zeros when nothing was written to it yet."""
        if bucket not in self.shares:
            self.shares[bucket] = self.allocate(bucket).zero_()
        return self.shares[bucket]

    def piece(self, piece: Piece) -> torch.Tensor:
        return self.share(piece.bucket)[piece.in_share.start : piece.in_share.stop]

    def present(self) -> list[torch.Tensor]:
        """The shares that there are, in the order of buckets."""
        return [self.share(bucket) for bucket in sorted(self.shares)]

    @property
    def num_bytes(self) -> int:
        return sum(share.nbytes for share in self.shares.values())

    def allocate(self, bucket: int) -> torch.Tensor:
        """Memory for the share of a bucket, with anything in it."""
        dtype, numel = sum_dtype(self.layout_ref.dtype_of(bucket)), self.layout_ref.layout.buckets[bucket].share_numel
        with torch.inference_mode(False):  # what is made in it is changed outside of it later
            return self.home_of(bucket).allocate(numel, dtype)

    def release(self) -> None:
        """Frees all shares."""
        self.shares.clear()
