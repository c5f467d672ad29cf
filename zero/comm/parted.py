"""A group of ranks that has groups of parts of its ranks beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero.comm.group import Group, GroupBeside, Levels, Needs, Pending, SharedHostMemory, Wire

Part = Callable[[Sequence[Sequence[int]]], Group]  # makes groups of parts of the ranks, and returns that of this rank


class PartedGroup:
    """Does as one group what nobody says otherwise of."""

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
        self._everyone.reconnect(base)  # first: the others are parts of it
        for group in self._parts:
            group.reconnect(None)

    def close(self) -> None:
        for group in (*reversed(self._parts), self._everyone):
            group.close()
