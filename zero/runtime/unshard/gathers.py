"""Chunks of weights on their way from all ranks, by collectives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import accelerators
from zero.comm.group import Group, Pending
from zero.errors import GroupLost
from zero.memory.homes.home import MemoryHome
from zero.plan.spans import Span

_GRACE_S = 0.2  # that another rank is waited for before it is told so
_TURN_S = 0.05  # between two looks


class Part(NamedTuple):
    """This rank's share of a bucket."""

    bucket: Span  # in the chunk
    own: Span  # in the chunk
    published: Callable[[bool], torch.Tensor]  # what the last step left there; True: for a thread beside the one that edits


class Scheduled(NamedTuple):
    """A chunk that can be gathered."""

    number: int  # the same on all ranks
    numel: int
    dtype: torch.dtype
    parts: Sequence[Part]


class Gather:
    """A chunk on its way."""

    def __init__(self, memory: torch.Tensor, pending: Sequence[Pending]) -> None:
        self.begun = time.monotonic()
        self._memory: torch.Tensor | None = memory  # kept until it has come
        self._pending = pending

    def done(self) -> bool:
        return all(each.done() for each in self._pending)

    def wait(self) -> None:
        for each in self._pending:
            each.wait()
        self._memory, self._pending = None, ()


class Gathers:
    """Issues collectives, and looks after those that are on their way. `lock` is held by who calls a method that issues;
    `late` is called with it where one has been on its way for longer than a grace time."""

    def __init__(
        self, beside: Group, device: torch.device, host: MemoryHome, lock: threading.Lock, late: Callable[[], None]
    ) -> None:
        self.num_bytes = 0  # that other ranks sent to this one
        self._beside = beside  # whose collectives have an order of their own
        self._device = device
        self._host = host
        self._lock = lock
        self._late = late
        self._outstanding: deque[Gather] = deque()
        self._watcher: threading.Thread | None = None
        beside.all_gather(torch.zeros(beside.size, device=device)).wait()  # or the first one would connect, at any time

    def issue(self, chunk: Scheduled, memory: torch.Tensor) -> Gather:
        """Begins to fill memory."""
        return self._issue(chunk, memory, in_thread=False)

    def issue_for_others(self, chunk: Scheduled, in_thread: bool) -> None:
        """Takes part in what this rank does not need. `in_thread`: in another one than those that read and edit weights."""
        if in_thread and self._device.index is not None:
            accelerators.get(self._device.type).set_index(self._device.index)
        with torch.inference_mode(False):
            memory = torch.empty(chunk.numel, dtype=chunk.dtype, device=self._device)
        self._issue(chunk, memory, in_thread)

    def _issue(self, chunk: Scheduled, memory: torch.Tensor, in_thread: bool) -> Gather:
        pending = []
        for bucket, own, published in chunk.parts:
            if in_thread:  # whose copies nobody waits for at the step
                memory[own.start : own.stop] = published(True)
            else:
                self._host.read(published(False), memory[own.start : own.stop]).wait()
            pending.append(self._beside.all_gather(memory[bucket.start : bucket.stop]))
            self.num_bytes += (bucket.numel - own.numel) * memory.itemsize
        self._drop_done()
        self._outstanding.append(Gather(memory, pending))
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="zero-gathers")
            self._watcher.start()
        return self._outstanding[-1]

    def _drop_done(self) -> None:
        while self._outstanding and self._outstanding[0].done():
            self._outstanding.popleft().wait()  # for the device's books: its memory may be in use again from now on

    def _watch(self) -> None:
        """Ends when nothing is on its way."""
        while True:
            time.sleep(_TURN_S)
            with self._lock:
                self._drop_done()
                if not self._outstanding:
                    self._watcher = None
                    return
                if time.monotonic() - self._outstanding[0].begun > _GRACE_S:
                    self._late()

    def wait_for_all(self) -> None:
        for gather in [*self._outstanding]:
            gather.wait()

    def end_warmup(self) -> None:
        self._beside.end_warmup()

    def close(self) -> None:
        """Waits for what is on its way, which all ranks have issued."""
        with contextlib.suppress(GroupLost):
            self.wait_for_all()
        self._outstanding.clear()
        self._beside.close()
