"""What every rank was last seen doing, for the error on ranks that miss another one.

[Note: watch] Each rank keeps a line about itself in the store that the process group was made with. Writing it is a message
without an answer, some microseconds. It is read only when something is wrong: the rank that noticed raises an alarm, and the
ranks that are still there answer it. A rank that does not answer has left the text of an error, or has closed its connection,
or is doing something else. The first rank that finds the cause writes it down, so that every rank raises the same one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping

from zero.comm.health.store import Store, StoreClient
from zero.errors import GroupLost

_MEETING_S = 2.0  # how long an alarm waits for answers; ranks that wait for others look for alarms more often than that
_LAST_WORDS_S = 0.3  # how long after its connections a rank's last words may come
_LOOK_S, _SHORTEST_LOOK_S = 0.05, 0.001  # between two looks at the store
_NOWHERE = "before its first step"
_UNKNOWN = "at a place that is not known, as the store of these lines went with it"
_UNWRITTEN = "at a place that is not known, as a store in a file keeps no such lines"

_watching: weakref.WeakSet[RankMonitor] = weakref.WeakSet()


class RankMonitor:
    """Publishes what this rank does, and finds out which rank is missing and why."""

    def __init__(self, store: StoreClient, rank: int, size: int, is_cheap: bool) -> None:
        self.phase = ""  # now, on this rank
        self._place: weakref.WeakMethod[Callable[[], str]] | None = None  # says where in that it is
        self._store = store
        self._rank = rank
        self._size = size
        self._is_cheap = is_cheap  # to write a line, so that it may be done several times a step
        self._process = os.getpid()
        self._has_left = False
        self._diagnosing = threading.Lock()
        self._cause = ""  # why ranks cannot go on, once that is known
        self._hosts: list[str] = []  # of all ranks; asked for at the start, as the store may be lost with one
        _watching.add(self)

    def note(self, phase: str, place: Callable[[], str] | None = None) -> None:
        """Publishes what this rank does from now on; `place` is a method that says where in it, if the rank ends by an
        error."""
        is_first, self.phase = not self.phase, phase
        self._place = None if place is None else weakref.WeakMethod(place)
        if self._is_cheap or is_first:
            self._store.tell(f"phase/{self._rank}", phase)

    def wait_for_start(self, limit_s: float, words_of: Callable[[int], str]) -> None:
        """Waits until every rank has written its first line; `words_of` are those that one left which will write none."""
        self._store.tell(f"host/{self._rank}", socket.gethostname())
        self.note(_NOWHERE if self._is_cheap else _UNWRITTEN)
        keys = [f"phase/{rank}" for rank in range(self._size)]
        deadline, pause_s = time.monotonic() + limit_s, _SHORTEST_LOOK_S
        # Looked at again and again: a store that is told to wait for keys logs a warning for each wait that was too short.
        while not self._store.ask(lambda store: store.check(keys)):
            late = [rank for rank, key in enumerate(keys) if self._store.line(key) is None]
            left = [f"rank {rank} {words}" for rank in late if (words := words_of(rank))]
            if left or (late and time.monotonic() > deadline):
                missing = f"of rank {', '.join(map(str, late))} nothing was seen within {limit_s:g} s"
                raise GroupLost(
                    f"Cannot connect {self._size} ranks: {'; '.join(left) or missing}. Start all of them, and look what those "
                    "print."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        hosts = [f"host/{rank}" for rank in range(self._size)]
        names = self._store.ask(lambda store: [store.get(key).decode() for key in hosts] if store.check(hosts) else [])
        self._hosts = names or []

    @property
    def is_of_this_process(self) -> bool:
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raises in a process that was forked from this rank, which still uses the connections."""
        if not self.is_of_this_process:
            raise ValueError(
                f"Cannot run a collective in process {os.getpid()}: rank {self._rank} is process {self._process}, from which "
                "this one was forked. Train in the process that sharded, and let the others load data."
            )

    def is_alarmed(self) -> bool:
        """True when a rank noticed that something is wrong."""
        return bool(self._store.ask(lambda store: store.check(["alarm"])))

    def diagnose(self, noticed: str, is_gone: Callable[[int], bool]) -> str:
        """Returns why the ranks cannot go on, as the first of them found it; `noticed` is what this rank saw."""
        self._store.ask(self._raise_alarm)
        with self._diagnosing:  # by one thread of this rank, as a connection that was touched may look like a closed one
            if not self._cause:
                cause = self._store.line("cause") or self._look_for_others(noticed, is_gone)
                agreed = self._store.ask(lambda store: store.compare_set("cause", "", cause))
                self._cause = cause if agreed is None else agreed.decode()
            return self._cause

    def report_exit(self, error: BaseException) -> None:
        """Publishes the error that ends this rank."""
        self._leave(raised(error))
        self._store.tell("alarm", "1")  # who waits for this rank looks for that

    def report_rebuild(self) -> None:
        """Publishes that this rank goes on over other connections, which ranks that still wait for it come to as well."""
        self._leave("called rebuild()")
        self._store.tell("alarm", "1")

    def tell_need(self, need: str) -> None:
        """Publishes what this rank needs of those that wait for it."""
        self._store.tell("need", need)

    def need(self) -> str | None:
        """Returns what any rank last published with `tell_need`."""
        return self._store.line("need")

    def tell_last_issued(self, issued: Mapping[str, int]) -> None:
        """Publishes how many collectives this rank has issued on each communicator, where it will issue no more."""
        self._store.tell(f"issued/{self._rank}", json.dumps(issued))

    def last_issued(self) -> list[dict[str, int]]:
        """Returns what `tell_last_issued` published of ranks that have closed."""
        lines = [self._store.line(f"issued/{rank}") for rank in range(self._size)]
        return [json.loads(line) for line in lines if line is not None]

    def close(self) -> None:
        """Ends the monitoring, in an order that all ranks follow. Ranks that still wait for this one find it gone."""
        if self.is_of_this_process:
            self._leave("closed its group")
        _watching.discard(self)

    def _leave(self, how: str) -> None:
        if self._has_left:  # for a reason that the others look for
            return
        self._has_left = True
        place = None if self._place is None else self._place()
        last_seen = f"{self.phase or _NOWHERE}{'' if place is None else place()}"
        self._store.tell(f"end/{self._rank}", f"{how}, {last_seen}")

    def _raise_alarm(self, store: Store) -> None:
        store.set(f"here/{self._rank}", "1")
        store.set("alarm", "1")

    def _look_for_others(self, noticed: str, is_gone: Callable[[int], bool]) -> str:
        reason = self._store.line(f"end/{self._rank}")
        if reason:  # a thread of this rank failed, and broke off what the others wait for
            return f"{self._named(self._rank)} {reason}"
        absent = [rank for rank in range(self._size) if rank != self._rank]
        left: dict[int, str] = {}
        gone: dict[int, bool] = {}  # by rank; touched once, since a touch that finds nothing spoils the connection
        begun = time.monotonic()
        while absent and (waited := time.monotonic() - begun) < _MEETING_S:
            left |= {rank: words for rank in absent if (words := self._store.line(f"end/{rank}"))}
            absent = [rank for rank in absent if rank not in left and not self._store.line(f"here/{rank}")]
            cause = self._store.line("cause")
            if cause:  # another rank was faster
                return cause
            if waited > _LAST_WORDS_S:
                gone |= {rank: is_gone(rank) for rank in absent if rank not in gone}
                if all(gone[rank] for rank in absent):
                    break
            time.sleep(_LOOK_S)
        if left:
            return "; ".join(f"{self._named(rank)} {words}" for rank, words in left.items())
        ended = [rank for rank in absent if gone.get(rank)]
        if ended:
            return f"{self._last_seen(ended)}, and is gone: its program ended or was killed"
        if self._store.is_lost:  # so that nothing can be learned of any rank
            holder = f"{self._named(0)} or the launcher{' there' * self._are_apart}"
            return f"the process that holds the ranks' store, which is {holder}, does not answer ({noticed})"
        if absent:
            return f"{self._last_seen(absent)}, and did not come ({noticed})"
        return f"{noticed}, though all ranks are there: {self._last_seen(range(self._size))}"

    def _last_seen(self, ranks: Iterable[int]) -> str:
        places = {rank: self._store.line(f"phase/{rank}") or _UNKNOWN for rank in ranks}
        return " and ".join(f"{self._named(rank)} was last seen {place}" for rank, place in places.items())

    def _named(self, rank: int) -> str:
        """Returns a rank's name, with its host where ranks are on several hosts."""
        return f"rank {rank} on {self._hosts[rank]}" if self._are_apart else f"rank {rank}"

    @property
    def _are_apart(self) -> bool:
        return len(set(self._hosts)) > 1


def leave(error: BaseException) -> None:
    """Tells all ranks of all its groups what ends this process."""
    for watch in [watch for watch in _watching if watch.is_of_this_process]:
        watch.report_exit(error)


def raised(error: BaseException) -> str:
    """Returns an error as one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    return f"raised {type(error).__name__}: {error}{where}"
