"""Collectives of torch on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zero.comm.group import Added


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
        for work in self._works:
            self._owner.wait_for(work)
        return self._finish()


class Exchanged(Added):
    """Pieces of all ranks, to be added."""

    def __init__(self, owner: Owner, work: Any, pieces: torch.Tensor, sum_dtype: torch.dtype) -> None:
        super().__init__(sum_dtype)
        self._works = Works(owner, [work], lambda: pieces)
        self._size = owner.size

    def done(self) -> bool:
        return self._works.done()

    def rows(self) -> Sequence[torch.Tensor]:
        return list(self._works.wait().view(self._size, -1))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What is only moved, as what every backend moves: some have no 16-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
