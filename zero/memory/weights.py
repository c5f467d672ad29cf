"""The weights: one line of flat memory, and what of it was edited."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from accelerators.memory_file import closing, memory_file
from zero.memory.flat import DTYPES, Line, sum_dtype
from zero.memory.pages import Pages, lay_out, num_bytes_of, pages_tell
from zero.plan.layout import Block
from zero.plan.spans import Span

_MOST_FILES = 64  # of a training: each keeps two descriptors open
# What is to be made of the descriptor of a file of so many bytes, by all ranks or none; None for who wants none.
InOneFile = Callable[[int, "Callable[[int], list[Pages]] | None"], "list[Pages] | None"]


class FlatBuffer:
    """The whole line on one device: a 1-D tensor a chunk."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.chunks: list[torch.Tensor] = []
        self.pages: dict[int, Pages] = {}  # of chunks that lie in a file; see [Note: pages of one's own]
        self._num_files = 0

    def reserve(self, chunks: Sequence[int], in_one_file: InOneFile | None) -> None:
        """A file for chunks on the host whose masters are copies: one that all ranks have open, if `in_one_file` finds that
        they can, or else one of this rank's own. Where there is none weights lie in ordinary memory, and all are compared."""
        layout = self.line.layout
        dtypes = {chunk: DTYPES[layout.chunks[chunk].dtype] for chunk in chunks}
        narrow = [chunk for chunk, dtype in dtypes.items() if dtype != sum_dtype(dtype)]
        if not narrow or self._num_files == _MOST_FILES:
            return
        self._num_files += 1
        sizes = [(layout.chunks[chunk].numel, dtypes[chunk]) for chunk in narrow]
        num_bytes, made, tells = num_bytes_of(sizes), None, pages_tell()
        if layout.num_shares > 1 and in_one_file is not None:
            made = in_one_file(num_bytes, (lambda descriptor: lay_out(descriptor, sizes, True)) if tells else None)
        if made is None and tells:
            with contextlib.suppress(OSError), closing(memory_file(num_bytes)) as descriptor:
                made = lay_out(descriptor, sizes, False)
        self.pages |= zip(narrow, made or (), strict=False)

    def place_of(self, chunk: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where values of that dtype may be read to and stay, before the chunk is filled: in a file that is made already."""
        pages = self.pages.get(chunk)
        return pages.written if pages is not None and pages.written.dtype == dtype else None

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, rank: int, given: bool = True) -> bool:
        """Gives a chunk, the next one, memory with these values; what all ranks see is there when all have done this. Whether
        that is `source` itself, which may be had if it is `given`."""
        layout, pages = self.line.layout, self.pages.get(chunk)
        if pages is None:
            self.chunks.append(source.to(device=device, dtype=DTYPES[layout.chunks[chunk].dtype], copy=not given))
            return _lies_at(source, self.chunks[chunk])
        self.chunks.append(pages.seen)
        if _lies_at(source, pages.written):
            return True
        spans = [Span(0, source.numel())]
        if pages.common:
            spans = [bucket.share(rank) for bucket in layout.buckets if bucket.chunk == chunk]
        for span in spans:
            pages.written[span.start : span.stop].copy_(source[span.start : span.stop])
        return False

    def forget(self, chunk: int = 0) -> None:
        """From a chunk on."""
        del self.chunks[chunk:]
        self.pages = {index: pages for index, pages in self.pages.items() if index < chunk}

    def slot(self, param: int) -> torch.Tensor:
        slot = self.line.layout.slots[param]
        assert slot is not None
        return self.chunks[slot.chunk][slot.span.start : slot.span.stop]

    def share(self, index: int, rank: int) -> torch.Tensor:
        bucket = self.line.layout.buckets[index]
        span = bucket.share(rank)
        return self.chunks[bucket.chunk][span.start : span.stop]

    def new_share(self, index: int, rank: int) -> torch.Tensor:
        """Where new weights are written: where they are seen, or into the file behind."""
        return self._cut_new(index, self.line.layout.buckets[index].share(rank))

    def new_bucket(self, index: int) -> torch.Tensor:
        return self._cut_new(index, self.line.layout.buckets[index].span)

    def _cut_new(self, index: int, span: Span) -> torch.Tensor:
        chunk = self.line.layout.buckets[index].chunk
        written = self.pages[chunk].written if chunk in self.pages else self.chunks[chunk]
        return written[span.start : span.stop]

    # what was edited ---------------------------------------------------------------------------------------------

    def is_in_file(self, bucket: int) -> bool:
        """So that it is known what was edited."""
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
        """What is seen of these is what was written last: edits were adopted, or come too late."""
        for chunk in {self.line.layout.buckets[bucket].chunk for bucket in buckets} & self.pages.keys():
            self.pages[chunk].drop()

    def keep(self) -> None:
        """Everything counts as edited, and stays what it is whatever other ranks do."""
        for pages in self.pages.values():
            pages.keep()

    def _pages_of(self, bucket: int) -> Pages | None:
        return self.pages.get(self.line.layout.buckets[bucket].chunk)


def _lies_at(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    return tensor.data_ptr() == place.data_ptr()
