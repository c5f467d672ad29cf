"""A group of one real rank among many that do not exist: to find out how much memory that rank needs."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import NoReturn

import torch

from zero.comm.group import ANYONES, Group, GroupBeside, Message, Pending, Wire
from zero.comm.hybrid import replicated
from zero.comm.results import CompletedResult, SingleRankResult, add_rows


class _Sent:
    """A round of a rank that keeps pace with the others: it is over when the next one is sent."""

    def __init__(self, owner: FakeGroup, finish: Callable[[], torch.Tensor]) -> None:
        self._owner, self._finish = owner, finish
        self._number = owner.num_sent = owner.num_sent + 1

    def done(self) -> bool:
        return self._owner.num_sent > self._number

    def wait(self) -> torch.Tensor:
        return self._finish()


class _Echo:
    """A message that this rank receives because it has sent it: the others do the same."""

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


def fake_group(size: int, shard_ranks: int) -> Group:
    """Rank 0 of so many, whose states are in shares of so many of them."""
    return replicated(FakeGroup(size), shard_ranks, lambda parts: FakeGroup(len(parts[0])))


class FakeGroup:
    """Rank 0 of `size` ranks, all alike and in pace. What it is sent is what it sends, in memory of its own as with a group
    that exchanges the pieces of a bucket; so a training with it holds, from moment to moment, what a real one does that
    is neither the first nor the last."""

    rank = 0
    shared_host_memory = None
    outer = levels = needs = None
    phase = ""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_sent = 0

    @property
    def inner(self) -> Group:
        return self

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return SingleRankResult(bucket, sum_dtype)
        rows = bucket.view(self.size, -1)
        num_kept = 0 if self.size > 2 else 1  # own piece; all but the first and the last rank receive theirs, too
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
            return SingleRankResult(bucket, sum_dtype)
        total = bucket.to(sum_dtype, copy=True)
        return _Sent(self, lambda: total)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        return CompletedResult(bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return CompletedResult(tensor)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return [message] * self.size

    def beside(self) -> GroupBeside | None:
        return None

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return True

    def new_wire(self) -> Wire:
        return _FakeWire(self.size)

    # Nobody is there to be told, waited for or lost.

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        pass

    def end_warmup(self) -> None:
        pass

    def reconnect(self, base: object) -> None:
        pass

    def close(self) -> None:
        pass
