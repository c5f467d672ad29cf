"""Memory in bytes: a reading, the cap that a user may set on it, and how both are written. It works without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3,
          "t": 1000**4, "tb": 1000**4, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip


@dataclass(frozen=True)
class MemoryReading:
    """The memory of one device at one moment, in bytes. None stands for a figure that the device does not report."""

    total: int | None
    """All bytes of the device, or of the container around this process."""
    available: int | None
    """Bytes that can be allocated now."""
    allocated: int | None
    """Bytes held by this process."""
    peak: int | None
    """The most bytes that this process held since `peak_since`."""
    peak_since: Literal["last reset", "process start"] = "last reset"
    """The beginning of the peak."""

    def __str__(self) -> str:
        figures = ((name, getattr(self, name)) for name in ("allocated", "peak", "available", "total"))
        return ", ".join(f"{name} {format_bytes(figure)}" for name, figure in figures)

    def capped(self, cap: int | None) -> MemoryReading:
        """Returns the reading that a device of at most `cap` bytes would give."""
        if cap is None:
            return self
        total = cap if self.total is None else min(cap, self.total)
        # Subtracted from the cap alone, as the device's `available` is already without what this process holds.
        left = max(0, cap - (self.allocated or 0))
        return replace(self, total=total, available=left if self.available is None else min(self.available, left))


def format_bytes(num_bytes: int | None) -> str:
    """Writes `1610612736` as `1.50 GiB`, and None as `?`."""
    if num_bytes is None:
        return "?"
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def parse_bytes(text: str) -> int:
    """Reads `4GiB`, `500 MB` or `1000` as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"Cannot take '{text}' as a number of bytes: it is not one. Write it like 4GiB, 500MB or 1000.")
    return int(Fraction(match[1]) * _UNITS[match[2]])  # a float would round large sizes, and overflow


def memory_cap() -> int | None:
    """Returns the bytes that ACCELERATOR_MEMORY allows. It is read at each call, so that a notebook can change it."""
    text = os.environ.get("ACCELERATOR_MEMORY", "").strip()
    if not text:
        return None
    try:
        cap = parse_bytes(text)
    except ValueError:
        raise ValueError(
            f"Cannot use ACCELERATOR_MEMORY={text}: it is not a number of bytes. Write it like 4GiB, 500MB or 1000."
        ) from None
    if cap == 0:
        raise ValueError(f"Cannot use ACCELERATOR_MEMORY={text}: nothing fits in 0 bytes. Give it a size, or unset it.")
    return cap


def format_table(readings: Iterable[tuple[str, MemoryReading]]) -> str:
    """Writes a line for each reading, with aligned columns."""
    head = ("", "allocated", "peak", "available", "total")
    rows = [head] + [(name, *(format_bytes(getattr(reading, column)) for column in head[1:])) for name, reading in readings]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)  # noqa: B905
