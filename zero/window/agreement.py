"""The messages of ranks when a window settles, and what follows from them: bytes and integers, no tensors.

Every rank sees the counts of all ranks and decides alone. The decisions are a function of the same counts, so they are the same
everywhere, errors included.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import SupportsFloat

from zero.comm.group import Group
from zero.comm.one_answer import exchange_about, exchange_texts, first_difference
from zero.errors import RankFailed, RanksDiffer, ZeroError
from zero.memory.shard import LayoutRef
from zero.plan.layout import set_bits
from zero.runtime.params.table import Params
from zero.runtime.params.tracking import ParamTracker

# The calls for which ranks settle. Ranks that settle for different ones have lost each other.
OCCASIONS = ("step", "zero_grad", "an operation on .grad", "unscale_", "settle", "whole_grad", "save")

Explain = Callable[[str, int], str]

_HEAD = struct.Struct("<BQQ8s8sQId8siIIIB")


@dataclass(frozen=True)
class GradEdits:
    """The edits that were found in `.grad`. Sets of parameters are bits of an int."""

    local: int  # the parameters of which a gradient waits on this rank, or was assigned by the user
    removed: int
    replaced: int


@dataclass(frozen=True)
class Counts:
    """The report of one rank on what it has done since the last settling. Sets of parameters and buckets are bits of an int."""

    occasion: str
    step: int = 0
    settles: int = 0
    digest: bytes = b""  # the digest of layout and configuration
    settings: bytes = bytes(8)  # the digest of the groups' settings, if the weights are about to be changed by them
    sent: int = 0  # the number of rounds of the agreed order that this rank has sent
    clears: int = 0  # how often the user cleared every .grad, by a way that is not reported, while rounds were unsettled
    weight: float = 0.0  # the sum over all micro-batches; it means nothing unless `weighted`
    weighted: bool = False
    weights: bytes = bytes(8)  # the digest of the weights of the micro-batches, one after the other
    row: int = -1  # the first of the ranks that backwards of this window exchanged gradients with; -1: none
    contributed: bool = False  # the rank had a gradient, or said that it has none
    failed: bool = False
    kept: bool = False  # the rank has gradients from before, which were settled
    changes: int = 0  # the digest of what the user did to settled gradients
    differing: int = 0  # the rank whose factors, as devices found out, were not those of rank 0 in the last step; 0: none
    micro_steps: int = 0  # the number of micro-steps that were counted in this window
    used: int = 0  # parameters: had a gradient here
    put: int = 0  # parameters: a `ShardedGrad` was put in .grad
    trained: int = 0  # parameters: require a gradient
    removed: int = 0  # parameters: the user set .grad to None
    replaced: int = 0  # parameters: the user set .grad to a tensor of his own
    lost: int = 0  # parameters: the model no longer computes with what we keep of them
    open: int = 0  # buckets: have something to send that fits the ordinary round
    wide: int = 0  # buckets: have something that only a round in the sum's dtype can carry
    later: int = 0  # buckets: have something that must not travel before the agreed rounds are over
    order: tuple[int, ...] = ()  # buckets: in which order this rank's became full


@dataclass(frozen=True)
class Agreement:
    """The decision of all ranks on what they do next."""

    rounds: int  # the number of rounds of the agreed order that every rank sends
    rest: tuple[int, ...]  # the buckets that need one round more
    wide: int  # the buckets of `rest` that travel in the sum's dtype
    discard: bool  # the rounds so far belong to gradients that were cleared
    used: int
    stepped: int  # the parameters in `used`, without those of a rank's own that only others used
    removed: int
    replaced: int
    weight: float | None  # the sum over all ranks, if the window is weighted
    order: tuple[int, ...]  # the order of buckets for the rounds after this settling
    error: ZeroError | None  # why nothing may be applied; raised once every round is in, so that ranks can go on
    starts_over: bool = False  # ranks are at different micro-steps, or would be: all begin a window


class Codec:
    """Packs `Counts` into bytes of a fixed size, which the layout decides, and reads them again."""

    def __init__(self, num_params: int, num_buckets: int) -> None:
        self._param_bytes = num_params // 8 + 1
        self._bucket_bytes = num_buckets // 8 + 1
        self._order = struct.Struct(f"<{num_buckets}i")
        self._num_bytes = _HEAD.size + 6 * self._param_bytes + 3 * self._bucket_bytes + self._order.size

    def pack(self, counts: Counts) -> bytes:
        flags = counts.weighted | counts.contributed << 1 | counts.failed << 2 | counts.kept << 3
        head = _HEAD.pack(
            OCCASIONS.index(counts.occasion), counts.step, counts.settles, counts.digest, counts.settings, counts.sent,
            counts.clears, counts.weight, counts.weights, counts.row, counts.changes, counts.differing, counts.micro_steps,
            flags,
        )  # fmt: skip
        of_params = (counts.used, counts.put, counts.trained, counts.removed, counts.replaced, counts.lost)
        of_buckets = (counts.open, counts.wide, counts.later)
        masks = [mask.to_bytes(self._param_bytes, "little") for mask in of_params]
        masks += [mask.to_bytes(self._bucket_bytes, "little") for mask in of_buckets]
        num_buckets = self._order.size // 4
        order = (counts.order + (-1,) * num_buckets)[:num_buckets]
        return b"".join((head, *masks, self._order.pack(*order)))

    def unpack(self, message: bytes) -> Counts:
        (code, step, settles, digest, settings, sent, clears, weight, weights, row, changes, differing, micro_steps,
         flags) = _HEAD.unpack_from(message)  # fmt: skip
        if len(message) != self._num_bytes:  # only a rank with another layout sends another length, and its digest says so
            return Counts(OCCASIONS[code], step, settles, digest)
        masks, offset = [], _HEAD.size
        for size in (self._param_bytes,) * 6 + (self._bucket_bytes,) * 3:
            masks.append(int.from_bytes(message[offset : offset + size], "little"))
            offset += size
        used, put, trained, removed, replaced, lost, open_, wide, later = masks
        return Counts(
            OCCASIONS[code], step, settles, digest, settings, sent, clears, weight,
            bool(flags & 1), weights, row, bool(flags & 2), bool(flags & 4), bool(flags & 8), changes, differing, micro_steps,
            used, put, trained, removed, replaced, lost, open_, wide, later,
            order=tuple(bucket for bucket in self._order.unpack_from(message, offset) if bucket >= 0),
        )  # fmt: skip


def agree(
    everyone: Sequence[Counts],
    order: Sequence[int],
    names: Sequence[str],
    explain: Explain,
    owners: Sequence[tuple[int, Sequence[int]]] = (),
    meeting: Sequence[Sequence[int]] = (),
    data: Sequence[int] = (),
) -> Agreement:
    """Returns what follows from all ranks' counts.

    Args:
        everyone: The counts of all ranks, by rank.
        order: The order of buckets that was agreed before.
        names: The names of the parameters, for errors.
        explain: A collective that returns the first difference between two ranks in what a digest is of, or where one failed.
        owners: Parameters, as bits, of which ranks have others by the same name; and the ranks that have the same as this one.
        meeting: Lists of ranks that hold parts of the same parameters, so that gradients of each pass through the others.
        data: The ranks whose data count; () if all do.
    """
    error = _different_digest(everyone, explain)
    if error is not None:
        raise error  # after this, no round can be trusted to be the same one on all ranks
    error = (
        _different_factors(everyone)  # comes first, as devices tell it once
        or _failure(everyone, explain)
        or _lost_parameters(everyone, names)
        or _different_place(everyone)
        or _different_settings(everyone, explain)
        or _different_freezing(everyone, names)
        or _different_windows(everyone)
        or _different_contributions(everyone)
        or _different_weights(everyone, meeting)
        or _different_edits(everyone, names)
        or _different_changes(everyone, explain)
    )
    clearing = any(counts.occasion == "zero_grad" for counts in everyone)
    apart = clearing and len({counts.micro_steps for counts in everyone}) > 1
    rounds = max(counts.sent for counts in everyone)
    wide = _union([counts.wide for counts in everyone])
    used = _union([counts.used for counts in everyone])
    rest = wide | _union([counts.later | _left_open(counts, rounds, order) for counts in everyone])
    weight = sum(everyone[rank].weight for rank in data or range(len(everyone)))
    stepped = used
    for params, ranks in owners:
        stepped = stepped & ~params | params & _union([everyone[rank].used for rank in ranks])
    return Agreement(
        rounds=rounds,
        rest=() if clearing or error is not None else tuple(set_bits(rest)),
        wide=wide,
        discard=clearing or error is not None or any(counts.clears for counts in everyone),
        used=used,
        stepped=stepped,
        removed=_union([counts.removed for counts in everyone]),
        replaced=_union([counts.replaced for counts in everyone]),
        weight=weight if any(counts.weighted for counts in everyone) else None,
        order=everyone[0].order,
        error=error,
        starts_over=error is not None or apart or any(counts.failed for counts in everyone),
    )


def _left_open(counts: Counts, rounds: int, order: Sequence[int]) -> int:
    """Returns the buckets, as bits, that still have something to send on a rank once it has caught up with the others."""
    left = counts.open
    if order:
        for number in range(counts.sent, min(rounds, counts.sent + len(order))):
            left &= ~(1 << order[number % len(order)])
    return left


def _union(masks: Sequence[int]) -> int:
    united = 0
    for mask in masks:
        united |= mask
    return united


def _different_digest(everyone: Sequence[Counts], explain: Explain) -> ZeroError | None:
    first = everyone[0]
    for rank, counts in enumerate(everyone):
        if counts.digest != first.digest:
            return RanksDiffer(
                f"Cannot go on: rank {rank} of {len(everyone)} built something else than rank 0, which shows at step "
                f"{counts.step + 1}: {explain('built', rank)}. Build the same model, optimizer and options on every rank; look "
                "for a seed, a path or `if rank == 0`."
            )
    return None


def _failure(everyone: Sequence[Counts], explain: Explain) -> ZeroError | None:
    """Returns the error if a rank failed, or cleared its gradients while the others go on: clearing is how a rank goes on
    after a failure."""
    clearing = [rank for rank, counts in enumerate(everyone) if counts.occasion == "zero_grad"]
    if len(clearing) == len(everyone):
        return None
    failed = sorted({rank for rank, counts in enumerate(everyone) if counts.failed} | set(clearing))
    if not failed:
        return None
    places = "".join(explain("failed", rank) for rank in failed)
    return RankFailed(
        f"Cannot go on: {_ranks(failed)} failed or cleared its gradients at step {everyone[0].step + 1}{places}, where the "
        f"others came to {next(counts.occasion for counts in everyone if counts.occasion != 'zero_grad')}; see its own error. "
        "Nothing was applied. Call zero_grad on all ranks to go on without this window."
    )


def _lost_parameters(everyone: Sequence[Counts], names: Sequence[str]) -> ZeroError | None:
    where = [rank for rank, counts in enumerate(everyone) if counts.lost]
    if not where:
        return None
    lost = [names[index] for index in set_bits(_union([counts.lost for counts in everyone]))]
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return ZeroError(
        f"Cannot train {', '.join(lost[:3])}{more}: on {_ranks(where)} it is no longer what was sharded: "
        "another Parameter took its place, or it has other memory (through an assignment, .to(dtype), .half(), a "
        "parametrization, or loading with assign=True). Change the model before sharding it, or close() the optimizer and "
        "shard anew."
    )


def _different_place(everyone: Sequence[Counts]) -> ZeroError | None:
    first = everyone[0]
    for rank, counts in enumerate(everyone):
        if (counts.occasion, counts.step, counts.settles) != (first.occasion, first.step, first.settles):
            alike = (counts.occasion, counts.step) == (first.occasion, first.step)
            settled_here, settled_there = (f", its settlement {each.settles + 1}" if alike else "" for each in (counts, first))
            return RanksDiffer(
                f"Cannot go on: rank {rank} of {len(everyone)} is at {counts.occasion} of step {counts.step + 1}"
                f"{settled_here}, and rank 0 is at {first.occasion} of step {first.step + 1}{settled_there}. Call step, "
                "zero_grad and operations on gradients in the same order on every rank (docs/collectives.md)."
            )
    return None


def _different_settings(everyone: Sequence[Counts], explain: Explain) -> ZeroError | None:
    first = everyone[0]
    for rank, counts in enumerate(everyone):
        if counts.settings != first.settings:
            return RanksDiffer(
                f"Cannot go on: rank {rank} of {len(everyone)} came to step {counts.step + 1} with settings "
                f"{counts.settings.hex()[:8]} in its optimizer's groups, rank 0 with {first.settings.hex()[:8]}: "
                f"{explain('settings', rank)}. Change them on all ranks alike; what a schedule looks at, such as a loss, must "
                "be the same number on all."
            )
    return None


def _different_freezing(everyone: Sequence[Counts], names: Sequence[str]) -> ZeroError | None:
    first = everyone[0]
    for rank, counts in enumerate(everyone):
        unlike = set_bits(counts.trained ^ first.trained)
        if unlike and counts.occasion != "zero_grad":
            frozen, trained = (rank, 0) if first.trained >> unlike[0] & 1 else (0, rank)
            return RanksDiffer(
                f"Cannot go on: at {first.occasion}, rank {trained} trains {names[unlike[0]]}, and rank {frozen} has it "
                "frozen. Set requires_grad on all ranks alike."
            )
    return None


def _different_windows(everyone: Sequence[Counts]) -> ZeroError | None:
    cleared = [rank for rank, counts in enumerate(everyone) if not counts.kept]
    if everyone[0].occasion == "zero_grad" or len(cleared) in (0, len(everyone)):
        return None
    return RanksDiffer(
        f"Cannot go on: {_ranks(cleared)} cleared gradients that were settled at step {everyone[0].step + 1}, where the others "
        f"kept them and came to {everyone[0].occasion}. Clear gradients on all ranks alike."
    )


def _different_contributions(everyone: Sequence[Counts]) -> ZeroError | None:
    if everyone[0].occasion == "zero_grad":
        return None
    idle = [rank for rank, counts in enumerate(everyone) if not counts.contributed]
    if idle and len(idle) < len(everyone):
        return RanksDiffer(
            f"Cannot go on: {_ranks(idle)} came to {everyone[0].occasion} at step {everyone[0].step + 1} without a gradient, "
            "but the others have one. Call optimizer.no_contribution() on a rank that has nothing to add."
        )
    weighted = [rank for rank, counts in enumerate(everyone) if counts.weighted]
    plain = [rank for rank, counts in enumerate(everyone) if counts.used and not counts.weighted]
    if weighted and plain:
        return RanksDiffer(
            f"Cannot go on: {_ranks(weighted)} gave a weight to its micro-batches, {_ranks(plain)} did not. "
            "Call weight(n) on all ranks or on none."
        )
    return None


def _different_weights(everyone: Sequence[Counts], meeting: Sequence[Sequence[int]]) -> ZeroError | None:
    """Returns the error for ranks that must have equal weights of micro-batches and do not, or None. Gradients of such ranks
    pass through each other: they have parts of one sequence, or parts of the same parameters."""
    if everyone[0].occasion == "zero_grad":
        return None
    rows = {counts.row for counts in everyone} - {-1}
    of_rows = [[rank for rank, counts in enumerate(everyone) if counts.row == row] for row in sorted(rows)]
    for why, ranks_of_all in (("part of the same sequences, so that gradients of the other pass through it", of_rows),
                              ("part that gradients of the other pass through", meeting)):  # fmt: skip
        for first, *ranks in ranks_of_all:
            for rank in ranks:
                one, other = everyone[first], everyone[rank]
                if one.weighted and other.weighted and (one.weight, one.weights) != (other.weight, other.weights):
                    portions = ", in other portions" if one.weight == other.weight else ""
                    return RanksDiffer(
                        f"Cannot go on: rank {rank} weighs its micro-batches {other.weight:g} and rank {first} {one.weight:g}"
                        f"{portions}, and each holds a {why}, weighted as its own. Call weight(n) on both with the "
                        "same n, their numbers together divided by how many they are; or shard with reduce='sum' and divide "
                        "each loss by the number of all ranks."
                    )
    return None


def _different_edits(everyone: Sequence[Counts], names: Sequence[str]) -> ZeroError | None:
    placed = [(rank, counts) for rank, counts in enumerate(everyone) if counts.put]
    for rank, counts in placed[1:]:
        first_rank, first = placed[0]
        if counts.clears != first.clears:
            return RanksDiffer(
                f"Cannot go on: rank {rank} cleared its gradients {counts.clears} times since the last step, rank {first_rank} "
                f"{first.clears} times. Clear them on all ranks alike."
            )
        # If one rank took a gradient away and then had another one, it was replaced there, and removed if it had none.
        edits, first_edits = counts.removed | counts.replaced, first.removed | first.replaced
        differ = set_bits((edits ^ first_edits) & counts.put & first.put)
        if differ:
            one, other = (rank, first_rank) if edits >> differ[0] & 1 else (first_rank, rank)
            return RanksDiffer(
                f"Cannot go on: rank {one} removed or replaced the gradient of {names[differ[0]]}, rank {other} kept it. "
                "Edit gradients on all ranks alike."
            )
    return None


def _different_factors(everyone: Sequence[Counts]) -> ZeroError | None:
    rank = max(counts.differing for counts in everyone)
    return _factors_differ(rank) if rank else None


def _factors_differ(rank: int) -> RanksDiffer:
    return gradients_differ(rank, "the last step, which changed nothing,")


def _different_changes(everyone: Sequence[Counts], explain: Explain) -> ZeroError | None:
    """Returns the error for a rank that changed gradients otherwise than rank 0, or None. If any digest differs, the values of
    all ranks are compared, also of those with equal digests: their numbers on devices may differ, and the judgement of the step
    does not compare numbers that were read for this."""
    first = everyone[0]
    if first.occasion == "zero_grad" or all(counts.changes == first.changes for counts in everyone):
        return None
    differing = (rank for rank in range(1, len(everyone)) if explain("changes", rank))
    return next((gradients_differ(rank, first.occasion) for rank in differing), None)


def gradients_differ(rank: int, occasion: str) -> RanksDiffer:
    """Returns the error for a rank that changed gradients otherwise than rank 0."""
    return RanksDiffer(
        f"Cannot go on: rank {rank} came to {occasion} with gradients changed otherwise than on rank 0: multiplied by another "
        "number, or by none. Change them on all ranks alike. A norm over parameters of which some are in no group of the "
        "optimizer is a rank's own: freeze those, or clip with clip=."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class WindowSync:
    """No settling succeeds unless all ranks have come to it after as many steps and settlings, with the same configuration.

    It tells the other ranks what this one has done and found, and hears it from them.
    """

    def __init__(
        self,
        group: Group,
        params: Params,
        layout_ref: LayoutRef,
        configuration: str,
        aliases: ParamTracker,
        settings: Callable[[], str],
    ) -> None:
        self.size = group.size
        self._step = 0
        # The rank that devices found with other factors in the last step; the host learns it late.
        self._differing: SupportsFloat | None = None
        self.tracker = aliases
        self.sync_count = 0
        self._group = group
        self._params = params
        self._layout_ref = layout_ref
        self._configuration = configuration  # as text
        self._configured = _short_digest(configuration).hex()
        self._settings = settings  # returns those of the optimizer's groups as text

    @property
    def step(self) -> int:
        """The number of steps so far, with those that were skipped."""
        return self._step

    def count_step(self) -> None:
        self._step += 1

    def expect(self, differing: SupportsFloat) -> None:
        """Keeps the result of the device's comparison of this step's factors for the next counts, which tell all ranks."""
        self._differing = differing

    def check_factors(self) -> None:
        """Raises if ranks had different factors in the last step: on all of them, as each device has compared the same. Waits
        for the device."""
        differing, self._differing = self._differing, None
        rank = 0 if differing is None else int(float(differing))
        if rank:
            raise _factors_differ(rank)

    def go_on_from(self, step: int) -> None:
        """Counts on from the step of a checkpoint."""
        self._step = step

    def set_phase(self, where: str, location: Callable[[], str] | None = None) -> None:
        """Publishes what this rank is doing; `location` says more exactly where, if it ends there."""
        phase = f"{where} of step {self.step + 1}"
        if phase != self._group.phase:
            self._group.set_phase(phase, location)

    def synchronize(self, local: Counts, order: Sequence[int], location: str, changes: Callable[[], str]) -> Agreement:
        """Exchanges the counts of all ranks, `local` being this rank's, and returns what follows from them under the agreed
        `order` of rounds. If this rank failed, `location` says where; `changes` says what was done to gradients. A
        collective."""
        layout = self._layout_ref.layout
        codec = Codec(len(layout.params), len(layout.buckets))
        counts = replace(
            local,
            step=self.step,
            settles=self.sync_count,
            digest=self._built(),
            settings=_short_digest(self._settings() if local.occasion == "step" else ""),
            differing=0 if self._differing is None else int(float(self._differing)),
            trained=sum(1 << index for index, tensor in enumerate(self._params.leaves) if tensor.requires_grad),
            lost=0 if local.occasion == "zero_grad" else self.tracker.replaced(),
        )
        messages = exchange_about(self._group, "step, zero_grad or settling", codec.pack(counts))
        self.sync_count += 1
        self._differing = None

        values = cache(lambda: exchange_texts(self._group, changes()))  # exchanged once, however many ranks are compared

        def explain(what: str, rank: int) -> str:
            return self._explain(what, rank, location, values)

        everyone = [codec.unpack(message) for message in messages]
        return agree(everyone, order, self._params.names, explain, self._owners(), self._meeting(), self._data())

    def _owners(self) -> list[tuple[int, list[int]]]:
        """Returns by family the parameters that ranks have of their own, and the ranks that hold this one's; for `agree`."""
        layout, owners = self._layout_ref.layout, []
        for number, family in enumerate(layout.parted, 1):
            params = sum(1 << index for index, spec in enumerate(layout.params) if spec.is_own and spec.family == number)
            owners.append((params, next(ranks for ranks in family.holders(self.size) if self._group.rank in ranks)))
        return owners

    def _meeting(self) -> list[list[int]]:
        """Returns the ranks that hold the parts of one copy, a list for each copy; for `agree`."""
        rows: dict[tuple[int, int, int], list[int]] = {}
        for index, family in enumerate(self._layout_ref.layout.parted):
            for rank in range(self.size):
                _, number, copy = family.seat_of(rank)
                rows.setdefault((index, number, copy), []).append(rank)
        return list(rows.values())

    def _data(self) -> list[int]:
        """Returns the ranks whose data count: of those that have the same data, the first; for `agree`."""
        whole, *_ = self._layout_ref.layout.families
        return [rank for rank in range(self.size) if not whole.seat_of(rank).copy]

    def _built(self) -> bytes:
        return _short_digest(f"{self._layout_ref.layout.digest} {self._configured}")

    def _explain(self, what: str, rank: int, location: str, values: Callable[[], Sequence[str]]) -> str:
        """Returns the first difference between rank 0 and another rank, or the place where that failed; nothing if what looked
        different is the same. A collective."""
        if what == "failed":
            return exchange_texts(self._group, location)[rank]
        if what == "changes":
            first, other = values()[0], values()[rank]
            return "" if other == first else other
        specs = self._layout_ref.layout.params
        params = (f"parameter {spec.name} {spec.shape} {spec.dtype} in group {spec.group}" for spec in specs)
        text = self._settings() if what == "settings" else "\n".join((self._configuration, *params))
        texts = exchange_texts(self._group, text)
        return first_difference(texts[0], texts[rank], rank)


def digest_of(weights: Sequence[float]) -> bytes:
    """Returns a digest of the weights of micro-batches, one after the other."""
    return _short_digest(repr([float(weight) for weight in weights])) if weights else bytes(8)


def _short_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]
