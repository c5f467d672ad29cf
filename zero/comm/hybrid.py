"""States in shares inside groups of ranks, and replicated across them.

[Note: two levels] Of W ranks, S consecutive ones share the states: the inner group. The W / S ranks that have the same share
are the outer group. A bucket of gradients is reduced and scattered inside; the share of the sum is all-reduced across, in the
dtype of sums. New weights are gathered inside. So between inner groups nothing travels but shares of gradients. All else that
ranks do together, they do as one group: agree, count, divide by W, compare.

Replicas have the same bits: what they step has come out of one all-reduce, and norms are added up from the shares of the first
inner group on all ranks.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Sequence

from zero.comm.exchange import exchange_texts
from zero.comm.group import Group
from zero.comm.parted import Part, PartedGroup
from zero.comm.solo import SoloGroup
from zero.errors import RanksDiffer

HOST = "host"  # as many ranks as a host has


class HybridGroup(PartedGroup):
    """A group of ranks with an inner and an outer one. Its own collectives are those of all ranks."""

    def __init__(self, everyone: Group, inner: Group, outer: Group) -> None:
        super().__init__(everyone, (inner, outer))

    @property
    def inner(self) -> Group:
        return self._parts[0]

    @property
    def outer(self) -> Group:
        return self._parts[1]


def replicated(everyone: Group, shard_ranks: int, part: Part) -> Group:
    """Makes every `shard_ranks` consecutive ranks of a group one that states are in shares of. A collective."""
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


def agreed_shard_ranks(everyone: Group, wanted: int | str | None) -> tuple[int, list[str]]:
    """Returns how many ranks states are in shares of, all for None, and the host of each rank. Raises on all ranks where that
    cannot be. A collective."""
    messages = [json.loads(text) for text in exchange_texts(everyone, json.dumps([wanted, socket.gethostname()]))]
    size, (first, _), hosts = everyone.size, messages[0], [host for _, host in messages]
    for rank, (other, _) in enumerate(messages):
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
    """How many there are on each, by the hosts of ranks in their order; 0 where they are not as many, or not in line."""
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    return runs[0] if len(runs) == len(set(hosts)) and len(set(runs)) == 1 else 0
