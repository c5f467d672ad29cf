"""Sets of small numbers as the bits of an int."""

from __future__ import annotations


def set_bits(mask: int) -> list[int]:
    """The positions of the ones, ascending. By its digits: arithmetic with thousands of bits would take as long for each."""
    return [position for position, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]
