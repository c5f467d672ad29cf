"""What a layout costs on one rank, in bytes: the numbers that measured memory is compared with."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from zero.plan.disk import lines_of_moments, stream_bytes, weights_place
from zero.plan.layout import ITEM_BYTES, Bucket, FlatLayout

_KEPT = 2  # buckets of a dtype that are kept for the next window: one to fill while another is sent
_ON_THE_WAY = 2  # copies between the device and the host that may be on their way in one direction


@dataclass(frozen=True)
class Shares:
    """Bytes of the states of a training that one rank has in one memory: its share, or all of a state that is not sharded."""

    weights: int = 0
    masters: int = 0  # nothing where the weights are as wide as their sums and in the same memory
    moments: int = 0  # of the optimizer
    gradients: int = 0  # this rank's shares, from the first round of a window until it is cleared

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.moments + self.gradients


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank, on the device of the weights and on a host beside it. What the user's own graph and batch need comes
    on top."""

    device: Shares
    staging: int  # buckets that are kept for the next window
    filling: int = 0  # while gradients come, beside the states: their shares so far, buckets, and what these become
    stepping: int = 0  # while the optimizer steps, beside the states: gradient shares, and what it needs itself
    host: Shares = Shares()
    waiting: int = 0  # gradients that are whole on the device until the last backward of a window sends them
    in_transit: int = 0  # host memory for what is on its way: weights to be compared and back, gradients to be added
    gathered: int = 0  # whole weights, where they are in shares
    disk: Shares = Shares()

    @property
    def states(self) -> int:
        """Bytes on the device between two windows."""
        return self.device.weights + self.device.masters + self.device.moments + self.staging

    @property
    def peak(self) -> int:
        """The most bytes on the device at one time while a window is filled and stepped."""
        return self.states + max(self.gathered + self.filling, self.stepping)

    @property
    def host_peak(self) -> int:
        return self.host.total + self.in_transit


def budget_of(
    layout: FlatLayout,
    rank: int = 0,
    num_moments: float | Sequence[float] = 2,
    num_backwards: int | None = None,
    by_blocks: bool = True,
    num_ranks: int | None = None,
    waits: bool = False,
    in_lines: bool = False,
    one_host: bool = False,
    fused_step: bool = False,
    shards_weights: bool = False,
    on_host: bool = False,
    gathered_bytes: float = 0,
) -> Budget:
    """The cost of `layout` with an optimizer of `num_moments` values an element, by group where they differ. `num_backwards`
    are sent in a window; None for any number. `by_blocks`: whether the optimizer is given one block after the other.
    `num_ranks` are there; None for as many as share the layout. `waits`: whether all gradients wait, in the dtype of sums, for
    the last backward of a window. `in_lines`: whether moments lie as masters do, each in one line for all of a share.
    `one_host`: whether ranks read what others send where that lies. `fused_step`: whether a step takes sums from where what was
    sent lay. `shards_weights`: whether weights are in shares. `on_host`: whether the device is a host; other ranks read shares
    of weights there. `gathered_bytes`: what whole weights may take.

    [Note: pace]
    This is what a rank needs that keeps pace with the others, once the order of its gradients is known: a bucket is full
    when the one before it was exchanged. What a rank that is ahead needs beside it depends on how far: where its host runs
    ahead of its device, two buckets and what comes for them. Copies to and from the host are taken to be as late as they may.
    """
    shares = {False: Counter[str](), True: Counter[str](), None: Counter[str]()}  # whether they live on the host; None: on disk
    are_others = (num_ranks or layout.num_shares) > 1
    stays = waits and fused_step and layout.num_shares == (num_ranks or layout.num_shares)
    come = 0.0 if one_host else _coming(rank, layout.num_shares)
    goes_on = 1 < layout.num_shares < (num_ranks or 0)  # to replicas, as a sum apart
    rounds = [_Round.of(layout, index, are_others, waits, come, goes_on) for index in range(len(layout.buckets))]
    remembered = [num_moments] if isinstance(num_moments, (int, float)) else num_moments  # the last is that of all other groups
    for bucket, round_ in zip(layout.buckets, rounds, strict=True):
        shares[_place(bucket, "gradients")]["gradients"] += round_.share
        is_kept = layout.chunks[bucket.chunk].is_kept
        are_apart = round_.narrow or (bucket.offloaded and (is_kept or not shards_weights))
        shares[_place(bucket, "masters")]["masters"] += round_.share if are_apart else 0
        if shards_weights:
            place = None if weights_place(layout, bucket.chunk) else bucket.offloaded and not is_kept
            shares[place]["weights"] += round_.weights * (layout.num_shares if is_kept else 1)
            is_once = bucket.offloaded or on_host or is_kept or layout.num_shares == 1  # no other rank reads it on the host
            shares[True]["weights"] += 0 if is_once else round_.weights
    for index, number in lines_of_moments(layout, rank, num_moments).items() if in_lines else ():
        shares[_place(layout.buckets[index], "moments")]["moments"] += number * rounds[index].share
    for param, spec in enumerate(() if in_lines else layout.params):  # the optimizer sees pieces, never the padding between
        num_bytes = remembered[min(spec.group, len(remembered) - 1)] * max(ITEM_BYTES[spec.dtype], ITEM_BYTES["float32"])
        for piece in layout.pieces(param, rank if layout.num_shares > 1 else 0):
            place = _place(layout.buckets[piece.bucket], "moments")
            shares[place]["moments"] += math.ceil(num_bytes * piece.in_param.numel)
    repeats = min(2 + _ON_THE_WAY, num_backwards or 1 + _ON_THE_WAY)  # more of them meet no more of each other
    all_at_once = waits and any(round_.narrow for round_ in rounds)
    kept, staged = _staging_of(layout, rounds, int(are_others), repeats, all_at_once)
    kept = staged if one_host and are_others else kept  # memory that ranks share keeps its pages
    latest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in layout.params), default=0)
    stepped = max((round_.share for round_ in rounds if not round_.offloaded), default=0)
    if not any(remembered):  # and then what comparing it with its weights takes is the most
        stepped = 0 if on_host else stepped * 3 // 4 * any(round_.narrow for round_ in rounds)
    near = [round_.share for round_ in rounds if not (round_.offloaded or round_.on_disk or (stays and round_.narrow))]
    streams = stream_bytes(layout, rank, num_moments)
    if not shards_weights:
        shares[False]["weights"] = sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks)
    gathered = [each.numel * ITEM_BYTES[each.dtype] for i, each in enumerate(layout.chunks) if _is_gathered(layout, i)]
    return Budget(
        device=Shares(**shares[False]),
        staging=kept,
        filling=staged - kept + _exchanged(rounds, repeats, waits, stays, latest) + streams[False].filling,
        stepping=sum(near) + (staged - kept if stays else stepped) + streams[False].stepping,
        host=Shares(**shares[True]),
        waiting=sum(round_.whole for round_ in rounds) if waits else 0,
        in_transit=_in_transit([round_ for round_ in rounds if round_.offloaded], repeats, by_blocks) + sum(streams[True]),
        disk=Shares(**shares[None]),
        gathered=_gathered(sorted(gathered, reverse=True), gathered_bytes) if shards_weights and not one_host else 0,
    )


@dataclass(frozen=True)
class _Round:
    """Bytes of what one bucket becomes."""

    filled: int
    pieces: int  # of other ranks, received in exchange; where every rank wants the whole sum, that is what comes
    whole: int  # all of it, in the dtype of sums
    total: int  # their sum, where it is apart: on its way to the host, or to be added to another one
    share: int
    weights: int  # this rank's share of the weights
    narrow: bool  # whether weights are narrower than sums
    offloaded: bool
    on_disk: bool  # the sums of its gradients

    @staticmethod
    def of(layout: FlatLayout, index: int, are_others: bool, waits: bool, come: float, goes_on: bool) -> _Round:
        bucket = layout.buckets[index]
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        wide = max(item, ITEM_BYTES["float32"])
        whole, share = bucket.span.numel * wide, bucket.share_numel * wide
        filled = whole if waits else bucket.span.numel * item
        shared = layout.num_shares > 1
        pieces = round(filled * come) if shared else share if are_others and come else 0
        total = share if goes_on or (shared and come) or (item < wide and not are_others and bucket.offloaded) else 0
        on_disk = _place(bucket, "gradients") is None
        return _Round(filled, pieces, whole, total, share, bucket.share_numel * item, item < wide, bucket.offloaded, on_disk)


def _place(bucket: Bucket, kind: str) -> bool | None:
    """Whether a kind of state lives on the host beside a device; None where it is on disk."""
    place = dict(bucket.away).get(kind)
    return bucket.offloaded if place is None else True if place == "host" else None


def _is_gathered(layout: FlatLayout, chunk: int) -> bool:
    """Whether a chunk in shares is gathered. One rank has all of its shares side by side, unless some are on the host."""
    is_beside = layout.num_shares == 1 and not any(layout.buckets[index].offloaded for index in layout.buckets_in(chunk))
    return not (layout.chunks[chunk].is_kept or is_beside)


def _gathered(chunks: Sequence[int], most: float) -> int:
    """Returns the bytes of gathered weights: the chunks of one operator and the next one at least, and never more than all.
    They are sorted, the largest first."""
    return max(sum(chunks[:2]), int(min(sum(chunks), most)))


def _coming(rank: int, num_ranks: int) -> float:
    """Returns the part of a bucket that a rank receives for it. The first and the last rank need not send themselves
    anything."""
    return 1.0 - (num_ranks > 1 and rank in (0, num_ranks - 1)) / num_ranks


def busiest_rank(layout: FlatLayout) -> int:
    """Returns the rank that has the most elements with one owner; 0 where there are none."""
    owned = Counter[int]()
    for param, spec in enumerate(layout.params):
        owner = layout.owner(param)
        if owner is not None:
            owned[owner] += spec.numel
    return max(sorted(owned), key=owned.__getitem__, default=0)


def usual_numel(layout: FlatLayout) -> int:
    """Returns the largest number of elements of a bucket, without the buckets of whole tensors, which are as large as they must
    be."""
    return layout.bucket_bytes // min(ITEM_BYTES.values()) + layout.num_shares * layout.align_bytes


def _staging_of(
    layout: FlatLayout, rounds: Sequence[_Round], sent_before: int, repeats: int, all_at_once: bool
) -> tuple[int, int]:
    """Bytes of buffers that are kept, and of all that there are at one time: as many of each dtype as one gradient fills, and
    those that were sent before and have not landed, in one size; larger ones than usual apart. `all_at_once`: what was added
    up in the dtype of sums is sent in it, when the window settles."""
    kept = staged = 0
    usual = usual_numel(layout)
    for is_large in (False, True):
        of_it = {index for index, bucket in enumerate(layout.buckets) if (bucket.span.numel > usual) == is_large}
        filled = max((len(of_it.intersection(layout.buckets_of(param))) for param in range(len(layout.params))), default=0)
        buffers = len(of_it) if all_at_once else min(filled + sent_before, len(of_it) * repeats)
        largest = Counter[str]()
        for index in of_it:
            dtype = layout.chunks[layout.buckets[index].chunk].dtype
            largest[dtype] = max(largest[dtype], rounds[index].filled)
        staged += buffers * sum(largest.values())
        kept += min(_KEPT, buffers) * sum(largest.values())
    return kept, staged


def _exchanged(rounds: Sequence[_Round], repeats: int, waits: bool, stays: bool, latest: int) -> int:
    """The most of shares on the device and of what lands in them, at the landing of any round, with what still waits to be
    sent and the latest gradient. What travels to the host stays until its copy is waited for."""
    whole = [round_.whole if waits and not round_.narrow else 0 for round_ in rounds]  # narrow ones wait in wide buckets
    waiting = list(itertools.accumulate(reversed(whole)))  # when one round is not sent yet, two, ...
    kept, all_ = 0, [*rounds] * repeats
    most = latest + max(sum(whole), sum(whole[1:]) + sum(first.pieces for first in all_[:1]))
    travelling = deque[int](maxlen=_ON_THE_WAY)
    for index, round_ in enumerate(all_):
        is_first, stays_here = index < len(rounds), not (round_.offloaded or round_.on_disk or (stays and round_.narrow))
        unsent = waiting[len(rounds) - index - 3] if index + 2 < len(rounds) else 0
        # The next one was sent before this one is looked at, as a gradient came; the last one lands without.
        others = unsent + sum(travelling) + sum(other.pieces + latest for other in all_[index + 1 : index + 2])
        kept += round_.share if is_first and stays_here else 0
        apart = round_.total if round_.offloaded or not is_first else 0  # in the memory of the pieces
        most = max(most, kept + max(round_.pieces, apart) + others)
        if round_.offloaded:
            travelling.append(round_.total)
    return most


def _in_transit(rounds: Sequence[_Round], repeats: int, by_blocks: bool) -> int:
    """What is lent is of one size. Weights of a bucket and of the next one come, and as many go as may be on their way, those
    that are being made among them; what goes may still do so when gradients come again."""
    coming = min(2, len(rounds)) if by_blocks else len(rounds)
    landings = min(_ON_THE_WAY, (repeats - 1) * len(rounds))  # the first of a bucket lands in its share
    largest = max((max(round_.weights, round_.share if landings else 0) for round_ in rounds), default=0)
    return largest * (max(coming, landings) + _ON_THE_WAY) if rounds else 0
