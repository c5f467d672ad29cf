"""Fetches shares of other ranks at any time, whatever the main thread of their owner is doing.

[Note: pulls] Each rank has one thread that takes requests, and one that sends answers and does other work that no thread waits
for. The first waits for requests only: a request for a version that its rank has not reached is answered when that version is
reached. So every request ends if its rank reaches the version, and no rank has to read anything for another one to get there.
Ranks may take different branches, or wait in a collective of the user.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zero.comm.group import ANYONES, Message, Wire
from zero.errors import GroupLost

logger = logging.getLogger("zero")

_FIRST_ANSWER_TAG, _LAST_ANSWER_TAG = ANYONES + 1, 2**30
_TURN_S = 0.5  # the seconds of a wait between two looks
_LONG_S = 5.0  # the seconds after which a wait is logged
_LEAVES = -1  # stands in place of a bucket: the rank will request nothing any more
_REACHED = -1  # stands in place of a tag: this is no request, and the rank will request nothing older
_ISSUED = -2  # stands in place of a tag: this is no request, and the rank waits for collectives that others have not issued

Answer = Callable[[torch.Tensor, Callable[[], object]], None]  # takes a share, and what waits until its values are there
# Called with a bucket, a step, a number of edits since, and an answer; it calls the answer with the share as of then: now, or
# when this rank has come as far.
Request = Callable[[int, int, int, Answer], None]
# Called with the number of a rank that will request nothing of a bucket that is older than a step and a number of edits.
Reached = Callable[[int, int, int, int], None]


class _Sending(NamedTuple):
    """The values to send to a rank under a tag, once they are there."""

    values: torch.Tensor
    rank: int
    tag: int
    wait: Callable[[], object] | None = None


class Pull:
    """A bucket on its way from all ranks."""

    def __init__(self, messages: Sequence[Message], requests: Sequence[torch.Tensor]) -> None:
        self._messages = messages
        self._requests = requests  # kept until they are sent

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages = self._requests = ()


class Pulls:
    """Every request is answered once this rank has reached its version, unless a thread that answers has failed.

    It fetches buckets from all ranks, and gives them this rank's shares.
    """

    def __init__(self, wire: Wire, request: Request, reached: Reached) -> None:
        self.num_pulled_bytes = 0
        # Called with what another rank passed to `tell_issued`.
        self.issue_told: Callable[[int, int, int], None] = lambda *_: None
        self._wire = wire
        self._request = request
        self._reached = reached
        self._next_tag = _FIRST_ANSWER_TAG
        # The queue of answers to send and of buckets to tell others about. A None ends it.
        self._sendings: queue.SimpleQueue[_Sending | int | None] = queue.SimpleQueue()
        self._reached_to_tell: dict[int, tuple[int, int]] = {}  # by bucket: the newest version that others have yet to be told
        self._has_left = False
        self._failure: RuntimeError | None = None  # the error that ended a thread of this object
        self._lock = threading.Lock()
        self._others = [rank for rank in range(wire.size) if rank != wire.rank]
        works = (self._take_requests, self._send) if self._others else ()
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True, name="zero-pulls") for work in works]
        for thread in self._threads:
            thread.start()
        wire.on_exit(self.end)

    def begin(self, bucket: int, memory: torch.Tensor, step: int, edits: int) -> Pull:
        """Begins to fetch the parts of other ranks into the memory of a bucket, at a version."""
        if self._failure is not None:
            self._wire.fail(self._failure)
        parts = memory.view(self._wire.size, -1)
        messages: list[Message] = []
        requests: list[torch.Tensor] = []
        for rank in self._others:
            with self._lock:
                tag = self._next_tag
                self._next_tag = tag + 1 if tag < _LAST_ANSWER_TAG else _FIRST_ANSWER_TAG
            # The receive is posted before the request is sent, so that an answer always has memory to go to.
            messages.append(self._wire.receive(parts[rank], rank, tag))
            requests.append(torch.tensor([self._wire.rank, bucket, step, edits, tag], device="cpu"))
            messages.append(self._wire.send(requests[-1], rank, ANYONES))
            self.num_pulled_bytes += parts[rank].nbytes
        return Pull(messages, requests)

    def tell_reached(self, bucket: int, step: int, edits: int) -> None:
        """Tells all others that this rank requests no older version of a bucket. It waits for no rank; if others are slow to
        read it, they only get the latest."""
        with self._lock:
            is_waiting = bucket in self._reached_to_tell
            self._reached_to_tell[bucket] = step, edits
        if not is_waiting:
            self._sendings.put(bucket)

    def tell_issued(self, window: int, num_needed: int, num_issued: int) -> None:
        """Tells all others three numbers, of which none is negative. It waits for no rank."""
        message = torch.tensor([self._wire.rank, window, num_needed, num_issued, _ISSUED], device="cpu")
        for rank in self._others:
            self._sendings.put(_Sending(message, rank, ANYONES))

    def close(self) -> None:
        """Ends the requests of this rank. It answers others until they have done the same, and waits for that; but no longer
        than for any message, and not for ranks that are lost."""
        limit_s = self._wire.limit_s
        untold_s = min(_LONG_S, limit_s)
        if not self.end(untold_s) and self._failure is None:
            logger.warning(
                "Rank %d has closed or deleted a sharded optimizer, and waits up to %g s for other ranks, which may still read "
                "its weights. Call close() on all ranks at the same place.", self._wire.rank, limit_s,
            )  # fmt: skip
        if self.end(limit_s - untold_s):
            self._wire.close()

    def end(self, limit_s: float) -> bool:
        """Closes within a time limit. Returns whether all others have closed, and every message was received."""
        if not self._has_left:  # sent once, as others count these messages
            self._has_left = True
            self._sendings.put(_LEAVES)
            self._sendings.put(None)
        last = time.monotonic() + limit_s
        for thread in self._threads:
            while thread.is_alive() and self._failure is None and time.monotonic() < last:
                thread.join(_TURN_S)
        return self._failure is None and not any(thread.is_alive() for thread in self._threads)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:  # for instance, a rank that requested something is gone
            self._failure = error

    def _take_requests(self) -> None:
        num_left = len(self._others)
        request = torch.empty(5, dtype=torch.int64, device="cpu")
        while num_left:
            self._wire.receive_from_any(request).wait()
            rank, bucket, step, edits, tag = request.tolist()
            if bucket == _LEAVES:
                num_left -= 1
            else:
                try:
                    self._take(rank, bucket, step, edits, tag)
                except GroupLost:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, others wait for an answer
                    what = f"{type(error).__name__}: {str(error).rstrip('.')}"
                    failure = f"Cannot send weights to other ranks: {what}. Start the ranks again from a checkpoint."
                    self._wire.fail(RuntimeError(failure), is_local=True)
        self._sendings.put(None)

    def _take(self, rank: int, bucket: int, step: int, edits: int, tag: int) -> None:
        if tag == _REACHED:
            self._reached(rank, bucket, step, edits)
        elif tag == _ISSUED:
            self.issue_told(bucket, step, edits)
        else:
            self._request(bucket, step, edits, partial(self._answer, rank, tag))

    def _answer(self, rank: int, tag: int, share: torch.Tensor, wait: Callable[[], object]) -> None:
        self._sendings.put(_Sending(share, rank, tag, wait))

    def _send(self) -> None:
        """Sends the answers, one after the other: a rank that requests a share has memory for it, and a thread that receives
        the rest. What is sent is kept alive until it has gone."""
        for _ in range(2):
            while (sending := self._sendings.get()) is not None:
                messages = self._tidings(sending) if isinstance(sending, int) else [sending]
                for values, rank, tag, wait in messages:
                    if wait is not None:
                        wait()
                    self._wire.send(values, rank, tag).wait()

    def _tidings(self, bucket: int) -> list[_Sending]:
        with self._lock:
            step, edits = self._reached_to_tell.pop(bucket, (0, 0))
        message = torch.tensor([self._wire.rank, bucket, step, edits, _REACHED], device="cpu")
        return [_Sending(message, rank, ANYONES) for rank in self._others]
