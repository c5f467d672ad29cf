"""Collects gradients into buckets, and has each bucket sent in an order that all ranks agreed on.

What becomes of a gradient, as plain torch would write it, by the stops of docs/internals.md:

    buffer[start:stop] = grad           # 2 collect  `Reducer.collect`, or `round_of` and `hold`: into its bucket's `Filling`
    work = reduce_scatter(sum, buffer)  # 3 reduce   `advance`, when it is full and has its turn; inflight.py sends it
    work.wait(); share += sum           # 4 keep     `SumKeeper` in keeping.py, in the order of sending
                                        # 5 settle   `send_missing_rounds` and `flush` send what is left; `update_order`
                                        #            learns the order of the next window

A rank that sends to nobody takes all gradients of a bucket at once, by `add_up` and alone.py, and goes on at 4.

[Note: rounds]
A *round* is one collective of one bucket. Collectives pair up by their order, so all ranks issue the same ones in the same
order; but backward may reach parameters in another order on each rank, or not reach some at all. So the order is fixed
beforehand: `order`, which all ranks agreed on when the last window settled, run through again for every further backward. A
rank sends the next round when every parameter that it used in that bucket last time has arrived. It never waits for another
rank.

With the order (2, 0, 1), on a rank whose backward fills bucket 0 first:

    full    0    2       1
    sent    -    2, 0    1    0 waits for its turn, which is right after 2

A rank that used no parameter of bucket 2 last time expects nothing there, and sends zeros as soon as another bucket waits for
its turn. What does not fit (a parameter that was not expected, a second use, a branch that only some ranks took) travels in one
round more when the window settles. Sums are linear: late is never lost, and a wrong guess costs time only.

[Note: wide]
The ordinary round travels in the parameters' dtype, one gradient a parameter. To add a second one to it there, in bf16, would
round; so what comes on top, and what several backwards add up before anything is sent, is added up apart in the dtype of sums,
and sent in that when the window settles. If the two dtypes are the same, it is simply added.

[Note: by lists]
On a device a launch costs more than the copy of a small gradient. So small ones are held there as they are until their bucket
is full, and one operator on lists copies them. All that are held have `MOST_HELD` elements at most, whatever buckets are open.
On the host each is copied as it comes, while it is in the processor's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accelerators import Accelerator
from zero.comm.group import Needs
from zero.memory.formats import ParamFormat, sum_dtype
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.budget import MOST_HELD
from zero.profiling import Timed, stop
from zero.window.alone import Arrived, WholeBuckets
from zero.window.inflight import InflightReductions

logger = logging.getLogger("zero")

_SPARE = 2  # staging buffers that are kept for the next window: one is filled while the other is sent
_FEW_GAPS = 4  # up to this number, each gap is zeroed by itself; beyond it, the whole buffer at once
_SMALL = 2**14  # elements that are zeroed in the time that two gaps take

Place = tuple[int, int, torch.dtype]  # of a parameter that lies in one bucket: the bucket, the start in it, and its dtype


class Filling:
    """The content of a bucket's next round: its buffer, and whose gradients are in it, or will be; see [Note: by lists]."""

    __slots__ = ("awaited", "buffer", "filled", "held", "producers", "views")

    def __init__(self, buffer: torch.Tensor, awaited: int, views: dict[int, torch.Tensor]) -> None:
        self.buffer = buffer
        self.views = views  # the slots in the buffer, by parameter
        self.awaited = awaited  # the parameters, as bits, without which this is not sent before the window settles
        self.filled = 0
        # Gradients that are not copied yet, with their start in the buffer, by parameter.
        self.held: dict[int, tuple[int, torch.Tensor]] = {}
        self.producers: list[Any] = []  # streams that wrote into the buffer or made what is held


class Reducer(Timed):
    """The n-th round is of the same bucket on every rank, and a gradient that comes too late for it travels in a later one.

    It fills buckets, and sends each when it is full and its turn has come; see [Note: rounds].
    """

    def __init__(
        self,
        layout_ref: LayoutRef,
        formats: Sequence[ParamFormat],
        accelerator: Accelerator,
        staging: Staging,
        flight: InflightReductions,
        num_laps: int = 1,
        needs: Needs | None = None,
    ) -> None:
        self.inflight = flight
        self.needs = needs  # says which rounds the device of a rank waits for; None where no device waits for ranks
        self._num_laps = num_laps  # how often a window goes through the order, if that is declared
        self.sent = 0  # rounds of the order that were sent since the last settling
        self.order = tuple(range(len(layout_ref.layout.buckets)))
        self.layout_ref = layout_ref
        self._formats = formats
        self._accelerator = accelerator
        self.holds = staging.runs_behind  # gradients are held until their bucket is full; see [Note: by lists]
        self._room = MOST_HELD  # elements of gradients that may still be held
        self.staging = staging
        self._rounds: dict[int, Filling] = {}
        self._wide_rounds: dict[int, Filling] = {}
        self._expected: int | None = None  # the parameters that this rank used last time; None before the first time
        # A set in order: buckets that something came for since the last settling, the latest last.
        self._arrived: dict[int, None] = {}
        self._whole_buckets = WholeBuckets(layout_ref, formats, staging, flight)
        self._window = 0  # the number of settlings so far, which is the same on all ranks
        # Buckets that were sent with the gradients of all their parameters, since somebody asked; None if nobody does.
        self.sent_whole: list[int] | None = None
        if needs is not None:
            needs.say(self._say_sent)

    # stop 2: collect ---------------------------------------------------------------------------------------------

    @stop("collect", lambda reducer, param, *_, **__: reducer.layout_ref.layout.params[param].name)
    def collect(self, param: int, grad: torch.Tensor, multiplier: float | None = None, apart: bool = False) -> None:
        """Copies a gradient into its slot; the caller may free it. `apart`: it is one of several that travel as their sum."""
        self.inflight.shard.check_resident()  # checked now, as the moment at which the sum comes depends on the other ranks
        form, stretches = self._formats[param], self.layout_ref.layout.stretches_of(param)
        for index, in_bucket, in_param in stretches:
            self._note_arrival(index)
            exact = multiplier is None and grad.dtype == self.layout_ref.dtype_of(index) and not apart
            target, fresh = self._target(index, param, exact)
            widens = not fresh and target.is_cpu and grad.dtype != target.dtype
            if len(stretches) == 1 and not widens:  # nearly always, so it is not flattened
                place, values = form.view_at(target, in_bucket.start), grad
            else:
                values = form.flatten(grad)[in_param.start : in_param.stop]
                place = target[in_bucket.start : in_bucket.start + values.numel()]
            factor = 1.0 if multiplier is None else multiplier
            if widens:  # torch's own `add_` would make a wide copy of the gradient first
                self.inflight.sums.add([values.contiguous()], place, factor, True)
            elif not fresh:
                place.add_(values, alpha=factor)
            else:
                place.copy_(values)
                if multiplier is not None:
                    place.mul_(multiplier)

    def place_of(self, param: int) -> Place | None:
        """Returns the bucket of a parameter, its start there and its dtype; None if it is in several, or has no place yet."""
        stretches = self.layout_ref.layout.stretches_of(param) if self.is_placed(param) else ()
        if len(stretches) != 1:
            return None
        [(bucket, in_bucket, _)] = stretches
        return bucket, in_bucket.start, self.layout_ref.dtype_of(bucket)

    def round_of(self, bucket: int) -> Filling:
        """Returns the ordinary round of a bucket that something comes for, and opens it if there is none."""
        if bucket != next(reversed(self._arrived), None):
            self._note_arrival(bucket)
        filling = self._rounds.get(bucket)
        if filling is None:
            self.inflight.shard.check_resident()
            filling = self._rounds[bucket] = self._open(bucket, self.layout_ref.dtype_of(bucket))
        if self.holds:
            self._note_producer(filling)
        return filling

    def hold(self, filling: Filling, param: int, start: int, grad: torch.Tensor) -> None:
        """Takes a gradient that nobody else has, and lets it lie until its bucket is full; see [Note: by lists]."""
        numel = grad.numel()
        if numel > self._room:
            self._copy_held(filling)
        if numel > self._room:
            self.place_in(filling, param, start).copy_(grad)
        else:
            filling.held[param] = start, grad
            self._room -= numel

    def fill(self, bucket: int, lent: Sequence[Arrived]) -> None:
        """Copies gradients, of which none is in the ordinary round of a bucket yet, into it; the caller may free them."""
        filling = self.round_of(bucket)
        places = [self.place_in(filling, param, start) for param, start, _ in lent]
        torch._foreach_copy_(places, [grad for *_, grad in lent])
        for param, *_ in lent:
            filling.filled |= 1 << param

    def awaits(self, bucket: int, param: int) -> bool:
        """Returns whether the ordinary round of a bucket, open or to come, has no gradient of a parameter yet."""
        filling = self._rounds.get(bucket)
        return filling is None or not filling.filled >> param & 1

    def _copy_held(self, filling: Filling) -> None:
        if not filling.held:
            return
        self._wait_for(filling.producers, filling.buffer)
        places = [self.place_in(filling, param, start) for param, (start, _) in filling.held.items()]
        grads = [grad for _, grad in filling.held.values()]
        torch._foreach_copy_(places, grads)
        current: Any = self._accelerator.current_stream(filling.buffer.device.index)
        # Otherwise the allocator could reuse a gradient that this stream has not read yet.
        if any(stream != current for stream in filling.producers):
            for grad in grads:
                grad.record_stream(current)
        self._forget_held(filling)

    def _forget_held(self, filling: Filling) -> None:
        held, filling.held = filling.held, {}
        self._room += sum(grad.numel() for _, grad in held.values())

    def _note_arrival(self, bucket: int) -> None:
        self._arrived.pop(bucket, None)
        self._arrived[bucket] = None

    def is_placed(self, param: int) -> bool:
        """Returns whether a parameter has a place in a bucket yet."""
        return self.layout_ref.layout.slots[param] is not None

    def buckets_of(self, param: int) -> Sequence[int]:
        """Returns the buckets that a parameter lies in; none if it has no place yet."""
        return self.layout_ref.layout.buckets_of(param) if self.is_placed(param) else ()

    def adds_up_wide(self, param: int) -> bool:
        """Returns whether several of its gradients can be added up here without being sent; see [Note: wide]."""
        dtypes = (self.layout_ref.dtype_of(index) for index, *_ in self.layout_ref.layout.stretches_of(param))
        return all(dtype != sum_dtype(dtype) for dtype in dtypes)

    def _target(self, index: int, param: int, exact: bool) -> tuple[torch.Tensor, bool]:
        """Returns where a gradient goes, and whether it is the first there; see [Note: wide]. `exact`: it can travel as it
        is. A rank alone sends the round first if it has a gradient of the parameter."""
        rounds, dtype = self._rounds, self.layout_ref.dtype_of(index)
        is_first = index not in rounds or not rounds[index].filled >> param & 1
        if not is_first and self.inflight.is_alone:  # one rank adds gradients up in the order of plain torch, one round each
            self.inflight.send(index, self._close(index), is_last=True)
            is_first = True
        if not (exact and is_first) and dtype != sum_dtype(dtype):
            rounds, dtype = self._wide_rounds, sum_dtype(dtype)
        filling = rounds.get(index)
        if filling is None:
            if rounds is self._wide_rounds:
                # The sum must exist first: otherwise two buffers of this bucket would be held.
                self.inflight.shard.materialize(index)
            filling = rounds[index] = self._open(index, dtype)
        self._note_producer(filling)
        fresh = not filling.filled >> param & 1
        filling.filled |= 1 << param
        if not fresh:
            self._copy_held(filling)  # the earlier gradient of this parameter may be among those that are held
        return filling.buffer, fresh

    def _awaited(self, bucket: int) -> int:
        params = self.layout_ref.layout.params_in[bucket]
        return params if self._expected is None else params & self._expected

    def _open(self, index: int, dtype: torch.dtype) -> Filling:
        bucket = self.layout_ref.layout.buckets[index]
        buffer = self.staging.borrow(bucket.span.numel, dtype, bucket.family, purpose=index)
        gaps = self.layout_ref.layout.gaps[index]
        # The gaps between slots are summed with everything else, and could hold a NaN from an earlier use of this memory.
        if len(gaps) > _FEW_GAPS or (gaps and buffer.numel() <= _SMALL):
            buffer.zero_()
        else:
            for gap in gaps:
                buffer[gap.start : gap.stop].zero_()
        return Filling(buffer, self._awaited(index), self.staging.views_of(buffer))

    def place_in(self, filling: Filling, param: int, start: int) -> torch.Tensor:
        """Returns the slot of a parameter in the buffer that is filled, in the parameter's shape."""
        place = filling.views.get(param)
        if place is None:
            place = filling.views[param] = self._formats[param].view_at(filling.buffer, start)
        return place

    def _note_producer(self, filling: Filling) -> None:
        if self.holds:
            stream = self._accelerator.current_stream(self.inflight.shard.device.index)
            if stream not in filling.producers:
                filling.producers.append(stream)

    def _wait_for(self, streams: Sequence[Any], buffer: torch.Tensor) -> None:
        """Makes the current stream wait for these: hooks of one backward may run on several streams, and the next operator must
        see what all of them wrote."""
        if streams:
            current = self._accelerator.current_stream(buffer.device.index)
            for stream in streams:
                if stream != current:
                    current.wait_stream(stream)

    def add_up(self, gradients: dict[int, list[Arrived]]) -> Iterator[tuple[int, list[Arrived]]]:
        """Takes gradients of a rank that sends to nobody, which are by bucket: those of whole buckets, as
        `WholeBuckets.add_up` does. If a bucket's gradients are not complete, or it has a round already, they stay there."""
        layout, whole = self.layout_ref.layout, list[int]()
        for bucket, of_bucket in gradients.items():
            is_whole = len(of_bucket) == layout.params_in[bucket].bit_count()
            if is_whole and bucket not in self._rounds and bucket not in self._wide_rounds:
                self._note_arrival(bucket)
                whole.append(bucket)
        return self._whole_buckets.add_up(gradients, whole)

    # stop 3: reduce ----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Sends every round whose turn it is and that is full; see [Note: rounds]. To nobody, any may go in its own time."""
        if self.inflight.sends_to_nobody:
            for bucket in [bucket for bucket, filling in self._rounds.items() if not filling.awaited & ~filling.filled]:
                self.inflight.send(bucket, self._close(bucket), is_last=True)
            return
        while self.order:
            index = self.order[self.sent % len(self.order)]
            filling = self._rounds.get(index)
            if self._awaited(index) & ~(0 if filling is None else filling.filled):
                return
            if self._rounds.keys().isdisjoint(self.order):
                return  # nothing waits for its turn, and a rank that awaits nothing would go round the order for ever
            self._send_next()

    def _send_next(self, counts: bool = True) -> None:
        lap, place = divmod(self.sent, len(self.order))
        index = self.order[place]
        self.sent += 1
        logger.debug("Round %d since settling %d: bucket %d", self.sent, self._window, index)
        filling = self._rounds.get(index)
        if self.sent_whole is not None and filling and filling.filled == self.layout_ref.layout.params_in[index]:
            self.sent_whole.append(index)
        self.inflight.send(index, self._close(index), counts, is_last=lap == self._num_laps - 1)

    def has_landed(self, bucket: int) -> bool:
        """Returns whether every gradient of a bucket that came here is in its sum."""
        is_open = bucket in self._rounds or bucket in self._wide_rounds
        return not is_open and self.inflight.has_landed(bucket)

    @torch.no_grad()
    def send_needed(self, need: str) -> None:
        """Sends rounds that the device of another rank waits for. All ranks send them by the settling."""
        window, rounds = map(int, need.split())
        if window == self._window:
            while self.sent < rounds:
                self._send_next()
            self.inflight.send_all_waiting()

    def _say_sent(self) -> str:
        return f"{self._window} {self.sent}"

    def _close(self, index: int, wide: bool = False) -> torch.Tensor:
        """Returns the bucket's round, ready to be sent, with zeros where nothing arrived."""
        bucket, dtype = self.layout_ref.layout.buckets[index], self.layout_ref.dtype_of(index)
        filling = (self._wide_rounds if wide else self._rounds).pop(index, None)
        if filling is None:
            return self.staging.borrow(bucket.span.numel, sum_dtype(dtype) if wide else dtype, bucket.family).zero_()
        self._copy_held(filling)
        if len(self.layout_ref.layout.gaps[index]) <= _FEW_GAPS:
            for param in bucket.params:
                if not filling.filled >> param & 1:
                    for bucket_index, in_bucket, _ in self.layout_ref.layout.stretches_of(param):
                        if bucket_index == index:
                            filling.buffer[in_bucket.start : in_bucket.stop].zero_()
        self._wait_for(filling.producers, filling.buffer)
        return filling.buffer

    # settling ----------------------------------------------------------------------------------------------------

    @property
    def num_staging_bytes(self) -> int:
        """Bytes of staging buffers that are in use, without those that gradients wait in."""
        return self.staging.num_bytes(_SPARE) - self.inflight.shard.num_staged_bytes - self.num_wide_bytes

    @property
    def num_wide_bytes(self) -> int:
        """The bytes of gradients that are added up here."""
        return sum(wide.buffer.nbytes for wide in self._wide_rounds.values())

    @property
    def open_buckets(self) -> int:
        return sum(1 << index for index in self._rounds)

    @property
    def wide_buckets(self) -> int:
        return sum(1 << index for index in self._wide_rounds)

    @property
    def arrival_order(self) -> tuple[int, ...]:
        """The buckets that a gradient reached, by the time of the last one: the order in which they can leave next time."""
        return tuple(self._arrived)

    def send_missing_rounds(self, rounds: int, counts: bool) -> None:
        """Sends the rounds that other ranks have sent and this one has not, and lands all of them."""
        while self.sent < rounds:
            self._send_next(counts)
            # The others send this round too, so at most one more stays in flight, and takes memory.
            self.inflight.retire(counts, most=1)
        self.inflight.retire(counts)
        if rounds and not counts:
            self.inflight.forget_errors()

    def flush(self, buckets: Sequence[int], wide: int) -> None:
        """Sends one more round for every bucket that needs it on some rank; of these, some in the dtype of sums. Then sums are
        those of all ranks."""
        for index in buckets:
            buffer = self._close_wide(index) if wide >> index & 1 else self._close(index)
            self.inflight.send(index, buffer, is_last=True)
            self.inflight.retire(counts=True, most=1)
        self.inflight.retire(counts=True)
        self.inflight.settle()

    def _close_wide(self, index: int) -> torch.Tensor:
        wide = self._close(index, wide=True)
        if index in self._rounds:
            ordinary = self._close(index)
            wide.add_(ordinary)
            self.staging.give_back(ordinary)
        return wide

    def update_order(self, order: Sequence[int], used: int, used_here: int) -> None:
        """Takes over the agreed order of the buckets that hold what was `used`, and expects of this rank what it did last; a
        window in which nothing was used teaches nothing."""
        if used:
            reached = {index for index, params in enumerate(self.layout_ref.layout.params_in) if params & used}
            first = [index for index in order if index in reached]
            self.order = (*first, *sorted(reached.difference(first)))
            self._expected = used_here
        self.sent = 0
        self._window += 1
        self.inflight.end_window()
        self._arrived.clear()
        self.staging.release(keep=_SPARE)  # buffers of rounds that other ranks were late for are not kept during the step

    def restart(self) -> None:
        """Starts as at the first window: what was sent is lost, and not all ranks may have learned the same order."""
        self.inflight.abandon()
        self.order = tuple(range(len(self.layout_ref.layout.buckets)))
        self.sent, self._expected, self._window = 0, None, 0
        self._arrived.clear()

    def drop(self) -> None:
        """Forgets what has not been sent."""
        for rounds in (self._rounds, self._wide_rounds):
            for filling in rounds.values():
                self._forget_held(filling)
                self.staging.give_back(filling.buffer)
            rounds.clear()

    def release(self) -> None:
        """Frees all buffers."""
        self.drop()
        self.inflight.abandon()
        self.release_buffers()
        self.inflight.shard.release()

    def release_buffers(self) -> None:
        """Frees the buffers that hold nothing; the next gradients make new ones."""
        self.staging.release()

    def drop_param(self, param: int) -> None:
        """Forgets what has not been sent of one parameter."""
        for index, in_bucket, _ in self.layout_ref.layout.stretches_of(param):
            for rounds in (self._rounds, self._wide_rounds):
                if index in rounds:
                    filling = rounds[index]
                    filling.filled &= ~(1 << param)
                    _, held = filling.held.pop(param, (0, None))
                    if held is None:
                        filling.buffer[in_bucket.start : in_bucket.stop].zero_()
                    else:
                        self._room += held.numel()
