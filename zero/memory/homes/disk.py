"""The home on a disk: state is computed with on the host, and read to there before.

Meanwhile a tensor of its shape and dtype without memory stands for it. Read by mistake it is NaN, and it cannot be written to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero.memory.homes.file import PAGE, FileTransfer, Region, StateFile, page_aligned
from zero.memory.homes.home import Home, Transfer


def absent(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor that stands for values on disk."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device="cpu").expand(numel)


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for values on disk."""
    return tensor.numel() > 1 and not any(tensor.stride())


class DiskHome:
    """A file, and host memory that its content is read to."""

    def __init__(self, host: Home, file: StateFile) -> None:
        self.device = host.device
        self.pinned = host.pinned
        self.file = file
        self._host = host
        self._regions: dict[int, Region] = {}  # by the address of what stands for them
        self._largest = 0  # bytes of the largest region so far: memory that is lent has as many, so that any serves the next
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # what was lent a part of, by its address

    @property
    def num_lent_bytes(self) -> int:
        return self._host.num_lent_bytes + sum(memory.nbytes for memory in (*self._free, *self._lent.values()))

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """What stands for a region of the file, until `free`."""
        stored = absent(numel, dtype)
        region = self._regions[stored.data_ptr()] = self.file.allocate(numel * dtype.itemsize)
        if region.num_bytes > self._largest:
            self._largest = region.num_bytes
            self._free.clear()  # too small from now on
        return stored

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and tensor.data_ptr() in self._regions

    def free(self, stored: torch.Tensor) -> None:
        region = self._regions.pop(stored.data_ptr(), None)
        if region is not None:  # else the file is closed
            self.file.free(region)

    def lend(self, stored: torch.Tensor) -> torch.Tensor:
        """Memory of the host for all that is stored, to be given back by `take_back` or by a transfer."""
        memory = self._free.pop() if self._free else page_aligned(self._largest, self._allocate)
        self._lent[memory.data_ptr()] = memory
        return memory[: stored.numel() * stored.dtype.itemsize].view(stored.dtype)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._host.allocate(num_bytes, torch.uint8)

    def take_back(self, memory: torch.Tensor) -> None:
        whole = self._lent.pop(memory.data_ptr())
        if whole.nbytes == self._largest:
            self._free.append(whole)

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that `fits` where whole pages do."""
        return page_aligned(numel * dtype.itemsize, self._allocate)[: numel * dtype.itemsize].view(dtype)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether its values are pages of memory of its own, that need no copy on their way."""
        if not tensor.is_cpu or tensor.data_ptr() in self._lent or tensor.dim() != 1 or not tensor.is_contiguous():
            return False
        return tensor.nbytes > 0 and not (tensor.data_ptr() % PAGE or tensor.nbytes % PAGE)

    def write(self, source: torch.Tensor, stored: torch.Tensor) -> Transfer:
        """Where `source` is memory that was lent, it is the transfer's until that is waited for, and given back then. Where it
        `fits`, the transfer reads it until then."""
        if self.fits(source):
            return self.file.write(source.view(torch.uint8), self._regions[stored.data_ptr()])
        if not source.is_cpu or source.data_ptr() not in self._lent:
            memory = self.lend(stored)
            self._host.write(source, memory.view(source.shape)).finish()
            source = memory
        region = self._regions[stored.data_ptr()]
        bytes_ = self._lent[source.data_ptr()][: region.num_bytes]
        return _Giving(self.file.write(bytes_, region), lambda: self.take_back(source))

    def read(self, stored: torch.Tensor, target: torch.Tensor) -> Transfer:
        region = self._regions[stored.data_ptr()]
        if self.fits(target):
            return self.file.read(region, target.view(torch.uint8))
        if target.is_cpu and target.data_ptr() in self._lent:
            return self.file.read(region, self._lent[target.data_ptr()][: region.num_bytes])
        memory = self.lend(stored)

        def arrive() -> None:
            self._host.read(memory.view(target.shape), target).finish()
            self.take_back(memory)

        return _Giving(self.file.read(region, self._lent[memory.data_ptr()][: region.num_bytes]), arrive)

    def add(self, values: torch.Tensor, factor: float, stored: torch.Tensor, fresh: bool) -> Transfer:
        memory = self.lend(stored)
        if not fresh:
            self.read(stored, memory).finish()
        self._host.add(values, factor, memory, fresh).finish()
        self._host.catch_up()
        return self.write(memory, stored)

    def catch_up(self) -> None:
        self._host.catch_up()

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.mirror(tensor)

    def give_back(self, mirror: torch.Tensor) -> None:
        self._host.give_back(mirror)

    def release(self) -> None:
        self._free.clear()
        self._host.release()

    def close(self) -> None:
        """Closes the file, which frees it."""
        self._free.clear()
        self._lent.clear()
        self._regions.clear()
        self.file.close()


class _Giving:
    """A transfer, and what is done once it has arrived."""

    def __init__(self, transfer: FileTransfer, then: Callable[[], None]) -> None:
        self._transfer = transfer
        self._then: Callable[[], None] | None = then

    def done(self) -> bool:
        return self._transfer.done()

    def finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            try:
                self._transfer.finish()
            finally:
                then()

    def wait(self) -> None:
        self.finish()

    def release_source(self) -> None:
        self.finish()
