"""This rank's shares of the weights, by version: other ranks read them while this one goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

Answer = Callable[[torch.Tensor], None]


class Version(NamedTuple):
    """Of the weights of a bucket: the steps that were taken, and the user's edits since the last one."""

    step: int = 0
    edits: int = 0


class _Request(NamedTuple):
    bucket: int
    version: Version
    answer: Answer


class VersionedShares:
    """Shares that are read by their version.

    A share is never edited in place, as another rank may be reading it: an edit is a new version, and what was before stays
    until the next step, for ranks that have not come to the edit yet. A step writes in place: all ranks have come to it, and
    none reads any more. A request for a version that this rank has not reached is answered when it has; nobody waits for it.
    """

    def __init__(self) -> None:
        self._step = 0
        self._shares: dict[int, list[torch.Tensor]] = {}  # by bucket: as of the step, and after each edit since
        self._requests: list[_Request] = []  # for versions that are still to come
        self._lock = threading.Lock()

    def add(self, bucket: int, share: torch.Tensor) -> None:
        """A bucket that is new; its weights count as of the present step."""
        self._change(lambda: self._shares.update({bucket: [share]}))

    def version(self, bucket: int) -> Version:
        return Version(self._step, len(self._shares[bucket]) - 1)

    def newest(self, bucket: int) -> torch.Tensor:
        return self._shares[bucket][-1]

    def published(self, bucket: int) -> torch.Tensor:
        """As the last step left it: what a step writes to, and the same on all ranks."""
        return self._shares[bucket][0]

    def edit(self, bucket: int, share: torch.Tensor) -> None:
        """From now on this is the newest version; the memory is taken over."""
        self._change(lambda: self._shares[bucket].append(share))

    def adopt_edits(self) -> None:
        """Edits go to where steps write. No rank reads any more."""
        with self._lock:
            for versions in self._shares.values():
                if len(versions) > 1:
                    versions[0].copy_(versions[-1])

    def publish(self) -> None:
        """The step is done: what is there now is a new version."""

        def begin_step() -> None:
            self._step += 1
            for versions in self._shares.values():
                del versions[1:]

        self._change(begin_step)

    def request(self, bucket: int, step: int, edits: int, answer: Answer) -> None:
        """Calls `answer` with a share at a version: now, or in the thread that reaches it."""
        version = Version(step, edits)
        with self._lock:
            share = self._at(bucket, version)
            if share is None:
                self._requests.append(_Request(bucket, version, answer))
        if share is not None:
            answer(share)

    def _at(self, bucket: int, version: Version) -> torch.Tensor | None:
        """None where it is still to come."""
        versions = self._shares.get(bucket)
        if versions is None or version.step > self._step:
            return None
        assert version.step == self._step, f"bucket {bucket} was read as of step {version.step}, in step {self._step}"
        return versions[version.edits] if version.edits < len(versions) else None

    def _change(self, change: Callable[[], None]) -> None:
        """Makes a change, and answers what waited for it."""
        with self._lock:
            change()
            requests, self._requests = self._requests, []
            found = [(request, self._at(request.bucket, request.version)) for request in requests]
            self._requests = [request for request, share in found if share is None]
        for request, share in found:
            if share is not None:
                request.answer(share)
