"""The home on a disk: state is computed with on the host, and read to there before.

Meanwhile a tensor of its shape and dtype without memory stands for it. Read by mistake it is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from zero.memory.addresses import address_of
from zero.memory.homes.file import PAGE, FileTransfer, Region, StateFile, page_aligned
from zero.memory.homes.home import MemoryHome, Pool, Transfer


def absent(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor that stands for values on disk."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device="cpu").expand(numel)


def is_absent(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor stands for values on disk."""
    return tensor.numel() > 1 and not any(tensor.stride())


class DiskHome:
    """The `Home` that is a file, and host memory that its content is read to."""

    def __init__(self, host: MemoryHome, file: StateFile) -> None:
        self.device = host.device
        self.memory = host
        self.file = file
        self.pages = Pool()  # host memory that any region of the file fits into

    def store(self, numel: int, dtype: torch.dtype) -> StoredOnDisk:
        """Makes an entry with a region of the file."""
        region = self.file.allocate(numel * dtype.itemsize)
        self.pages.expect(region.num_bytes)
        return StoredOnDisk(self, region, absent(numel, dtype))

    def borrow_pages(self) -> torch.Tensor:
        return self.pages.borrow(partial(page_aligned, allocate=self._allocate))

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns host memory that begins at a page, so that whole pages are read and written without a copy."""
        return page_aligned(numel * dtype.itemsize, self._allocate)[: numel * dtype.itemsize].view(dtype)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return self.memory.allocate(num_bytes, torch.uint8)

    def release(self) -> None:
        """Frees the memory that is not lent."""
        self.pages.release()
        self.memory.release()

    def close(self) -> None:
        """Closes the file, which frees it."""
        self.pages.release()
        self.file.close()


class StoredOnDisk:
    """The `Stored` of values that live in a region of a file."""

    def __init__(self, home: DiskHome, region: Region, values: torch.Tensor) -> None:
        self.values = values
        self._home = home
        self._region = region
        self._pages: torch.Tensor | None = None  # lent pages
        self._line: torch.Tensor | None = None  # the part of these pages that the values take
        self._version = values._version

    def lend(self, device: torch.device) -> torch.Tensor | None:
        return self._lend() if device == self._home.device else None

    def _lend(self) -> torch.Tensor:
        assert self._pages is None, "its memory is lent already"
        self._pages = self._home.borrow_pages()
        with torch.inference_mode(False):
            self._line = self._pages[: self.values.numel() * self.values.dtype.itemsize].view(self.values.dtype)
        return self._line

    def take_back(self) -> None:
        pages, self._pages, self._line = self._pages, None, None
        if pages is not None:
            self._home.pages.give_back(pages)

    def reclaim(self) -> None:
        if self._pages is not None:
            self._home.file.settle()
            self.take_back()

    def write(self, source: torch.Tensor) -> Transfer:
        """Begins to write `source`. If `source` was lent, it is taken back once the transfer is waited for. If it is whole
        pages, the transfer reads it until then; else it is copied."""
        if source is not self._line:
            if _is_pages(source):
                return self._home.file.write(source.view(torch.uint8), self._region)
            line = self._lend()
            self._home.memory.write(source, line.view(source.shape)).finish()
        return _Lent(self, self._home.file.write(self._lent, self._region))

    def read(self, target: torch.Tensor) -> Transfer:
        if target is self._line:
            return self._home.file.read(self._region, self._lent)
        if _is_pages(target):
            return self._home.file.read(self._region, target.view(torch.uint8))
        line = self._lend()
        arrive = self._home.file.read(self._region, self._lent)
        return _Lent(self, arrive, lambda: self._home.memory.read(line.view(target.shape), target).finish())

    def is_spoilt(self) -> bool:
        before, self._version = self._version, self.values._version
        return self._version != before

    @property
    def _lent(self) -> torch.Tensor:
        """The lent pages, cut to the bytes of the region."""
        assert self._pages is not None
        return self._pages[: self._region.num_bytes]

    def free(self) -> None:
        self.take_back()
        self._home.file.free(self._region)


def _is_pages(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is whole pages of memory, which are read and written without a copy."""
    if not tensor.is_cpu or tensor.dim() != 1 or not tensor.is_contiguous():
        return False
    return tensor.nbytes > 0 and not (address_of(tensor) % PAGE or tensor.nbytes % PAGE)


class _Lent:
    """A `Transfer` of lent memory, which is given back after it. `then` runs in between, while the memory is still lent."""

    def __init__(self, stored: StoredOnDisk, transfer: FileTransfer, then: Callable[[], None] = lambda: None) -> None:
        self._transfer = transfer
        self._then = then
        self._stored: StoredOnDisk | None = stored

    def done(self) -> bool:
        return self._transfer.done()

    def finish(self) -> None:
        stored, self._stored = self._stored, None
        if stored is not None:
            try:
                self._transfer.finish()
                self._then()
            finally:
                stored.take_back()

    def wait(self) -> None:
        self.finish()

    def release_source(self) -> None:
        self.finish()
