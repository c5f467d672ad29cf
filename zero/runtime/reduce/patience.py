"""How long a rank that is ahead waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 1.0
_SHORTER, _LONGER = 0.25, 1.1


class Patience:
    """Waits for other ranks: `LONGEST_S` at first, and less where that was in vain, as where ranks branch apart at every step,
    and one waits with what another one sends when the window settles.

    A wait in vain makes further ones four times as short, and is the last before a round of others comes. Each window without
    one makes them a tenth longer, slowly, since ranks that branch apart have many such windows too.
    """

    def __init__(self) -> None:
        self._longest_s = LONGEST_S
        self._waits = True
        self._was_in_vain = False  # in this window

    def wait(self, is_done: Callable[[], bool]) -> None:
        until = time.monotonic() + self._longest_s
        while self._waits and not is_done():
            time.sleep(0.001)
            if time.monotonic() >= until:
                self._waits, self._was_in_vain = False, True
                self._longest_s *= _SHORTER

    def one_came(self) -> None:
        self._waits = True

    def end_window(self) -> None:
        if not self._was_in_vain:
            self._longest_s = min(LONGEST_S, _LONGER * self._longest_s)
        self._was_in_vain = False
