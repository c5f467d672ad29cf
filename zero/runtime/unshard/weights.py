"""Weights in shares: this rank keeps its own, and fetches those of others when an operator needs them.

The life of a weight, by the calls that come from outside:

    1. `prepare`, `fill`              the values of a chunk come whole, once, and this rank keeps its share of each bucket
    2. `attach`                       the parameter stays the object that it is, with its shape, and has no memory from here on
       an operator is given it        not by this file: the parameter asks the cache of gathered chunks for its own, which
                                      is filled by `ShardedChunk.fetch` in exchange.py, and freed when room is needed
    3. `begin_step`, or `take_edits`  nobody reads the shares of the last step any more
    4. `share`                        the step writes this rank's shares
    5. `end_step`                     they are the new weights, which ranks fetch at their next use
    6. `detach`, `forget`, `close`    the parameter has memory of its own again

Of a chunk with one bucket of 8 elements the first of two ranks keeps elements 0 to 3 and the second 4 to 7. Between `end_step`
and the next `begin_step` no memory is written that another rank may be reading: what the user edits is a new version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import partial

import torch

from zero.comm.one_answer import run_on_all
from zero.memory.flatten import Flattener
from zero.memory.formats import DTYPES, ParamFormat, dtype_name
from zero.memory.homes.home import Home
from zero.memory.homes.registry import Move, Moved
from zero.memory.shard import LayoutRef
from zero.memory.weights import FlatBuffer, Place
from zero.plan.budget import weights_place
from zero.plan.homes import Away
from zero.plan.layout import FlatLayout, ParamSpec, PartSpec, Span
from zero.runtime.params.absent import Absent, make_absent_param
from zero.runtime.params.swap import become_plain, swap
from zero.runtime.params.table import Params
from zero.runtime.unshard.exchange import ShardedChunk, Share, ShareExchange
from zero.runtime.unshard.memory import ShareMemory
from zero.runtime.unshard.schedule import Schedule


class ShardedWeights:
    """Each chunk is kept whole by all ranks of its family, or each of them has exactly its share of every bucket.

    The weights of stage 3. It implements `Weights` in zero/memory/weights.py, where each public method is described;
    `FlatBuffer` there is the simple one, for stages 0 to 2: read that first.

    A share is on the device, on the host if its bucket is offloaded, or on a disk. Kept whole are small parameters, as
    `keep_whole_numel` says. Frozen weights have a layout of their own, and neither masters nor gradients.
    """

    def __init__(
        self, layout_ref: LayoutRef, params: Params, exchanges: Sequence[ShareExchange], first_number: int = 0
    ) -> None:
        self.layout_ref = layout_ref
        self.chunks: dict[int, ShardedChunk] = {}
        self._kept = FlatBuffer(layout_ref)  # the chunks that all ranks keep whole
        self._frozen: ShardedWeights | None = None
        self._is_frozen_written = False  # the running step has written frozen weights
        self._params = params
        # The number of the first share: those of trained weights are even, those of frozen ones odd.
        self._first_number = first_number
        self.exchange = exchanges[0]
        self._exchanges = exchanges  # by family
        self._unwritten: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # by name: a plain tensor, and its first version
        self._unwritten_buffers: Callable[[], list[str]] = list  # returns their names when a step asks
        self._shares: dict[int, Share] = {}  # by bucket
        self._memories = [ShareMemory(layout_ref, exchange) for exchange in exchanges]

    # chunks ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        chunks = self.layout_ref.layout.chunks
        self._settle()
        coming = [chunk for chunk in range(self.num_chunks, len(chunks)) if not chunks[chunk].is_kept]
        for family, memory in enumerate(self._memories):
            memory.prepare([chunk for chunk in coming if chunks[chunk].family == family])

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, given: bool = True) -> bool:
        if self.layout_ref.layout.chunks[chunk].is_kept:
            return self._kept.fill(chunk, source, device, given)
        layout, dtype = self.layout_ref.layout, DTYPES[self.layout_ref.layout.chunks[chunk].dtype]
        family = layout.chunks[chunk].family
        exchange, memory = self._exchanges[family], self._memories[family]
        whole = memory.take_whole(chunk)  # the chunk's memory, if all ranks see it or this rank is alone; else None
        with torch.inference_mode(False):  # steps will change it
            for index in layout.buckets_in(chunk):
                bucket = layout.buckets[index]
                span = bucket.share(exchange.group.inner.rank)  # all that this rank keeps of `source`
                values, lives_on = memory.take_share(index, whole)
                if not source.is_meta:  # otherwise the share gets its values later
                    values.copy_(source[span.start : span.stop])
                self._shares[index] = exchange.add(self._first_number + 2 * index, bucket.span, span, values, lives_on)
        shares = [self._shares[index] for index in layout.buckets_in(chunk)]
        self.chunks[chunk] = ShardedChunk(exchange, layout.chunks[chunk].numel, dtype, shares, whole)
        return False

    def forget(self, chunk: int = 0) -> None:
        for each in range(chunk, len(self.layout_ref.layout.chunks)):
            for index in self.layout_ref.layout.buckets_in(each):
                if index in self._shares:
                    self._exchange_of(index).remove(self._shares.pop(index))
        for memory in self._memories:
            memory.forget()
        self.exchange.cache.forget([self.chunks.pop(each) for each in list(self.chunks) if each >= chunk])
        self._kept.forget(chunk)

    def _exchange_of(self, bucket: int) -> ShareExchange:
        return self._exchanges[self.layout_ref.layout.buckets[bucket].family]

    def _settle(self) -> None:
        for exchange in self._exchanges:
            exchange.settle()

    # parameters --------------------------------------------------------------------------------------------------

    def attach(self, param: int, tensor: torch.nn.Parameter, param_format: ParamFormat) -> None:
        slot, name = self.layout_ref.layout.slots[param], self._params.names[param]
        assert slot is not None
        if self.layout_ref.layout.chunks[slot.chunk].is_kept:
            is_empty = tensor.is_meta and tensor.numel()
            if tensor.is_meta:
                become_plain(tensor, torch.empty_like(tensor, device=self.exchange.device))
            self._kept.attach(param, tensor, param_format)
            if is_empty:
                self.expect_values({name: tensor})
            return
        chunk = self.chunks[slot.chunk]
        shadow = param_format.unflatten(torch.empty(param_format.numel, dtype=chunk.dtype, device="meta"))
        if tensor.is_meta and tensor.numel():
            chunk.unwritten[name] = slot.span
        swap(tensor, make_absent_param(chunk, name, slot.span.start, shadow, self.exchange.device, tensor.requires_grad))

    def detach(self, tensor: torch.nn.Parameter, values: torch.Tensor) -> None:
        if isinstance(tensor, Absent):
            become_plain(tensor, values.to("meta") if tensor.label in tensor.in_chunk.unwritten else values)
        elif any(each is tensor for each in self._plain_unwritten().values()):
            become_plain(tensor, values.to("meta"))
        else:
            tensor.data = values

    def memory_of(self, param: int) -> torch.Tensor | None:
        slot = self.layout_ref.layout.slots[param]
        is_kept = slot is not None and self.layout_ref.layout.chunks[slot.chunk].is_kept
        return self._kept.memory_of(param) if is_kept else None

    # a step ------------------------------------------------------------------------------------------------------

    def share(self, bucket: int, rank: int) -> torch.Tensor:
        if bucket not in self._shares:
            return self._kept.share(bucket, rank)
        assert self.layout_ref.layout.share_of(bucket, rank) == self._exchange_of(bucket).group.inner.rank
        return self._shares[bucket].memory

    def to_publish(self, bucket: int) -> torch.Tensor | None:
        return None if bucket in self._shares else self._kept.to_publish(bucket)

    def renewed(self) -> Sequence[int]:
        renewed = [bucket for bucket, share in self._shares.items() if share.is_renewed]
        for bucket in renewed:
            self._shares[bucket].is_renewed = False
        return renewed

    def check_edits(self, written: Collection[torch.Tensor]) -> None:
        kept: dict[int, list[Span]] = {}
        for weights in (self, *([self._frozen] if self._frozen is not None else ())):
            for slot in weights.layout_ref.layout.slots:
                if slot is not None and slot.chunk in weights.chunks and weights._params.tensors[slot.param] not in written:
                    kept.setdefault(weights.chunks[slot.chunk].number, []).append(slot.span)
        for exchange in self._exchanges:
            exchange.check_edits(kept)

    def schedules(self) -> list[Schedule]:
        return [exchange.schedule for exchange in self._exchanges if exchange.schedule is not None]

    def take_edits(self) -> None:
        self._settle()
        for exchange in self._exchanges:
            exchange.take_edits()

    def begin_step(self) -> None:
        self._settle()
        for exchange in self._exchanges:
            exchange.begin_step()

    def end_step(self) -> None:
        written = [self] if self._frozen is None or not self._is_frozen_written else [self, self._frozen]
        self._is_frozen_written = False
        for exchange in self._exchanges:
            exchange.end_step([share for each in written for share in each._shares_of(exchange)])

    def _shares_of(self, exchange: ShareExchange) -> Iterator[Share]:
        return (share for bucket, share in self._shares.items() if self._exchange_of(bucket) is exchange)

    # values that have yet to come --------------------------------------------------------------------------------

    def expect_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._unwritten |= {name: (weakref.ref(tensor), tensor._version) for name, tensor in tensors.items()}

    def expect_buffers(self, unwritten: Callable[[], list[str]]) -> None:
        self._unwritten_buffers = unwritten

    def note_written(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if isinstance(tensor, Absent):
                tensor.in_chunk.unwritten.pop(tensor.label, None)
        for name in [name for name, each in self._plain_unwritten().items() if any(each is tensor for tensor in tensors)]:
            del self._unwritten[name]

    def _plain_unwritten(self) -> dict[str, torch.Tensor]:
        """Returns the plain tensors that have no values yet, by name."""
        pairs = {name: (made(), version) for name, (made, version) in self._unwritten.items()}
        empty = {name: tensor for name, (tensor, version) in pairs.items() if tensor is not None and tensor._version == version}
        self._unwritten = {name: self._unwritten[name] for name in empty}
        return empty

    def check_written(self) -> None:
        self._check_absent()
        chunks = [*(self._frozen.chunks.values() if self._frozen is not None else ()), *self.chunks.values()]
        names = [name for chunk in reversed(chunks) for name in reversed(chunk.unwritten)]
        names += [*self._plain_unwritten(), *self._unwritten_buffers()]
        if names:
            raise RuntimeError(
                f"Cannot step: nobody has written to {', '.join(names[:5])} ({len(names)} such parameters and buffers), which "
                "were on the meta device. Initialise them, as with reset_parameters, or load them."
            )

    def _check_absent(self) -> None:
        """Refuses parameters that are tensors of their own by now: their values would not be trained."""
        layout, params = self.layout_ref.layout, self._params
        if self.exchange.cache.num_plain:
            return  # gathered() makes its parameters absent again itself
        for slot in layout.slots:
            if slot is not None and slot.chunk in self.chunks and not isinstance(params.tensors[slot.param], Absent):
                raise RuntimeError(
                    f"Cannot step: {params.names[slot.param]} was exchanged for a tensor of its own, as by "
                    "torch.utils.swap_tensors, and its weights are in shares. Write to it in place or by .data, or close() the "
                    "optimizer first."
                )

    # frozen parameters -------------------------------------------------------------------------------------------

    def take_frozen(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.nn.Parameter],
        place: Place,
        offload: float,
        away: tuple[Away, ...],
        awaited: Container[torch.nn.Parameter],
        part_specs: Sequence[PartSpec],
    ) -> None:
        formats = [ParamFormat.of(tensor) for tensor in tensors]
        specs = [
            ParamSpec(name, each.longest(tensor.shape), dtype_name(tensor.dtype), 0, offload, away=away, **each._asdict())
            for name, tensor, each in zip(names, tensors, part_specs, strict=True)
        ]
        layout = self.layout_ref.layout
        laid_out = FlatLayout.build(specs, layout.num_shares, layout.bucket_bytes, layout.align_bytes, parted=layout.parted)
        self._frozen = frozen = ShardedWeights(LayoutRef(laid_out), Params(tensors, names), self._exchanges, 1)
        frozen.prepare()
        flattener = Flattener(frozen, tensors, formats, place)

        def move(chunk: int) -> None:
            nothing = flattener.nothing(chunk, awaited)
            source = flattener.read(chunk) if nothing is None else nothing
            flattener.write(chunk, source)
            if nothing is None:
                flattener.recycle(source)

        for chunk in range(len(laid_out.chunks)):
            try:
                run_on_all(self.exchange.group, partial(move, chunk))
            except BaseException:
                frozen.forget(chunk)
                flattener.rollback()
                raise
            flattener.commit()

    def has_frozen(self, tensor: torch.nn.Parameter) -> bool:
        return self._frozen is not None and isinstance(tensor, Absent) and tensor.in_chunk in self._frozen.chunks.values()

    def frozen(self) -> list[torch.nn.Parameter]:
        return [] if self._frozen is None else list(filter(self.has_frozen, self._frozen._params.tensors))

    def frozen_pieces(self) -> Iterator[tuple[torch.nn.Parameter, ParamFormat, list[tuple[Span, torch.Tensor]]]]:
        frozen = self._frozen
        if frozen is not None:
            self._is_frozen_written = True
            rank, layout = self.exchange.group.rank, frozen.layout_ref.layout
            for param, tensor in enumerate(frozen._params.tensors):
                if self.has_frozen(tensor):
                    pieces = [
                        (piece.in_param, frozen.share(piece.bucket, rank)[piece.in_share.start : piece.in_share.stop])
                        for piece in layout.pieces(param, rank)
                    ]
                    yield tensor, ParamFormat.of(tensor), pieces

    def return_frozen(self) -> None:
        if self._frozen is not None:
            for tensor in self.frozen():
                self._frozen.detach(tensor, tensor.data.clone(memory_format=torch.preserve_format))
            self._frozen.forget()
            self._frozen = None

    # other homes -------------------------------------------------------------------------------------------------

    @property
    def whole_chunks(self) -> dict[int, torch.Tensor]:
        return self._kept.whole_chunks

    def share_moves(self, moved: Moved) -> Iterator[Move]:
        for chunk in self.chunks:
            on_device = [index for index in self.layout_ref.layout.buckets_in(chunk) if not self._shares[index].memory.is_cpu]
            if on_device and self._exchange_of(on_device[0]).is_alone and self.chunks[chunk].common is not None:
                yield partial(self._move_all, chunk, moved)
            else:
                yield from (partial(self._move_share, index, moved) for index in on_device)
        if self._frozen is not None:
            yield from self._frozen.share_moves(moved)

    def _move_share(self, bucket: int, moved: Moved, home: Home) -> None:
        """Moves a share to a home. On the host it needs no memory of its own if other ranks read it there anyway."""
        share, exchange = self._shares[bucket], self._exchange_of(bucket)
        exchange.cache.release_memory()
        served = exchange.versions.newest(share.number)
        if exchange.is_alone:
            served = moved(served, home)
            exchange.versions.move(share.number, served)
        share.is_served = home.device == served.device
        share.memory = served if share.is_served else moved(served, home)
        share.is_renewed = True

    def _move_all(self, chunk: int, moved: Moved, home: Home) -> None:
        """Moves all shares of a chunk to a home, for a rank alone: they stay side by side."""
        self.exchange.cache.release_memory()
        common = self.chunks[chunk].common
        assert common is not None
        common = moved(common, home)
        self.chunks[chunk].move(common)
        for index in self.layout_ref.layout.buckets_in(chunk):
            share = self._shares[index]
            share.memory, share.is_renewed = common[share.span.start : share.span.stop], True
            self._exchange_of(index).versions.move(share.number, share.memory)

    # what is kept ------------------------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        return len(self.chunks) + self._kept.num_chunks

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self._kept.memory()
        for bucket, share in self._shares.items():
            if self._is_on_disk(bucket):
                continue
            yield share.memory
            if not share.is_served:
                yield self._exchange_of(bucket).versions.newest(share.number)
        if self._frozen is not None:
            yield from self._frozen.memory()

    @property
    def num_disk_bytes(self) -> int:
        num_bytes = sum(share.memory.nbytes for bucket, share in self._shares.items() if self._is_on_disk(bucket))
        return num_bytes + (0 if self._frozen is None else self._frozen.num_disk_bytes)

    def _is_on_disk(self, bucket: int) -> bool:
        layout = self.layout_ref.layout
        return weights_place(layout, layout.buckets[bucket].chunk) is not None

    def room(self) -> float:
        return self.exchange.cache.budget_bytes - self.exchange.cache.num_bytes

    @property
    def num_fetched_bytes(self) -> int:
        return sum(exchange.num_fetched_bytes for exchange in self._exchanges)

    @property
    def are_read_by_others(self) -> bool:
        return any(not exchange.is_alone for exchange in self._exchanges)

    # the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._frozen is not None:
            self._frozen.forget()
        for exchange in self._exchanges:
            exchange.close()
        self.forget()

    def reconnect(self) -> None:
        for exchange in self._exchanges:
            exchange.reconnect()
