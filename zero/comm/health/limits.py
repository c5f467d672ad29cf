"""Calls that wait for another process, with a time limit.

[Note: limits]
A store or a rank that was stopped closes no connection and never answers, and a call of torch.distributed that waits for it
cannot be broken off. So a daemon thread makes the call, and the caller waits for that thread until the limit is over. The
interpreter ends without waiting for daemon threads. From Python 3.12 on it starts no thread once it has begun to end, so some
are started before (`reserve`), and wait.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable


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
    if _reserved.process != os.getpid():  # the threads are the parent's
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
