"""Memory for shares of weights: that in which they live, and that in which other ranks read them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from zero.comm.one_answer import run_on_all
from zero.errors import DiskFailed
from zero.memory.formats import DTYPES
from zero.memory.homes.home import DeviceHome, MemoryHome
from zero.memory.homes.mapped import MappedFile, map_of
from zero.memory.homes.registry import DISK
from zero.memory.shard import LayoutRef
from zero.plan.budget import weights_place
from zero.runtime.unshard.exchange import ShareExchange


class ShareMemory:
    """The memory of chunks of a layout that are to be filled, until they are."""

    def __init__(self, layout_ref: LayoutRef, exchange: ShareExchange) -> None:
        self._layout_ref = layout_ref
        self._exchange = exchange
        self._whole: dict[int, torch.Tensor] = {}  # by chunk: memory that all ranks see, or of a rank alone
        self._on_disk: dict[int, torch.Tensor] = {}  # by bucket: memory of a share on a disk, which is sent to other ranks

    def prepare(self, chunks: Sequence[int]) -> None:
        """Makes the memory that ranks share, and the files on disks. A collective; it fails on all ranks or on none."""
        places = {chunk: weights_place(self._layout_ref.layout, chunk) for chunk in chunks}
        for place in sorted({place for place in places.values() if place is not None}):
            self._map(place.removeprefix(DISK), [chunk for chunk in chunks if places[chunk] == place])
        others = [chunk for chunk in chunks if places[chunk] is None]
        shared = self._exchange.group.inner.shared_host_memory
        if shared is not None:
            self._whole.update(zip(others, shared.common(list(map(self._num_bytes, others))), strict=True))
        elif self._exchange.is_alone:
            for chunk in others:
                homes = [self._home_of(index) for index in self._layout_ref.layout.buckets_in(chunk)]
                if len({home.device for home in homes}) == 1:
                    self._whole[chunk] = homes[0].allocate(self._num_bytes(chunk), torch.uint8)

    def _map(self, directory: str, chunks: Sequence[int]) -> None:
        """Maps files for chunks that are on a disk. Of ranks that share memory the first one makes a file for all; other ranks
        make one each, for their own shares. Inner groups may differ in this, as both ways have the same collectives of all
        ranks."""
        layout, group, alone = self._layout_ref.layout, self._exchange.group, self._exchange.is_alone
        is_common = not alone and group.inner.shared_host_memory is not None
        buckets = [index for chunk in chunks for index in layout.buckets_in(chunk)]
        sizes = [layout.buckets[index].share_numel * self._item(layout.buckets[index].chunk) for index in buckets]
        sizes = list(map(self._num_bytes, chunks)) if alone or is_common else sizes
        with contextlib.ExitStack() as files:

            def make() -> MappedFile | None:
                makes = group.inner.rank == 0 or not is_common
                return files.enter_context(contextlib.closing(MappedFile(directory, sizes))) if makes else None

            made = run_on_all(group, make)
            identity = b""
            if is_common:
                identity = group.inner.all_gather_bytes(b"" if made is None else made.identity().encode())[0]

            def reach() -> list[torch.Tensor]:
                try:
                    return map_of(identity.decode(), sizes) if made is None else made.tensors
                except OSError as error:
                    raise DiskFailed(
                        f"Cannot map the file in {directory} for weights, which another rank made: {error}. Set "
                        "shared_memory=False."
                    ) from error

            tensors = run_on_all(group, reach)
        if alone or is_common:
            self._whole.update(zip(chunks, tensors, strict=True))
        else:
            self._on_disk.update(zip(buckets, tensors, strict=True))

    def _num_bytes(self, chunk: int) -> int:
        return self._layout_ref.layout.chunks[chunk].numel * self._item(chunk)

    def _item(self, chunk: int) -> int:
        return DTYPES[self._layout_ref.layout.chunks[chunk].dtype].itemsize

    def _home_of(self, bucket: int) -> MemoryHome:
        is_on_host = self._layout_ref.layout.buckets[bucket].offloaded
        # Memory of the device itself is copied faster.
        return self._exchange.host if is_on_host else DeviceHome(self._exchange.device)

    def take_whole(self, chunk: int) -> torch.Tensor | None:
        """Returns the memory for all of a chunk; None if each share has its own."""
        whole = self._whole.pop(chunk, None)
        return None if whole is None else whole.view(DTYPES[self._layout_ref.layout.chunks[chunk].dtype])

    def take_share(self, bucket: int, whole: torch.Tensor | None) -> tuple[torch.Tensor, torch.device]:
        """Returns the memory in which this rank's share is read, which is a part of `whole` if there is one, and the device on
        which the share lives."""
        entry, home = self._layout_ref.layout.buckets[bucket], self._home_of(bucket)
        span, dtype = entry.share(self._exchange.group.inner.rank), DTYPES[self._layout_ref.layout.chunks[entry.chunk].dtype]
        if whole is not None:
            return whole[span.start : span.stop], home.device
        if bucket in self._on_disk:
            return self._on_disk.pop(bucket).view(dtype), home.device
        read_in = home if entry.offloaded or self._exchange.is_alone else DeviceHome(torch.device("cpu"))
        return read_in.allocate(span.numel, dtype), home.device

    def forget(self) -> None:
        """Frees the memory that was not taken."""
        self._whole.clear()
        self._on_disk.clear()
