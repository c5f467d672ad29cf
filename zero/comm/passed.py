"""The exchanges that backwards went through: gradients of the ranks that take part in one meet there."""

from __future__ import annotations

from typing import NamedTuple


class Passed(NamedTuple):
    """All exchanges in backwards of this process so far."""

    num: int = 0
    row: int = -1  # the first rank of those that took part in the latest one


_passed = Passed()


def passed() -> Passed:
    """Returns what backwards of this process have exchanged so far."""
    return _passed


def note_passed(row: int) -> None:
    """Counts an exchange in a backward."""
    global _passed
    _passed = Passed(_passed.num + 1, row)
