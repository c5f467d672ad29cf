"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}{end}": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1) for end in ("", "b")}


def as_bytes(given: Any) -> Any:
    """Returns the number of `4GiB`, `1.5 GiB` or `500 MB` as `accelerators.memory` does; anything else unchanged."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", given.lower()) if isinstance(given, str) else None
    return given if match is None or match[2] not in _UNITS else int(Fraction(match[1]) * _UNITS[match[2]])
