"""One rank's shares of the buckets, the layout in force, and how a part refers to the object that it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from zero.memory.formats import DTYPES, sum_dtype
from zero.memory.homes.home import MemoryHome
from zero.memory.homes.registry import Homes
from zero.plan.layout import FlatLayout, Piece

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """Returns the method without a reference to its object: a cycle would be freed by the garbage collector only."""
    ref = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = ref()
        assert bound is not None, "a part outlived the object it belongs to"
        return bound(*args, **kwargs)

    return call


class LayoutRef:
    """Refers to the layout in force, which is replaced as a whole when parameters are added."""

    def __init__(self, layout: FlatLayout) -> None:
        self.replace(layout)

    def replace(self, layout: FlatLayout) -> None:
        self.layout = layout
        dtypes = [DTYPES[layout.chunks[each.chunk].dtype] for each in layout.buckets]
        self._dtypes = dtypes  # by bucket
        # The buckets, as bits, whose parameters are narrower than their sums.
        self.narrow_buckets = sum(1 << bucket for bucket, dtype in enumerate(dtypes) if dtype != sum_dtype(dtype))

    def dtype_of(self, bucket: int) -> torch.dtype:
        return self._dtypes[bucket]


class Shard:
    """The shares of one rank: for each bucket a 1-D tensor in the dtype of sums, in its home, made when it is first needed."""

    def __init__(self, layout_ref: LayoutRef, homes: Homes) -> None:
        self.homes = homes
        self.shares: dict[int, torch.Tensor] = {}
        self.layout_ref = layout_ref

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.homes.device.device

    def home_of(self, bucket: int) -> MemoryHome:
        return self.homes.host if self.layout_ref.layout.buckets[bucket].offloaded else self.homes.device

    def share(self, bucket: int) -> torch.Tensor:
        """Returns the share of a bucket: zeros if nothing was written to it yet."""
        if bucket not in self.shares:
            self.shares[bucket] = self.allocate(bucket).zero_()
        return self.shares[bucket]

    def piece(self, piece: Piece) -> torch.Tensor:
        return self.share(piece.bucket)[piece.in_share.start : piece.in_share.stop]

    def present(self) -> list[torch.Tensor]:
        """Returns the shares that exist, in the order of buckets."""
        return [self.share(bucket) for bucket in sorted(self.shares)]

    @property
    def num_bytes(self) -> int:
        return sum(share.nbytes for share in self.shares.values())

    def allocate(self, bucket: int) -> torch.Tensor:
        """Returns memory for the share of a bucket, with undefined contents."""
        dtype, numel = sum_dtype(self.layout_ref.dtype_of(bucket)), self.layout_ref.layout.buckets[bucket].share_numel
        with torch.inference_mode(False):  # an inference tensor could not be changed later, outside of inference mode
            return self.home_of(bucket).allocate(numel, dtype)

    def release(self) -> None:
        """Frees all shares."""
        self.shares.clear()
