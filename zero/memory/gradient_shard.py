"""This rank's shares of the gradients, which are added up as they come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import accelerators
from accelerators.streams import Stream
from zero.memory.deferred_sum import DeferredSum
from zero.memory.formats import by_device, sum_dtype
from zero.memory.gradient_stream import GradientStream
from zero.memory.homes.disk import is_absent
from zero.memory.homes.home import Home, Transfer
from zero.memory.homes.registry import Homes
from zero.memory.norms import on_host
from zero.memory.shard import LayoutRef, Shard, weakly
from zero.plan.layout import Piece

NEEDED = "weights", "gradients"  # the states that have to be in their homes for anything that is done with gradients


class GradientShard(Shard):
    """A sum is read only once everything that was added to it has arrived, and with all factors that were given since.

    What is added to a share is sent to its home while other work goes on. Host memory is kept for the next window, since the
    system would have to clear every page of it again.

    [Note: partial sums]
    If replicas have the same share (see [Note: replicas] in zero/comm/levels.py), a sum is partial while it is one of the
    inner group alone. What was settled in that share before is put aside meanwhile: the sum over replicas must not take it in
    again.
    """

    def __init__(self, layout_ref: LayoutRef, homes: Homes) -> None:
        super().__init__(layout_ref, homes)
        self.deferred: dict[int, DeferredSum] = {}  # see [Note: deferred sums] in zero/memory/deferred_sum.py
        self._wanted = [True, False]  # something besides the step needed a sum: in the last window, and in this one
        self._kept: dict[int, torch.Tensor] = {}  # by bucket: host memory of the last window
        # By bucket: the factor that its share is multiplied by at the next reading.
        self._deferred_scales: dict[int, float] = {}
        # By bucket: pieces that are multiplied then, each with the position of its factor in `_numbers`.
        self._products: dict[int, list[tuple[Piece, int]]] = {}
        # Copies of factors that are on a device, in the order in which they came.
        self._numbers: list[tuple[torch.Tensor, Stream]] = []
        self._read: list[float] = []  # the factors that have come to the host
        self.partial: dict[int, torch.Tensor | None] = {}  # by bucket whose sum is partial: the sum that was put aside
        self._home_apart = partial(_home_apart, layout_ref, homes)
        self.stream = GradientStream(self.shares, self._home_apart, weakly(self.allocate), homes.host.catch_up)

    def share(self, bucket: int) -> torch.Tensor:
        """Returns the share of a bucket: zeros if nothing was added to it yet."""
        self._wanted[1] = True
        return self.sum_of(bucket, writes=True)

    def sum_of(self, bucket: int, writes: bool = False) -> torch.Tensor:
        """Returns the share for the step, which does not count as a use of the sum. What is written to it is kept if
        `writes`."""
        self.check_resident()
        self.home_of(bucket).catch_up()
        self.materialize(bucket)
        if bucket not in self.shares:
            self._make(bucket).zero_()
        self.stream.use(bucket, writes)
        self._apply_deferred_scale(bucket)
        return self.shares[bucket]

    def _make(self, bucket: int) -> torch.Tensor:
        """Gives a share memory, with anything in it."""
        self.stream.make_room(bucket)  # done before it is allocated: otherwise one sum more would be in memory
        memory = self.shares[bucket] = self.allocate(bucket)
        self.stream.begin(bucket)
        return memory

    def add(self, bucket: int, values: torch.Tensor, factor: float) -> Transfer:
        """Adds `factor * values`, which may be changed. The transfer that is returned still reads them."""
        target, fresh = self.target(bucket)
        return self.home_of(bucket).add(values, factor, target, fresh)

    def target(self, bucket: int) -> tuple[torch.Tensor, bool]:
        """Returns the memory that values of a bucket are added to, and whether it is fresh: then they are written there."""
        self.check_resident()
        self._apply_deferred_scale(bucket)
        self.materialize(bucket)
        fresh = bucket not in self.shares
        if fresh:
            self._make(bucket)
        self.stream.use(bucket, writes=True)
        self._wanted[1] |= not fresh
        return self.shares[bucket], fresh

    def begin_partial(self, bucket: int) -> None:
        """Puts a share aside until `end_partial`: sums that are added meanwhile are those of the inner group alone."""
        if bucket not in self.partial:
            self.partial[bucket] = self._take_out(bucket) if bucket in self else None

    def end_partial(self, bucket: int) -> torch.Tensor:
        """Returns the sums that were added since `begin_partial`, and makes the share what it was then."""
        added, before = self._take_out(bucket), self.partial.pop(bucket)
        if before is not None:
            self.sum_of(bucket, writes=True).copy_(before)
        return added

    def reuse(self, bucket: int, added: torch.Tensor) -> None:
        """Takes back what `end_partial` returned, as memory for the next sum."""
        if added.is_cpu and self.home_of(bucket).device == added.device and not self.stream.has(bucket):
            self._kept[bucket] = added

    def add_across(self, bucket: int, values: torch.Tensor, factor: float) -> None:
        """Adds `factor` times a sum over replicas to the share: to the one that was put aside, while there is a partial sum."""
        if bucket not in self.partial:
            self.add(bucket, values, factor).finish()
            return
        more, before = torch.mul(values, factor), self.partial[bucket]
        self.partial[bucket] = more if before is None else before.add_(more.to(before.device))

    def zero(self, piece: Piece) -> None:
        self.piece(piece).zero_()
        before = self.partial.get(piece.bucket)
        if before is not None:
            before[piece.in_share.start : piece.in_share.stop].zero_()

    def _take_out(self, bucket: int) -> torch.Tensor:
        """Returns a sum, and leaves none, or zeros if it lives on disk."""
        share = self.sum_of(bucket, writes=True)
        if not self.stream.has(bucket):
            return self.shares.pop(bucket)
        share, _ = share.clone(), share.zero_()
        return share

    def __contains__(self, bucket: int) -> bool:
        """Returns whether anything was added to a share in this window."""
        return bucket in self.shares or bucket in self.deferred

    def addends(self, bucket: int) -> tuple[Sequence[torch.Tensor], tuple[float, ...]]:
        """Returns the rows that a share is the sum of, and the factors that the sum is multiplied by, one after the other."""
        if bucket not in self.deferred:
            return [self.sum_of(bucket)], ()
        self.check_resident()
        return self.deferred[bucket].addends, self.deferred[bucket].factors

    def can_defer(self, bucket: int) -> bool:
        """Returns whether the sum of a bucket may be deferred: it is not begun, not on disk, and nothing but the step needs
        it."""
        return bucket not in self and not any(self._wanted) and not self.stream.has(bucket)

    def defer(self, bucket: int, rows: DeferredSum) -> None:
        self.deferred[bucket] = rows
        if self._kept.pop(bucket, None) is not None:
            accelerators.of(self.device).empty_cache()  # the rows take the place of that memory

    def materialize(self, bucket: int) -> None:
        """Computes the deferred sum of a bucket."""
        if bucket in self.deferred:
            share = self.allocate(bucket)
            self.deferred[bucket].add_into(share)
            self.shares[bucket] = share
            self.deferred.pop(bucket).release()

    def defer_scale(self, bucket: int, factor: float) -> None:
        """Multiplies a share when it is next read; never, if it is cleared before."""
        if bucket in self.deferred:
            self.deferred[bucket].factors += (factor,)
            return
        if self.stream.has(bucket):
            self.stream.multiply(bucket, factor)
            return
        self._deferred_scales[bucket] = self._deferred_scales.get(bucket, 1.0) * factor

    def can_defer_product(self, piece: Piece, number: Any) -> bool:
        """Returns whether a piece is on the host, and a number that it is to be multiplied by on a device."""
        is_there = isinstance(number, torch.Tensor) and number.dim() == 0 and not number.is_cpu and number.is_floating_point()
        is_in_memory = piece.bucket in self.shares and not self.stream.has(piece.bucket)
        return is_there and is_in_memory and self.shares[piece.bucket].is_cpu

    def defer_product(self, piece: Piece, number: torch.Tensor) -> None:
        """Multiplies a piece when its share is next read."""
        accelerator = accelerators.of(number.device)
        copy, stream = number.detach().to(accelerator.norm_dtype(), copy=True), accelerator.current_stream(number.device.index)
        if piece.bucket not in self._products:
            self._apply_deferred_scale(piece.bucket)  # the scale came before this product
        self._products.setdefault(piece.bucket, []).append((piece, len(self._numbers)))
        self._numbers.append((copy.view(1), stream))

    def _apply_products(self, bucket: int) -> None:
        """Multiplies the pieces of a share. All numbers come to the host in one transfer."""
        unread = self._numbers[len(self._read) :]
        for number, stream in unread:
            current = accelerators.of(number.device).current_stream(number.device.index)
            if current != stream:  # a backward may read them in a stream that the caller has not ordered behind the product
                current.wait_stream(stream)
        self._read += itertools.chain.from_iterable(on_host([number for number, _ in unread]))
        self.home_of(bucket).catch_up()
        for piece, index in self._products.pop(bucket):
            self.shares[bucket][piece.in_share.start : piece.in_share.stop].mul_(self._read[index])

    def _apply_deferred_scale(self, bucket: int) -> None:
        if bucket in self._products:
            self._apply_products(bucket)
        if bucket in self._deferred_scales:
            self.shares[bucket].mul_(self._deferred_scales.pop(bucket))

    def check_resident(self) -> None:
        """Raises while states that gradients need are on the host."""
        self.homes.check_resident("use gradients", NEEDED)

    def multiply(self, factor: float) -> None:
        for rows in self.deferred.values():
            rows.factors += (factor,)
        if self.shares and factor != 1.0:
            for indices in by_device(shares := self.present()):
                torch._foreach_mul_([shares[index] for index in indices], factor)
            for bucket in filter(self.stream.has, self.shares):
                self.stream.multiply(bucket, factor)

    def present(self) -> list[torch.Tensor]:
        """Returns the shares in memory whose sums were taken, in the order of buckets."""
        return [self.sum_of(bucket) for bucket in sorted(self.shares) if not self.stream.has(bucket)]

    def clear(self) -> None:
        self.homes.host.catch_up()  # memory that a copy still writes to must not be used again
        self.stream.clear()
        if self.shares or self.deferred:
            self._wanted = [self._wanted[1], False]
        for bucket, share in self.shares.items():
            is_apart = is_absent(share) or self.stream.has(bucket)
            # Only memory that is at home for good.
            if share.is_cpu and not is_apart and self.home_of(bucket).device == share.device:
                self._kept[bucket] = share
        self.shares.clear()
        self.partial.clear()
        for rows in self.deferred.values():
            rows.release()
        self.deferred.clear()
        self._deferred_scales.clear()
        self._products.clear()
        self._numbers, self._read = [], []

    def release(self) -> None:
        """Frees all shares."""
        self.clear()
        self._kept.clear()

    @property
    def num_staged_bytes(self) -> int:
        """Returns how many of `num_bytes` are in staging buffers."""
        return sum(rows.num_bytes for rows in self.deferred.values() if rows.is_staged)

    @property
    def num_bytes(self) -> int:
        in_memory = sum(share.nbytes for share in self.shares.values() if not is_absent(share))
        return in_memory + sum(rows.num_bytes for rows in self.deferred.values())

    def prepare(self) -> None:
        """Allocates the host memory of sums that live beside the device, as if a window had left it.

        A driver that pins memory waits for all work of its device. In a backward that work may wait for ranks which in turn
        wait for this one. So where devices wait for each other memory is pinned while all ranks are here.
        """
        for bucket in range(len(self.layout_ref.layout.buckets)):
            home = self._home_apart(bucket) or self.home_of(bucket)
            is_beside = home.device != self.device and not self.stream.has(bucket)
            if is_beside and bucket not in self and bucket not in self._kept:
                self._kept[bucket] = self.allocate(bucket)

    def allocate(self, bucket: int) -> torch.Tensor:
        if bucket in self._kept:
            return self._kept.pop(bucket)
        home = self._home_apart(bucket)
        if home is None or home.device != self.device:
            return super().allocate(bucket)
        return home.allocate(self.layout_ref.layout.buckets[bucket].share_numel, sum_dtype(self.layout_ref.dtype_of(bucket)))


def _home_apart(layout_ref: LayoutRef, homes: Homes, bucket: int) -> Home | None:
    """Returns the home of a sum if that is not the home of its masters, else None."""
    away = layout_ref.layout.buckets[bucket].away
    place = dict(away).get("gradients") if away else None
    return None if place is None else homes.at("gradients", place)
