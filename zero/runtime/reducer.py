"""Collects gradients into buckets, sends full ones, keeps this rank's share of what comes back.

[Note: rounds]
A *round* is one collective of one bucket. Which bucket the n-th round is for is fixed by `order`, which all
ranks agreed on when the last window settled; the order is run through again for every further backward. A
rank sends the next round when every parameter that it used in that bucket last time has arrived, so a bucket
that it never touches goes out as zeros without waiting. It never waits for another rank. What does not fit
(a parameter that was not expected, a second use, a branch that only some ranks took) stays, and travels in a
round more when the window settles. Sums are linear: late is never lost, and a wrong guess costs time only.

[Note: wide]
The ordinary round travels in the parameters' dtype, one gradient a parameter. To add a second one to it there,
in bf16, would round; so what comes on top is added up apart in the dtype of sums, and sent in that when the
window settles. Where the two dtypes are the same, it is simply added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from accelerators import Accelerator
from zero.comm.group import Group, Pending
from zero.memory.flat import DTYPES, Form, Shard, sum_dtype
from zero.memory.staging import Staging
from zero.plan.layout import FlatLayout
from zero.runtime.agreement import Agreement, set_bits

_FEW_GAPS = 4  # up to here each gap is zeroed by itself, beyond it the whole buffer at once


class _Round:
    """What a bucket will send next: its buffer, and whose gradients are in it."""

    __slots__ = ("buffer", "filled", "producers")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.filled = 0
        self.producers: list[object] = []  # streams that wrote into it, where there are any


class Flight:
    """Rounds on their way, first in, first out, and the shard that they end in."""

    def __init__(self, layout: FlatLayout, group: Group, staging: Staging, shard: Shard) -> None:
        self.factor = 1.0  # what a sum is multiplied with when it is kept
        self.num_bytes = 0  # sent so far, by this rank
        self._reduce = group.all_reduce if layout.num_shares < group.size else group.reduce_scatter
        self._staging = staging
        self._shard = shard
        self._rounds: deque[tuple[int, torch.Tensor, Pending]] = deque()

    def __len__(self) -> int:
        return len(self._rounds)

    def send(self, bucket: int, buffer: torch.Tensor) -> None:
        self.num_bytes += buffer.nbytes
        self._rounds.append((bucket, buffer, self._reduce(buffer, sum_dtype(buffer.dtype))))
        while self._rounds and self._rounds[0][2].done():
            self._land(keep=True)

    def land_all(self, keep: bool) -> None:
        while self._rounds:
            self._land(keep)

    def _land(self, keep: bool) -> None:
        bucket, buffer, pending = self._rounds.popleft()
        total = pending.wait()
        if keep:
            self._shard.add(bucket, total, self.factor)
        self._staging.give_back(buffer)


class Reducer:
    def __init__(
        self, layout: FlatLayout, forms: Sequence[Form], accelerator: Accelerator, staging: Staging, flight: Flight
    ) -> None:
        self.flight = flight
        self.sent = 0  # rounds of the order since the last settling
        self.order = tuple(range(len(layout.buckets)))
        self._layout = layout
        self._forms = forms
        self._accelerator = accelerator
        self._staging = staging
        self._rounds: dict[int, _Round] = {}
        self._wide: dict[int, torch.Tensor] = {}
        self._params_in = [sum(1 << param for param in bucket.params) for bucket in layout.buckets]
        self._expected = self._params_in  # by bucket: the parameters that a round waits for
        self._learned: object = None
        self._arrived: dict[int, None] = {}  # buckets that something came for since the last settling, the latest last

    # stop 2: collect ---------------------------------------------------------------------------------------------

    def collect(self, param: int, grad: torch.Tensor, weight: float | None = None) -> None:
        """Copies a gradient into its slot; the caller may free it."""
        slot = self._layout.slots[param]
        line: torch.Tensor | None = None
        for index in self._layout.buckets_of(param):
            bucket = self._layout.buckets[index]
            part = slot.span.overlap(bucket.span)
            if part is None:
                continue
            self._arrived.pop(index, None)
            self._arrived[index] = None
            target, fresh = self._target(index, param, grad.dtype, weight)
            place = target[part.start - bucket.span.start : part.stop - bucket.span.start]
            if part.numel == slot.span.numel:  # the whole parameter, as nearly always: no need to flatten it
                place, values = self._forms[param].shaped(place), grad
            else:
                line = self._forms[param].line(grad) if line is None else line
                values = line[part.start - slot.span.start : part.stop - slot.span.start]
            if not fresh:
                place.add_(values, alpha=1.0 if weight is None else weight)
            else:
                place.copy_(values)
                if weight is not None:
                    place.mul_(weight)

    def _target(self, index: int, param: int, dtype: torch.dtype, weight: float | None) -> tuple[torch.Tensor, bool]:
        """Where a gradient goes, and whether it is the first there; see [Note: wide]."""
        bucket_dtype = DTYPES[self._layout.chunks[self._layout.buckets[index].chunk].dtype]
        narrow = bucket_dtype != sum_dtype(bucket_dtype)
        if narrow and (weight is not None or dtype != bucket_dtype or self._has(index, param)):
            return self._wide_buffer(index), False
        round_ = self._rounds.get(index)
        if round_ is None:
            round_ = self._rounds[index] = _Round(self._open(index, bucket_dtype))
        self._note_producer(round_)
        fresh = not round_.filled >> param & 1
        round_.filled |= 1 << param
        return round_.buffer, fresh

    def _has(self, index: int, param: int) -> bool:
        return index in self._rounds and bool(self._rounds[index].filled >> param & 1)

    def _open(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self._staging.borrow(self._layout.buckets[index].span.numel, dtype)
        gaps = self._layout.gaps[index]
        # What lies between the slots would be summed with everything else, and could be NaN from whoever had this memory before.
        if len(gaps) > _FEW_GAPS:
            buffer.zero_()
        else:
            for gap in gaps:
                buffer[gap.start : gap.stop].zero_()
        return buffer

    def _wide_buffer(self, index: int) -> torch.Tensor:
        if index not in self._wide:
            dtype = sum_dtype(DTYPES[self._layout.chunks[self._layout.buckets[index].chunk].dtype])
            self._wide[index] = self._staging.borrow(self._layout.buckets[index].span.numel, dtype).zero_()
        return self._wide[index]

    def _note_producer(self, round_: _Round) -> None:
        if not self._accelerator.is_synchronous:
            stream = self._accelerator.current_stream()
            if stream not in round_.producers:
                round_.producers.append(stream)

    # stop 3: reduce ----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Sends every round whose turn it is and that is full; see [Note: rounds]."""
        while any(index in self.order for index in self._rounds):
            index = self.order[self.sent % len(self.order)]
            filled = self._rounds[index].filled if index in self._rounds else 0
            if self._expected[index] & ~filled:
                return
            self._send_next()

    def _send_next(self) -> None:
        index = self.order[self.sent % len(self.order)]
        self.sent += 1
        self.flight.send(index, self._close(index))

    def _close(self, index: int) -> torch.Tensor:
        """The bucket's round, ready to be sent: zeros where nothing arrived."""
        bucket = self._layout.buckets[index]
        round_ = self._rounds.pop(index, None)
        if round_ is None:
            return self._staging.borrow(bucket.span.numel, DTYPES[self._layout.chunks[bucket.chunk].dtype]).zero_()
        if len(self._layout.gaps[index]) <= _FEW_GAPS:
            for param in bucket.params:
                if not round_.filled >> param & 1:
                    part = self._layout.slots[param].span.overlap(bucket.span)
                    if part is not None:
                        round_.buffer[part.start - bucket.span.start : part.stop - bucket.span.start].zero_()
        for stream in round_.producers:
            # Hooks of one backward may run on several streams; the collective starts on this one and must see what all wrote.
            self._accelerator.current_stream().wait_stream(stream)
        return round_.buffer

    # settling ----------------------------------------------------------------------------------------------------

    @property
    def open_buckets(self) -> int:
        return sum(1 << index for index in self._rounds)

    @property
    def wide_buckets(self) -> int:
        return sum(1 << index for index in self._wide)

    @property
    def arrival_order(self) -> tuple[int, ...]:
        """Buckets that a gradient reached, by the time of the last one: the order in which they can leave next time."""
        return tuple(self._arrived)

    def catch_up(self, agreement: Agreement) -> None:
        """Sends the rounds that other ranks have sent and this one has not, and lands all of them."""
        while self.sent < agreement.rounds:
            self._send_next()
        self.flight.land_all(keep=not agreement.discard)

    def send_rest(self, agreement: Agreement) -> None:
        """One more round for every bucket that needs it on some rank."""
        for index in agreement.rest:
            self.flight.send(index, self._close_wide(index) if agreement.wide >> index & 1 else self._close(index))
        self.flight.land_all(keep=True)

    def _close_wide(self, index: int) -> torch.Tensor:
        wide = self._wide_buffer(index)
        del self._wide[index]
        if index in self._rounds:
            ordinary = self._close(index)
            wide.add_(ordinary)
            self._staging.give_back(ordinary)
        return wide

    def learn(self, agreement: Agreement, used_here: int) -> None:
        """Takes over the agreed order, and expects of this rank what it did last."""
        lesson = (agreement.used, agreement.order, used_here)
        if agreement.used and lesson != self._learned:
            self._learned = lesson
            reached = {index for param in set_bits(agreement.used) for index in self._layout.buckets_of(param)}
            first = [index for index in agreement.order if index in reached]
            self.order = (*first, *sorted(reached.difference(first)))
            self._expected = [used_here & params for params in self._params_in]
        self.sent = 0
        self._arrived.clear()

    def drop(self) -> None:
        """Forgets what has not been sent."""
        for round_ in self._rounds.values():
            self._staging.give_back(round_.buffer)
        for wide in self._wide.values():
            self._staging.give_back(wide)
        self._rounds.clear()
        self._wide.clear()

    def drop_param(self, param: int) -> None:
        """Forgets what has not been sent of one parameter."""
        for index in self._layout.buckets_of(param):
            bucket = self._layout.buckets[index]
            part = self._layout.slots[param].span.overlap(bucket.span)
            if part is None:
                continue
            place = slice(part.start - bucket.span.start, part.stop - bucket.span.start)
            if index in self._rounds:
                self._rounds[index].buffer[place].zero_()
                self._rounds[index].filled &= ~(1 << param)
            if index in self._wide:
                self._wide[index][place].zero_()
