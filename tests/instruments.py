"""What tests look through: a group that writes down every collective, and memory that is NaN before and after it is used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from tests import inside
from zero.comm.group import Group, GroupBeside, Levels, Needs, Pending, SharedHostMemory
from zero.comm.torch_group import TorchGroup
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.home import Transfer
from zero.memory.staging import Staging


@contextlib.contextmanager
def collectives_beside() -> Iterator[None]:
    """Weights in shares are gathered by collectives over gloo too, where messages are as fast."""
    with mock.patch.object(TorchGroup, "beside", lambda self: self.part([range(self.size)]) if self.size > 1 else None):
        yield


@dataclass(frozen=True)
class Entry:
    """One collective as one rank issued it."""

    operation: str
    numel: int  # the elements, or the bytes of a message
    dtype: str
    phase: str

    @property
    def is_message(self) -> bool:
        return self.operation == "exchange"

    @property
    def num_bytes(self) -> int:
        return self.numel if self.is_message else self.numel * getattr(torch, self.dtype).itemsize


@dataclass
class Ledger:
    """A group that hands everything on to another one and keeps the books of this rank.

    `section` is whatever the test says that it is doing now; it stands in every entry from then on.
    """

    group: Group
    section: str = "construction"
    entries: list[Entry] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def inner(self) -> Group:
        return self if self.group.inner is self.group else self.group.inner

    @property
    def outer(self) -> Group | None:
        return self.group.outer

    @property
    def levels(self) -> Levels | None:
        return self.group.levels

    @property
    def needs(self) -> Needs | None:
        return self.group.needs

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        self._note("reduce_scatter", bucket)
        return self.group.reduce_scatter(bucket, sum_dtype)

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        self._note("all_to_all", bucket)
        return self.group.all_to_all(bucket)

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        self._note("all_reduce", bucket)
        return self.group.all_reduce(bucket, sum_dtype)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        self._note("all_gather", bucket)
        return self.group.all_gather(bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        self._note("broadcast", tensor)
        return self.group.broadcast(tensor)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        self.entries.append(Entry("exchange", len(message), "bytes", self.section))
        return self.group.all_gather_bytes(message)

    def new_wire(self) -> Any:
        return self.group.new_wire()

    def beside(self) -> GroupBeside | None:
        return self.group.beside()

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.group.staging(numel, dtype, device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return self.group.is_reusable(buffer)

    @property
    def phase(self) -> str:
        return self.group.phase

    def set_phase(self, phase: str, location: Any = None) -> None:
        self.group.set_phase(phase, location)

    def end_warmup(self) -> None:
        self.group.end_warmup()

    @property
    def shared_host_memory(self) -> SharedHostMemory | None:
        return self.group.shared_host_memory

    def reconnect(self, base: Any) -> None:
        self.group.reconnect(base)

    def close(self) -> None:
        self.group.close()

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.entries.append(Entry(operation, tensor.numel(), dtype, self.section))

    def of(self, phase: str, *operations: str) -> list[Entry]:
        """What was issued in a phase; of all operations when none is named."""
        return [e for e in self.entries if e.phase == phase and (not operations or e.operation in operations)]

    def rounds(self, phase: str) -> list[Entry]:
        """The reductions of a phase."""
        return self.of(phase, "reduce_scatter", "all_reduce")

    def wires(self) -> list[Entry]:
        """The tensors in their order, then the messages in theirs: their two orders do not depend on each other."""
        return [e for e in self.entries if not e.is_message] + [e for e in self.entries if e.is_message]


@contextlib.contextmanager
def poison() -> Iterator[list[Any]]:
    """Every staging buffer and gradient share is NaN when it is handed out and again when it is given back, on all ranks.

    Gives the list of what was poisoned, so that a test can see that there was something.
    """
    make, clear, borrow, give_back = GradientShard.allocate, GradientShard.clear, Staging.borrow, Staging.give_back
    lock, seen = threading.Lock(), []

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        with lock:
            seen.append((tensor.numel(), tensor.dtype))
        with torch.no_grad():
            return tensor.fill_(float("nan"))

    def poisoned_clear(shard: GradientShard) -> None:
        for share in shard.present():
            fill(share)
        clear(shard)

    def poisoned_give_back(staging: Staging, buffer: torch.Tensor, transfer: Transfer | None = None) -> None:
        fill(buffer)
        give_back(staging, buffer, transfer)

    with (
        mock.patch.object(GradientShard, "allocate", lambda shard, bucket: fill(make(shard, bucket))),
        mock.patch.object(GradientShard, "clear", poisoned_clear),
        mock.patch.object(Staging, "borrow", lambda staging, *args, **options: fill(borrow(staging, *args, **options))),
        mock.patch.object(Staging, "give_back", poisoned_give_back),
    ):
        yield seen


def poison_padding(optimizer: Any) -> int:
    """Fills what lies between the slots of the flat weights with NaN; returns how many elements that were."""
    layout, chunks = inside.layout(optimizer), inside.published_chunks(optimizer)
    filled = 0
    with torch.no_grad():
        for bucket, gaps in zip(layout.buckets, layout.gaps, strict=True):
            for gap in gaps:
                chunks[bucket.chunk][bucket.span.start + gap.start : bucket.span.start + gap.stop] = float("nan")
                filled += gap.numel
    return filled
