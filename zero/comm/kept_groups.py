"""Process groups for messages of two ranks that are not in use, kept for the next training of the same ranks."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class Purpose(NamedTuple):
    """What process groups are made for. Their threads belong to one process."""

    world: Any
    ranks: tuple[int, ...]
    process: int


class KeptGroups:
    """The kept process groups, each with its purpose."""

    def __init__(self) -> None:
        self._kept: list[tuple[Purpose, Any]] = []

    def take(self, purpose: Purpose) -> Any:
        """Returns a process group that was made for this purpose, or None. Other ranks may have kept another."""
        position = next((index for index, (key, _) in enumerate(self._kept) if key == purpose), None)
        return None if position is None else self._kept.pop(position)[1]

    def keep(self, purpose: Purpose, group: Any) -> None:
        """Keeps a process group. Those of an older world are dropped."""
        self._kept = [kept for kept in self._kept if kept[0].world is purpose.world]
        self._kept.append((purpose, group))

    def end_process(self) -> None:
        """Drops the groups of this process. Those of the process that it was forked from are left as they are, since their
        threads are not here."""
        self._kept = [kept for kept in self._kept if kept[0].process != os.getpid()]
