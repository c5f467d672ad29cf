"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)}


def as_bytes(given: Any) -> Any:
    """Returns the number of `4GiB` or `500 MB`; anything else unchanged."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", given.lower()) if isinstance(given, str) else None
    return given if match is None or match[2] not in _UNITS else int(match[1]) * _UNITS[match[2]]
