"""The two threads of a staged group: one sends, one receives.

[Note: threads] The first thread copies a chunk to the host, waits for the copy and starts gloo on it. The second one waits for
gloo and issues the copy back. So three chunks are under way at a time, and a program waits for a collective only where it needs
the result. Collectives keep the order in which they were called, those on host tensors and barriers included: ranks match
gloo's collectives by their order.

A failure ends the group, as the ranks no longer agree on how many chunks were sent: the collective that failed and all later
ones raise it. Where one on host tensors fails, it is gloo that knows what can go on.
"""

from __future__ import annotations

import atexit
import datetime
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from accelerators.staged.exchange import Chunk, Exchange
from accelerators.staged.memory import Buffer, Buffers
from accelerators.staged.work import StagedWork

MOST_RECENT = 16
TURN = datetime.timedelta(seconds=0.2)  # of waiting for gloo, between two looks whether the group was closed
_CLOSE_S = 2.0  # for a thread to end that waits for another rank or for the device

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class HostCall(NamedTuple):
    """A collective on host tensors."""

    start: Callable[[], Any]
    work: StagedWork

    def fail(self, error: BaseException) -> None:
        self.work.fail(error)

    def finish(self) -> None:
        self.work.finish()


class Part(NamedTuple):
    """A chunk on the wire, or the end of a collective."""

    job: Exchange | HostCall
    carried: Any = None
    chunk: Chunk | None = None
    buffer: Buffer | None = None
    start: int = 0
    is_last: bool = False


class Pipeline:
    """Starts its threads with the first collective."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Exchange | HostCall | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._buffers = Buffers()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._closed = False
        self._recent: deque[Exchange] = deque()  # whose results later ones may read without a wait of the program in between
        self._failed_to_send: BaseException | None = None
        self._failed_to_land: BaseException | None = None

    def put(self, job: Exchange | HostCall) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"Cannot run a collective in process {os.getpid()}: its group belongs to process {self._process}, from which "
                "this one was forked. Make a group in this process."
            )
        with self._starting:
            if self._closed:
                raise RuntimeError("Cannot run a collective: its group was destroyed. Make another group.")
            if not self._threads:
                loops = {"staged-send": self._send, "staged-receive": self._receive}
                self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]
                for thread in self._threads:
                    thread.start()
                _open.add(self)
            self._jobs.put(job)

    def close(self) -> None:
        """Ends the threads. What has come lands; what has not fails, and is waited for no longer."""
        with self._starting:
            was_closed, self._closed = self._closed, True
            self._jobs.put(None)
        if was_closed or self._process != os.getpid():
            return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        _open.discard(self)

    # the thread that sends

    def _send(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = attempt(job, partial(self._start, job))
            if isinstance(job, Exchange):
                self._failed_to_send = self._failed_to_send or error
            self._under_way.put(Part(job, is_last=True))
            del job  # or it would stay until the next one
        self._under_way.put(None)

    def _start(self, job: Exchange | HostCall) -> None:
        self._check()
        if isinstance(job, HostCall):
            self._under_way.put(Part(job, job.start()))
            return
        for earlier in filter(job.follows, self._recent):
            job.wait_for(earlier)
        if len(self._recent) == MOST_RECENT:
            job.wait_for(self._recent.popleft())
        self._recent.append(job)
        for start in job.starts():
            buffer = self._buffers.take()
            carried = None
            try:
                self._check()
                chunk = job.copy_out(buffer, start)
                carried = job.carry(chunk)
            finally:
                if carried is None:
                    self._buffers.give_back(buffer)
            self._under_way.put(Part(job, carried, chunk, buffer, start))

    def _check(self) -> None:
        failure = self._failed_to_send or self._failed_to_land
        if failure is not None:
            raise failure

    # the thread that receives

    def _receive(self) -> None:
        while (part := self._under_way.get()) is not None:
            if not part.is_last:
                error = attempt(part.job, partial(self._land, part))
                if isinstance(part.job, Exchange):
                    self._failed_to_land = self._failed_to_land or error
            else:
                part.job.finish()
            del part
        self._buffers.wait()

    def _land(self, part: Part) -> None:
        try:
            if self._failed_to_land is not None:
                raise self._failed_to_land
            self.wait_for(part.carried)
            if isinstance(part.job, Exchange) and part.buffer is not None and part.chunk is not None:
                part.job.copy_in(part.buffer, part.chunk, part.start)
        finally:
            if part.buffer is not None:
                self._buffers.give_back(part.buffer)

    def wait_for(self, carried: Any) -> None:
        """Until gloo has done its part, or the group is closed."""
        while True:
            try:
                carried.wait(TURN)
                return
            except RuntimeError:
                if carried.is_completed():
                    carried.wait()  # it failed, and says why; or it was done just now
                    return
                if self._closed:
                    raise RuntimeError("its group was destroyed while it waited for other ranks") from None


def attempt(job: Exchange | HostCall, act: Callable[[], None]) -> Exception | None:
    """Does a part of a collective; returns what it raised, which the collective raises too."""
    try:
        act()
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, the program that waits for the collective gets it
        job.fail(error)
        return error


def close_all() -> None:
    """The interpreter ends. A thread that waits in gloo then would take the process down."""
    for pipeline in list(_open):
        pipeline.close()


atexit.register(close_all)
