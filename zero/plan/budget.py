"""The cost of a layout on one rank, in bytes: memory by kind of state, what is on disk, and what is sent in a step.

Measured memory and measured traffic are compared with these numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zero.plan.layout import ITEM_BYTES, Bucket, FlatLayout, round_up
from zero.plan.stages import stage_of

MOST_HELD = 2**18  # elements of gradients that lie where they were made, before a list of them is copied to their buckets
_SPARE = 2  # buckets of a dtype that are kept for the next window: one is filled while another is sent
_ON_THE_WAY = 2  # copies between the device and the host that may be on their way in one direction
_PAGE = 4096  # every line begins and ends at a page
STREAMED = 3  # buckets in memory: one that is read, one that is stepped, and one that is written
_SUMS = 4  # lines of gradients in memory while they come: two that are used, and two on their way to disk
_OF_MATRICES = 7  # halves of a share that Muon's orthogonalisation takes: an update, and five matrices in bf16
_READ_SUMS = 2  # lines of gradients in memory in a step: one that is used, and one that comes
# Large enough that a collective is worth its latency, small enough that a few in flight do not matter beside the model.
USUAL_BUCKET_BYTES = 16 * 2**20  # the bytes of a bucket, for a model of a gigabyte or less
_MOST_BYTES = 64 * 2**20
_NUM = 64  # buckets of a large model
_LEAST_ON_NETWORK = 3 * 2**20  # a bucket costs a millisecond or more of two processors
_LEAST_OF_A_RANK = 2**18  # a delay of five microseconds is nothing beside sending so many bytes
_NUM_ON_NETWORK = 16  # buckets of a model, over a network


@dataclass(frozen=True)
class Shares:
    """Bytes of the states of a training that one rank has in one memory: its share, or all of a state that is not sharded."""

    weights: int = 0
    masters: int = 0  # nothing if the weights are as wide as their sums and in the same memory
    moments: int = 0  # the optimizer's state
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
    filling: int = 0  # beside the states while gradients come: their shares so far, buckets, and what these become
    stepping: int = 0  # beside the states while the optimizer steps: gradient shares, and what the step needs itself
    host: Shares = Shares()
    waiting: int = 0  # gradients that are whole on the device until the last backward of a window sends them
    # Host memory for what is on its way: weights that come to be compared and go back, gradients to be added.
    in_transit: int = 0
    gathered: int = 0  # whole weights of stage 3
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


@dataclass(frozen=True)
class PlannedTraining:
    """The settings of a training that decide what a layout costs one rank."""

    num_moments: float | Sequence[float] = 2  # values that the optimizer remembers for an element, by group if groups differ
    num_backwards: int | None = None  # backwards that are sent in a window; None if any number may be
    num_ranks: int | None = None  # None if all ranks share the layout
    by_blocks: bool = True  # the optimizer is given one block after the other
    waits: bool = False  # all gradients wait, in the dtype of sums, for the last backward of a window
    in_lines: bool = False  # moments lie as masters do, each in one line for all of a share
    one_host: bool = False  # ranks read what others send in place
    fused_step: bool = False  # a step takes sums from the rows that were sent
    shards_weights: bool = False  # weights are in shares
    on_host: bool = False  # the device is a host, on which other ranks read shares of weights
    gathered_bytes: float = 0  # the most bytes of whole weights
    activations: int = 0  # bytes that a forward and a backward need beside weights and gradients

    @property
    def remembered(self) -> Sequence[float]:
        """The values an element by group; the last is that of all other groups."""
        return [self.num_moments] if isinstance(self.num_moments, (int, float)) else self.num_moments


_USUAL = PlannedTraining()


def budget_of(layout: FlatLayout, rank: int = 0, training: PlannedTraining = _USUAL) -> Budget:
    """Returns the cost of a layout in a training.

    [Note: pace]
    This is what a rank needs that keeps pace with the others, once the order of its gradients is known: a bucket is full
    when the one before it was exchanged. What a rank that is ahead needs beside it depends on how far: if its host runs
    ahead of its device, two buckets or small ones of the bytes of two usual ones, and what comes for them. Copies to and from
    the host are taken to be as late as they may.
    """
    num_ranks, one_host, waits = training.num_ranks or layout.num_shares, training.one_host, training.waits
    are_others = num_ranks > 1
    stays = waits and training.fused_step and all(each.num_shares == each.num_summing(num_ranks) for each in layout.families)
    rounds = [_Round.of(layout, index, rank, num_ranks, training) for index in range(len(layout.buckets))]
    offloaded = [round_ for round_ in rounds if round_.offloaded]
    # Further backwards meet no more copies on their way.
    repeats = min(2 + _ON_THE_WAY, training.num_backwards or 1 + _ON_THE_WAY)
    all_at_once = waits and any(round_.narrow for round_ in rounds)
    kept, staged = _staging_of(layout, rounds, int(are_others), repeats, all_at_once)
    kept = staged if one_host and are_others else kept  # memory that ranks share keeps its pages
    latest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in layout.params), default=0)
    stepped = max((round_.stepped for round_ in rounds if not round_.offloaded), default=0)
    if not any(training.remembered):  # comparing masters with their weights takes the most then
        stepped = 0 if training.on_host else stepped * 3 // 4 * any(round_.narrow for round_ in rounds)
    near = [round_.share for round_ in rounds if not (round_.offloaded or round_.on_disk or (stays and round_.narrow))]
    states, streams = _states_of(layout, rank, training, rounds), stream_bytes(layout, rank, training.num_moments)
    gathered = [each.numel * ITEM_BYTES[each.dtype] for i, each in enumerate(layout.chunks) if _is_gathered(layout, i)]
    are_gathered = training.shards_weights and not one_host
    return Budget(
        device=states[False],
        staging=kept,
        filling=staged - kept + _exchanged(rounds, repeats, waits, stays, latest) + streams[False].filling
        + training.activations,
        stepping=sum(near) + (staged - kept if stays else stepped) + streams[False].stepping,
        host=states[True],
        waiting=sum(round_.whole for round_ in rounds) if waits else 0,
        in_transit=_in_transit(offloaded, repeats, training.by_blocks) + sum(streams[True]),
        disk=states[None],
        gathered=_gathered(sorted(gathered, reverse=True), training.gathered_bytes) if are_gathered else 0,
    )


def _states_of(
    layout: FlatLayout, rank: int, training: PlannedTraining, rounds: Sequence[_Round]
) -> dict[bool | None, Shares]:
    """Returns the bytes of all states, by whether they live on the host beside a device; None: on disk."""
    shares = {False: Counter[str](), True: Counter[str](), None: Counter[str]()}
    shards_weights, remembered = training.shards_weights, training.remembered
    for bucket, round_ in zip(layout.buckets, rounds, strict=True):
        shares[_place(bucket, "gradients")]["gradients"] += round_.share
        is_kept = layout.chunks[bucket.chunk].is_kept
        are_apart = round_.narrow or (bucket.offloaded and (is_kept or not shards_weights))
        shares[_place(bucket, "masters")]["masters"] += round_.share if are_apart else 0
        if shards_weights:
            place = None if weights_place(layout, bucket.chunk) else bucket.offloaded and not is_kept
            shares[place]["weights"] += round_.weights * (bucket.num_shares if is_kept else 1)
            # The share of weights on the host is counted once unless other ranks read a copy of it there.
            is_once = bucket.offloaded or training.on_host or is_kept or bucket.num_shares == 1
            shares[True]["weights"] += 0 if is_once else round_.weights
    if not shards_weights:
        shares[False]["weights"] = sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks)
    if training.in_lines:
        for index, number in lines_of_moments(layout, rank, remembered).items():
            shares[_place(layout.buckets[index], "moments")]["moments"] += number * rounds[index].share
    else:  # the optimizer sees pieces, never the padding between them
        for param, spec in enumerate(layout.params):
            num_bytes = remembered[min(spec.group, len(remembered) - 1)] * max(ITEM_BYTES[spec.dtype], ITEM_BYTES["float32"])
            for piece in layout.pieces(param, rank):
                place = _place(layout.buckets[piece.bucket], "moments")
                shares[place]["moments"] += math.ceil(num_bytes * piece.in_param.numel)
    return {place: Shares(**by_kind) for place, by_kind in shares.items()}


@dataclass(frozen=True)
class _Round:
    """The bytes of a bucket in each form that it takes, from its gradients to its new weights."""

    filled: int
    listed: int  # gradients beside the bucket that are copied by one list
    pieces: int  # what other ranks send; all of the sum if every rank wants the whole sum
    whole: int  # all of the bucket, in the dtype of sums
    total: int  # the sum, if it has memory of its own: on its way to the host, or to be added to another one
    share: int
    stepped: int  # what the step of the bucket needs beside it
    weights: int  # this rank's share of the weights
    narrow: bool  # weights are narrower than sums
    offloaded: bool
    on_disk: bool  # the sums of its gradients live on a disk

    @staticmethod
    def of(layout: FlatLayout, index: int, rank: int, num_ranks: int, training: PlannedTraining) -> _Round:
        bucket, waits, one_host = layout.buckets[index], training.waits, training.one_host
        family = layout.families[bucket.family]
        num_shares, num_summing = family.num_shares, family.num_summing(num_ranks)
        are_others, shared = num_summing > 1, num_shares > 1
        come = 0.0 if one_host else _coming(family.share_of(rank), num_shares)
        goes_on = 1 < num_shares < num_summing  # the sum has memory of its own, and is added to those of replicas
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        wide = max(item, ITEM_BYTES["float32"])
        whole, share = bucket.span.numel * wide, bucket.share_numel * wide
        filled = whole if waits else bucket.span.numel * item
        listed = 0 if training.on_host else min(bucket.span.numel, MOST_HELD) * item
        pieces = round(filled * come) if shared else share if are_others and come else 0
        total = share if goes_on or (shared and come) or (item < wide and not are_others and bucket.offloaded) else 0
        on_disk = _place(bucket, "gradients") is None
        stepped, weights = share * _OF_MATRICES // 2 if bucket.has_owners else share, bucket.share_numel * item
        return _Round(filled, listed, pieces, whole, total, share, stepped, weights, item < wide, bucket.offloaded, on_disk)


def _place(bucket: Bucket, kind: str) -> bool | None:
    """Returns True if a kind of state lives on the host beside a device; None if it is on disk."""
    place = dict(bucket.away).get(kind)
    return bucket.offloaded if place is None else True if place == "host" else None


def _is_gathered(layout: FlatLayout, chunk: int) -> bool:
    """Returns True if a chunk in shares is gathered. One rank has all of its shares side by side, unless some are on the
    host."""
    is_alone = layout.families[layout.chunks[chunk].family].num_shares == 1
    is_beside = is_alone and not any(layout.buckets[index].offloaded for index in layout.buckets_in(chunk))
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
    """Returns the bytes of buffers that are kept, and of all that there are at one time: as many of each dtype as one gradient
    fills, and those that were sent before and have not landed, in one size; larger ones than usual apart, and those of each
    family. `all_at_once`: what was added up in the dtype of sums is sent in it, when the window settles."""
    kept = staged = 0
    usual = usual_numel(layout)
    kinds = [(bucket.span.numel > usual, bucket.family) for bucket in layout.buckets]
    for kind in dict.fromkeys(kinds):
        of_it = {index for index, of_bucket in enumerate(kinds) if of_bucket == kind}
        filled = max((len(of_it.intersection(layout.buckets_of(param))) for param in range(len(layout.params))), default=0)
        buffers = len(of_it) if all_at_once else min(filled + sent_before, len(of_it) * repeats)
        largest = Counter[str]()
        for index in of_it:
            dtype = layout.chunks[layout.buckets[index].chunk].dtype
            largest[dtype] = max(largest[dtype], rounds[index].filled)
        staged += buffers * sum(largest.values())
        kept += min(_SPARE, buffers) * sum(largest.values())
    return kept, staged


def _exchanged(rounds: Sequence[_Round], repeats: int, waits: bool, stays: bool, latest: int) -> int:
    """Returns the most bytes of shares on the device and of what lands in them, at the landing of any round, with what still
    waits to be sent and the latest gradient. What travels to the host stays until its copy is waited for."""
    whole = [round_.whole if waits and not round_.narrow else 0 for round_ in rounds]  # narrow gradients wait in wide buckets
    # The bytes that wait while one round is not sent yet, while two are not, and so on.
    waiting = list(itertools.accumulate(reversed(whole)))
    kept, all_ = 0, [*rounds] * repeats
    first = sum(max(latest + each.pieces, each.listed) for each in rounds[:1])
    most = max(sum(whole) + latest, sum(whole[1:]) + first)
    travelling = deque[int](maxlen=_ON_THE_WAY)
    for index, round_ in enumerate(all_):
        is_first, stays_here = index < len(rounds), not (round_.offloaded or round_.on_disk or (stays and round_.narrow))
        unsent = waiting[len(rounds) - index - 3] if index + 2 < len(rounds) else 0
        # When a gradient comes, the next round is sent before this one is looked at. The last round lands with none behind it.
        following = sum(max(other.pieces + latest, other.listed) for other in all_[index + 1 : index + 2])
        others = unsent + sum(travelling) + following
        kept += round_.share if is_first and stays_here else 0
        apart = round_.total if round_.offloaded or not is_first else 0  # a first sum lies in the memory of the pieces
        most = max(most, kept + max(round_.pieces, apart) + others)
        if round_.offloaded:
            travelling.append(round_.total)
    return most


def _in_transit(rounds: Sequence[_Round], repeats: int, by_blocks: bool) -> int:
    """Returns the bytes of host memory that is lent, all of one size. Weights of a bucket and of the next one come, and as many
    go as may be on their way, those that are being made among them; what goes may still do so when gradients come again."""
    coming = min(2, len(rounds)) if by_blocks else len(rounds)
    landings = min(_ON_THE_WAY, (repeats - 1) * len(rounds))  # the first sum of a bucket lands in its share
    largest = max((max(round_.weights, round_.share if landings else 0) for round_ in rounds), default=0)
    return largest * (max(coming, landings) + _ON_THE_WAY) if rounds else 0


# a stage --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank, on the device of the weights and on a host beside it."""

    device: Shares  # the gradients at the most that they take
    buckets: int  # the buckets that are kept from window to window
    host: Shares
    peak: int = 0  # the most bytes on the device, of model states alone
    host_peak: int = 0

    @property
    def total(self) -> int:
        return self.device.total + self.buckets


def cost_of(
    layout: FlatLayout, stage: int, rank: int = 0, accumulation: int = 1, training: PlannedTraining = _USUAL
) -> Cost:
    """Returns the cost of windows of so many backwards at a stage, to one rank, whose optimizer steps block by block. The stage
    and the accumulation say what of `training` follows from them.

    Before the last backward of a window, stages that accumulate locally have every gradient whole. If ranks are on one host,
    all train in the memory of that, and a fused step is one pass over it.
    """
    row = stage_of(stage)
    one_host = training.one_host
    training = replace(
        training, waits=accumulation > 1 and row.accumulates_locally, on_host=training.on_host or one_host,
        num_backwards=1 if row.accumulates_locally else accumulation, shards_weights=row.shards_weights,
    )  # fmt: skip
    budget = budget_of(layout, rank, training)
    if one_host:
        if training.fused_step and accumulation == 1:
            budget = _without_sums(budget, layout, training.num_ranks or layout.num_shares)
        if not row.shards_weights:
            budget = replace(budget, staging=budget.staging + _published_bytes(layout))
    device = replace(budget.device, gradients=max(budget.waiting, budget.device.gradients))
    return Cost(device, budget.staging, budget.host, budget.peak, budget.host_peak)


def _published_bytes(layout: FlatLayout) -> int:
    """Returns the bytes of shared memory from which other ranks read this rank's new weights: one share is written while
    another is read."""
    if not layout.is_sharded:
        return 0
    items = [ITEM_BYTES[layout.chunks[bucket.chunk].dtype] for bucket in layout.buckets]
    largest = max((item * bucket.share_numel for item, bucket in zip(items, layout.buckets, strict=True)), default=0)
    return largest * min(2, len(layout.buckets))


def _without_sums(budget: Budget, layout: FlatLayout, num_ranks: int) -> Budget:
    """Returns the budget without sums of gradients: if what was sent takes no more than its sum, a step that adds it up itself
    needs no other memory for gradients."""
    for chunk in layout.chunks:
        if num_ranks * ITEM_BYTES[chunk.dtype] > max(ITEM_BYTES[chunk.dtype], ITEM_BYTES["float32"]):
            return budget
    sent = sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks)
    # The latest gradient, which is not copied to its bucket yet.
    latest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in layout.params), default=0)
    device = replace(budget.device, gradients=sent)
    return replace(budget, device=device, staging=0, filling=sent + latest, stepping=sent)


# disks ----------------------------------------------------------------------------------------------------------------


def disk_bytes(layout: FlatLayout, rank: int = 0, num_moments: float | Sequence[float] = 2) -> Counter[tuple[str, str]]:
    """Returns what files of states take, by kind and place, with an optimizer of so many values an element, by group if they
    differ. Weights are in memory that is a file, and not among them."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    moments = lines_of_moments(layout, rank, num_moments)
    for index, bucket in enumerate(layout.buckets):
        for kind, place in bucket.away:
            if place != "host" and kind != "weights" and lives(layout, index, kind):
                num_bytes[kind, place] += line_bytes(layout, index) * (moments[index] if kind == "moments" else 1)
    return num_bytes


def weights_place(layout: FlatLayout, chunk: int) -> str | None:
    """Returns the disk that the weights of a chunk live on; None if they are in memory. Those of a chunk are in one place."""
    places = {dict(layout.buckets[index].away).get("weights") for index in layout.buckets_in(chunk)}
    return places.pop() if len(places) == 1 and not layout.chunks[chunk].is_kept else None


def weights_bytes(layout: FlatLayout) -> int:
    """Returns the bytes of a rank's shares of weights on disks."""
    on_disk = (bucket for bucket in layout.buckets if weights_place(layout, bucket.chunk) is not None)
    return sum(bucket.share_numel * ITEM_BYTES[layout.chunks[bucket.chunk].dtype] for bucket in on_disk)


def lives(layout: FlatLayout, bucket: int, kind: str) -> bool:
    """Returns True if a kind of state is stored apart from the weights: masters as wide as the weights, in one memory, are the
    same."""
    entry = layout.buckets[bucket]
    item = ITEM_BYTES[layout.chunks[entry.chunk].dtype]
    return kind != "masters" or entry.offloaded or item < ITEM_BYTES["float32"]


def line_bytes(layout: FlatLayout, bucket: int) -> int:
    """Returns the bytes of a share in the dtype of sums, in whole pages."""
    entry = layout.buckets[bucket]
    return round_up(entry.share_numel * max(ITEM_BYTES[layout.chunks[entry.chunk].dtype], ITEM_BYTES["float32"]), _PAGE)


def lines_of_moments(layout: FlatLayout, rank: int, num_moments: float | Sequence[float]) -> Counter[int]:
    """Returns for each bucket as many lines as its parameter with the most values an element needs."""
    # The last number is that of all other groups.
    remembered = [num_moments] if isinstance(num_moments, (int, float)) else num_moments
    lines: Counter[int] = Counter()
    for param, spec in enumerate(layout.params):
        number = remembered[min(spec.group, len(remembered) - 1)]
        for piece in layout.pieces(param, rank):
            lines[piece.bucket] = max(lines[piece.bucket], math.ceil(number))
    return lines


class Streamed(NamedTuple):
    """The memory for states that live elsewhere, while they are here."""

    filling: int = 0  # the sums while gradients come
    stepping: int = 0  # sums, masters and moments while the optimizer steps


def stream_bytes(layout: FlatLayout, rank: int, num_moments: float | Sequence[float]) -> dict[bool, Streamed]:
    """Returns the memory of streams, by whether it is on the host beside a device. Lines are of one size."""
    moments, most, buckets = lines_of_moments(layout, rank, num_moments), Counter[bool](), Counter[bool]()
    largest, sums = Counter[bool](), Counter[bool]()
    for index, bucket in enumerate(layout.buckets):
        if "gradients" in dict(bucket.away):
            sums[bucket.offloaded] = max(sums[bucket.offloaded], line_bytes(layout, index))
        kinds = [kind for kind, _ in bucket.away if kind in ("masters", "moments") and lives(layout, index, kind)]
        lines = sum(moments[index] if kind == "moments" else 1 for kind in kinds)
        if lines:
            buckets[bucket.offloaded] += 1
            most[bucket.offloaded] = max(most[bucket.offloaded], lines)
            largest[bucket.offloaded] = max(largest[bucket.offloaded], line_bytes(layout, index))
    coming = {where: min(STREAMED, buckets[where]) * most[where] * largest[where] for where in (False, True)}
    return {where: Streamed(_SUMS * sums[where], _READ_SUMS * sums[where] + coming[where]) for where in (False, True)}


def written_bytes(layout: FlatLayout, rank: int = 0, num_moments: float | Sequence[float] = 2, rounds: int = 1) -> int:
    """Returns the bytes that go to disks in a step of so many rounds of gradients."""
    files = disk_bytes(layout, rank, num_moments)
    states = sum(number * (rounds if kind == "gradients" else 1) for (kind, _), number in files.items())
    return states + weights_bytes(layout)


# traffic --------------------------------------------------------------------------------------------------------------


def default_bucket_bytes(weight_bytes: int, world: int, on_network: bool, is_host: bool = True) -> int:
    """Returns what `bucket_bytes="auto"` is, for host tensors that go over a network or others. What is sent first waits for a
    bucket of gradients, and what is sent last for a bucket of the step: over a network buckets are smaller, to hide the rest.
    Those of large models are larger, as each costs time on the host; so are those of one rank on a device, which sends nothing
    and waits for the host alone."""
    if world == 1 and not is_host:
        return _MOST_BYTES
    if not on_network:
        return min(_MOST_BYTES, max(USUAL_BUCKET_BYTES, weight_bytes // _NUM))
    least = max(_LEAST_ON_NETWORK, world * _LEAST_OF_A_RANK)
    return min(USUAL_BUCKET_BYTES, max(least, weight_bytes // _NUM_ON_NETWORK))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step."""

    gradients: int
    weights: int
    passes: int  # rounds through all ranks: one for a collective, two for an all-reduce
    across: int = 0  # the bytes of gradients that go from one group of ranks that share states to the others

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.across

    def seconds(self, world: int, link_bytes_per_s: float, latency_s: float) -> float:
        """Estimates the seconds that this traffic takes on a ring, from bandwidth and latency."""
        return self.total / link_bytes_per_s + self.passes * (world - 1) * latency_s


def traffic_of(layout: FlatLayout, stage: int, world: int, num_backwards: int = 1) -> Traffic:
    """Returns the traffic of a window of `num_backwards`, on `world` ranks that all use all of the layout's parameters. If
    fewer share it, the others have replicas. `docs/scaling.md` shows the numbers.

    A reduce-scatter and an all-gather of N bytes both send N (world - 1) / world from each rank, an all-reduce twice as many,
    and of sums, which are fp32 or wider.
    """
    row = stage_of(stage)
    rounds = 1 if row.accumulates_locally else num_backwards
    # Gradients that waited for the end of an accumulation are wider than their weights, and are sent so.
    as_sums = not row.shards_optimizer or (row.accumulates_locally and num_backwards > 1)
    num_shares = layout.num_shares if row.shards_optimizer else world
    replicas = world // num_shares
    gradients = weights = across = 0
    for bucket in layout.buckets:
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        sent = bucket.span.numel * (num_shares - 1) // num_shares
        across += 2 * (bucket.share_numel * (replicas - 1) // replicas) * max(4, item)
        gradients += rounds * sent * (max(4, item) if as_sums else item) * (1 if row.shards_optimizer else 2)
        gathers = 2 if row.shards_weights else 1  # one gather for forward and one for backward
        weights += gathers * sent * item if row.shards_optimizer else 0
    number = len(layout.buckets)
    as_one = row.shards_optimizer and not row.shards_weights
    publications = sum(1 for _ in layout.published_as_one(range(number))) if as_one else number
    passes = (rounds * number + publications) * (num_shares > 1) + 2 * number * (replicas > 1)
    return Traffic(gradients, weights, passes, across)
