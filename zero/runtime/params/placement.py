"""Gives parameters their place in flat memory, and takes it from them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from zero.comm.group import Group, SharedHostMemory
from zero.comm.levels import holders_of
from zero.comm.one_answer import run_on_all
from zero.memory.flatten import NO_MEMORY, Flattener
from zero.memory.formats import ParamFormat
from zero.memory.masters import Masters
from zero.memory.weights import Place, Weights
from zero.plan.layout import FlatLayout, round_up, set_bits
from zero.runtime.params.table import Params

_AT_ONCE = 2**24  # the bytes that rank 0 lends at a time, unless one chunk has more
_ALIGNMENT = 64


class ParamPlacer:
    """Gives parameters a place in flat memory, with rank 0's values on every rank, and this rank's masters of them."""

    def __init__(
        self, params: Params, formats: list[ParamFormat], weights: Weights, masters: Masters, group: Group, place: Place
    ) -> None:
        self._params = params
        self._formats = formats
        self.weights = weights
        self._masters = masters
        self._group = group
        self._place = place

    @torch.no_grad()
    def place(self, params: Sequence[int], then: Callable[[], None] = lambda: None) -> list[int]:
        """Places parameters, calls `then`, and returns the buckets that are new. If any of it fails, everything is as before. A
        collective."""
        layout_ref = self.weights.layout_ref
        before = layout_ref.layout
        layout_ref.replace(before.extended(params))
        flattener = Flattener(self.weights, self._params.tensors, self._formats, self._place)
        new = range(len(before.buckets), len(layout_ref.layout.buckets))
        try:
            self.weights.prepare()
            self._move(flattener)
            run_on_all(self._group, lambda: self._finish(flattener, params, then))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the frames would keep the memory that is needed now
            self.remove(flattener.dtypes, before)
            raise
        for family in range(len(layout_ref.layout.families)):
            sharing = self._sharing(self._holders(family))
            if sharing is not None:
                sharing.trim()
        return list(new)

    def _holders(self, family: int) -> Group:
        """Returns the ranks that hold the same of a family as this one. The first of them gives the values."""
        return holders_of(self._group, family)

    def _sharing(self, holders: Group) -> SharedHostMemory | None:
        return holders.shared_host_memory if self._place.is_host else None

    def _move(self, flattener: Flattener) -> None:
        chunks = range(self.weights.num_chunks, len(self.weights.layout_ref.layout.chunks))
        for batch in self._batches(flattener, chunks):
            with self._read(flattener, batch) as sources:
                run_on_all(self._group, partial(self._take, flattener, batch, sources))
            del sources  # freed before other chunks are read

    def _finish(self, flattener: Flattener, params: Sequence[int], then: Callable[[], None]) -> None:
        self._masters.make_params()
        then()
        flattener.log(params)

    def _batches(self, flattener: Flattener, chunks: Sequence[int]) -> Iterator[list[int]]:
        """Yields the chunks that are read at once: several small ones of a family if its first rank lends its memory, else
        one."""
        batch, num_bytes = list[int](), 0
        layout = self.weights.layout_ref.layout
        for chunk in chunks:
            more = _num_bytes(flattener.size_of(chunk))
            family = layout.chunks[chunk].family
            is_alone = self._sharing(self._holders(family)) is None or (batch and layout.chunks[batch[0]].family != family)
            if batch and (is_alone or num_bytes + more > _AT_ONCE):
                yield batch
                batch, num_bytes = [], 0
            batch, num_bytes = [*batch, chunk], num_bytes + more
        if batch:
            yield batch

    @contextlib.contextmanager
    def _read(self, flattener: Flattener, batch: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Yields the values that chunks have on the first rank that holds them: in its own memory if all see that, from which
        each takes what it wants, or else in memory of this rank."""
        holders = self._holders(self.weights.layout_ref.layout.chunks[batch[0]].family)
        group, fills, sharing = self._group, holders.rank == 0, self._sharing(holders)
        if sharing is None:
            [chunk] = batch
            with self._rolling_back(flattener, chunk):
                source = run_on_all(group, lambda: flattener.read(chunk, fills))
                holders.broadcast(source).wait()
                yield [source]
            return
        sizes = [flattener.size_of(chunk) for chunk in batch]

        def read() -> torch.Tensor:
            lent = holders.staging(sum(map(_num_bytes, sizes)), torch.uint8, self._place.device)
            for chunk, part in zip(batch, _cut(lent, sizes), strict=True):
                flattener.read(chunk, fills, part)
            return lent

        with sharing.rank0_view(run_on_all(group, read)) as seen, self._rolling_back(flattener, batch[0]):
            yield _cut(seen, sizes)

    @contextlib.contextmanager
    def _rolling_back(self, flattener: Flattener, chunk: int) -> Iterator[None]:
        """Rolls back the move of a chunk and of those after it if the block raises."""
        try:
            yield
        except BaseException:
            self._masters.forget(chunk)
            self.weights.forget(chunk)
            flattener.rollback()
            raise
        flattener.commit()

    def _take(self, flattener: Flattener, batch: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        layout, masters = self.weights.layout_ref.layout, self._masters
        may_keep = self._sharing(self._holders(layout.chunks[batch[0]].family)) is None
        for chunk, source in zip(batch, sources, strict=True):
            buckets = {index: layout.buckets[index] for index in layout.buckets_in(chunk)}
            is_kept = flattener.write(chunk, source, may_keep)
            # A master takes all of its memory or none, as a part would keep the rest alive.
            has_all = layout.families[layout.chunks[chunk].family].num_shares == 1
            is_whole = has_all and source.nbytes == source.untyped_storage().nbytes()
            has_home = all(masters.shard.home_of(bucket).holds(source) for bucket in buckets)
            given = may_keep and is_whole and not is_kept and has_home
            for index, bucket in buckets.items():
                share = bucket.share(layout.share_of(index, masters.rank))
                is_kept |= masters.adopt_source(index, source[share.start : share.stop], given)
            if may_keep and not is_kept:
                flattener.recycle(source)

    @torch.no_grad()
    def own_values(self, elsewhere: int) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Returns every parameter with a copy of its present value, except those, as bits, that the model does not have.
        A collective if weights are in shares."""
        slots, gone = self.weights.layout_ref.layout.slots, set(set_bits(elsewhere))
        laid_out = (slot for slot in slots if slot is not None and slot.chunk < self.weights.num_chunks)
        placed = [slot.param for slot in laid_out if slot.param not in gone]
        tensors = [*map(self._params.tensors.__getitem__, placed), *self.weights.frozen()]
        return [(tensor, tensor.data.clone(memory_format=torch.preserve_format)) for tensor in tensors]

    @torch.no_grad()
    def detach(self, values: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Gives these parameters these values, as memory of their own."""
        for tensor, value in values:
            self.weights.detach(tensor, value)

    @torch.no_grad()
    def remove(self, dtypes: Mapping[int, torch.dtype], before: FlatLayout) -> None:
        """Gives every parameter that was not laid out before memory of its own, its old dtype, and the value of its master if
        this rank has all of that. If there is no memory for it, it stays in its place, which then lives as long."""
        for chunk in reversed(range(len(before.chunks), self.weights.num_chunks)):
            for param in self.weights.layout_ref.layout.chunks[chunk].params:
                with contextlib.suppress(*NO_MEMORY):
                    self.weights.detach(self._params.tensors[param], self._value_of(param, dtypes[param]))
            self._masters.forget(chunk)
            self.weights.forget(chunk)
        self._masters.forget(len(before.chunks))
        self.weights.forget(len(before.chunks))
        self.weights.layout_ref.replace(before)

    def _value_of(self, param: int, dtype: torch.dtype) -> torch.Tensor:
        layout, tensor = self.weights.layout_ref.layout, self._params.tensors[param]
        data = tensor.detach().to(dtype, copy=True)
        if tensor.dtype != dtype:
            pieces = list(layout.pieces(param, self._masters.rank))
            if sum(piece.in_param.numel for piece in pieces) == tensor.numel():
                data.copy_(self._formats[param].unflatten(torch.cat([self._masters.streams.piece(piece) for piece in pieces])))
        return data

    def release(self) -> None:
        self._masters.release()
        self.weights.close()
        self.weights.forget()


def _num_bytes(size: tuple[int, torch.dtype]) -> int:
    numel, dtype = size
    return round_up(numel * dtype.itemsize, _ALIGNMENT)


def _cut(memory: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Cuts memory into parts of these sizes, one after the other."""
    parts = zip(torch.split(memory, list(map(_num_bytes, sizes))), sizes, strict=True)
    return [part[: numel * dtype.itemsize].view(dtype) for part, (numel, dtype) in parts]
