"""What the user wrote to weights since the last step, so that ranks can compare it."""

from __future__ import annotations

import hashlib

import torch

from zero.plan.spans import Span

_ROW = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EditLog:
    """The edits of one rank, in order, each with a checksum of its values, which stays on the device until ranks compare."""

    def __init__(self) -> None:
        self._edits: list[tuple[int, Span, torch.Tensor]] = []

    def note(self, chunk: int, written: Span, memory: torch.Tensor) -> None:
        self._edits.append((chunk, written, checksum(memory[written.start : written.stop])))

    def digest(self) -> bytes:
        """The same on two ranks exactly when they made the same edits; no bytes where there were none."""
        if not self._edits:
            return b""
        lines = [f"{chunk} {written.start} {written.stop} {sums.tolist()}" for chunk, written, sums in self._edits]
        return hashlib.sha256("\n".join(lines).encode()).digest()

    def clear(self) -> None:
        self._edits.clear()


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Of the bits of some values and of where they are: sums over rows and over columns, each with odd factors."""
    bits = values.contiguous().view(_BITS[values.element_size()])
    num_whole = bits.numel() // _ROW * _ROW
    rows, rest = bits[:num_whole].view(-1, _ROW), bits[num_whole:]
    sums = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest.to(torch.int64)
    return torch.stack([_weighted(each) for each in sums])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, 2 * sums.numel() + 1, 2, device=sums.device)).sum()
