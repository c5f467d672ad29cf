"""Shares of other ranks, at any time: whatever the main thread of their owner is doing.

[Note: pulls]
Each rank has a thread that takes requests and one that sends answers. The first waits for nothing but requests: a version that
its rank has not reached is answered when it is reached. So every request ends if its rank comes to that version, and no rank
has to read anything for another one to come there. Ranks may take different branches, or sit in a collective of the user's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zero.comm.group import ANYONES, Message, Wire

_FIRST_ANSWER_TAG, _LAST_ANSWER_TAG = ANYONES + 1, 2**30
_TURN_S = 0.5  # of waiting
_LEAVES = -1  # in place of a bucket: the rank requests nothing any more

Answer = Callable[[torch.Tensor], None]
# Calls an answer with the share of a bucket as of a step and a number of edits since: now, or when this rank has come there.
Request = Callable[[int, int, int, Answer], None]


class Pull:
    """A bucket on its way from all ranks."""

    def __init__(self, messages: Sequence[Message], requests: Sequence[torch.Tensor]) -> None:
        self._messages = messages
        self._requests = requests  # kept until they were sent

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages = self._requests = ()


class Pulls:
    """Fetches buckets from all ranks, and gives them this rank's shares."""

    def __init__(self, wire: Wire, request: Request) -> None:
        self.num_pulled_bytes = 0
        self._wire = wire
        self._request = request
        self._next_tag = _FIRST_ANSWER_TAG
        self._answers: queue.SimpleQueue[tuple[torch.Tensor, int, int] | None] = queue.SimpleQueue()  # to be sent; None ends it
        self._farewells: list[Message] = []  # once they were sent
        self._failure: Exception | None = None  # of a thread that answers
        self._lock = threading.Lock()
        self._others = [rank for rank in range(wire.size) if rank != wire.rank]
        works = (self._take_requests, self._send_answers) if self._others else ()
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True, name="zero-pulls") for work in works]
        for thread in self._threads:
            thread.start()
        wire.on_exit(self.end)

    def begin(self, bucket: int, memory: torch.Tensor, step: int, edits: int) -> Pull:
        """Begins to fill the parts of other ranks in the memory of a bucket, as of a version."""
        if isinstance(self._failure, RuntimeError):  # as where a rank that asked is gone
            self._wire.fail(self._failure)
        if self._failure is not None:
            raise RuntimeError("Cannot fetch weights: this rank's thread that answers others has failed.") from self._failure
        parts = memory.view(self._wire.size, -1)
        messages: list[Message] = []
        requests: list[torch.Tensor] = []
        for rank in self._others:
            with self._lock:
                tag = self._next_tag
                self._next_tag = tag + 1 if tag < _LAST_ANSWER_TAG else _FIRST_ANSWER_TAG
            # What comes has a place before it is asked for.
            messages.append(self._wire.receive(parts[rank], rank, tag))
            requests.append(torch.tensor([self._wire.rank, bucket, step, edits, tag]))
            messages.append(self._wire.send(requests[-1], rank, ANYONES))
            self.num_pulled_bytes += parts[rank].nbytes
        return Pull(messages, requests)

    def close(self) -> None:
        """This rank requests nothing any more. It answers until all others have said the same, so this waits for them; but no
        longer than for any message, and not for ranks that are lost."""
        if self.end(self._wire.limit_s):
            self._wire.close()

    def end(self, limit_s: float) -> bool:
        """The same, for so long at most. Returns whether all others have said so, and every message was received."""
        if not self._farewells:  # others count them
            farewell = torch.tensor([self._wire.rank, _LEAVES, 0, 0, 0])
            self._farewells = [self._wire.send(farewell, rank, ANYONES) for rank in self._others]
        last = time.monotonic() + limit_s
        for thread in self._threads:
            while thread.is_alive() and self._failure is None and time.monotonic() < last:
                thread.join(_TURN_S)
        if any(thread.is_alive() for thread in self._threads) or self._failure is not None:
            return False
        for message in self._farewells:
            message.wait()
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where this rank next fetches
            self._failure = error

    def _take_requests(self) -> None:
        num_left = len(self._others)
        request = torch.empty(5, dtype=torch.int64)
        while num_left:
            self._wire.receive_from_any(request).wait()
            rank, bucket, step, edits, tag = request.tolist()
            if bucket == _LEAVES:
                num_left -= 1
            else:
                self._request(bucket, step, edits, partial(self._answer, rank, tag))
        self._answers.put(None)

    def _answer(self, rank: int, tag: int, share: torch.Tensor) -> None:
        self._answers.put((share, rank, tag))

    def _send_answers(self) -> None:
        """One after the other: a rank that requests a share has a place for it already. A share is kept until it was sent."""
        while (answer := self._answers.get()) is not None:
            share, rank, tag = answer
            self._wire.send(share, rank, tag).wait()
