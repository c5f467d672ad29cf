"""The weights: one line of flat memory, and what of it was edited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from accelerators.memory_file import closing, memory_file
from zero.memory.flat import DTYPES, Line, sum_dtype
from zero.memory.pages import Pages, lay_out, num_bytes_of, pages_tell
from zero.plan.layout import Block
from zero.plan.spans import Span


class FlatBuffer:
    """The whole line on one device: a 1-D tensor a chunk."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.chunks: list[torch.Tensor] = []
        self.pages: dict[int, Pages] = {}  # of chunks that lie in a file; see [Note: pages of one's own]

    def reserve(self, chunks: Sequence[int], common: Callable[[int, bool], int | None]) -> None:
        """Memory that tells of edits, for chunks whose masters are copies: in a file that all ranks have open, which `common`
        gives for so many bytes to who wants one, or else in one of this rank's own."""
        layout = self.line.layout
        dtypes = {chunk: DTYPES[layout.chunks[chunk].dtype] for chunk in chunks}
        sizes = {chunk: (layout.chunks[chunk].numel, dtype) for chunk, dtype in dtypes.items() if dtype != sum_dtype(dtype)}
        if not sizes:
            return
        tells, num_bytes = pages_tell(), num_bytes_of(list(sizes.values()))
        descriptor = common(num_bytes, tells) if layout.num_shares > 1 else None
        if tells:
            with closing(memory_file(num_bytes) if descriptor is None else descriptor) as opened:
                self.pages |= zip(sizes, lay_out(opened, list(sizes.values()), descriptor is not None), strict=True)

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, rank: int) -> None:
        """Gives a chunk, the next one, memory with these values; what all ranks see is there when all have done this."""
        layout, pages = self.line.layout, self.pages.get(chunk)
        if pages is None:
            self.chunks.append(source.to(device=device, dtype=DTYPES[layout.chunks[chunk].dtype]))
            return
        spans = [Span(0, source.numel())]
        if pages.common:
            spans = [bucket.share(rank) for bucket in layout.buckets if bucket.chunk == chunk]
        for span in spans:
            pages.written[span.start : span.stop].copy_(source[span.start : span.stop])
        self.chunks.append(pages.seen)

    def forget(self, chunk: int = 0) -> None:
        """From a chunk on."""
        del self.chunks[chunk:]
        self.pages = {index: pages for index, pages in self.pages.items() if index < chunk}

    # what was edited ---------------------------------------------------------------------------------------------

    def tells(self, bucket: int) -> bool:
        """Whether it is known what of a bucket was edited."""
        return self._pages_of(bucket) is not None

    def is_common(self, bucket: int) -> bool:
        """Whether all ranks see what one has written of a bucket."""
        pages = self._pages_of(bucket)
        return pages is not None and pages.common

    def look(self) -> None:
        for pages in self.pages.values():
            pages.look()

    def edited(self, block: Block, rank: int) -> Span | None:
        """The part of a rank's block outside of which nothing was edited before the last look."""
        pages, start = self._pages_of(block.bucket), self.line.layout.buckets[block.bucket].share(rank).start
        if pages is None:
            return Span(0, block.span.numel)
        start += block.span.start
        edited = pages.edited(Span(start, start + block.span.numel))
        return None if edited is None else edited.shifted(-start)

    def drop(self, buckets: Iterable[int]) -> None:
        """Edits of these, which were adopted, are taken back where they are."""
        for chunk in {self.line.layout.buckets[bucket].chunk for bucket in buckets} & self.pages.keys():
            self.pages[chunk].drop()

    def keep(self) -> None:
        """Everything counts as edited, and stays what it is whatever other ranks do."""
        for pages in self.pages.values():
            pages.keep()

    def _pages_of(self, bucket: int) -> Pages | None:
        return self.pages.get(self.line.layout.buckets[bucket].chunk)

    def slot(self, param: int) -> torch.Tensor:
        slot = self.line.layout.slots[param]
        assert slot is not None
        return self.chunks[slot.chunk][slot.span.start : slot.span.stop]

    def bucket(self, index: int) -> torch.Tensor:
        return self._cut(index, self.line.layout.buckets[index].span)

    def share(self, index: int, rank: int) -> torch.Tensor:
        return self._cut(index, self.line.layout.buckets[index].share(rank))

    def _cut(self, index: int, span: Span) -> torch.Tensor:
        return self.chunks[self.line.layout.buckets[index].chunk][span.start : span.stop]

    # new ones, which are written where they are seen or into the pages behind ------------------------------------

    def new_bucket(self, index: int) -> torch.Tensor:
        return self._cut_new(index, self.line.layout.buckets[index].span)

    def new_share(self, index: int, rank: int) -> torch.Tensor:
        return self._cut_new(index, self.line.layout.buckets[index].share(rank))

    def _cut_new(self, index: int, span: Span) -> torch.Tensor:
        pages = self._pages_of(index)
        return self._cut(index, span) if pages is None else pages.written[span.start : span.stop]
