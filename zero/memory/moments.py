"""What an optimizer remembers of each element, laid out as the masters are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero.memory.flat import goes_with_elements
from zero.plan.layout import Piece


class Moments:
    """A line a bucket and name, in the kind of memory that the bucket's masters are in; the optimizer's state of a master is a
    view of it."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make  # memory for as many values as a bucket has masters
        self._lines: dict[tuple[int, str], torch.Tensor] = {}

    def line(self, bucket: int, name: str) -> torch.Tensor:
        if (bucket, name) not in self._lines:
            self._lines[bucket, name] = self._make(bucket).zero_()
        return self._lines[bucket, name]

    def take_over(self, piece: Piece, state: dict[str, Any]) -> None:
        """State of a master that the optimizer made by itself comes to where it belongs."""
        for name, value in state.items():
            if goes_with_elements(name, value, torch.Size([piece.in_share.numel])):
                own = self.line(piece.bucket, name)[piece.in_share.start : piece.in_share.stop]
                if value.dtype == own.dtype and value.data_ptr() != own.data_ptr():
                    state[name] = own.copy_(value)

    def release(self) -> None:
        """Lets go of all lines; what the optimizer's state still has is taken over from there."""
        self._lines.clear()
