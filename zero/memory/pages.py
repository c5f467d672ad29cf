"""Weights on the host that tell by themselves what of them somebody edited.

[Note: pages of one's own]
Narrow weights are seen through a private mapping of a file without a name, and a step writes the new ones through a shared
mapping of the same file. Whoever edits a weight, by whatever way, is given a page of his own by the system, and the system
says which those are: so where nothing was edited, nothing is compared. A step takes over what is on such pages and drops them,
and the file shows again. Where the ranks of one host share memory the file is one for all of them: each writes
its own share of the new weights, and all see them, without a copy. Who breaks off within `step` may therefore see some of them.

A page that is the process's own says no more than that it may have been edited; so whoever writes masters by another way
than a step makes the pages of their weights his own, and the next step compares them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from accelerators.memory_file import closing, memory_file
from accelerators.own_pages import Notes, OwnPages, Table
from zero.plan.spans import Span, round_up

_alive: weakref.WeakSet[Pages] = weakref.WeakSet()


class Pages:
    """A chunk of weights: as they are seen, which is where they are edited, and where new ones are written."""

    def __init__(
        self, private: mmap.mmap, shared: mmap.mmap, start: int, numel: int, dtype: torch.dtype, common: bool, notes: bool
    ) -> None:
        seen, written = (
            torch.frombuffer(mapping, dtype=dtype, offset=start, count=max(1, numel)) for mapping in (private, shared)
        )
        self.seen, self.written = seen[:numel], written[:numel]
        self.common = common  # to all ranks
        self._private = private
        self._start = start
        self._address = self.seen.data_ptr()
        self._finder = _finder_of(seen.data_ptr(), _whole_pages(numel, dtype), notes)
        self._own: torch.Tensor | None = None  # pages, in their order, as the last look found them; None for anything
        _alive.add(self)

    def look(self) -> None:
        """Finds out what was edited until now."""
        self._own = self._found()

    def edited(self, part: Span) -> Span | None:
        """The stretch of a part outside of which nothing was edited before the last look; None for nothing at all."""
        own = self._own  # read once: another thread may fork meanwhile
        if own is None or self._moved():
            return part
        size = self.seen.element_size()
        first, end = (part.start * size) // mmap.PAGESIZE, -(-part.stop * size // mmap.PAGESIZE)
        own = own[(own >= first) & (own < end)] if own.numel() else own
        if not own.numel():
            return None
        begin, end = (int(page) * mmap.PAGESIZE // size for page in (own[0], own[-1] + 1))
        return Span(max(part.start, begin), min(part.stop, end))

    def drop(self) -> None:
        """What was edited is forgotten, all of it: what was written last is seen."""
        own, self._own = self._found(to_drop=True), None
        if own is None:
            self.seen.copy_(self.written)
        elif own.numel():
            first, end = int(own[0]), int(own[-1]) + 1
            try:
                self._private.madvise(
                    mmap.MADV_DONTNEED, self._start + first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE
                )
            except OSError:  # of pages that are locked in memory
                self.seen.copy_(self.written)

    def keep(self) -> None:
        """What is seen now is seen whatever others write, and counts as edited."""
        self.seen.view(torch.int16).bitwise_or_(0)
        self._own = None

    def leave(self) -> None:
        """Has nothing to do with the file any more: this is a process that was forked, and the file its parent's."""
        self.written, self.common, self._address = self.seen, False, -1

    def _found(self, to_drop: bool = False) -> torch.Tensor | None:
        """The pages that were edited; None where that cannot be found out, and any may have been."""
        with contextlib.suppress(OSError):
            return None if self._moved() else self._finder.find(to_drop)
        return None

    def _moved(self) -> bool:
        """Storage can be exchanged under its tensors, as for sending it to another process. And whoever left has none there."""
        return self.seen.data_ptr() != self._address


def _before_fork() -> None:
    """What a child sees stays what it was when it was made."""
    with torch.no_grad():
        for pages in list(_alive):
            pages.keep()


def _in_child() -> None:
    for pages in list(_alive):
        pages.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def num_bytes_of(sizes: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum(_whole_pages(numel, dtype) for numel, dtype in sizes)


def lay_out(
    descriptor: int, sizes: Sequence[tuple[int, torch.dtype]], common: bool, notes: bool | None = None
) -> list[Pages]:
    """Chunks side by side in a file that is as large as they are together. `notes`: taken of edits, rather than the table
    read; None where that was found to work."""
    shared = mmap.mmap(descriptor, num_bytes_of(sizes))
    private = mmap.mmap(descriptor, num_bytes_of(sizes), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    starts = itertools.accumulate((_whole_pages(*size) for size in sizes), initial=0)
    notes = _takes_notes() if notes is None else notes
    return [Pages(private, shared, start, *size, common, notes) for start, size in zip(starts, sizes, strict=False)]


def _whole_pages(numel: int, dtype: torch.dtype) -> int:
    return round_up(max(1, numel * dtype.itemsize), mmap.PAGESIZE)


def _finder_of(address: int, num_bytes: int, notes: bool) -> OwnPages:
    with contextlib.suppress(OSError):
        if notes:
            return Notes(address, num_bytes)
    return Table(address, num_bytes)


@functools.cache
def pages_tell() -> bool:
    """Whether the system says which were written; tried, since it may not, or say the same of all."""
    return _takes_notes() or _works(False)


@functools.cache
def _takes_notes() -> bool:
    return _works(True)


def _works(notes: bool) -> bool:
    sizes = [(mmap.PAGESIZE, torch.bfloat16)]  # two pages
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with closing(memory_file(num_bytes_of(sizes))) as descriptor:
            [pages] = lay_out(descriptor, sizes, False, notes)
        whole, half = Span(0, pages.seen.numel()), pages.seen.numel() // 2

        def told() -> Span | None:
            pages.look()
            return pages.edited(whole)

        pages.written.fill_(1.0)
        is_clean = told() is None and bool((pages.seen == 1.0).all()) and told() is None
        for value in (2.0, 3.0):  # and once more on a page that was dropped
            pages.seen[-1] = value
            is_clean &= told() == Span(half, whole.stop) and bool((pages.written == 1.0).all())
            pages.drop()
            is_clean &= told() is None and bool((pages.seen == 1.0).all()) and told() is None
        return is_clean
    return False
