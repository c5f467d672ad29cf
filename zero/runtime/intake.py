"""Gives parameters their place on the flat line, and takes it away again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from zero.comm.group import Group, in_one_file, together
from zero.memory.flat import Form
from zero.memory.flatten import Flattener, Place, unflatten
from zero.memory.masters import Masters
from zero.memory.weights import FlatBuffer
from zero.runtime.params import Params


class Intake:
    """Gives parameters a place on the line: rank 0's values, flat on every rank, and this rank's masters of them."""

    def __init__(
        self, params: Params, forms: list[Form], weights: FlatBuffer, masters: Masters, group: Group, place: Place
    ) -> None:
        self._params = params
        self._forms = forms
        self._weights = weights
        self._masters = masters
        self._group = group
        self._place = place

    @torch.no_grad()
    def lay(self, params: Sequence[int]) -> list[int]:
        """A collective; returns the buckets that are new."""
        line = self._weights.line
        num_chunks, num_buckets = len(line.layout.chunks), len(line.layout.buckets)
        line.layout = line.layout.extended(params)
        flattener = Flattener(self._weights, self._params.tensors, self._forms, self._place)
        new, chunks = range(num_buckets, len(line.layout.buckets)), range(num_chunks, len(line.layout.chunks))
        if self._place.is_host:
            together(self._group, lambda: self._weights.reserve(chunks, partial(in_one_file, self._group)))
        for chunk in chunks:
            source = together(self._group, lambda chunk=chunk: flattener.read(chunk, self._group.rank == 0))  # type: ignore[misc]
            if not self._weights.is_everybodys(chunk, source):
                self._group.broadcast(source).wait()
            with flattener.putting_back(chunk, source):
                together(self._group, lambda chunk=chunk, source=source: self._take(flattener, chunk, source))  # type: ignore[misc]
            del source  # before the next one is made
        self._weights.drop(new)  # pages that are locked in memory were there before the file was filled
        together(self._group, lambda: self._finish(flattener, params))
        return list(new)

    def _finish(self, flattener: Flattener, params: Sequence[int]) -> None:
        self._masters.cut()
        flattener.log(params)

    def _take(self, flattener: Flattener, chunk: int, source: torch.Tensor) -> None:
        layout, masters = self._weights.line.layout, self._masters
        buckets = {index: bucket for index, bucket in enumerate(layout.buckets) if bucket.chunk == chunk}
        is_kept = flattener.write(chunk, source, masters.rank)
        # All of its memory or none: a part of it would keep the rest.
        is_whole = layout.num_shares == 1 and source.nbytes == source.untyped_storage().nbytes()
        given = is_whole and not is_kept and not any(map(masters.shard.travels, buckets))
        for index, bucket in buckets.items():
            share = bucket.share(masters.rank)
            is_kept |= masters.take(index, source[share.start : share.stop], given)
        if not is_kept:
            flattener.reuse(source)

    def laid_out(self) -> list[torch.nn.Parameter]:
        """The parameters whose memory is the flat one."""
        num_chunks = len(self._weights.chunks)
        slots = self._weights.line.layout.slots
        return [self._params.tensors[slot.param] for slot in slots if slot is not None and slot.chunk < num_chunks]

    @torch.no_grad()
    def undo(self, dtypes: Sequence[torch.dtype]) -> None:
        """Gives every parameter memory of its own and the dtype that it had, from the master where this rank has all of it."""
        layout = self._weights.line.layout
        for tensor in self.laid_out():
            index = self._params.index[id(tensor)]
            unflatten([tensor])
            if tensor.dtype != dtypes[index]:
                tensor.data = tensor.data.to(dtypes[index])
                pieces = list(layout.pieces(index, self._group.rank if layout.num_shares > 1 else 0))
                if sum(piece.in_param.numel for piece in pieces) == tensor.numel():
                    line = torch.cat([self._masters.shard.piece(piece) for piece in pieces])
                    tensor.copy_(self._forms[index].shaped(line))
        self.release()

    def release(self) -> None:
        self._masters.release()
        self._weights.forget()
