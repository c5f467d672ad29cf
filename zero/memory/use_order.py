"""The order in which gathered weights are used, learned from the last window, so that the next use is known ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from typing import Generic, TypeVar

Chunk = TypeVar("Chunk", bound=Hashable)

_NOT_IN_THIS_WINDOW = 1 << 40  # positions: farther than any use that is left in it
_NEVER = 1 << 60


class UseOrder(Generic[Chunk]):
    """The uses of chunks in the last window, and the position of this window in them. Uses of one chunk in a row count as one.

    A window repeats the last one as a rule. If it does not, the position is found again at the next use that is known.
    """

    def __init__(self) -> None:
        self._learned: list[Chunk] = []  # the uses of the last window
        self._places: dict[Chunk, list[int]] = {}  # the places of each chunk in them
        self._so_far: list[Chunk] = []  # the uses of this window
        self._position = -1  # the place in the last window of the latest use that it had too
        self._is_known = False  # whether the last window had the latest use

    def use(self, chunk: Chunk) -> None:
        """Notes that a chunk is used now."""
        if self._so_far and self._so_far[-1] == chunk:
            return
        self._so_far.append(chunk)
        places = self._places.get(chunk, ())
        index = bisect_right(places, self._position)
        self._is_known = index < len(places)
        if self._is_known:
            self._position = places[index]

    def upcoming(self, number: int) -> list[Chunk]:
        """Returns the chunks that are used next, as far as is known: none after a use that the last window did not have."""
        if not self._is_known:
            return []
        return self._learned[self._position + 1 : self._position + 1 + number]

    def distance(self, chunk: Chunk) -> int:
        """Returns how far away the next use of a chunk is. A chunk that is not used again in this window is farther than all
        that are."""
        places = self._places.get(chunk)
        if places is None:
            return _NEVER
        index = bisect_right(places, self._position)
        return places[index] if index < len(places) else _NOT_IN_THIS_WINDOW + places[0]

    def end_window(self) -> None:
        """Ends the window: the next one is expected to use what this one did. A window without any use teaches nothing."""
        if self._so_far:
            self._learned, self._places = self._so_far, {}
            for place, chunk in enumerate(self._learned):
                self._places.setdefault(chunk, []).append(place)
        self._so_far, self._position, self._is_known = [], -1, False
