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
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero.comm.exchange import exchange_texts
from zero.comm.group import Group, Pending, SharedHostMemory, Wire
from zero.comm.loopback import solo
from zero.errors import RanksDiffer

HOST = "host"  # as many ranks as a host has


class HybridGroup:
    """A group of ranks with an inner and an outer one. Its own collectives are those of all ranks."""

    def __init__(self, everyone: Group, inner: Group, outer: Group) -> None:
        self.rank = everyone.rank
        self.size = everyone.size
        self.inner = inner
        self.outer = outer
        self._everyone = everyone

    @property
    def shared_host_memory(self) -> SharedHostMemory | None:
        return self._everyone.shared_host_memory

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

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._everyone.staging(numel, dtype, device)

    def is_read(self, buffer: torch.Tensor) -> bool:
        return self._everyone.is_read(buffer)

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        self._everyone.set_phase(phase, location)

    def end_warmup(self) -> None:
        for group in (self._everyone, self.inner, self.outer):
            group.end_warmup()

    def reconnect(self, base: Any) -> None:
        self._everyone.reconnect(base)  # first: the others are parts of it
        self.inner.reconnect(None)
        self.outer.reconnect(None)

    def close(self) -> None:
        for group in (self.outer, self.inner, self._everyone):
            group.close()


def replicated(everyone: Group, shard_ranks: int, part: Callable[[Sequence[Sequence[int]]], Group]) -> Group:
    """Makes every `shard_ranks` consecutive ranks of a group one that states are in shares of. `part` makes groups of parts of
    its ranks, and returns the one that this rank is in. A collective."""
    size = everyone.size
    if shard_ranks == size:
        return everyone
    inner: Group = solo()
    if shard_ranks > 1:
        inner = part([range(first, first + shard_ranks) for first in range(0, size, shard_ranks)])
    try:
        outer = part([range(share, size, shard_ranks) for share in range(shard_ranks)])
    except BaseException:
        inner.close()
        raise
    return HybridGroup(everyone, inner, outer)


def agreed_shard_ranks(everyone: Group, wanted: int | str | None) -> int:
    """Returns how many ranks states are in shares of, all for None. Raises on all ranks where that cannot be. A collective."""
    told = [json.loads(text) for text in exchange_texts(everyone, json.dumps([wanted, socket.gethostname()]))]
    size, (first, _) = everyone.size, told[0]
    for rank, (theirs, _) in enumerate(told):
        if theirs != first:
            raise RanksDiffer(
                f"Cannot shard: rank {rank} of {size} has shard_ranks={theirs!r} where rank 0 has {first!r}. Give all ranks "
                "the same."
            )
    if wanted is None:
        return size
    if wanted == HOST:
        return _ranks_of_a_host([host for _, host in told])
    assert isinstance(wanted, int)
    if size % wanted:
        raise ValueError(
            f"Cannot shard with shard_ranks={wanted}: {size} ranks are not a multiple of it. Choose a divisor of {size}, or "
            "leave shard_ranks out."
        )
    return wanted


def _ranks_of_a_host(hosts: Sequence[str]) -> int:
    runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts)]
    if len(runs) > len(set(hosts)) or len({count for _, count in runs}) > 1:
        found = ", ".join(f"{count} on {host}" for host, count in runs)
        raise ValueError(
            f"Cannot shard with shard_ranks='host': in the order of ranks there are {found}. Start as many ranks on each host, "
            "one host after the other, or give shard_ranks a number."
        )
    return runs[0][1]
