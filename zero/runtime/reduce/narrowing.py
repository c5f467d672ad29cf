"""How a bucket of gradients is narrowed before it is sent, and read where it arrives."""

from __future__ import annotations

from typing import Protocol

import torch

from zero.comm.eight_bits import EIGHT_BITS, Noise, decode, encode, num_bytes_of
from zero.comm.group import Group, Pending
from zero.comm.results import sum_in_rank_order
from zero.memory.formats import DTYPES
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.grad_scaling import Scaling


class Narrowing(Protocol):
    """What is sent in place of a bucket."""

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        """What is sent in place of `buffer`, which goes back unless it is that."""

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """The sum over the ranks of the inner group, of this rank's share; or where there is one share, of all ranks."""

    def forget_errors(self) -> None:
        """Gradients that were narrowed are thrown away, or lost."""


def in_shares(layout_ref: LayoutRef, group: Group) -> bool:
    """Whether each rank wants its share of a sum, and not all of it."""
    return layout_ref.layout.num_shares == group.inner.size


class AsItIs:
    """Sends the bucket itself."""

    def __init__(self, layout_ref: LayoutRef, group: Group) -> None:
        self._reduce = group.inner.reduce_scatter if in_shares(layout_ref, group) else group.all_reduce

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        return buffer

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._reduce(sent, sum_dtype)

    def forget_errors(self) -> None:
        """There are none to be made up for."""


class RoundedTo(AsItIs):
    """Rounds what is wider than `dtype` to it."""

    def __init__(self, layout_ref: LayoutRef, group: Group, dtype: torch.dtype) -> None:
        super().__init__(layout_ref, group)
        self._dtype = dtype

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        if buffer.dtype.itemsize <= self._dtype.itemsize:
            return buffer
        narrow = staging.borrow(buffer.numel(), self._dtype).copy_(buffer)
        staging.give_back(buffer)
        return narrow


class InEightBits:
    """Sends 8 bits a number, see zero/comm/eight_bits.py. The error of the rounding is added to the next gradient of the
    bucket, so a rank keeps as many numbers as it has gradients. The sum over ranks is taken in float32."""

    def __init__(self, layout_ref: LayoutRef, group: Group, scaling: Scaling) -> None:
        self._layout_ref = layout_ref
        self._group = group.inner
        self._scaling = scaling
        self._noise = Noise(group.rank)
        self._missing: dict[int, tuple[torch.Tensor, float]] = {}  # by bucket, and the loss scale that it carries

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        num_shares, scale = self._layout_ref.layout.num_shares, self._scaling.loss_scale
        missing, before = self._missing.pop(bucket, (None, scale))
        if missing is None or missing.numel() != buffer.numel():
            missing = torch.zeros_like(buffer)
        rows = torch.add(buffer.float(), missing, alpha=scale / before).view(num_shares, -1)  # two halves may not fit in one
        size = num_bytes_of(rows.shape[1])
        message = staging.borrow(num_shares * size, torch.uint8)
        encode(rows, message.view(num_shares, size), self._noise)
        missing.copy_(rows.sub_(decode(message.view(num_shares, size), rows.shape[1])).view(-1))
        self._missing[bucket] = missing.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), scale
        staging.give_back(buffer)
        return message

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return _InNumbers(self._group.all_to_all(sent), self._group.size, self._layout_ref.layout.buckets[bucket].share_numel)

    def forget_errors(self) -> None:
        self._missing.clear()


class _InNumbers:
    """The sum of what comes in 8 bits."""

    def __init__(self, pending: Pending, num_ranks: int, numel: int) -> None:
        self._pending = pending
        self._sizes = num_ranks, numel

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> torch.Tensor:
        num_ranks, numel = self._sizes
        rows = decode(self._pending.wait().view(num_ranks, -1), numel)
        return sum_in_rank_order(rows, num_ranks, torch.float32)


def narrowing_of(dtype: str | None, group: Group, layout_ref: LayoutRef, scaling: Scaling) -> Narrowing:
    """What `reduce_dtype` means. On one rank nothing travels in 8 bits."""
    if dtype == EIGHT_BITS:
        return AsItIs(layout_ref, group) if group.inner.size == 1 else InEightBits(layout_ref, group, scaling)
    return AsItIs(layout_ref, group) if dtype is None else RoundedTo(layout_ref, group, DTYPES[dtype])
