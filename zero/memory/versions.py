"""This rank's shares of the weights, by version: other ranks read them while this one goes on."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zero.memory.homes.home import DONE, Transfer
from zero.plan.layout import Span

# Takes a share, and a function that waits until its values are there.
Answer = Callable[[torch.Tensor, Callable[[], object]], None]


class Version(NamedTuple):
    """A version of the weights of a bucket: the number of steps, and of the user's edits since the last one."""

    step: int = 0
    edits: int = 0


class _Request(NamedTuple):
    """A request for a version that is not reached yet."""

    bucket: int
    version: Version
    answer: Answer


@dataclass
class _Share:
    """A share as the last step left it, as it is now, and the values that each edit since the last step overwrote."""

    published: torch.Tensor
    newest: torch.Tensor
    arrival: Transfer = DONE  # the copy that brings here what the last step left
    num_edits: int = 0
    # Values that the last edits wrote over, oldest first.
    overwritten: deque[tuple[Span, torch.Tensor]] = field(default_factory=deque)
    reached: dict[int, Version] = field(default_factory=dict)  # by rank: the version that it has said to have reached

    def at(self, edits: int) -> torch.Tensor:
        if edits == self.num_edits:
            return self.newest
        share = self.newest.clone()
        for span, values in itertools.islice(reversed(self.overwritten), self.num_edits - edits):
            share[span.start : span.stop] = values
        return share

    def release(self, step: int, num_others: int) -> None:
        """Drops the overwritten values that no rank can ask for any more."""
        others = [version.edits if version.step == step else 0 for version in self.reached.values()]
        reached = min(others, default=self.num_edits) if len(others) == num_others else 0
        while self.num_edits - len(self.overwritten) < reached and self.overwritten:
            self.overwritten.popleft()


class VersionedShares:
    """Shares that are read by their version.

    A share is never edited in place, as another rank may be reading it: an edit makes a new one. What it overwrote is kept
    for ranks that have not come to the edit yet: until all of them have said that they have, or until the next step. A step
    writes in place: all ranks have come to it, and none reads any more. A request for a version that this rank has not reached
    is answered when it has; nobody waits for it. What a step left may still be on its way here from a device: no host waits for
    that but one that reads, edits or sends it.
    """

    def __init__(self, num_others: int = 0) -> None:
        self._num_others = num_others  # the number of other ranks that read these shares
        self._step = 0
        self._shares: dict[int, _Share] = {}  # by bucket
        self._removed: set[int] = set()  # buckets that go with the next step
        self._requests: list[_Request] = []  # requests for versions that are still to come
        self._lock = threading.Lock()

    def add(self, bucket: int, share: torch.Tensor) -> None:
        """Adds a bucket. Its weights count as those of the present step."""
        self._removed.discard(bucket)
        self._change(lambda: self._shares.update({bucket: _Share(share, share)}))

    def remove(self, bucket: int) -> None:
        """Removes a bucket that this rank reads no more. Others may read it until the next step."""
        self._removed.add(bucket)

    def clear(self) -> None:
        """Drops all shares, when no rank reads any of them any more."""
        with self._lock:
            self._shares.clear()
            self._removed.clear()

    def move(self, bucket: int, share: torch.Tensor) -> None:
        """Replaces a share that no other rank reads by a copy of its newest values in other memory."""
        assert not self._num_others
        self._shares[bucket].published = self._shares[bucket].newest = share

    def version(self, bucket: int) -> Version:
        return Version(self._step, self._shares[bucket].num_edits)

    def place(self, bucket: int) -> torch.Tensor:
        """Returns the memory of the newest values, which may be on their way there."""
        return self._shares[bucket].newest

    def newest(self, bucket: int) -> torch.Tensor:
        """Returns the newest values, when they are there."""
        self._shares[bucket].arrival.finish()
        return self._shares[bucket].newest

    def published(self, bucket: int) -> torch.Tensor:
        """Returns a share as the last step left it, when it is there."""
        self._shares[bucket].arrival.finish()
        return self._shares[bucket].published

    def edit(self, bucket: int, span: Span, values: torch.Tensor, is_first: bool = False) -> None:
        """Makes a new version with these values in a span, which may be empty. If `is_first`, no rank may read what was there,
        and it is not kept."""
        share = self._shares[bucket]
        share.arrival.finish()
        if not self._num_others:  # no other rank reads what was there
            share.newest[span.start : span.stop] = values
            self._change(lambda: setattr(share, "num_edits", share.num_edits + 1))
            return
        edited = share.newest.clone() if span.numel and not is_first else share.newest
        if is_first:
            edited[span.start : span.stop], span, values = values, Span(0, 0), values[:0]
        overwritten = edited[span.start : span.stop].clone()
        edited[span.start : span.stop] = values

        def replace() -> None:
            share.newest = edited
            share.num_edits += 1
            share.overwritten.append((span, overwritten))
            share.release(self._step, self._num_others)

        self._change(replace)

    def begin_step(self) -> list[int]:
        """Takes over all edits, and returns the buckets that had any. No rank reads any more, and all have made the same
        edits."""
        with self._lock:
            while self._removed:
                self._shares.pop(self._removed.pop(), None)
            edited = [bucket for bucket, share in self._shares.items() if share.num_edits]
            for share in map(self._shares.__getitem__, edited):
                if share.newest is not share.published:
                    share.published.copy_(share.newest)
                share.newest, share.num_edits = share.published, 0
                share.overwritten.clear()
            return edited

    def end_step(self, arrivals: Mapping[int, Transfer]) -> None:
        """Makes the present values a new version, some of which arrive by these copies, by bucket."""

        def publish() -> None:
            self._step += 1
            for bucket, arrival in arrivals.items():
                self._shares[bucket].arrival = arrival

        self._change(publish)

    def request(self, bucket: int, step: int, edits: int, answer: Answer) -> None:
        """Calls `answer` with a share at a version: now, or in the thread that reaches it."""
        version = Version(step, edits)
        with self._lock:
            share = self._at(bucket, version)
            if share is None:
                self._requests.append(_Request(bucket, version, answer))
        if share is not None:
            answer(*share)

    def reached(self, rank: int, bucket: int, step: int, edits: int) -> None:
        """Notes that another rank requests no older version of a bucket."""
        with self._lock:
            share = self._shares.get(bucket)
            if share is not None:
                share.reached[rank] = Version(step, edits)
                share.release(self._step, self._num_others)

    def _at(self, bucket: int, version: Version) -> tuple[torch.Tensor, Callable[[], object]] | None:
        """Returns a share at a version, and a function that waits until its values are there; None if that version is still to
        come."""
        share = self._shares.get(bucket)
        if share is None or version.step > self._step or version.edits > share.num_edits:
            return None
        if version.step < self._step:
            raise RuntimeError(
                f"Cannot read weights as of step {version.step} after step {self._step}: a thread of another rank read them "
                "while that rank stepped. Take a lock around both."
            )
        least = share.num_edits - len(share.overwritten)
        assert version.edits >= least, f"bucket {bucket} was read as of edit {version.edits}, and all ranks were at {least}"
        return share.at(version.edits), share.arrival.finish

    def _change(self, change: Callable[[], None]) -> None:
        """Makes a change, and answers the requests that waited for it."""
        with self._lock:
            change()
            requests, self._requests = self._requests, []
            results = [(request, self._at(request.bucket, request.version)) for request in requests]
            self._requests = [request for request, share in results if share is None]
        for request, share in results:
            if share is not None:
                request.answer(*share)
