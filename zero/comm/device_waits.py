"""Ranks help each other where a device waits for a collective, and its host does not.

[Note: devices that wait]
Such a collective is on the device until all ranks have issued it. So a rank may be kept, in whatever waits for its device, by
others that wait for it elsewhere; and if a rank is lost, nothing that waits for the device hears of it. A thread looks at
what is on the device. What has been there for a while makes it say what this rank needs of the others, who do that while they
wait for a message, of whichever training: a rank may be kept by one, and the others wait for it in another. After the time
limit it finds out who is lost, and has what is on the device broken off: then what waited goes on, and the next collective
raises.

[Note: even] A group beside this one has collectives in an order of their own. Streams of a device share its queues, and each of
these hands its entries out in order. So what one rank has issued beside, and others have not come to, must not come into their
queues behind a wait for what the first rank sends after it: each would wait for the other. Such waits follow a message that all
ranks have exchanged, unless what is issued beside has its turn among what they wait for, as among rounds of gradients. So every
message tells how many collectives beside its rank has issued, in all trainings, and who has issued fewer catches up before it
goes on. Ranks that do the same tell the same, and do nothing. No host waits for more than the message.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from zero.comm.health import RankMonitor
from zero.errors import GroupLost

_SUCCESS = 0  # torch's WorkResult.SUCCESS, which futures return
_TURN_S = 0.05  # seconds between two looks
_GRACE_S = 0.2  # seconds for which other ranks are waited for before they are told
_LOOK_S = 0.5  # seconds between two looks for an alarm
_PATIENCE_S = 1.0  # seconds beyond the time limit, as a host that waits knows more and reports first
_ENDS_S = 1.0  # seconds in which a collective ends that all ranks have issued
_HEAD, _COUNT = struct.Struct("<H"), struct.Struct("<8sII")  # how many counts a message has, and each: see [Note: even]


class _OnDevice(NamedTuple):
    work: Any
    since: float
    communicator: str
    number: int  # its number among those that this rank issued on the communicator


class _Beside(NamedTuple):
    """The methods of the owner of a communicator beside the main order, held weakly."""

    issued: weakref.WeakMethod[Callable[[], tuple[int, int]]]
    issue: weakref.WeakMethod[Callable[[int, int], None]]


class DeviceWaits:
    """A collective on the device is listed until it is done, is broken off, or its connections are replaced.

    The list is that of a group and its parts, on this rank's device. It has the members of `zero.comm.group.Needs`.

    `lose` is called with what was noticed when a group is lost, and `limit_s` says how long a collective may take now. What is
    called is of objects that this one and its thread do not keep.
    """

    def __init__(self, choose_device: Callable[[], None], limit_s: Callable[[], float], lose: Callable[[str], None]) -> None:
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()  # the group, and the groups of its parts
        self._monitor: RankMonitor | None = None
        self._choose_device = choose_device
        self._limit_s = weakref.WeakMethod(limit_s)
        self._lose = weakref.WeakMethod(lose)
        self._need: weakref.WeakMethod[Callable[[], str]] | None = None
        self._on_loss: weakref.WeakMethod[Callable[[bool], None]] | None = None
        self._act: weakref.WeakMethod[Callable[[str], None]] | None = None
        self._works: list[_OnDevice] = []
        self._issued: Counter[str] = Counter()  # the number of collectives by communicator
        self._beside: dict[bytes, _Beside] = {}  # by a digest of the communicator's name
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self.restarting = threading.RLock()  # held while connections are made or broken off, as these two must not meet
        _open.add(self)

    def restart(self, monitor: RankMonitor) -> None:
        """Begins anew over new connections, with the monitor of these."""
        with self.restarting, self._lock:
            self._monitor = monitor
            self._works.clear()
            self._issued.clear()
            self._beside.clear()

    def is_watched_by(self, monitor: RankMonitor) -> bool:
        """Returns whether its connections are still those of this monitor."""
        return self._monitor is monitor

    # what ranks say -----------------------------------------------------------------------------------------------

    def say(self, need: Callable[[], str]) -> None:
        self._need = weakref.WeakMethod(need)

    def heed(self, act: Callable[[str], None]) -> None:
        self._act = weakref.WeakMethod(act)

    def do_needed(self) -> None:
        """Does what another rank last said that it needs."""
        act = None if self._act is None else self._act()
        if act is not None and self._monitor is not None and (need := self._monitor.need()) is not None:
            with contextlib.suppress(GroupLost):  # the next call of that training raises it
                act(need)

    def on_loss(self, act: Callable[[bool], None]) -> None:
        self._on_loss = weakref.WeakMethod(act)

    # collectives beside the main order, see [Note: even] ----------------------------------------------------------

    def even(self, communicator: str, issued: Callable[[], tuple[int, int]], issue: Callable[[int, int], None]) -> None:
        """Has every message of hosts tell what `issued` returns, and `issue` called with the most that a rank tells."""
        beside = _Beside(weakref.WeakMethod(issued), weakref.WeakMethod(issue))
        self._beside[hashlib.sha256(communicator.encode()).digest()[:8]] = beside

    def leave(self, communicator: str) -> None:
        """Tells of a communicator no more."""
        self._beside.pop(hashlib.sha256(communicator.encode()).digest()[:8], None)

    def counts(self) -> dict[bytes, tuple[int, int]]:
        """Returns what this rank has issued beside, by communicator."""
        asked = [(key, beside.issued()) for key, beside in list(self._beside.items())]
        return {key: issued() for key, issued in asked if issued is not None}

    def catch_up(self, counts: dict[bytes, tuple[int, int]]) -> None:
        """Issues what other ranks have issued beside, and this one has not."""
        for key, so_far in self.counts().items():
            issue = beside.issue() if (beside := self._beside.get(key)) is not None else None
            if issue is not None and counts.get(key, so_far) > so_far:
                with contextlib.suppress(GroupLost):  # the next call of that training raises it
                    issue(*counts[key])

    # what is on the device ----------------------------------------------------------------------------------------

    def add(self, work: Any, communicator: str) -> None:
        """Notes a collective that was issued."""
        with self._lock:
            self._issued[communicator] += 1
            self._works.append(_OnDevice(work, time.monotonic(), communicator, self._issued[communicator]))
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, daemon=True, name="zero-device")
                self._watcher.start()

    def wait_for_all(self) -> None:
        """Waits until all that was issued is done, or was broken off because other ranks did not come to it."""
        while self._works and self._watcher is not None:
            time.sleep(_TURN_S)

    def tell_last(self) -> None:
        """Tells the others how many this rank has issued, as it issues no more."""
        if self._monitor is not None:
            self._monitor.tell_last_issued(self._issued)

    def break_off(self, communicators: Iterable[Any]) -> None:
        """Aborts what these communicators have on the device, after the training was told. First it waits a while: a device may
        be behind its host, and have an update before it that all ranks have issued."""
        last = time.monotonic() + _ENDS_S
        while (oldest := self._oldest()) is not None and time.monotonic() < last:
            if self._monitor is not None and _never_ends(oldest, self._monitor):
                break
            time.sleep(_TURN_S)
        act = None if self._on_loss is None else self._on_loss()
        with self._lock:
            any_failed = any(has_failed(each.work) for each in self._works)
        if act is not None:
            act(any_failed)
        with self._lock:
            self._works.clear()
        for communicator in communicators:
            communicator.abort()

    def _oldest(self) -> _OnDevice | None:
        """Returns the oldest collective that is not done."""
        with self._lock:
            return next((each for each in self._works if not each.work.is_completed()), None)

    def _watch(self) -> None:
        self._choose_device()
        said = looked = 0.0
        while True:
            time.sleep(_TURN_S)
            with self._lock:
                self._works = [each for each in self._works if not each.work.is_completed() or has_failed(each.work)]
                if not self._works:
                    self._watcher = None
                    return
                oldest, monitor = self._works[0], self._monitor
            oldest_s = (now := time.monotonic()) - oldest.since
            limit_s, lose, need = self._limit_s(), self._lose(), None if self._need is None else self._need()
            if limit_s is None or lose is None or monitor is None:
                self._watcher = None
                return
            if oldest_s > _GRACE_S and now - said > _GRACE_S and need is not None:
                monitor.tell_need(need())  # told again and again, as another rank's word takes the place of this one's
                said = now
            is_over = oldest_s > limit_s() + _PATIENCE_S or has_failed(oldest.work)
            if not is_over and oldest_s > _LOOK_S and now - looked > _LOOK_S:
                is_over, looked = monitor.is_alarmed() or _never_ends(oldest, monitor), now
            if is_over:
                lose(f"a collective was on its device for {oldest_s:.1f} s")
                with self._lock:
                    self._watcher = None
                    return
            del oldest, limit_s, lose, need  # a thread that sleeps must not keep these alive


def _never_ends(on_device: _OnDevice, monitor: RankMonitor) -> bool:
    """Returns whether a rank of its communicator, which all of them used at build, has closed without having issued it."""
    number = on_device.number
    return any(issued.get(on_device.communicator, number) < number for issued in monitor.last_issued())


_open: weakref.WeakSet[DeviceWaits] = weakref.WeakSet()


def do_needed() -> None:
    """Does what other ranks need, for all trainings. The thread that waits for a message calls it."""
    for waits in list(_open):
        waits.do_needed()


def with_counts(message: bytes) -> bytes:
    """Returns a message of this rank that tells what it has issued beside, in all trainings; see [Note: even]."""
    counts = [_COUNT.pack(key, *issued) for waits in list(_open) for key, issued in waits.counts().items()]
    return b"".join((_HEAD.pack(len(counts)), *counts, message))


def evened(messages: Sequence[bytes]) -> list[bytes]:
    """Returns the messages of all ranks, once this one has issued beside what they tell of."""
    most, plain = dict[bytes, tuple[int, int]](), list[bytes]()
    for message in messages:
        end = _HEAD.size + _HEAD.unpack_from(message)[0] * _COUNT.size
        for key, *issued in _COUNT.iter_unpack(message[_HEAD.size : end]):
            most[key] = max(most.get(key, (0, 0)), tuple(issued))
        plain.append(message[end:])
    for waits in list(_open):
        waits.catch_up(most)
    return plain


def has_failed(work: Any) -> bool:
    """Returns whether a collective that a stream waits for is known to have failed. NCCL calls it completed, and waiting for it
    does not raise. Other backends do not say."""
    try:
        result = work.get_future_result()
        return bool(result.done()) and result.value() != _SUCCESS
    except (AttributeError, RuntimeError):
        return False
