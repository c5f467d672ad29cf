"""Collectives of torch on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from zero.comm.group import add_rows, sum_in_rank_order


class Owner(Protocol):
    """The group that began them."""

    size: int

    def wait_for(self, work: Any) -> None: ...


class Works:
    """Some that belong together, and what is to be done with their output."""

    def __init__(self, owner: Owner, works: list[Any], finish: Callable[[], torch.Tensor]) -> None:
        self._owner, self._works, self._finish = owner, works, finish

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        self._wait()
        return self._finish()

    def _wait(self) -> None:
        for work in self._works:
            self._owner.wait_for(work)


class Exchanged(Works):
    """Pieces of all ranks, to be added."""

    def __init__(self, owner: Owner, works: list[Any], pieces: torch.Tensor, sum_dtype: torch.dtype) -> None:
        super().__init__(owner, works, lambda: sum_in_rank_order(pieces, owner.size, sum_dtype))
        self._rows = list(pieces.view(owner.size, -1))

    def wait_into(self, target: torch.Tensor, factor: float, adds: bool) -> None:
        self._wait()
        add_rows(self._rows, target, factor, adds)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What is only moved, as what every backend moves: some have no 16-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
