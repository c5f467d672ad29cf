"""Groups that are made of others: replicas of shares, and hosts in two levels; and groups of one rank, with no others or many.

[Note: replicas] Of W ranks, S consecutive ones share the states: the inner group. The W / S ranks that have the same share
are the outer group. A bucket of gradients is reduced and scattered inside; the share of the sum is all-reduced across, in the
dtype of sums. New weights are gathered inside. So between inner groups nothing travels but shares of gradients. All else that
ranks do together, they do as one group: agree, count, divide by W, compare.

Replicas have the same bits: what they step has come out of one all-reduce, and norms are added up from the shares of the first
inner group on all ranks.

[Note: by host] Of H hosts with L ranks each, all ranks of a host share memory, and the H ranks that have the same number on
their hosts are a column, with a group of its own over the network. A bucket is reduced inside first: through shared memory a
rank adds up what the ranks of its host have for each rank of its column. These H sums are reduced and scattered in the column.
New weights go the other way: each rank gathers the shares of its column, and then ranks of a host copy those of each other. So
a host sends every other host the weights once and not L times, and the gradients once, in the dtype of sums. In bytes, fp32
gradients are L times less than without levels, and bf16 ones L / 2 times, so that nothing is saved of these with two ranks a
host. Weights that a rank pulls for itself do not go by levels, but from rank to rank.

[Note: families] Parameters that are parts of larger ones, as experts are, are summed over the ranks that hold the same part.
These are a group of their own beside that of whole parameters, with an inner and an outer one if states are replicated.
Under tensor parallelism some ranks have the same data. Then several groups of ranks, each with all of the data, lie side by
side, and each trains a copy of the whole parameters. A part is summed over the ranks of one such group that hold the part. If
parts lie across the groups, there is one copy of each part; experts that lie inside each group have as many copies as there are
groups. All ranks that hold a part begin with the same values, and compare them. Buckets of all families are sent in one order
that all ranks agreed on, so ranks of groups that overlap cannot wait for each other in a circle.

The gradients of a host's ranks are added up first, and then the sums of hosts, in the order of hosts. If ranks of a host do
not share memory, all ranks send each other their pieces and add them in that same order, so that both ways give the same bits.
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from zero.comm.group import ANYONES, Group, GroupBeside, Levels, Message, Needs, Pending, SharedHostMemory, Wire
from zero.comm.one_answer import exchange_texts
from zero.comm.results import CompletedResult, SingleRankResult, add_rows, sum_in_rank_order, wait_into
from zero.errors import RanksDiffer
from zero.plan.families import Seat, seated

# Makes a group of each of these parts of a group's ranks, and returns the one that this rank is in.
Part = Callable[[Sequence[Sequence[int]]], Group]

HOST = "host"  # stands for the number of ranks of a host


class PartedGroup:
    """A group with parts. Methods that a subclass does not override are those of the group of all ranks."""

    def __init__(self, everyone: Group, parts: Sequence[Group]) -> None:
        self.rank = everyone.rank
        self.size = everyone.size
        self._everyone = everyone
        self._parts = parts

    @property
    def inner(self) -> Group:
        return self

    @property
    def outer(self) -> Group | None:
        return None

    @property
    def levels(self) -> Levels | None:
        return self._everyone.levels

    @property
    def shared_host_memory(self) -> SharedHostMemory | None:
        return self._everyone.shared_host_memory

    @property
    def needs(self) -> Needs | None:
        return self._everyone.needs

    @property
    def phase(self) -> str:
        return self._everyone.phase

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._everyone.reduce_scatter(bucket, sum_dtype)

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        return self._everyone.all_to_all(bucket)

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._everyone.all_reduce(bucket, sum_dtype)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        return self._everyone.all_gather(bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return self._everyone.broadcast(tensor)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return self._everyone.all_gather_bytes(message)

    def new_wire(self) -> Wire:
        return self._everyone.new_wire()

    def beside(self) -> GroupBeside | None:
        return self._everyone.beside()

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._everyone.staging(numel, dtype, device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return self._everyone.is_reusable(buffer)

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        self._everyone.set_phase(phase, location)

    def end_warmup(self) -> None:
        for group in (self._everyone, *self._parts):
            group.end_warmup()

    def reconnect(self, base: Any) -> None:
        self._everyone.reconnect(base)  # first, as the other groups are parts of this one
        for group in self._parts:
            group.reconnect(None)

    def close(self) -> None:
        for group in (*reversed(self._parts), self._everyone):
            group.close()


class SoloGroup:
    """A group of one rank, which waits for no other and sends nothing."""

    rank, size = 0, 1
    outer = levels = needs = shared_host_memory = None

    def __init__(self) -> None:
        self.phase = ""

    @property
    def inner(self) -> Group:
        return self

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return SingleRankResult(bucket, sum_dtype)

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        return CompletedResult(bucket)

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return SingleRankResult(bucket, sum_dtype)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        return CompletedResult(bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return CompletedResult(tensor)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return [message]

    def new_wire(self) -> Wire:
        return _SoloWire()

    def beside(self) -> GroupBeside | None:
        return None

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return True

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        self.phase = phase

    def end_warmup(self) -> None: ...

    def reconnect(self, base: Any) -> None: ...

    def close(self) -> None: ...


class _SoloWire:
    """A wire to no other rank, so nothing is sent."""

    rank, size = 0, 1
    limit_s = 0.0  # there is nobody to wait for

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message:
        self._refuse()

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        self._refuse()

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError("Cannot send or receive a message: there is one rank. Keep what it has for itself, or start several.")

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        raise error

    def on_exit(self, end: Callable[[float], bool]) -> None: ...

    def close(self) -> None: ...


class HybridGroup(PartedGroup):
    """A group of ranks with an inner and an outer one; see [Note: replicas]. Its own collectives are those of all ranks."""

    def __init__(self, everyone: Group, inner: Group, outer: Group) -> None:
        super().__init__(everyone, (inner, outer))

    @property
    def inner(self) -> Group:
        return self._parts[0]

    @property
    def outer(self) -> Group:
        return self._parts[1]


def replicated(everyone: Group, shard_ranks: int, part: Part) -> Group:
    """Returns a group whose states are in shares of `shard_ranks` consecutive ranks each, and replicated over the others. A
    collective."""
    size = everyone.size
    if shard_ranks == size:
        return everyone
    inner: Group = SoloGroup()
    if shard_ranks > 1:
        inner = part([range(first, first + shard_ranks) for first in range(0, size, shard_ranks)])
    try:
        outer = part([range(share, size, shard_ranks) for share in range(shard_ranks)])
    except BaseException:
        inner.close()
        raise
    return HybridGroup(everyone, inner, outer)


Seats = tuple[Seat, ...]  # by rank


class FamilyGroup(PartedGroup):
    """A group in which ranks hold parts of some parameters; see [Note: families]."""

    def __init__(self, everyone: Group, seats: Sequence[Seats], sums: Sequence[Group], holders: Sequence[Group],
                 meshes: Sequence[Sequence[int]]) -> None:  # fmt: skip
        made = {id(group): group for group in (*sums, *holders) if group is not everyone}
        super().__init__(everyone, list(made.values()))
        self.seats = seats  # by family; empty for whole parameters if there is one copy of them
        self.meshes = meshes  # the ranks along which this rank holds parts, by family from 1 on
        self._sums = sums  # the ranks that sum gradients, by family
        self._holders = holders  # the ranks that hold parts, by family

    @property
    def inner(self) -> Group:
        return self._sums[0].inner

    @property
    def outer(self) -> Group | None:
        return self._sums[0].outer

    @property
    def levels(self) -> Levels | None:
        return self._sums[0].levels

    def of_family(self, family: int) -> Group:
        return self._sums[family]

    def holders_of(self, family: int) -> Group:
        return self._holders[family]


def of_family(group: Group, family: int) -> Group:
    """Returns the group over which a family's gradients are summed: the ranks that hold the same part and have other data."""
    if isinstance(group, FamilyGroup):
        return group.of_family(family)
    assert not family, "parts are of families that the group was made with"
    return group


def holders_of(group: Group, family: int) -> Group:
    """Returns the group of ranks that hold the same part as this one of a family's parameters; all ranks for family 0."""
    return group.holders_of(family) if isinstance(group, FamilyGroup) else group


def seats_of(group: Group) -> Sequence[Seats]:
    """Returns the seats of ranks, by family from 1 on."""
    return group.seats[1:] if isinstance(group, FamilyGroup) else ()


def copies_of(group: Group) -> Seats:
    """Returns the seats of ranks in the family of whole parameters; none if there is one copy of these."""
    return group.seats[0] if isinstance(group, FamilyGroup) else ()


def meshes_of(group: Group) -> Sequence[Sequence[int]]:
    """Returns, by family from 1 on, the ranks that hold the parts of a parameter together with this rank."""
    return group.meshes if isinstance(group, FamilyGroup) else ()


def first_holder(seats: Seats, rank: int) -> int:
    """Returns the first of the ranks that hold the same part as `rank`."""
    return next(other for other, seat in enumerate(seats) if seat.part == seats[rank].part)


def with_families(
    everyone: Group, of_data: Group, copies: Seats, together: int, seats: Sequence[Seats], meshes: Sequence[Sequence[int]],
    part: Part,
) -> Group:  # fmt: skip
    """Makes groups of the ranks that hold the same part, for the family of each mesh. States of whole parameters are in shares
    of `together` ranks of `of_data` that follow each other; states of a part, of those of them that hold the part. A
    collective."""
    sums, holders = [of_data], [everyone]
    numbers = [seat.number for seat in copies] or range(everyone.size)
    try:
        for of_ranks in seats:
            summing = _alike([(seat.part, seat.copy) for seat in of_ranks])
            if summing == _alike([seat.copy for seat in copies]):
                sums.append(of_data)
            else:
                runs = {number for ranks in summing for number in Counter(numbers[rank] // together for rank in ranks).values()}
                sums.append(_of_holders(summing, runs.pop() if len(runs) == 1 else 1, part))
            holding = _alike([seat.part for seat in of_ranks])
            holders.append(sums[-1] if holding == summing else part(holding))
    except BaseException:
        for group in {id(group): group for group in (*sums, *holders)}.values():
            if group not in (everyone, of_data):
                group.close()
        raise
    return FamilyGroup(everyone, [copies, *seats], sums, holders, meshes)


def _alike(keys: Sequence[Any]) -> list[list[int]]:
    """Returns lists of the ranks that have the same key, in the order of keys."""
    return [[rank for rank, other in enumerate(keys) if other == key] for key in sorted(set(keys))]


def _of_holders(holders: Sequence[Sequence[int]], together: int, part: Part) -> Group:
    """Returns the group of the ranks that hold the same part as this one, with states in shares of `together` of them."""
    if len(holders[0]) == 1:
        return SoloGroup()
    everyone = part(holders)
    if together == everyone.size:
        return everyone

    def part_of_holders(numbers: Sequence[Sequence[int]]) -> Group:
        return part([[ranks[number] for number in each] for ranks in holders for each in numbers])

    try:
        return replicated(everyone, together, part_of_holders)
    except BaseException:
        everyone.close()
        raise


def agreed_seats(
    everyone: Group, world: Sequence[int], meshes: Sequence[Sequence[int]], copies: Seats = ()
) -> list[Seats]:
    """Returns, for each mesh that this rank holds parts along, the seats of all ranks. A mesh is given as the ranks that have a
    parameter together, in the order of their parts, by their numbers in the `world`. The gradients of a part are summed
    over ranks that train the same one of the `copies` of whole parameters. Raises on all ranks if meshes and ranks do not fit.
    A collective."""
    of_ranks = [json.loads(text) for text in exchange_texts(everyone, json.dumps(list(map(list, meshes))))]
    seats: list[Seats] = []
    for rank, others in enumerate(of_ranks):
        if len(others) != len(of_ranks[0]):
            raise RanksDiffer(
                f"Cannot shard: rank {rank} of {everyone.size} holds parts along {len(others)} meshes, rank 0 along "
                f"{len(of_ranks[0])}. Say zero.part of the same parameters, or distribute the same ones, on all ranks."
            )
    for of_mesh in zip(*of_ranks, strict=True):
        for rank, ranks in enumerate(of_mesh):
            outside = [number for number in ranks if number not in world]
            if outside:
                raise ValueError(
                    f"Cannot shard: rank {rank} holds a part along ranks {ranks}, and ranks {outside} are not in the group "
                    "that trains. Pass a group that has all ranks of the mesh, or leave group out."
                )
            if ranks != sorted(ranks):  # the group of a DeviceMesh has them in ascending order, whatever the mesh says
                raise ValueError(
                    f"Cannot shard: rank {rank} holds a part along ranks {ranks}, and in a process group ranks ascend, so that "
                    "it would be another's part there. Make the mesh of ranks in ascending order, as init_device_mesh does."
                )
            apart = [number for number in ranks if of_mesh[world.index(number)] != ranks]
            if apart or len(ranks) != len(of_mesh[0]):
                other = world.index(apart[0]) if apart else 0
                raise RanksDiffer(
                    f"Cannot shard: rank {rank} holds a part along ranks {ranks}, and rank {other} along {of_mesh[other]}. "
                    "Make the mesh with the same call on all ranks, as init_device_mesh does."
                )
        seats_in_mesh = seated([ranks.index(world[rank]) for rank, ranks in enumerate(of_mesh)], copies)
        together = [(seat.part, seat.copy) for seat in seats_in_mesh]
        odd = [ranks for ranks in of_mesh if len({seats_in_mesh[world.index(number)][1:] for number in ranks}) > 1]
        if len(set(map(together.count, together))) > 1:
            odd.append(of_mesh[0])
        if odd:
            raise ValueError(
                f"Cannot shard: ranks {odd[0]} hold the parts of a parameter, which is not how the parts of others "
                "are spread. Make the mesh of ranks in ascending order, as init_device_mesh does."
            )
        seats.append(seats_in_mesh)
    return seats


def agreed_shard_ranks(everyone: Group, wanted: int | str | None, is_across: bool) -> tuple[int, list[str]]:
    """Returns the number of ranks that states are in shares of, which is all for None, and the host of each rank. `is_across`
    says that this rank holds parts along ranks outside of the group. Raises on all ranks if they do not fit. A collective."""
    message = json.dumps([wanted, socket.gethostname(), is_across])
    messages = [json.loads(text) for text in exchange_texts(everyone, message)]
    size, (first, *_), hosts = everyone.size, messages[0], [host for _, host, _ in messages]
    beyond = [rank for rank, (*_, beyond) in enumerate(messages) if beyond]
    if len(beyond) not in (0, size):
        raise RanksDiffer(
            f"Cannot shard: of {size} ranks of a group, {', '.join(map(str, beyond))} hold parts along ranks outside of it, "
            "and the others do not. Make all meshes of parts lie inside the group, or all across it."
        )
    for rank, (other, *_) in enumerate(messages):
        if other != first:
            raise RanksDiffer(
                f"Cannot shard: rank {rank} of {size} has shard_ranks={other!r} where rank 0 has {first!r}. Give all ranks "
                "the same."
            )
    if wanted is None:
        return size, hosts
    if wanted == HOST:
        of_a_host = ranks_of_a_host(hosts)
        if not of_a_host:
            counts = ", ".join(f"{len(list(run))} on {host}" for host, run in itertools.groupby(hosts))
            raise ValueError(
                f"Cannot shard with shard_ranks='host': in the order of ranks there are {counts}. Start as many ranks on each "
                "host, one host after the other, or give shard_ranks a number."
            )
        return of_a_host, hosts
    assert isinstance(wanted, int)
    if size % wanted:
        raise ValueError(
            f"Cannot shard with shard_ranks={wanted}: {size} ranks are not a multiple of it. Choose a divisor of {size}, or "
            "leave shard_ranks out."
        )
    return wanted, hosts


def ranks_of_a_host(hosts: Sequence[str]) -> int:
    """Returns the number of ranks that each host has. `hosts` are the hosts of the ranks, in the order of ranks. Returns 0 if
    some hosts have more ranks than others, or if the ranks of a host do not follow each other."""
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    return runs[0] if len(runs) == len(set(hosts)) and len(set(runs)) == 1 else 0


def by_hosts(everyone: Group, num_local: int, part: Part) -> Group:
    """Returns the group in two levels if the ranks of each host share memory, else in one that adds up in the same order. Each
    host has `num_local` ranks that follow each other. The groups that `part` makes go through shared memory if they can. A
    collective."""
    size = everyone.size
    inside = part([range(first, first + num_local) for first in range(0, size, num_local)])
    # Ranks have agreed on shared memory inside each host only. A column has ranks of all hosts, so all must agree.
    if not all(everyone.all_gather_bytes(b"" if inside.shared_host_memory is None else b"shared")):
        inside.close()
        return HostLevels(everyone, num_local)
    return HostLevels(everyone, num_local, inside, part([range(number, size, num_local) for number in range(num_local)]))


class HostLevels(PartedGroup):
    """A group of the ranks of several hosts; see [Note: by host]. In two levels it has the group of ranks
    `inside` this host, and the group of this rank's column, which goes `across` hosts."""

    def __init__(self, everyone: Group, num_local: int, inside: Group | None = None, across: Group | None = None) -> None:
        super().__init__(everyone, [] if inside is None or across is None else [inside, across])
        self._num_local = num_local
        self._begun: deque[_InTwoParts] = deque()  # collectives whose second part has yet to begin

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if not self._parts:
            return _SumByHost(self._everyone.all_to_all(bucket), self.size, self._num_local, sum_dtype)
        return self.reduce_by_hosts(bucket, sum_dtype, lambda sums: self.across.reduce_scatter(sums, sum_dtype))

    @property
    def levels(self) -> Levels | None:
        return self if self._parts else None

    @property
    def across(self) -> Group:
        return self._parts[1]

    def reduce_by_hosts(
        self, bucket: torch.Tensor, sum_dtype: torch.dtype, reduce_across: Callable[[torch.Tensor], Pending]
    ) -> Pending:
        inside, across = self._parts
        self._complete(but=_Sum)
        sums = [inside.reduce_scatter(pieces, sum_dtype) for pieces in bucket.view(across.size, -1)]

        def begin_across() -> Pending:
            added = torch.empty(bucket.numel() // inside.size, dtype=sum_dtype, device=bucket.device)
            for pending, row in zip(sums, added.view(across.size, -1), strict=True):
                wait_into(pending, row, 1.0, False)
            return reduce_across(added)

        return self._begin(_Sum(self._advance, sums, begin_across))

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        if not self._parts:
            return self._everyone.all_gather(bucket)
        inside, across = self._parts
        self._complete(but=_Gathering)
        pieces = bucket.view(across.size, inside.size, -1)
        column = pieces[:, inside.rank].contiguous()
        shares = across.all_gather(column.view(-1))

        def begin_inside() -> Pending:
            shares.wait()
            pieces[:, inside.rank] = column
            return _All([inside.all_gather(of_host.view(-1)) for of_host in pieces], bucket)

        return self._begin(_Gathering(self._advance, [shares], begin_inside))

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return (self._parts[0] if self._parts else self._everyone).staging(numel, dtype, device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return (self._parts[0] if self._parts else self._everyone).is_reusable(buffer)

    def reconnect(self, base: Any) -> None:
        self._begun.clear()
        super().reconnect(base)

    # All ranks must begin the collectives of a group in one order, and a rank begins a second part whenever it finds the first
    # parts done. So second parts begin in the order of the first ones. And sums and gatherings are never under way together: a
    # sum's second part uses the group that a gathering's first part uses, and the other way round.

    def _begin(self, pending: _InTwoParts) -> Pending:
        self._begun.append(pending)
        return pending

    def _complete(self, but: type[_InTwoParts]) -> None:
        if self._begun and not isinstance(self._begun[-1], but):
            self._advance(self._begun[-1])

    def _advance(self, until: _InTwoParts | None = None) -> None:
        """Begins second parts, in order: up to that of `until`, waiting for the first parts of all these, and then as long as
        first parts are done."""
        while self._begun and (until in self._begun or self._begun[0].is_ready()):
            self._begun[0].begin_second()
            self._begun.popleft()  # removed last: if the group is lost, a later wait for it raises again


class _InTwoParts:
    """A collective that consists of first parts, and of a second part that begins once they are done."""

    def __init__(
        self,
        advance: Callable[[_InTwoParts | None], None],
        first: Sequence[Pending],
        begin_second: Callable[[], Pending],
    ) -> None:
        self._advance = advance
        self._first = first
        self._begin_second = begin_second
        self._second: Pending | None = None

    def is_ready(self) -> bool:
        return all(pending.done() for pending in self._first)

    def begin_second(self) -> None:
        self._second = self._begin_second()
        self._first = ()

    def done(self) -> bool:
        self._advance(None)
        return self._second is not None and self._second.done()

    def wait(self) -> torch.Tensor:
        self._advance(self)
        assert self._second is not None, "the group was lost, or connected again, since this began"
        return self._second.wait()


class _Sum(_InTwoParts):
    """A sum: first inside each host, then across hosts."""


class _Gathering(_InTwoParts):
    """A gathering: first across hosts, then inside each host."""


class _All:
    """The result of several collectives that run at once."""

    def __init__(self, all_: Sequence[Pending], result: torch.Tensor) -> None:
        self._all = all_
        self._result = result

    def done(self) -> bool:
        return all(pending.done() for pending in self._all)

    def wait(self) -> torch.Tensor:
        for pending in self._all:
            pending.wait()
        return self._result


class _SumByHost:
    """The sum of the pieces that come from all ranks: first those of each host are added up, then the sums of hosts."""

    def __init__(self, pieces: Pending, num_ranks: int, num_local: int, sum_dtype: torch.dtype) -> None:
        self._pieces = pieces
        self._sizes = num_ranks, num_local
        self._sum_dtype = sum_dtype

    def done(self) -> bool:
        return self._pieces.done()

    def wait(self) -> torch.Tensor:
        num_ranks, num_local = self._sizes
        pieces = self._pieces.wait().view(num_ranks, -1)
        of_hosts = [sum_in_rank_order(pieces[first : first + num_local], num_local, self._sum_dtype)
                    for first in range(0, num_ranks, num_local)]  # fmt: skip
        add_rows(of_hosts, of_hosts[0])
        return of_hosts[0]


class _Sent:
    """A round of a rank that keeps pace with the others: the round is over when the next one is sent."""

    def __init__(self, owner: FakeGroup, finish: Callable[[], torch.Tensor]) -> None:
        self._owner, self._finish = owner, finish
        self._number = owner.num_sent = owner.num_sent + 1

    def done(self) -> bool:
        return self._owner.num_sent > self._number

    def wait(self) -> torch.Tensor:
        return self._finish()


class _Echo:
    """A message that comes back to its sender: ranks that do not exist are taken to send the same."""

    def __init__(self, sent: queue.SimpleQueue[torch.Tensor], memory: torch.Tensor) -> None:
        self._sent = sent
        self._memory = memory

    def wait(self) -> None:
        self._memory.copy_(self._sent.get())


class _FakeWire:
    """Messages between rank 0 and ranks that do not exist."""

    rank = 0
    limit_s = math.inf

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message:
        if tag == ANYONES:
            self._sent.put(values.clone())
        return CompletedResult(values)

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        return CompletedResult(memory.zero_())

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        return _Echo(self._sent, memory)

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        raise error

    def on_exit(self, end: Callable[[float], bool]) -> None: ...

    def close(self) -> None: ...


class FakeGroup(SoloGroup):
    """A group that plays rank 0 of `size` ranks that all do the same at the same time.

    It receives what it sends, in memory of its own, as with a group that exchanges the pieces of a bucket. So a training with
    it holds at each moment what a real rank does that is neither the first nor the last."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.num_sent = 0

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return super().reduce_scatter(bucket, sum_dtype)
        rows = bucket.view(self.size, -1)
        num_kept = 0 if self.size > 2 else 1  # all but the first and the last rank also receive their own piece
        pieces = rows[num_kept:].clone()

        def total() -> torch.Tensor:
            result = torch.empty(rows[0].shape, dtype=sum_dtype, device=rows.device)
            add_rows([*rows[:num_kept], *pieces], result)
            return result

        return _Sent(self, total)

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        pieces = bucket.clone()
        return _Sent(self, lambda: pieces)

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return super().all_reduce(bucket, sum_dtype)
        total = bucket.to(sum_dtype, copy=True)
        return _Sent(self, lambda: total)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return [message] * self.size

    def new_wire(self) -> Wire:
        return _FakeWire(self.size)


def fake_group(size: int, shard_ranks: int) -> Group:
    """Makes a group that plays rank 0 of `size` ranks, with states in shares of `shard_ranks` of them."""
    return replicated(FakeGroup(size), shard_ranks, lambda parts: FakeGroup(len(parts[0])))
