"""Process groups that nobody uses for now, kept for the next training that needs such.

For a sub-group only its members are here to make them (`use_local_synchronization`), and torch then names groups by their
ranks and the number of groups alive: made again after being destroyed, they get the old name and find the old addresses in
the store. So those of a sub-group are kept when it is closed.
"""

from __future__ import annotations

import os
from typing import Any, Generic, NamedTuple, TypeVar

Groups = TypeVar("Groups")


class Purpose(NamedTuple):
    """What process groups are made for. Their threads are those of one process."""

    world: Any
    ranks: tuple[int, ...]
    backend: str
    limits: Any
    process: int


class KeptGroups(Generic[Groups]):
    """Those of one kind, each with what it was made for."""

    def __init__(self) -> None:
        self._kept: list[tuple[Purpose, Groups]] = []

    def take(self, purpose: Purpose) -> Groups | None:
        """Some that were made for this; None where there are none."""
        found = next((index for index, (its, _) in enumerate(self._kept) if its == purpose), None)
        return None if found is None else self._kept.pop(found)[1]

    def keep(self, purpose: Purpose, groups: Groups) -> None:
        """Those of a world that was left are of no use any more."""
        self._kept = [kept for kept in self._kept if kept[0].world is purpose.world]
        self._kept.append((purpose, groups))

    def end_process(self) -> None:
        """This process lets go of its own. What it was forked with is left as it is, as its threads are not here."""
        self._kept = [kept for kept in self._kept if kept[0].process != os.getpid()]
