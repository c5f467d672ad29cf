"""How a bucket of gradients is narrowed before it is sent, and read where it arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from zero.comm.eight_bits import EIGHT_BITS, Noise, decode, encode, num_bytes_of
from zero.comm.group import Group, Pending
from zero.comm.results import sum_in_rank_order
from zero.comm.two_levels import TwoLevelGroup
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


class _Coder:
    """Codes the numbers of a bucket in 8 bits, see zero/comm/eight_bits.py. The error of the rounding is added to those that
    are coded next, so it keeps as many numbers."""

    def __init__(self, scaling: Scaling, seed: int) -> None:
        self._scaling = scaling
        self._noise = Noise(seed)
        self.missing: dict[int, tuple[torch.Tensor, float]] = {}  # by bucket, and the loss scale that it carries

    def encode(self, bucket: int, values: torch.Tensor, num_rows: int, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The message of each of so many equal parts, one after the other, in memory for so many bytes."""
        scale = self._scaling.loss_scale
        missing, before = self.missing.pop(bucket, (None, scale))
        if missing is None or missing.numel() != values.numel():
            missing = torch.zeros_like(values)
        rows = torch.add(values.float(), missing, alpha=scale / before).view(num_rows, -1)  # two halves may not fit in one
        size = num_bytes_of(rows.shape[1])
        message = allocate(num_rows * size)
        encode(rows, message.view(num_rows, size), self._noise)
        missing.copy_(rows.sub_(decode(message.view(num_rows, size), rows.shape[1])).view(-1))
        self.missing[bucket] = missing.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), scale
        return message


class InEightBits:
    """Sends 8 bits a number. The sum over ranks is taken in float32."""

    def __init__(self, layout_ref: LayoutRef, group: Group, scaling: Scaling) -> None:
        self._layout_ref = layout_ref
        self._group = group.inner
        self._coder = _Coder(scaling, group.rank)

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        allocate = partial(staging.borrow, dtype=torch.uint8)
        message = self._coder.encode(bucket, buffer, self._layout_ref.layout.num_shares, allocate)
        staging.give_back(buffer)
        return message

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return _InNumbers(self._group.all_to_all(sent), self._group.size, self._layout_ref.layout.buckets[bucket].share_numel)

    def forget_errors(self) -> None:
        self._coder.missing.clear()


class InEightBitsAcross:
    """Adds up inside a host as it is, and sends the sums of the host in 8 bits to the others, whose sum is taken in float32."""

    def __init__(self, group: TwoLevelGroup, scaling: Scaling) -> None:
        self._group = group
        self._coder = _Coder(scaling, group.rank)

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        return buffer

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._group.reduce_by_hosts(sent, torch.float32, partial(self._send, bucket))

    def _send(self, bucket: int, sums: torch.Tensor, across: Group) -> Pending:
        allocate = partial(torch.empty, dtype=torch.uint8, device=sums.device)
        message = self._coder.encode(bucket, sums, across.size, allocate)
        return _InNumbers(across.all_to_all(message), across.size, sums.numel() // across.size)

    def forget_errors(self) -> None:
        self._coder.missing.clear()


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
    if dtype == EIGHT_BITS and group.inner.size > 1:
        if isinstance(group.inner, TwoLevelGroup) and group.inner.is_in_two_levels:
            return InEightBitsAcross(group.inner, scaling)
        return InEightBits(layout_ref, group, scaling)
    if dtype == EIGHT_BITS:
        return AsItIs(layout_ref, group)
    return AsItIs(layout_ref, group) if dtype is None else RoundedTo(layout_ref, group, DTYPES[dtype])
