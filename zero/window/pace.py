"""Decides how long a host waits in a backward: for its own device, so that few buffers are in use, and for ranks behind it.

Either wait is for memory alone. What a window computes is the same if none of them ever happens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from accelerators.streams import Event
from zero.comm.group import Pending
from zero.memory.staging import Staging
from zero.plan.budget import USUAL_BUCKET_BYTES

_AHEAD = 2  # the buckets, however large, whose filling the host may have issued before the device comes to it
_AHEAD_BYTES = 2 * USUAL_BUCKET_BYTES  # the same in bytes, for small buckets: a device fills two of them sooner than a host
LONGEST_S = 1.0
_SHORTER, _LONGER = 0.25, 1.1


class DevicePace:
    """A host waits for its own device alone, and only while that waits for no other rank.

    [Note: ahead of the device]
    A host can queue a whole backward on a device that has hardly begun it; then every bucket would need a buffer at once. So
    after each send the host waits until its device has filled all buckets but the last two, or, if they are small, all but
    the last `_AHEAD_BYTES`.

    This cannot lock ranks that branch apart: the host waits for its own device alone, and the stream that fills buckets waits
    for no round that is on its way. Once that is true no more (`_waits_for_ranks`: rounds were sent that others needed), the
    host waits no more in this window. The stream may also be behind the weights of the last step, or sums that settled: all
    ranks have issued those already, so they end without this host.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        # Rounds that the device may not have filled yet, each with the bytes marked before it.
        self._marks: deque[tuple[Event, int]] = deque()
        self._marked_bytes = 0  # the bytes of all buffers that were ever marked
        # The stream that fills buffers has to wait for a round of this window, so its progress says nothing of filling.
        self._waits_for_ranks = False

    def wait(self, buffer: torch.Tensor) -> None:
        """Waits until the device is near `buffer`, which was sent just now."""
        filled = None if self._waits_for_ranks else self._staging.mark(buffer)
        if filled is None:
            return
        self._marks.append((filled, self._marked_bytes))
        # The whole storage counts, as small buckets may be lent large buffers.
        self._marked_bytes += buffer.untyped_storage().nbytes()
        while len(self._marks) > _AHEAD and self._marked_bytes - self._marks[0][1] > _AHEAD_BYTES:
            self._marks.popleft()[0].synchronize()

    def note_needed(self, pending: Pending) -> None:
        """Notes that the stream goes on to wait for a round, if that is not done."""
        self._waits_for_ranks |= not pending.done()

    def end_window(self) -> None:
        """Begins to count anew: all rounds have landed or are abandoned."""
        self._marks.clear()
        self._waits_for_ranks = False


class Patience:
    """Waits for other ranks: `LONGEST_S` at first, and less if that was in vain, as when ranks branch apart at every step, and
    one waits with what another one sends when the window settles.

    A wait in vain makes further ones four times as short, and is the last before a round of others comes. Each window without
    one makes them a tenth longer, slowly, since ranks that branch apart have many such windows too.
    """

    def __init__(self) -> None:
        self._longest_s = LONGEST_S
        self._waits = True
        self._was_in_vain = False  # a wait of this window ended before its round was there

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
