"""Ranks of several hosts, which exchange tensors inside each host first, and then from host to host.

[Note: by host] Of H hosts with L ranks each, all ranks of a host share memory, and the H ranks that have the same number on
their hosts are a column, with a group of its own over the network. A bucket is reduced inside first: through shared memory a
rank adds up what the ranks of its host have for each rank of its column. These H sums are reduced and scattered in the column.
New weights go the other way: each rank gathers the shares of its column, and then ranks of a host copy those of each other. So
a host sends each other one the weights once and not L times; and gradients once, in the dtype of sums: of bf16 gradients L / 2
times less, which is as much for two ranks a host, and of fp32 ones L times. Weights that ranks fetch for themselves go from
each rank to each.

The ranks of each host are added up first, and then the hosts, in their order. Where ranks of a host do not share memory, all
ranks send each other their pieces and add them in that same order, so that the bits do not depend on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero.comm.group import Group, Levels, Pending
from zero.comm.parted import Part, PartedGroup
from zero.comm.results import add_rows, sum_in_rank_order, wait_into


def by_hosts(everyone: Group, num_local: int, part: Part) -> Group:
    """The group, in two levels where ranks of a host share memory. `num_local`: how many each host has, one host after the
    other. `part`: its groups go through shared memory where they can. A collective."""
    size = everyone.size
    inside = part([range(first, first + num_local) for first in range(0, size, num_local)])
    # They agree inside each host only, and a column goes through all.
    if not all(everyone.all_gather_bytes(b"" if inside.shared_host_memory is None else b"shared")):
        inside.close()
        return TwoLevelGroup(everyone, num_local)
    return TwoLevelGroup(everyone, num_local, inside, part([range(number, size, num_local) for number in range(num_local)]))


class TwoLevelGroup(PartedGroup):
    """A group of the ranks of several hosts; see [Note: by host]. In two levels it has the ranks `inside` this host, and the
    column that goes `across`."""

    def __init__(self, everyone: Group, num_local: int, inside: Group | None = None, across: Group | None = None) -> None:
        super().__init__(everyone, [] if inside is None or across is None else [inside, across])
        self._num_local = num_local
        self._begun: deque[_InTwoParts] = deque()  # whose second part is still to begin

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

    # Second parts begin in the order in which the first ones did. And one kind is on its way at a time, as the second part of
    # one uses the group that the first part of the other does: so in each group all ranks begin the same in the same order.

    def _begin(self, pending: _InTwoParts) -> Pending:
        self._begun.append(pending)
        return pending

    def _complete(self, but: type[_InTwoParts]) -> None:
        if self._begun and not isinstance(self._begun[-1], but):
            self._advance(self._begun[-1])

    def _advance(self, until: _InTwoParts | None = None) -> None:
        """Begins second parts: up to that one, for whose first parts it waits, and of those whose first parts are done."""
        while self._begun and (until in self._begun or self._begun[0].is_ready()):
            self._begun[0].begin_second()
            self._begun.popleft()  # not before: where the group is lost, who waits for this one is to be told so again


class _InTwoParts:
    """A collective that goes on with another one when its first parts are done."""

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
    """Inside first, then across."""


class _Gathering(_InTwoParts):
    """Across first, then inside."""


class _All:
    """Several at once."""

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
    """What comes from all ranks, to be added up by host first."""

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
