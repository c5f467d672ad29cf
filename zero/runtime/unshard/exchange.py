"""Exchanges weights in shares: this rank's share by version, and whole chunks from the shares of all ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zero.comm.group import Group, GroupBeside
from zero.comm.one_answer import exchange_about
from zero.comm.pulls import Pull, Pulls
from zero.errors import GroupLost, RanksDiffer
from zero.memory.gathered import Arrival, GatheredChunk, GatheredWeights
from zero.memory.homes.home import MemoryHome, Transfer
from zero.memory.shard import weakly
from zero.memory.versions import VersionedShares
from zero.plan.layout import Span
from zero.runtime.unshard.edits import EditLog
from zero.runtime.unshard.gathers import Gather, Part, Scheduled
from zero.runtime.unshard.schedule import Schedule

_STEP_ENDED = -2  # the number of no share: its version tells ranks that wait that this one has ended its step


@dataclass(eq=False)
class Share:
    """The share that this rank has of a bucket, and its memory."""

    number: int  # the same on all ranks
    bucket: Span  # the elements in the chunk
    span: Span  # the elements in the chunk
    memory: torch.Tensor  # on the device, or the memory that other ranks read if that is enough
    is_served: bool  # `memory` is what other ranks read, or would
    is_renewed: bool = False  # `memory` has been replaced since the last `renewed`


class ShareExchange:
    """Between two steps no memory is written that another rank may be reading: an edit makes a new version of a share.

    The weights in shares of one family, trained and frozen ones, have in common the shares that other ranks read. The cache of
    chunks that are gathered is that of all families. See [Note: absent weights] in zero/runtime/params/absent.py.

    Ranks may read whatever they like between two steps, each for itself. They must make the same edits in the same order.
    Shares are read inside the inner group; that all ranks made the same edits is compared among all.

    [Note: visible weights]
    Ranks that share host memory keep their shares of a chunk side by side in it. So all of them see whole chunks as the last
    step left them, and nothing is gathered: a rank only waits until the others have ended their step. What a user edits since
    is in memory of the rank that edits, as others may be reading; such a chunk is gathered from all ranks until the next step.
    A rank alone has the shares of a chunk side by side too, where they live, and edits them there.
    """

    def __init__(
        self, group: Group, cache: GatheredWeights, host: MemoryHome, everyone: Group, holders: Sequence[Sequence[int]]
    ) -> None:
        self.host = host  # the home of shares that are not on the device
        self.cache = cache
        self._everyone = everyone  # the group of all families: if two ranks differ, all raise
        self._holders = holders  # by part: the ranks that hold it
        self.group = group
        self.versions = VersionedShares(group.inner.size - 1)  # this rank's shares as other ranks get them, in host memory
        self.versions.add(_STEP_ENDED, torch.zeros(1, device="cpu"))
        self.pulls, self._schedule = self._connect(group.inner.beside())
        self._shares: dict[int, Share] = {}  # by number
        self._edits = EditLog()
        self._copies: list[Transfer] = []  # those that bring what the last step left to where other ranks read it
        self._others: Pull | None = None  # arrives when all other ranks have ended the last step
        self._lock = threading.RLock()  # forward and backward run in threads of their own

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def schedule(self) -> Schedule | None:
        """The order of the weights that come by collectives; None if none do."""
        return self._schedule

    @property
    def is_alone(self) -> bool:
        """True if no other rank reads the shares of this one, so that they need not be on the host."""
        return self.group.inner.size == 1

    def add(self, number: int, bucket: Span, span: Span, values: torch.Tensor, lives_on: torch.device) -> Share:
        """Adds a share. Other ranks read `values`; if the share `lives_on` another device, this rank has a copy there."""
        memory = values.to(lives_on)
        self._shares[number] = share = Share(number, bucket, span, memory, memory is values)
        served = values if share.is_served or self.is_alone else self.host.allocate(values.numel(), values.dtype).copy_(values)
        self.versions.add(number, served)
        return share

    def remove(self, share: Share) -> None:
        """Removes a share that this rank reads no more. Others may read it until the next step."""
        del self._shares[share.number]
        self.versions.remove(share.number)
        if self._schedule is not None:
            self._schedule.forget(share.number)

    @property
    def num_fetched_bytes(self) -> int:
        """Bytes that other ranks sent to this one."""
        return self.pulls.num_pulled_bytes + (0 if self._schedule is None else self._schedule.num_bytes)

    # between two steps -------------------------------------------------------------------------------------------

    def pull(self, share: Share, memory: torch.Tensor) -> Pull:
        """Begins to fill the parts of other ranks in the memory of a bucket, as of this rank's own version."""
        return self.pulls.begin(share.number, memory, *self.versions.version(share.number))

    def gather(self, chunk: Scheduled, memory: torch.Tensor, is_edited: bool) -> Gather | None:
        """Begins to fill memory with a chunk by a collective, or returns None if it is to be pulled."""
        return None if self._schedule is None else self._schedule.fetch(chunk, memory, is_edited)

    def present(self, share: Share) -> torch.Tensor:
        """Returns what the last step left in a share, for the thread that edits weights."""
        return self.published(share) if self.versions.version(share.number).edits else share.memory

    def published(self, share: Share) -> torch.Tensor:
        """Returns what the last step left in a share, in the memory that other ranks read, for any thread."""
        return self.versions.published(share.number)

    def edit(self, shares: Sequence[Share], written: Span, memory: torch.Tensor, is_first: bool = False) -> None:
        """Takes over what a user wrote to the chunk that has these shares. `is_first`: there were no values before."""
        with self._lock, torch.inference_mode(False):
            self.cache.begin_write()
            if self.group.size > 1:  # a single rank has nobody to compare edits with
                self._edits.note(shares[0].number, written, memory)
            for share in shares:
                edited = share.span.overlap(written)
                inside = Span(0, 0) if edited is None else edited.shifted(-share.span.start)
                values = memory[:0] if edited is None else memory[edited.start : edited.stop]
                self.versions.edit(share.number, inside, values.to(self.versions.place(share.number).device), is_first)
                if share.is_served:
                    self._renew(share)
                else:
                    share.memory[inside.start : inside.stop] = values
            if self._edits.are_many(shares[0].number, sum(share.bucket.numel for share in shares)):
                for share in shares:  # otherwise others would keep old values for this rank, which will not ask for them
                    self.pulls.tell_reached(share.number, *self.versions.version(share.number))

    def is_edited(self, share: Share) -> bool:
        """Returns whether a share was edited since the last step apart from what all ranks see. A rank alone edits in place."""
        return not self.is_alone and self.versions.version(share.number).edits > 0

    def _renew(self, share: Share) -> None:
        share.memory, share.is_renewed = self.versions.place(share.number), True

    def wait_for_others(self) -> None:
        """Waits until every rank has ended the last step, so that the chunks which all ranks see are whole."""
        with self._lock:
            if self._others is not None:
                self._others.wait()
                self._others = None

    # a step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a step, in which shares are written, once all families have settled. A collective."""
        self._end_reads()
        differing = self._differing("an update of weights in shares", self._edits.digest())
        if differing is not None:
            first, rank = differing
            raise RanksDiffer(
                f"Cannot step: rank {rank} of {self._everyone.size} edited weights that rank {first} did not edit so since the "
                "last step. Edit weights alike on all ranks; to go on from here, load a checkpoint or weights."
            )
        self._take_over()

    def check_edits(self, kept: Mapping[int, Sequence[Span]]) -> None:
        """Raises unless all ranks edited these parts of chunks alike. What else is edited will be overwritten. A collective."""
        digest = self._edits.digest(lambda chunk, written: any(map(written.overlap, kept.get(chunk, ()))))
        differing = self._differing("a load of weights in shares", digest)
        if differing is not None:
            first, rank = differing
            raise RanksDiffer(
                f"Cannot load: rank {rank} of {self._everyone.size} edited weights that rank {first} did not edit so since the "
                "last step and that are not in what is loaded. Nothing was changed. Load all weights."
            )

    def take_edits(self) -> None:
        """Makes the present values a new version, whether ranks edited alike or not. All ranks call it, and will overwrite what
        differs, once all families have settled."""
        self._end_reads()
        self._take_over()
        self.end_step(())

    def settle(self) -> None:
        """Waits for the collectives that ranks have issued, and issues no more until the next version. A collective."""
        if self._schedule is not None:
            self._schedule.settle()

    def _differing(self, about: str, digest: bytes) -> tuple[int, int] | None:
        """Returns two ranks that hold the same, of which the second has another digest. When it returns no rank asks whether a
        step has ended, or reads weights."""
        self.wait_for_others()
        digests = exchange_about(self._everyone, about, digest)
        pairs = ((first, rank) for first, *ranks in self._holders for rank in ranks)
        return next((pair for pair in pairs if digests[pair[0]] != digests[pair[1]]), None)

    def _end_reads(self) -> None:
        """Ends this rank's reads of weights, and waits until its device has read all shares that lie on the host."""
        self.cache.end_window()
        self.cache.begin_write()
        self._let_copies_go_first()
        self.host.finish_reads()

    def _let_copies_go_first(self) -> None:
        """Makes the current stream wait for the copies of the last step, before it writes to the memory that they read or uses
        it for something else. The host goes on."""
        for copy in self._copies:
            copy.wait()

    def _take_over(self) -> None:
        self._edits.clear()
        for number in self.versions.begin_step():
            if self._shares[number].is_served:
                self._renew(self._shares[number])

    def end_step(self, written: Sequence[Share]) -> None:
        """Makes the present values of these shares the new weights."""
        apart = [share for share in written if not share.is_served]
        copies = {share.number: self.host.write(share.memory, self.versions.place(share.number)) for share in apart}
        self._copies = list(copies.values())
        self.versions.end_step(copies)
        if self._schedule is not None:
            self._schedule.begin_window()
        self._ask_others()

    def _ask_others(self) -> None:
        if not self.is_alone and self.group.inner.shared_host_memory is not None:
            version = self.versions.version(_STEP_ENDED)
            self._others = self.pulls.begin(_STEP_ENDED, torch.empty(self.group.inner.size, device="cpu"), *version)

    def close(self) -> None:
        """Ends the reading of shares of other ranks. A collective."""
        with contextlib.suppress(GroupLost):
            self.wait_for_others()
        if self._schedule is not None:
            self._schedule.end()
        self.pulls.close()
        try:
            self.cache.wait()  # done before connections are closed, also for chunks that were fetched ahead and never used
        except GroupLost:
            self.cache.abandon()
        if self._schedule is not None:
            self._schedule.close()
        self._let_copies_go_first()
        self._copies = []  # they keep the memory of shares, which goes with the training
        self.versions.clear()

    def reconnect(self) -> None:
        """Goes on over new connections of the group. A collective."""
        self.cache.abandon()
        num_fetched_bytes, beside = self.num_fetched_bytes, None
        if self._schedule is not None:
            beside = self._schedule.abandon()
            beside.reconnect(None)
        self.pulls, self._schedule = self._connect(beside)
        self.pulls.num_pulled_bytes = num_fetched_bytes
        self._ask_others()

    def _connect(self, beside: GroupBeside | None) -> tuple[Pulls, Schedule | None]:
        inner = self.group.inner
        pulls = Pulls(inner.new_wire(), self.versions.request, self.versions.reached)
        if beside is None:
            return pulls, None
        schedule = Schedule(inner, beside, self.device, self.host, pulls.tell_issued)
        pulls.issue_told = schedule.issue_told
        return pulls, schedule


class ShardedChunk(GatheredChunk):
    """A chunk has all its values in `common`, if there is one and no share was edited, or else only in the shares of ranks."""

    def __init__(
        self, exchange: ShareExchange, numel: int, dtype: torch.dtype, shares: Sequence[Share], common: torch.Tensor | None
    ) -> None:
        super().__init__(exchange.cache, numel, dtype)
        self._shares = shares
        self.common = common  # the whole chunk, in memory that all ranks see, or that of a rank alone
        self._exchange = exchange
        present, published = weakly(exchange.present), weakly(exchange.published)
        parts = [Part(each.bucket, each.span, partial(present, each), partial(published, each)) for each in shares]
        self._scheduled = Scheduled(self.number, numel, dtype, parts)

    @property
    def number(self) -> int:
        """The number of its first share, by which all ranks know its edits."""
        return self._shares[0].number

    def move(self, common: torch.Tensor) -> None:
        """Makes other memory that of all of its values."""
        self.common = common
        self.views, self.lasting = {}, None

    def visible(self) -> torch.Tensor | None:
        is_here = self.common is not None and self.common.device.type == self._exchange.device.type
        return self._seen() if is_here else None

    def fetch(self, memory: torch.Tensor) -> Arrival:
        seen = self._seen()
        read = self._exchange.host.read
        if seen is not None:
            return read(seen, memory)
        gather = self._exchange.gather(self._scheduled, memory, any(map(self._exchange.is_edited, self._shares)))
        if gather is not None:
            return gather
        landing = memory if memory.is_cpu else torch.empty(memory.shape, dtype=memory.dtype, device="cpu")
        pulls, copies = list[Pull](), list[Transfer]()
        for share in self._shares:
            copies.append(read(share.memory, memory[share.span.start : share.span.stop]))
            pulls.append(self._exchange.pull(share, landing[share.bucket.start : share.bucket.stop]))
        return _Landing(pulls, copies, landing, memory, [share.span for share in self._shares])

    def edited(self, written: Span) -> None:
        assert self.memory is not None
        first = {name: span for name, span in self.unwritten.items() if span.overlap(written) is not None}
        for name in first:
            del self.unwritten[name]
        is_first = any(span.start <= written.start and written.stop <= span.stop for span in first.values())
        self._exchange.edit(self._shares, written, self.memory, is_first)

    def _seen(self) -> torch.Tensor | None:
        """Returns `common` once others have ended their step; None if it does not have the present values."""
        if self.common is None or any(map(self._exchange.is_edited, self._shares)):
            return None
        self._exchange.wait_for_others()
        return self.common


class _Landing:
    """A chunk that is being fetched, by way of the host if the device is another one."""

    def __init__(
        self,
        pulls: Sequence[Pull],
        copies: Sequence[Transfer],
        landing: torch.Tensor,
        memory: torch.Tensor,
        spans: Sequence[Span],
    ) -> None:
        self._pulls = pulls
        self._copies = copies  # copies of this rank's shares
        self._landing = landing
        self._memory = memory
        self._local_spans = spans

    def wait(self) -> None:
        for pull in self._pulls:
            pull.wait()
        for copy in self._copies:
            copy.wait()
        if self._landing is not self._memory:
            start = 0
            # This rank's own shares are there.
            for span in (*self._local_spans, Span(self._memory.numel(), self._memory.numel())):
                self._memory[start : span.start] = self._landing[start : span.start]
                start = span.stop
