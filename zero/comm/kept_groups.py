"""Process groups that are not in use, kept for the next training of the same ranks.

For a sub-group only its members make them (`use_local_synchronization`), and torch then names groups by their ranks and the
number of groups alive: made again after being destroyed, they get the old name and find the old addresses in the store. So
process groups of a sub-group are kept when it is closed.
"""

from __future__ import annotations

import os
from typing import Any, Generic, NamedTuple, TypeVar

Groups = TypeVar("Groups")


class Purpose(NamedTuple):
    """What process groups are made for. Their threads belong to one process."""

    world: Any
    ranks: tuple[int, ...]
    backend: str
    limits: Any
    process: int


class KeptGroups(Generic[Groups]):
    """The kept process groups of one kind, each with its purpose."""

    def __init__(self) -> None:
        self._kept: list[tuple[Purpose, Groups]] = []

    def take(self, purpose: Purpose) -> Groups | None:
        """Returns process groups that were made for this purpose, or None."""
        position = next((index for index, (key, _) in enumerate(self._kept) if key == purpose), None)
        return None if position is None else self._kept.pop(position)[1]

    def keep(self, purpose: Purpose, groups: Groups) -> None:
        """Keeps process groups. Those of an older world are dropped."""
        self._kept = [kept for kept in self._kept if kept[0].world is purpose.world]
        self._kept.append((purpose, groups))

    def end_process(self) -> None:
        """Drops the groups of this process. Those of the process that it was forked from are left as they are, since their
        threads are not here."""
        self._kept = [kept for kept in self._kept if kept[0].process != os.getpid()]
