"""The weights: all buckets in flat memory, one tensor a chunk."""

from __future__ import annotations

import torch

from zero.memory.formats import DTYPES
from zero.memory.shard import LayoutRef


class FlatBuffer:
    """The weights of all buckets on one device: a 1-D tensor a chunk."""

    def __init__(self, layout_ref: LayoutRef) -> None:
        self.layout_ref = layout_ref
        self.chunks: list[torch.Tensor] = []

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, given: bool = True) -> bool:
        """Gives a chunk, the next one, memory with these values. Returns whether that is `source` itself, which may be kept if
        it is `given`."""
        dtype = DTYPES[self.layout_ref.layout.chunks[chunk].dtype]
        self.chunks.append(source.to(device=device, dtype=dtype, copy=not given))
        return self.chunks[chunk] is source

    def forget(self, chunk: int = 0) -> None:
        """Drops this chunk and all after it."""
        del self.chunks[chunk:]

    def slot(self, param: int) -> torch.Tensor:
        slot = self.layout_ref.layout.slots[param]
        assert slot is not None
        return self.chunks[slot.chunk][slot.span.start : slot.span.stop]

    def bucket(self, index: int) -> torch.Tensor:
        bucket = self.layout_ref.layout.buckets[index]
        return self.chunks[bucket.chunk][bucket.span.start : bucket.span.stop]

    def share(self, index: int, rank: int) -> torch.Tensor:
        bucket = self.layout_ref.layout.buckets[index]
        span = bucket.share(rank)
        return self.chunks[bucket.chunk][span.start : span.stop]
