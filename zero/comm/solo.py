"""The group of a single rank, as of a program that was started without a launcher: what it sends is what it receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zero.comm.group import Group, GroupBeside, Message, Pending, Wire
from zero.comm.results import CompletedResult, SingleRankResult


class SoloGroup:
    """One rank, which waits for nobody and has nobody to tell anything."""

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
    limit_s = 0.0  # nobody is waited for

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
