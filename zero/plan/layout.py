"""The layout of parameters: where each lies in flat memory, and where that memory is cut. It is arithmetic, without tensors.

[Note: an example]
Four fp32 parameters in the model's order, embed (24 elements), norm (4), fc (40), bias (10); two ranks; buckets of 128 bytes,
which are 32 elements; every slot begins at a multiple of 4 elements. Backward reaches bias first:

    chunk 0  | bias 0..10 | gap |              bucket 0: 0..16     rank 0 has 0..8,   rank 1 has 8..16
    chunk 1  | fc 0..40 |                      bucket 1: 0..24     rank 0 has 0..12,  rank 1 has 12..24
                                               bucket 2: 24..40    rank 0 has 24..32, rank 1 has 32..40
    chunk 2  | norm 0..4 | embed 4..28 | gap | bucket 3: 0..32     rank 0 has 0..16,  rank 1 has 16..32

The words, each with what it is in the example:

    chunk   memory that is allocated at once                          chunk 2 has norm and embed
    slot    the place of one parameter in its chunk                   embed has 4..28
    bucket  a span of a chunk, the unit in which gradients travel     fc is longer than a bucket, so chunk 1 is cut into two
    share   one rank's span of a bucket; all are equally long         a reduce-scatter of bucket 1 sums 0..12 on rank 0
    stretch the elements of one parameter in one bucket               fc has 0..24 in bucket 1 and 24..40 in bucket 2
    piece   the elements of one parameter in one share                bias has 0..8 on rank 0 and 8..10 on rank 1

[Note: chunks, buckets, shares]
Parameters lie in the order in which backward reaches them, the last of the model first, one dtype at a time. A chunk has
several parameters and is one bucket; or it has one parameter that is larger than a bucket, and is cut into as many buckets as
it needs. So every parameter is one span of one allocation, and no bucket grows for a large parameter. There are as few
chunks as possible, as even in length as possible, since the memory in which gradients travel is as large as the largest bucket.
A piece lies in one bucket, so code that works bucket by bucket needs no index arithmetic but this file's.

The parameters of a chunk are of one kind: one dtype, one family, one wish for homes, all or none kept whole by every rank at
stage 3, all or none with an owner. For any parameters, tests/zero/plan/test_layout.py holds this by
test_no_chunk_has_parameters_of_two_kinds, and what a chunk is by test_a_chunk_is_one_bucket_or_one_parameter.

Alternatives, and why not: if each parameter was cut by itself, small ones would be padded to the number of ranks, and a
collective of several would copy each of them in and out. If all parameters were one line that is cut anywhere, one parameter
could lie in two allocations, and would be no tensor.

A parameter that is frozen, or that joined later, has a number but no slot until some rank has a gradient for it; then the
layout is *extended*, which moves nothing that has a place.

The rest of the words are needed where a training is less plain:

- An optimizer may have to see a parameter as a whole tensor. Such a parameter has one *owner*: it lies in one rank's share of
  one bucket, and is one piece; see [Note: shelves] in zero/plan/owners.py. It is in a chunk of such parameters, which is one
  bucket, as large as it must be.
- Work on host memory goes by *blocks* that fit a cache: a piece ends where its block does.
- A bucket may be *offloaded*, and kinds of its states may be *away*: see zero/plan/homes.py.
- A parameter may be one rank's *part* of a larger one. Then it has a *family*: see zero/plan/families.py. All ranks have the
  same layout, whatever part they hold: if parts are uneven, a slot is as long as the longest part, and on other ranks the rest
  of it is a gap.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from zero.plan.families import Family, Seat
from zero.plan.homes import Asked, Away, assign_homes
from zero.plan.owners import Tensor, height_of, shelves_of, stacked, starts_in, work_of

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_MOST_AS_ONE = 2**16  # the most bytes of several buckets that one collective gathers


@dataclass(frozen=True)
class Span:
    """The elements from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Span) -> Span | None:
        """Returns the elements that are in both spans; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def piece(self, rank: int, num_pieces: int) -> Span:
        """Returns the `rank`th of `num_pieces` equal spans; this span must divide evenly."""
        numel, rest = divmod(self.numel, num_pieces)
        assert rest == 0, f"{self} does not divide into {num_pieces}"
        return Span(self.start + rank * numel, self.start + (rank + 1) * numel)

    def cut(self, every: int | None) -> Iterator[Span]:
        """Yields this span in spans that end at multiples of `every`; all of it if `every` is None."""
        start = self.start
        while start < self.stop:
            stop = self.stop if every is None else min(self.stop, (start // every + 1) * every)
            yield Span(start, stop)
            start = stop


@dataclass(frozen=True)
class ParamSpec:
    """The facts of a parameter that the layout needs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0  # the number of its group in the optimizer, which does not decide its place
    offload: float = 0.0  # the ratio of its group's sharded states that lives on the host
    kept: bool = False  # every rank keeps it whole at stage 3
    work: int = 0  # the work of its update, if one rank must have all of it; 0 if any rank may have any element
    away: tuple[Away, ...] = ()  # the kinds of its group's states that are kept apart from where they are stepped
    family: int = 0  # the number of its family; 0 if it is whole
    is_own: bool = False  # ranks with other parts have other parameters of this name
    shapes: tuple[tuple[int, ...], ...] = ()  # the shapes of all parts if they are uneven; `shape` is that of the longest

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shape_of(self, part: int) -> tuple[int, ...]:
        return self.shapes[part] if self.shapes else self.shape

    @property
    def uneven_dims(self) -> list[int]:
        """The dimensions along which some parts are longer than others, from the last."""
        return [dim for dim in reversed(range(len(self.shape))) if len({shape[dim] for shape in self.shapes}) > 1]

    @property
    def least_numel(self) -> int:
        """The elements of the shortest part."""
        return min(map(math.prod, self.shapes), default=self.numel)


class PartSpec(NamedTuple):
    """The fields of a `ParamSpec` that say which part of a larger parameter it is; family 0 if it is whole."""

    family: int
    is_own: bool
    shapes: tuple[tuple[int, ...], ...] = ()

    def longest(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the longest part, from `shape`, that of this rank's part."""
        return tuple(map(max, zip(*self.shapes, strict=True))) if self.shapes else tuple(shape)


@dataclass(frozen=True)
class Chunk:
    """Memory that is allocated at once: several parameters in one bucket, or one parameter in several."""

    dtype: str
    numel: int
    params: tuple[int, ...]
    is_kept: bool = False  # every rank keeps it whole at stage 3
    family: int = 0  # the family of its parameters


@dataclass(frozen=True)
class Slot:
    """The place of a parameter in its chunk."""

    param: int  # index into FlatLayout.params
    chunk: int
    span: Span  # the elements in the chunk


@dataclass(frozen=True)
class Bucket:
    """A span of a chunk that is reduced, stepped and published at once."""

    chunk: int
    span: Span  # the elements in the chunk
    params: tuple[int, ...]
    num_shares: int
    has_owners: bool = False  # each of its parameters has one owner
    offloaded: bool = False
    # The kinds of states that are kept apart from where they are stepped, each with its place.
    away: tuple[tuple[str, str], ...] = ()
    family: int = 0  # the family of its parameters

    @property
    def share_numel(self) -> int:
        return self.span.numel // self.num_shares

    def share(self, number: int) -> Span:
        """Returns the span in the chunk of one of this bucket's shares."""
        return self.span if self.num_shares == 1 else self.span.piece(number, self.num_shares)


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that lie in one rank's share of one bucket, or in one block of it."""

    param: int
    bucket: int
    in_share: Span
    in_param: Span


class Stretch(NamedTuple):
    """The elements of one parameter that lie in one bucket."""

    bucket: int
    in_bucket: Span  # counted from the bucket's start
    in_param: Span


class Block(NamedTuple):
    """A span of a share that one pass of a step works on."""

    bucket: int
    span: Span  # the elements in the share
    is_last: bool  # the last block of its bucket


@dataclass(frozen=True)
class FlatLayout:
    """The layout of all parameters: where every element lies in chunks, buckets and shares. It never changes; `joined` and
    `extended` return another one.

        params = [ParamSpec("embed", (6, 4), "float32"), ParamSpec("bias", (10,), "float32")]
        layout = FlatLayout.build(params, num_shares=2, bucket_bytes=128, align_bytes=16)
        layout.buckets[0].share(1)      # Span(8, 16): rank 1 sums and steps these elements of bucket 0
        list(layout.pieces(1, rank=1))  # [Piece(1, 0, Span(0, 2), Span(8, 10))]: rank 1 has elements 8 and 9 of bias
    """

    params: tuple[ParamSpec, ...]
    slots: tuple[Slot | None, ...]  # by parameter; None if the parameter has no place yet
    chunks: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]  # in the order in which backward fills them
    num_shares: int  # the number of shares of whole parameters
    bucket_bytes: int
    align_bytes: int = 64
    block_numel: int | None = None  # the elements of a block; None if shares are not cut into blocks
    parted: tuple[Family, ...] = ()  # the families of parts, from 1 on
    copies: tuple[Seat, ...] = ()  # the seats in the family of whole parameters, if several groups of ranks train copies

    @staticmethod
    def build(
        params: Sequence[ParamSpec],
        num_shares: int,
        bucket_bytes: int,
        align_bytes: int = 64,
        unplaced: Collection[int] = (),
        block_numel: int | None = None,
        parted: tuple[Family, ...] = (),
        copies: tuple[Seat, ...] = (),
    ) -> FlatLayout:
        """Lays out `params`, given in the model's order, in `num_shares` shares; see [Note: an example].

        Args:
            params: What to lay out: name, shape, dtype and wishes of each.
            num_shares: The number of ranks that share a bucket of whole parameters; 1 if nothing is sharded.
            bucket_bytes: The bytes of a bucket, which is rounded up to divide evenly, and may be longer if tensors stay whole.
            align_bytes: Every slot and every share begins at a multiple of it.
            unplaced: Numbers of parameters that get no slot yet, as they are frozen.
            block_numel: The elements of a block, if shares are stepped a block at a time.
            parted: The families of parts of larger parameters.
            copies: The place of each rank, if several groups of ranks train copies of the whole parameters.
        """
        if bucket_bytes < 1 or num_shares < 1 or align_bytes < 16 or align_bytes & (align_bytes - 1):
            sizes = f"buckets of {bucket_bytes} bytes for {num_shares} ranks, aligned to {align_bytes} bytes"
            raise ValueError(f"Cannot lay out {sizes}. Give at least 1 byte, 1 rank, and a power of two from 16 as alignment.")
        empty = FlatLayout((), (), (), (), num_shares, bucket_bytes, align_bytes, block_numel, parted, copies).joined(params)
        return empty.extended([param for param in range(len(params)) if param not in unplaced])

    def joined(self, params: Sequence[ParamSpec]) -> FlatLayout:
        """Returns the layout with more parameters, without slots."""
        return replace(self, params=(*self.params, *params), slots=(*self.slots, *(None for _ in params)))

    def extended(self, params: Collection[int]) -> FlatLayout:
        """Returns the layout with slots for these parameters too, in chunks and buckets of their own after the others."""
        return _Builder(self).add(params)

    @cached_property
    def families(self) -> tuple[Family, ...]:
        return (Family(self.num_shares, self.copies), *self.parted)

    def family_of(self, param: int) -> Family:
        return self.families[self.params[param].family]

    def shape_of(self, param: int, rank: int) -> tuple[int, ...]:
        """Returns the shape of the part of a parameter that a rank holds."""
        return self.params[param].shape_of(self.family_of(param).seat_of(rank).part)

    def share_of(self, bucket: int, rank: int) -> int:
        """Returns the number of the share that a rank has of a bucket."""
        return self.families[self.buckets[bucket].family].share_of(rank)

    @property
    def is_sharded(self) -> bool:
        """Returns True if ranks have shares of some parameters, and not all of each."""
        return any(family.num_shares > 1 for family in self.families)

    def pieces(self, param: int, rank: int) -> Iterator[Piece]:
        """Yields the pieces of a parameter in the rank's shares, in order."""
        slot = self.slots[param]
        if slot is None:
            return
        held = Span(slot.span.start, slot.span.start + math.prod(self.shape_of(param, rank)))
        for index in self.buckets_of(param):
            share = self.buckets[index].share(self.share_of(index, rank))
            overlap = held.overlap(share)
            if overlap is not None:
                for block in overlap.shifted(-share.start).cut(self._block_numel(index)):
                    yield Piece(param, index, block, block.shifted(share.start - slot.span.start))

    def blocks(self, bucket: int) -> tuple[Block, ...]:
        """Returns the blocks into which each share of a bucket is cut; one block if shares are not cut."""
        return self._blocks[bucket]

    def block_of(self, piece: Piece) -> Block:
        block_numel = self._block_numel(piece.bucket)
        return self._blocks[piece.bucket][0 if block_numel is None else piece.in_share.start // block_numel]

    def owner(self, param: int) -> int | None:
        """Returns the number of the share that has all of a parameter; None if it may lie in several shares, or has no slot."""
        slot = self.slots[param]
        if slot is None or not self.params[param].work:
            return None
        return next((slot.span.start // self.buckets[index].share_numel for index in self.buckets_of(param)), 0)

    def work_of(self, rank: int) -> int:
        """Returns the work of the updates of all tensors that a rank owns."""
        owned = (param for param in range(len(self.params)) if self.owner(param) == self.family_of(param).share_of(rank))
        return sum(self.params[param].work for param in owned)

    def stretches_of(self, param: int) -> tuple[Stretch, ...]:
        """Returns the stretch of a parameter that lies in each of its buckets, in order."""
        return self._stretches[param]

    def buckets_of(self, param: int) -> tuple[int, ...]:
        return self._buckets_of_param[param]

    def buckets_in(self, chunk: int) -> tuple[int, ...]:
        """Returns the buckets that a chunk is cut into, in order."""
        return self._buckets_in_chunk[chunk]

    @property
    def owned_numel(self) -> int:
        """The number of elements of all shares of one rank, padding included; the same on every rank."""
        return sum(bucket.share_numel for bucket in self.buckets)

    def _block_numel(self, bucket: int) -> int | None:
        return None if self.buckets[bucket].has_owners else self.block_numel

    @cached_property
    def digest(self) -> str:
        """A digest that is equal on two ranks exactly if their layouts are equal."""
        text = repr((self.params, self.slots, self.chunks, self.buckets, self.families))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def params_in(self) -> tuple[int, ...]:
        """The parameters that have elements in a bucket, as bits, by bucket. Its `params` may also have parameters without
        elements."""
        members = [0] * len(self.buckets)
        for param, stretches in enumerate(self._stretches):
            for index, *_ in stretches:
                members[index] |= 1 << param
        return tuple(members)

    @cached_property
    def stays_on_device(self) -> bool:
        """True if no state of any bucket lives elsewhere than on the device of the weights."""
        return not any(bucket.offloaded or bucket.away for bucket in self.buckets)

    def published_as_one(self, buckets: Sequence[int]) -> Iterator[list[int]]:
        """Yields these buckets in lists, each of which one collective gathers. Small neighbours share one, as a collective
        costs as much as some ten thousand elements."""
        together, room, last = list[int](), 0, None
        for index in buckets:
            bucket = self.buckets[index]
            kind = bucket.family, self.chunks[bucket.chunk].dtype
            num_bytes = bucket.span.numel * ITEM_BYTES[kind[1]]
            if together and (num_bytes > room or kind != last):
                yield together
                together = []
            if not together:
                room, last = _MOST_AS_ONE, kind
            together.append(index)
            room -= num_bytes
        if together:
            yield together

    @cached_property
    def gaps(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each bucket, from its start, that lie in no slot, or that are filled on some ranks only as parts are
        uneven."""
        return tuple(tuple(self._gaps_of(bucket)) for bucket in self.buckets)

    def _gaps_of(self, bucket: Bucket) -> Iterator[Span]:
        position = bucket.span.start
        slots = (self.slots[param] for param in bucket.params)
        filled = ((slot.span.start, self.params[slot.param].least_numel) for slot in slots if slot is not None)
        for start, numel in sorted(filled):
            overlap = Span(start, start + numel).overlap(bucket.span)
            if overlap is not None:
                if overlap.start > position:
                    yield Span(position, overlap.start).shifted(-bucket.span.start)
                position = overlap.stop
        if position < bucket.span.stop:
            yield Span(position, bucket.span.stop).shifted(-bucket.span.start)

    @cached_property
    def _blocks(self) -> tuple[tuple[Block, ...], ...]:
        wholes = (Span(0, bucket.share_numel) for bucket in self.buckets)
        return tuple(
            tuple(Block(index, span, span.stop == whole.stop) for span in whole.cut(self._block_numel(index)))
            for index, whole in enumerate(wholes)
        )

    @cached_property
    def _stretches(self) -> tuple[tuple[Stretch, ...], ...]:
        return tuple(tuple(self._overlaps(param)) for param in range(len(self.params)))

    def _overlaps(self, param: int) -> Iterator[Stretch]:
        slot = self.slots[param]
        for index in self.buckets_of(param):
            assert slot is not None
            bucket = self.buckets[index]
            overlap = slot.span.overlap(bucket.span)
            if overlap is not None:
                yield Stretch(index, overlap.shifted(-bucket.span.start), overlap.shifted(-slot.span.start))

    @cached_property
    def _buckets_in_chunk(self) -> tuple[tuple[int, ...], ...]:
        buckets: list[list[int]] = [[] for _ in self.chunks]
        for index, bucket in enumerate(self.buckets):
            buckets[bucket.chunk].append(index)
        return tuple(map(tuple, buckets))

    @cached_property
    def _buckets_of_param(self) -> tuple[tuple[int, ...], ...]:
        buckets: list[list[int]] = [[] for _ in self.params]
        for index, bucket in enumerate(self.buckets):
            for param in bucket.params:
                buckets[param].append(index)
        return tuple(tuple(indices) for indices in buckets)


class _ChunkKind(NamedTuple):
    """The properties that all parameters of a chunk have in common."""

    dtype: str
    family: int
    places: object  # where their states are wanted
    is_kept: bool
    have_owners: bool


class _Builder:
    """Lays out parameters: 1. those of a kind together, 2. in chunks, 3. which are cut into buckets, 4. each with a home."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._slots = list(layout.slots)
        self._chunks = list(layout.chunks)
        self._buckets: list[Bucket] = []

    def add(self, params: Collection[int]) -> FlatLayout:
        # 1. No chunk has parameters of two kinds, since it is allocated, summed and moved as one.
        kinds: dict[_ChunkKind, list[int]] = {}
        for param in sorted(params, reverse=True):
            spec = self._layout.params[param]
            kind = _ChunkKind(spec.dtype, spec.family, (spec.offload, spec.away), spec.kept, spec.work > 0)
            kinds.setdefault(kind, []).append(param)
        # 2 and 3. Each of the two ends in `_buckets`.
        for kind, members in kinds.items():
            if kind.have_owners:
                self._lay_owned(kind, members)
            else:
                self._lay(kind, members)
        # A bucket is full when backward reaches the last of its parameters, which is the first of them in the model's order.
        new = sorted(self._buckets, key=lambda bucket: -min(bucket.params))
        # 4. All parameters of a bucket ask for the same.
        specs = [self._layout.params[bucket.params[0]] for bucket in new]
        asked = [Asked(bucket.span.numel, spec.offload, spec.away) for bucket, spec in zip(new, specs, strict=True)]
        homes = assign_homes(asked)
        placed = (replace(bucket, offloaded=offloaded, away=away) for bucket, (offloaded, away) in zip(new, homes, strict=True))
        buckets = (*self._layout.buckets, *placed)
        return replace(self._layout, slots=tuple(self._slots), chunks=tuple(self._chunks), buckets=buckets)

    def _lay(self, kind: _ChunkKind, params: Sequence[int]) -> None:
        """Lays parameters in as few chunks as possible, with the longest of these as short as possible.

        Filling each chunk before the next begins gives the fewest: four parameters of 8 elements make chunks of 24 and 8 with a
        limit of 28. The least limit that still gives as few is searched for, here 16, which makes two of 16.
        """
        starts, ends = [0], list[int]()
        for param in params:
            ends.append(starts[-1] + self._layout.params[param].numel)
            starts.append(round_up(ends[-1], self._align(kind)))

        def chunks(most: int) -> list[Span]:
            spans, first = list[Span](), 0
            while first < len(params):
                spans.append(Span(first, max(first + 1, bisect_right(ends, starts[first] + most))))
                first = spans[-1].stop
            return spans

        limit = min(self._bucket_numel(kind), ends[-1])
        fewest = len(chunks(limit))
        least = bisect_left(range(limit), True, key=lambda most: len(chunks(most)) <= fewest)
        for span in chunks(least):
            slots = [Span(starts[index], ends[index]).shifted(-starts[span.start]) for index in range(span.start, span.stop)]
            self._close(kind, params[span.start : span.stop], slots)

    @cached_property
    def _loads(self) -> list[list[int]]:
        """The work of the tensors that each share owns, by family. Parameters without an owner add nothing."""
        loads = [[0] * family.num_shares for family in self._layout.families]
        for param, spec in enumerate(self._layout.params):
            owner, of_family = self._layout.owner(param), loads[spec.family]
            if owner is not None and owner < len(of_family):  # an empty tensor may begin behind the last share
                of_family[owner] += spec.work
        return loads

    def _lay_owned(self, kind: _ChunkKind, params: Sequence[int]) -> None:
        """Lays parameters that have owners, each chunk of them in one bucket."""
        specs, align, loads = self._layout.params, self._align(kind), self._loads[kind.family]
        tensors = [Tensor(param, round_up(specs[param].numel, align), specs[param].work) for param in params]
        for shelf in stacked(shelves_of(tensors, loads), self._bucket_numel(kind)):
            starts, numel = starts_in(shelf), height_of(shelf) * len(shelf)
            spans = [Span(start, start + specs[param].numel) for param, start in starts.items()]
            self._add_chunk(kind, numel, list(starts), spans)
            if numel:
                chunk, span = len(self._chunks) - 1, Span(0, numel)
                self._buckets.append(Bucket(chunk, span, tuple(starts), len(shelf), has_owners=True, family=kind.family))
            loads[:] = [load + work_of(region) for load, region in zip(loads, shelf, strict=True)]

    def _close(self, kind: _ChunkKind, params: Sequence[int], slots: Sequence[Span]) -> None:
        """Ends a chunk, which is padded to divide evenly among the ranks, and cuts it into buckets."""
        num_shares = self._layout.families[kind.family].num_shares
        index, unit = len(self._chunks), num_shares * self._align(kind)
        numel = round_up(slots[-1].stop, unit)
        self._add_chunk(kind, numel, params, slots)
        num_buckets = max(1, -(-numel // round_up(self._bucket_numel(kind), unit)))
        step = round_up(-(-numel // num_buckets), unit)
        for start in range(0, numel, max(1, step)):
            span = Span(start, min(start + step, numel))
            self._buckets.append(Bucket(index, span, tuple(params), num_shares, family=kind.family))

    def _add_chunk(self, kind: _ChunkKind, numel: int, params: Sequence[int], slots: Sequence[Span]) -> None:
        for param, span in zip(params, slots, strict=True):
            self._slots[param] = Slot(param, len(self._chunks), span)
        self._chunks.append(Chunk(kind.dtype, numel, tuple(params), kind.is_kept, kind.family))

    def _align(self, kind: _ChunkKind) -> int:
        return self._layout.align_bytes // ITEM_BYTES[kind.dtype]

    def _bucket_numel(self, kind: _ChunkKind) -> int:
        return max(1, self._layout.bucket_bytes // ITEM_BYTES[kind.dtype])


# shapes and numbers ---------------------------------------------------------------------------------------------------


def round_up(number: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """Returns a shape with another length along a dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])


def set_bits(mask: int) -> list[int]:
    """Returns the positions of the ones in a mask, ascending. They are read off its digits: each arithmetic operation on a mask
    of thousands of bits would take time for all of its bits."""
    return [position for position, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]
