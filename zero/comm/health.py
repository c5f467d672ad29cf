"""The watch of ranks over each other: what each was last seen doing, which one is missing and why, how a process leaves.

[Note: watch] Each rank keeps a line about itself where the others can read it: in memory, if all of them share some, or in the
store that the process group was made with. A line in the store is a message without an answer, which wakes the thread that
serves the store. Lines are read only when something is wrong: the rank that noticed raises an alarm, and the ranks that are
still there answer it. A rank that does not answer has left the text of an error, or has closed its connection, or is doing
something else. The first rank that finds the cause writes it down, so that every rank raises the same one.

[Note: limits]
A store or a rank that was stopped closes no connection and never answers, and a call of torch.distributed that waits for it
cannot be broken off. So a daemon thread makes the call, and the caller waits for that thread until the limit is over. The
interpreter ends without waiting for daemon threads. From Python 3.12 on it starts no thread once it has begun to end, so some
are started before (`reserve`), and wait.

[Note: the end] The error that ends the process, if there is one, is told to the ranks that wait for this one, or will. Then the
connections and their threads are closed. Threads of gloo take the lock of the interpreter to free a tensor, and one that waits
for that lock while the interpreter ends kills the process, even after a successful training. A thread ends when its work is
done; work with a rank that hangs is waited for only briefly, as it will not end now either.

The process that holds the store may hang too. So everything here that waits for another process does so by `at_once`, and all
of it together takes a few seconds at most. See [Note: limits].
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from zero.errors import GroupLost

Answer = TypeVar("Answer")

_ANSWER_S = 5.0  # the seconds that the store may take for one answer

_MEETING_S = 2.0  # the seconds that an alarm waits for answers; ranks that wait look for alarms more often than that
_LAST_WORDS_S = 0.3  # the seconds by which a rank's last words may come later than the end of its connections
_LOOK_S, _SHORTEST_LOOK_S = 0.05, 0.001  # seconds between two looks at the store
_NOWHERE = "before its first step"
_UNKNOWN = "at a place that is not known, as the store of these lines went with it"
_UNWRITTEN = "at a place that is not known, as a store in a file keeps no such lines"
_RAISED = "raised"  # begins the last words of a rank that an error ended

_watching: weakref.WeakSet[RankMonitor] = weakref.WeakSet()

_WORDS_S = 2.0  # seconds for telling the error
_CLOSE_S = 3.0  # seconds for closing connections


class _Reserve:
    """Threads of this process that are ready to make a call."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.num_idle = 0
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def grow(self, number: int) -> None:
        while self.num_idle < number:
            threading.Thread(target=self._serve, daemon=True, name="zero-reserve").start()
            self.num_idle += 1

    def take(self, call: Callable[[], None]) -> bool:
        if not self.num_idle:
            return False
        self.num_idle -= 1
        self._calls.put(call)
        return True

    def _serve(self) -> None:
        self._calls.get()()


_reserved = _Reserve()


def reserve(number: int) -> None:
    """Keeps that many threads ready for the end of the interpreter."""
    global _reserved
    if _reserved.process != os.getpid():  # the threads belong to the parent process
        _reserved = _Reserve()
    _reserved.grow(number)


def at_once(calls: Iterable[Callable[[], object]], limit_s: float) -> bool:
    """Makes all of these calls at once, each in a thread; False when some have not returned within the limit. Without any
    thread, neither a new one nor a reserved one, a call is made here, however long it takes."""
    waits = [_begin(call) for call in calls]
    deadline = time.monotonic() + limit_s
    return all(wait(max(0.0, deadline - time.monotonic())) for wait in waits)


def _begin(call: Callable[[], object]) -> Callable[[float], bool]:
    """Begins a call in a thread, and returns what waits for its end, for so long."""
    thread = threading.Thread(target=call, daemon=True, name="zero-call")
    try:
        thread.start()
    except RuntimeError:
        return _begin_without_new_thread(call)

    def wait(limit_s: float) -> bool:
        thread.join(limit_s)
        return not thread.is_alive()

    return wait


def _begin_without_new_thread(call: Callable[[], object]) -> Callable[[float], bool]:
    ended = threading.Event()

    def run() -> None:
        try:
            call()
        finally:
            ended.set()

    if _reserved.process != os.getpid() or not _reserved.take(run):
        run()
    return ended.wait


class Store(Protocol):
    """The methods of a store of torch.distributed that are used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class StoreClient:
    """A client of a store, or of the part of it under a prefix. `whole` is then the client of all of it, as there is one
    connection."""

    def __init__(self, store: Store, whole: StoreClient | None = None) -> None:
        self.store: Any = store  # a store of torch.distributed
        # This is set for good when an answer is late: the thread that waits for it holds the connection, so any other question
        # would wait for that thread.
        self._lost: threading.Event = threading.Event() if whole is None else whole._lost

    @property
    def is_lost(self) -> bool:
        """True when the process that holds the store was found to be gone, or not to answer."""
        return self._lost.is_set()

    def ask(self, question: Callable[[Store], Answer], limit_s: float | None = None) -> Answer | None:
        """Returns the answer, or None when there is none in time: the process that holds the store may be the missing one."""
        if self.is_lost:
            return None
        answers: list[Answer] = []

        def put() -> None:
            with contextlib.suppress(RuntimeError):  # the connection is closed
                answers.append(question(self.store))

        if not at_once([put], _ANSWER_S if limit_s is None else limit_s):
            self._lost.set()
        return answers[0] if answers else None

    def line(self, key: str) -> str | None:
        """Returns what was written under a key, or None."""
        return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def count(self, key: str, limit_s: float) -> int:
        """Returns how often this was called with a key on any rank, this call included."""
        number = self.ask(lambda store: store.add(key, 1), limit_s)
        if number is None:
            raise GroupLost(
                "Cannot connect the ranks: the process that holds their store, which is rank 0 or the launcher, does not "
                "answer. Start the ranks again from a checkpoint."
            )
        return number

    def tell(self, key: str, value: str) -> None:
        """Writes a line under a key. The store does not answer, so it takes some microseconds."""
        if not self.is_lost:
            try:
                self.store.set(key, value)
            except RuntimeError:  # the process that held the store is gone; another place finds that out and reports it
                self._lost.set()


class Phases(Protocol):
    """The memory in which each rank writes what it does, and which all ranks read."""

    def write(self, phase: str) -> None: ...

    def read(self, rank: int) -> str: ...


class RankMonitor:
    """The cause of a loss is the same on all ranks that reach the store, and never changes once it is known.

    It publishes what this rank does, and finds out which rank is missing and why.
    """

    def __init__(self, store: StoreClient, rank: int, size: int, is_cheap: bool, phases: Phases | None = None) -> None:
        self.phase = ""  # what this rank does
        self._place: weakref.WeakMethod[Callable[[], str]] | None = None  # returns the rank's place in the phase
        self._store = store
        self._rank = rank
        self._size = size
        self._is_cheap = is_cheap  # whether a line may be written to the store several times a step
        self._phases = phases  # holds the lines if the store does not
        self._process = os.getpid()
        self._has_left = False
        self._diagnosing = threading.Lock()
        self._cause = ""  # the reason for which ranks cannot go on, once it is known
        self._hosts: list[str] = []  # by rank; read at the start, as the store may be lost with a rank
        _watching.add(self)

    def note(self, phase: str, place: Callable[[], str] | None = None, phases: Phases | None = None) -> None:
        """Publishes what this rank does from now on, in the store if not in `phases`; `place` is a method that says where in
        it, if the rank ends by an error."""
        if not self.is_of_this_process:
            return  # a forked process is no rank, and would write over its parent's line
        is_first, self.phase, self._phases = not self.phase, phase, phases
        self._place = None if place is None else weakref.WeakMethod(place)
        if phases is not None:
            phases.write(phase)
        if is_first or (phases is None and self._is_cheap):
            self._store.tell(f"phase/{self._rank}", phase)

    def wait_for_start(self, limit_s: float, words_of: Callable[[int], str]) -> None:
        """Waits until every rank has written its first line; `words_of` gives the last words of a rank that will write none."""
        self._store.tell(f"host/{self._rank}", socket.gethostname())
        self.note(_NOWHERE if self._is_cheap else _UNWRITTEN, phases=self._phases)  # the phase of older connections is over
        keys = [f"phase/{rank}" for rank in range(self._size)]
        deadline, pause_s = time.monotonic() + limit_s, _SHORTEST_LOOK_S
        # The store is asked again and again, as torch logs a warning for each wait for keys that was too short.
        while not self._store.ask(lambda store: store.check(keys)):
            late = [rank for rank, key in enumerate(keys) if self._store.line(key) is None]
            left = [f"rank {rank} {words}" for rank in late if (words := words_of(rank))]
            if left or (late and time.monotonic() > deadline):
                missing = f"nothing was seen of rank {', '.join(map(str, late))} within {limit_s:g} s"
                raise GroupLost(
                    f"Cannot connect {self._size} ranks: {'; '.join(left) or missing}. Start all of them, and read what those "
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
        """Returns True when a rank noticed that something is wrong."""
        return bool(self._store.ask(lambda store: store.check(["alarm"])))

    def diagnose(self, noticed: str, is_gone: Callable[[int], bool]) -> str:
        """Returns why the ranks cannot go on, as the first of them found it; `noticed` is what this rank saw."""
        self._store.ask(self._raise_alarm)
        with self._diagnosing:  # one thread at a time, as a connection that another thread touches may look closed
            if not self._cause:
                cause = self._store.line("cause") or self._look_for_others(noticed, is_gone)
                agreed = self._store.ask(lambda store: store.compare_set("cause", "", cause))
                self._cause = cause if agreed is None else agreed.decode()
            return self._cause

    def report_exit(self, error: BaseException) -> None:
        """Publishes the error that ends this rank."""
        self._leave(raised(error))
        self._store.tell("alarm", "1")  # ranks that wait for this one look for the alarm

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
        """Publishes how many collectives this rank has issued on each communicator, once it issues no more."""
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
        if self._has_left:  # the first reason counts
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
        if reason:  # a thread of this rank has failed, and broke off what the others wait for
            return f"{self._named(self._rank)} {reason}"
        absent = [rank for rank in range(self._size) if rank != self._rank]
        left: dict[int, str] = {}
        gone: dict[int, bool] = {}  # by rank; asked once, since a touch that finds nothing spoils the connection
        begun = time.monotonic()
        while absent and (waited := time.monotonic() - begun) < _MEETING_S:
            left |= {rank: words for rank in absent if (words := self._store.line(f"end/{rank}"))}
            absent = [rank for rank in absent if rank not in left and not self._store.line(f"here/{rank}")]
            cause = self._store.line("cause")
            if cause:  # another rank has found the cause already
                return cause
            if waited > _LAST_WORDS_S:
                gone |= {rank: is_gone(rank) for rank in absent if rank not in gone}
                if all(gone[rank] for rank in absent):
                    break
            time.sleep(_LOOK_S)
        reasons = [f"{self._named(rank)} {words}" for rank, words in left.items()]
        ended = [rank for rank in absent if gone.get(rank)]
        # After an error of one rank a launcher ends the others. A rank that closed its group, or called rebuild(), ended none.
        if ended and not any(words.startswith(_RAISED) for words in left.values()):
            reasons.insert(0, f"{self._last_seen(ended)}, and is gone: its program ended or was killed")
        if reasons:
            return "; ".join(reasons)
        if self._store.is_lost:  # the store is lost, so nothing can be learned of any rank
            holder = f"{self._named(0)} or the launcher{' there' * self._are_apart}"
            return f"the process that holds the ranks' store, which is {holder}, does not answer ({noticed})"
        if absent:
            return f"{self._last_seen(absent)}, and did not come ({noticed})"
        return f"{noticed}, though all ranks are there: {self._last_seen(range(self._size))}"

    def _last_seen(self, ranks: Iterable[int]) -> str:
        read = (lambda rank: self._store.line(f"phase/{rank}")) if self._phases is None else self._phases.read
        places = {rank: read(rank) or _UNKNOWN for rank in ranks}
        return " and ".join(f"{self._named(rank)} was last seen {place}" for rank, place in places.items())

    def _named(self, rank: int) -> str:
        """Returns a rank's name, with its host if ranks are on several hosts."""
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
    return f"{_RAISED} {type(error).__name__}: {error}{where}"


class Leaving(Protocol):
    """A group that has connections to close."""

    def release(self) -> Callable[[], None]:
        """Forgets the connections; what is returned closes them, and may wait for what is under way."""


_open: weakref.WeakKeyDictionary[Leaving, int] = weakref.WeakKeyDictionary()  # each with the process that opened it


def prepare() -> None:
    """Reserves threads for the end, before a group is made: one for each group, and one for the error and the world."""
    reserve(len(_open) + 3)


def opened(group: Leaving) -> None:
    _open[group] = os.getpid()


def end(store: StoreClient | None, rank: int, end_world: Callable[[], None] | None = None) -> None:
    at_once([partial(leave_words, store, rank)], _WORDS_S)
    are_closed = close_within_limit([group.release() for group, process in list(_open.items()) if process == os.getpid()])
    if are_closed and end_world is not None:  # otherwise ending the world would wait for the same connections
        close_within_limit([end_world])


def close_within_limit(closings: list[Callable[[], None]]) -> bool:
    """Closes connections on which work with a rank that hangs may be going on. Returns whether they are closed."""
    return at_once(closings, _CLOSE_S)


def leave_words(store: StoreClient | None, rank: int) -> None:
    """Tells the others the error that ends this process; `store` is that of all ranks, if it can still be used."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return
    leave(error)
    if store is not None:
        store.tell(_key_of(rank), f"{raised(error)}, before it sharded")


def words_of(store: StoreClient, rank: int) -> str:
    """Returns the error of a rank that ended before it sharded; nothing if it did not."""
    return store.line(_key_of(rank)) or ""


def _key_of(rank: int) -> str:
    return f"zero ended/{rank}"
