"""Logs what the user wrote to weights since the last step, so that ranks can compare it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from zero.plan.layout import Span

_LEAST_EDIT = 1024  # the least number of elements that an edit counts as, since its checksum takes memory too
_LEAST_MANY = 16 * _LEAST_EDIT
_ROW = 4096
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that a product forgets no earlier edit
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EditLog:
    """The edits of one rank: a checksum for each place that was edited, kept on the device until ranks compare them."""

    def __init__(self) -> None:
        self._edits: dict[tuple[int, Span], torch.Tensor] = {}  # in the order of the last edit of each
        self._num_edited: dict[int, int] = {}  # elements by chunk

    def note(self, chunk: int, written: Span, memory: torch.Tensor) -> None:
        self._num_edited[chunk] = self._num_edited.get(chunk, 0) + max(written.numel, _LEAST_EDIT)
        sums = checksum(memory[written.start : written.stop]) + 1
        before = self._edits.pop((chunk, written), None)
        # Changed in place: the sums may have been made in another stream, which would use freed memory again at once.
        self._edits[chunk, written] = sums if before is None else before.mul_(_FACTOR).add_(sums)

    def digest(self, concerns: Callable[[int, Span], bool] = lambda chunk, written: True) -> bytes:
        """Returns a digest that is the same on two ranks exactly if they made the same edits, of those that `concerns` selects.
        It is empty if there were none."""
        edits = [(chunk, written, sums) for (chunk, written), sums in self._edits.items() if concerns(chunk, written)]
        lines = [f"{chunk} {written.start} {written.stop} {sums.tolist()}" for chunk, written, sums in edits]
        return hashlib.sha256("\n".join(lines).encode()).digest() if lines else b""

    def are_many(self, chunk: int, numel: int) -> bool:
        """Returns whether as many elements as a chunk has were edited since this was last True. Repeated edits count each
        time."""
        if self._num_edited.get(chunk, 0) < max(numel, _LEAST_MANY):
            return False
        del self._num_edited[chunk]
        return True

    def clear(self) -> None:
        self._edits.clear()


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of the bits of values and of their places: sums over rows and over columns, each with odd factors."""
    bits = values.contiguous().view(_BITS[values.element_size()])
    num_whole = bits.numel() // _ROW * _ROW
    rows, rest = bits[:num_whole].view(-1, _ROW), bits[num_whole:]
    sums = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest.to(torch.int64)
    return torch.stack([_weighted(each) for each in sums])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, 2 * sums.numel() + 1, 2, device=sums.device)).sum()
