"""The forms in which a bucket of gradients is sent, and how each is read where it arrives.

[Note: 8 bits] A row of N numbers is N bytes, filled up to a multiple of four, and a float32 for each block of 256: the size of
its step, which is its largest magnitude over 127. A number that is not finite makes its whole block so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from zero.comm.group import Group, Levels, Pending
from zero.comm.results import sum_in_rank_order
from zero.memory.formats import DTYPES
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.memory.weights import Weights
from zero.plan.scaling import Scaling

EIGHT_BITS = "int8"  # the name that a configuration uses
BLOCK = 256
_MOST = 127
_NUM_BLOCKS = 256  # the number of blocks in a table of noise
_ALIGN = 4  # a float32 is read in place, so it starts at a multiple of its bytes


class Narrowing(Protocol):
    """The form in which buckets are sent."""

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        """Returns the buffer that is sent in place of `buffer`. Unless they are the same, `buffer` is given back."""

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """Returns this rank's share of the sum over the ranks of the inner group; if there is one share, over all ranks."""

    def forget_errors(self, found_inf: torch.Tensor | None = None) -> None:
        """Forgets the errors of gradients that are thrown away, or lost; with `found_inf`, only if that is 1."""


class AsItIs:
    """The `Narrowing` that sends the bucket itself. `in_shares`: each rank wants its share of the sum, and not all of it."""

    def __init__(self, group: Group, in_shares: bool) -> None:
        self._reduce = group.inner.reduce_scatter if in_shares else group.all_reduce

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        return buffer

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._reduce(sent, sum_dtype)

    def forget_errors(self, found_inf: torch.Tensor | None = None) -> None:
        """Does nothing, as no errors are kept."""


class InTurn:
    """The `Narrowing` that sends as another one does, each round in its place among gathers of weights."""

    def __init__(self, narrowing: Narrowing, weights: Weights) -> None:
        self._narrowing = narrowing
        self._weights = weights

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        for schedule in self._weights.schedules():
            schedule.close_round()
        return self._narrowing.narrow(bucket, buffer, staging)

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        schedules = self._weights.schedules()
        for schedule in schedules:
            schedule.begin_round()
        pending = self._narrowing.reduce(bucket, sent, sum_dtype)
        for schedule in schedules:
            schedule.end_round()
        return pending

    def forget_errors(self, found_inf: torch.Tensor | None = None) -> None:
        self._narrowing.forget_errors(found_inf)


class RoundedTo(AsItIs):
    """A narrowing that rounds gradients of wider dtypes to `dtype`, and leaves others as they are."""

    def __init__(self, group: Group, in_shares: bool, dtype: torch.dtype, layout_ref: LayoutRef) -> None:
        super().__init__(group, in_shares)
        self._dtype = dtype
        self._layout_ref = layout_ref

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        if buffer.dtype.itemsize <= self._dtype.itemsize:
            return buffer
        family = self._layout_ref.layout.buckets[bucket].family
        narrow = staging.borrow(buffer.numel(), self._dtype, family).copy_(buffer)
        staging.give_back(buffer)
        return narrow


class Code(Protocol):
    """Numbers as bytes. A transport need not be able to add them: they are read where they arrive.

    What is not finite comes out so, and what is finite comes out finite, however large. A message may begin at any multiple of
    its size.
    """

    def num_bytes(self, numel: int) -> int:
        """Returns the size in bytes of the message for `numel` numbers."""

    def encode(self, rows: torch.Tensor, messages: torch.Tensor) -> None:
        """Writes each row of float32 to a row of bytes."""

    def decode(self, messages: torch.Tensor, numel: int) -> torch.Tensor:
        """Reads the numbers of each row of bytes, in float32."""


class Noise:
    """Random numbers for rounding, uniform between 0 and 1. Those of one call are made together, so that a device need not make
    them."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._table = torch.rand(_NUM_BLOCKS, BLOCK, generator=self._generator, device="cpu")
        self._tables: dict[torch.device, torch.Tensor] = {}

    def draw(self, blocks: int, device: torch.device) -> torch.Tensor:
        """Returns a random number for each number of so many `blocks`."""
        table = self._tables.setdefault(device, self._table.to(device, copy=True))
        shift = torch.rand((), generator=self._generator, device="cpu").item()
        return table.repeat(-(-blocks // _NUM_BLOCKS), 1)[:blocks].add_(shift).frac_()


class EightBits:
    """The code of gradients: what they are rounded to is right on average. See [Note: 8 bits]."""

    def __init__(self, seed: int) -> None:
        self._noise = Noise(seed)

    def num_bytes(self, numel: int) -> int:
        return num_bytes_of(numel)

    def encode(self, rows: torch.Tensor, messages: torch.Tensor) -> None:
        encode(rows, messages, self._noise)

    def decode(self, messages: torch.Tensor, numel: int) -> torch.Tensor:
        return decode(messages, numel)


def num_bytes_of(numel: int) -> int:
    """Returns the size in bytes of the message for `numel` numbers."""
    return _start_of_sizes(numel) + _ALIGN * _num_blocks(numel)


def encode(rows: torch.Tensor, messages: torch.Tensor, noise: Noise) -> None:
    """Writes each row of numbers to a row of bytes: each number is rounded at random to one of the two steps beside it, so that
    the expected value is the number itself."""
    count, numel = rows.shape
    blocks = _num_blocks(numel)
    padded = torch.nn.functional.pad(rows.float(), (0, blocks * BLOCK - numel)).view(count, blocks, BLOCK)
    sizes = padded.abs().amax(dim=2) / _MOST
    steps = padded / torch.where(sizes == 0, 1.0, sizes).unsqueeze(2)
    steps.add_(noise.draw(count * blocks, steps.device).view(steps.shape)).floor_()
    steps.nan_to_num_(nan=0.0).clamp_(-_MOST, _MOST)
    messages[:, :numel] = steps.view(count, -1)[:, :numel].to(torch.int8).view(torch.uint8)
    messages[:, _start_of_sizes(numel) :].view(torch.float32).copy_(sizes)


def decode(messages: torch.Tensor, numel: int) -> torch.Tensor:
    """Reads the numbers of each row of bytes, in float32."""
    sizes = messages[:, _start_of_sizes(numel) :].view(torch.float32)
    return messages[:, :numel].view(torch.int8).float() * sizes.repeat_interleave(BLOCK, dim=1)[:, :numel]


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _start_of_sizes(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN


# Each entry makes the code of one rank from a number that no other rank has.
CODES: dict[str, Callable[[int], Code]] = {EIGHT_BITS: EightBits}


class _Coder:
    """A coder of buckets. It keeps the rounding errors of each bucket, one for each number, and adds them to the numbers of the
    bucket that are coded next."""

    def __init__(self, code: Code, scaling: Scaling) -> None:
        self.code = code
        self._scaling = scaling
        # Rounding errors by bucket, each with the loss scale that they contain.
        self.missing: dict[int, tuple[torch.Tensor, float]] = {}

    def encode(self, bucket: int, values: torch.Tensor, num_rows: int, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Returns the messages of `num_rows` equal parts, one after the other, in memory that `allocate` makes."""
        scale = self._scaling.loss_scale
        missing, before = self.missing.pop(bucket, (None, scale))
        if missing is None or missing.numel() != values.numel():
            missing = torch.zeros_like(values)
        # In fp32, as two halves may not fit in one.
        rows = torch.add(values.float(), missing, alpha=scale / before).view(num_rows, -1)
        size = self.code.num_bytes(rows.shape[1])
        message = allocate(num_rows * size)
        self.code.encode(rows, message.view(num_rows, size))
        missing.copy_(rows.sub_(self.code.decode(message.view(num_rows, size), rows.shape[1])).view(-1))
        self.missing[bucket] = missing.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), scale
        return message

    def forget_errors(self, found_inf: torch.Tensor | None) -> None:
        if found_inf is None:
            self.missing.clear()
        elif self.missing:
            torch._foreach_mul_([missing for missing, _ in self.missing.values()], 1 - found_inf)


class AsBytes:
    """The `Narrowing` that sends bytes. The sum over ranks is taken in float32."""

    def __init__(self, layout_ref: LayoutRef, group: Group, coder: _Coder) -> None:
        self._layout_ref = layout_ref
        self._group = group.inner
        self._coder = coder

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        allocate = partial(staging.borrow, dtype=torch.uint8, family=self._layout_ref.layout.buckets[bucket].family)
        message = self._coder.encode(bucket, buffer, self._layout_ref.layout.buckets[bucket].num_shares, allocate)
        staging.give_back(buffer)
        return message

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        numel = self._layout_ref.layout.buckets[bucket].share_numel
        return _Decoded(self._group.all_to_all(sent), self._group.size, numel, self._coder.code)

    def forget_errors(self, found_inf: torch.Tensor | None = None) -> None:
        self._coder.forget_errors(found_inf)


class AsBytesAcross:
    """The `Narrowing` that adds up gradients as they are inside a host. Hosts send each other these sums as bytes, and add them
    up in float32."""

    def __init__(self, levels: Levels, coder: _Coder) -> None:
        self._levels = levels
        self._coder = coder

    def narrow(self, bucket: int, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        return buffer

    def reduce(self, bucket: int, sent: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._levels.reduce_by_hosts(sent, torch.float32, partial(self._send, bucket))

    def _send(self, bucket: int, sums: torch.Tensor) -> Pending:
        across = self._levels.across
        allocate = partial(torch.empty, dtype=torch.uint8, device=sums.device)
        message = self._coder.encode(bucket, sums, across.size, allocate)
        return _Decoded(across.all_to_all(message), across.size, sums.numel() // across.size, self._coder.code)

    def forget_errors(self, found_inf: torch.Tensor | None = None) -> None:
        self._coder.forget_errors(found_inf)


class _Decoded:
    """The sum of what comes as bytes."""

    def __init__(self, pending: Pending, num_ranks: int, numel: int, code: Code) -> None:
        self._pending = pending
        self._num_ranks = num_ranks
        self._numel = numel
        self._code = code

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> torch.Tensor:
        rows = self._code.decode(self._pending.wait().view(self._num_ranks, -1), self._numel)
        return sum_in_rank_order(rows, self._num_ranks, torch.float32)


def narrowing_of(
    dtype: str | None, group: Group, in_shares: bool, layout_ref: LayoutRef, scaling: Scaling
) -> Narrowing:
    """Returns the form that `reduce_dtype` stands for in this group. On one rank nothing is coded."""
    if dtype in CODES and group.inner.size > 1:
        levels = group.inner.levels
        if levels is not None:
            return AsBytesAcross(levels, _Coder(CODES[dtype](group.inner.rank), scaling))
        return AsBytes(layout_ref, group, _Coder(CODES[dtype](group.rank), scaling))
    if dtype is None or dtype in CODES:
        return AsItIs(group, in_shares)
    return RoundedTo(group, in_shares, DTYPES[dtype], layout_ref)
