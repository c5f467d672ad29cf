"""A group that writes down every collective, for tests to look through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from zero.comm.group import Group, GroupBeside, Levels, Needs, Pending, SharedHostMemory


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
