"""Weights in shares: this rank keeps its own, and fetches those of others when an operator needs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from zero.comm.exchange import run_on_all
from zero.memory.flatten import Flattener
from zero.memory.formats import DTYPES, ParamFormat, dtype_name
from zero.memory.place import Place
from zero.memory.shard import LayoutRef
from zero.plan.layout import FlatLayout, ParamSpec
from zero.runtime.params.absent import Absent, make_absent_param
from zero.runtime.params.swap import become_absent, become_plain
from zero.runtime.params.table import Params
from zero.runtime.unshard.exchange import ShardedChunk, Share, ShareExchange


class ShardedWeights:
    """The weights of a layout on all ranks: this rank has its share of each bucket, on the host where the bucket is offloaded.
    Frozen weights have a layout of their own, and neither masters nor gradients."""

    def __init__(self, layout_ref: LayoutRef, params: Params, exchange: ShareExchange, first_number: int = 0) -> None:
        self.layout_ref = layout_ref
        self.chunks: list[ShardedChunk] = []
        self._frozen: ShardedWeights | None = None
        self._params = params
        self._first_number = first_number  # of shares; every second one is of the frozen weights
        self.exchange = exchange
        self._shares: dict[int, Share] = {}  # by bucket
        self._common: dict[int, torch.Tensor] = {}  # memory of chunks that all ranks see

    # what is kept ------------------------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def num_bytes(self) -> int:
        return sum(share.memory.nbytes for share in self._shares.values()) + (self._frozen.num_bytes if self._frozen else 0)

    def prepare(self) -> None:
        layout, exchange = self.layout_ref.layout, self.exchange
        new = range(self.num_chunks, len(layout.chunks))
        sizes = [layout.chunks[chunk].numel * DTYPES[layout.chunks[chunk].dtype].itemsize for chunk in new]
        shared = exchange.group.shared_host_memory
        if shared is not None:
            self._common.update(zip(new, shared.common(sizes), strict=True))
        elif exchange.group.size == 1 and exchange.device.type == "cpu":
            self._common.update((chunk, torch.empty(size, dtype=torch.uint8)) for chunk, size in zip(new, sizes, strict=True))

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, given: bool = True) -> bool:
        layout, dtype = self.layout_ref.layout, DTYPES[self.layout_ref.layout.chunks[chunk].dtype]
        common = self._common[chunk].view(dtype) if chunk in self._common else None
        with torch.inference_mode(False):  # steps will change it
            for index in layout.buckets_in(chunk):
                bucket = layout.buckets[index]
                own = bucket.share(self.exchange.group.rank)
                values = source[own.start : own.stop].to(device="cpu", dtype=dtype, copy=True)
                if common is not None:
                    values = common[own.start : own.stop].copy_(values)
                number = self._first_number + 2 * index
                self._shares[index] = self.exchange.add(number, bucket.span, own, values, bucket.offloaded)
        shares = [self._shares[index] for index in layout.buckets_in(chunk)]
        self.chunks.append(ShardedChunk(self.exchange, layout.chunks[chunk].numel, dtype, shares, common))
        return False

    def forget(self, chunk: int = 0) -> None:
        for each in range(chunk, len(self.layout_ref.layout.chunks)):
            for index in self.layout_ref.layout.buckets_in(each):
                if index in self._shares:
                    self.exchange.remove(self._shares.pop(index))
        self._common = {each: memory for each, memory in self._common.items() if each < chunk}
        self.exchange.cache.forget(self.chunks[chunk:])
        del self.chunks[chunk:]

    # parameters --------------------------------------------------------------------------------------------------

    def attach(self, param: int, tensor: torch.nn.Parameter, param_format: ParamFormat) -> None:
        slot = self.layout_ref.layout.slots[param]
        assert slot is not None
        chunk = self.chunks[slot.chunk]
        line = torch.empty(chunk.numel, dtype=chunk.dtype, device="meta")
        shadow = param_format.unflatten(line[slot.span.start : slot.span.stop])
        device, name = self.exchange.device, self._params.names[param]
        become_absent(tensor, make_absent_param(chunk, param, name, shadow, device, tensor.requires_grad))

    def detach(self, tensor: torch.nn.Parameter, values: torch.Tensor) -> None:
        if isinstance(tensor, Absent):
            become_plain(tensor, values)
        else:
            tensor.data = values

    def memory_of(self, param: int) -> None:
        return None

    # frozen parameters -------------------------------------------------------------------------------------------

    def take_frozen(self, names: Sequence[str], tensors: Sequence[torch.nn.Parameter], place: Place, offload: float) -> None:
        formats = [ParamFormat.of(tensor) for tensor in tensors]
        shapes, dtypes = [tuple(tensor.shape) for tensor in tensors], [dtype_name(tensor.dtype) for tensor in tensors]
        specs = [ParamSpec(*each, offload=offload) for each in zip(names, shapes, dtypes, strict=True)]
        layout = self.layout_ref.layout
        laid_out = FlatLayout.build(specs, layout.num_shares, layout.bucket_bytes, layout.align_bytes)
        self._frozen = frozen = ShardedWeights(LayoutRef(laid_out), Params(tensors, names), self.exchange, 1)
        frozen.prepare()
        flattener = Flattener(frozen, tensors, formats, place)

        def move(chunk: int) -> None:
            source = flattener.read(chunk)
            flattener.write(chunk, source)
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
        return self._frozen is not None and isinstance(tensor, Absent) and tensor.in_chunk in self._frozen.chunks

    def return_frozen(self) -> None:
        if self._frozen is not None:
            for tensor in filter(self.has_frozen, self._frozen._params.tensors):
                become_plain(tensor, tensor.data.clone(memory_format=torch.preserve_format))
            self._frozen.forget()
            self._frozen = None

    # a step ------------------------------------------------------------------------------------------------------

    def share(self, bucket: int, rank: int) -> torch.Tensor:
        assert rank == self.exchange.group.rank
        return self._shares[bucket].memory

    def to_publish(self, bucket: int) -> torch.Tensor | None:
        return None

    def renewed(self) -> Sequence[int]:
        renewed = [bucket for bucket, share in self._shares.items() if share.is_renewed]
        for bucket in renewed:
            self._shares[bucket].is_renewed = False
        return renewed

    def begin_step(self) -> None:
        self.exchange.begin_step()

    def end_step(self) -> None:
        self.exchange.end_step(list(self._shares.values()))

    def close(self) -> None:
        self.exchange.close()

    def reconnect(self) -> None:
        self.exchange.reconnect()
