"""Chunks of weights on their way from all ranks, by collectives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import accelerators
from zero.comm.group import GroupBeside, Pending
from zero.errors import GroupLost
from zero.memory.homes.home import MemoryHome
from zero.plan.layout import Span

_GRACE_S = 0.2  # the seconds of a wait for another rank before this one asks it to take part
_SHORT_GRACE_S = 0.01  # the same once a rank had to be asked, until a gather ends
_TURN_S = 0.05  # the seconds between two looks


class Part(NamedTuple):
    """The share that this rank has of a bucket, and the functions that return it."""

    bucket: Span  # the elements in the chunk
    share: Span  # the elements in the chunk
    present: Callable[[], torch.Tensor]  # returns what the last step left there, for the thread that edits weights
    published: Callable[[], torch.Tensor]  # returns the same in host memory, for any thread


class Scheduled(NamedTuple):
    """A chunk that can be gathered."""

    number: int  # the same on all ranks
    numel: int
    dtype: torch.dtype
    parts: Sequence[Part]


class Turn(NamedTuple):
    """The turn at which a gather is issued."""

    window: int
    place: int  # the place in the order of the window


InStream = Callable[[], contextlib.AbstractContextManager[Any]]


class Gather:
    """A chunk on its way, in memory that was made in these streams. Other threads may have made it."""

    def __init__(
        self, turn: Turn, memory: Sequence[torch.Tensor], pending: Sequence[Pending], in_streams: Sequence[InStream]
    ) -> None:
        self.turn = turn
        self.was_told = False  # ranks that did not come were told of it
        self._memory = memory  # kept alive until the chunk has come
        self._pending = pending
        self._in_streams = in_streams

    def done(self) -> bool:
        return all(each.done() for each in self._pending)

    def wait(self) -> None:
        """Waits until the current stream may use the chunk. If only the stream waits, the chunk is still on its way afterwards,
        and its memory is kept until it has come."""
        self._let_stream_wait()
        if self.done():
            self.finish()

    def finish(self) -> None:
        """Lets go of its memory, once it is done. The streams that may have made the memory wait first, as they would use it
        again at once."""
        for in_stream in self._in_streams:
            with in_stream():
                self._let_stream_wait()
        self._memory = ()

    def _let_stream_wait(self) -> None:
        """Makes the current stream wait. Each that uses the chunk does so, also once another thread has found that the chunk
        has come: what that thread knows orders no stream of this one. Fails without it:
        test_a_stream_waits_for_a_gather_that_another_thread_has_finished."""
        for each in self._pending:
            each.wait()


class Gathers:
    """The memory of a gather is kept until the gather is done, whichever thread needs it, or until the connections are lost.

    The thread that issues a collective holds `lock`. `late` is called with it held, with the turn that other ranks have not
    come to within a grace time. Values that this rank does not need are gathered into one scratch memory, by several gathers
    at once if need be, as nobody reads it.
    """

    def __init__(
        self, beside: GroupBeside, device: torch.device, host: MemoryHome, lock: threading.Lock, late: Callable[[Turn], None]
    ) -> None:
        self.num_bytes = 0  # the bytes that other ranks sent to this one
        self._beside = beside
        self._device = device
        self._host = host
        self._lock = lock
        self._late = late
        self._outstanding: deque[Gather] = deque()
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._too_small: list[torch.Tensor] = []  # too small for later chunks, and kept as gathers may still write to it
        accelerator = accelerators.of(device)
        # This enters a stream in which nothing waits for a rank.
        self._in_side_stream = partial(accelerator.in_stream, accelerator.new_stream(device.index))
        self._watcher: threading.Thread | None = None
        self._broken: BaseException | None = None  # set if a part of a chunk was issued, and not the rest
        beside.gather(torch.zeros(1, device=device), torch.zeros(beside.size, device=device)).wait()  # connects all ranks

    def issue(self, turn: Turn, chunk: Scheduled, memory: torch.Tensor) -> Gather:
        """Begins to fill memory with a chunk that this rank needs."""
        shares = [memory[part.share.start : part.share.stop] for part in chunk.parts]
        for share, part in zip(shares, chunk.parts, strict=True):
            self._host.read(part.present(), share).wait()
        return self._issue(turn, chunk, shares, memory)

    def issue_for_others(self, turn: Turn, chunk: Scheduled) -> None:
        """Takes part in the gather of a chunk that this rank does not need."""
        self._issue(turn, chunk, [self._copied(part.present()) for part in chunk.parts], self._room(chunk))

    def issue_in_thread(self, turn: Turn, chunk: Scheduled) -> None:
        """Takes part in a gather, in any thread. It does not wait for what those that read and edit weights gave the device."""
        with self._on_device(), self._in_side_stream():
            self._issue(turn, chunk, [self._copied(part.published()) for part in chunk.parts], self._room(chunk))

    def _copied(self, share: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a share on the device, as the share may be edited meanwhile.

        [Note: no wait under the lock] The host waits for a copy from its memory, and the current stream may wait for other
        ranks. They can be told only by a thread that needs the lock. So such a copy has a stream of its own, in which nothing
        waits for a rank.
        """
        if share.device == self._device:
            return share.clone()
        with self._in_side_stream():
            return share.to(self._device)

    def _choose_device(self) -> None:
        if self._device.index is not None:
            accelerators.of(self._device).set_index(self._device.index)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """This thread is on the device inside, and after it where it was before: it may be one of the user's."""
        accelerator = accelerators.of(self._device)
        before = None if self._device.index is None else accelerator.current_index()
        self._choose_device()
        try:
            yield
        finally:
            if before is not None:
                accelerator.set_index(before)

    def _of_streams(self) -> Sequence[InStream]:
        accelerator = accelerators.of(self._device)
        if not accelerator.has_streams:
            return ()
        return partial(accelerator.in_stream, accelerator.current_stream(self._device.index)), self._in_side_stream

    def _room(self, chunk: Scheduled) -> torch.Tensor:
        if self._scratch.nbytes < chunk.numel * chunk.dtype.itemsize:
            self._too_small.append(self._scratch)
            with torch.inference_mode(False):
                self._scratch = torch.empty(chunk.numel * chunk.dtype.itemsize, dtype=torch.uint8, device=self._device)
        return self._scratch[: chunk.numel * chunk.dtype.itemsize].view(chunk.dtype)

    def _issue(self, turn: Turn, chunk: Scheduled, shares: Sequence[torch.Tensor], memory: torch.Tensor) -> Gather:
        """Issues the collectives of a chunk. All memory was allocated before, so nothing can fail unless the group is lost: a
        chunk that was issued in part would leave ranks with different orders."""
        if self._broken is not None:
            raise GroupLost("Cannot gather weights: a gather broke off before. Start the ranks again.") from self._broken
        pending = []
        try:
            for part, share in zip(chunk.parts, shares, strict=True):
                pending.append(self._beside.gather(share, memory[part.bucket.start : part.bucket.stop]))
                self.num_bytes += (part.bucket.numel - part.share.numel) * memory.itemsize
        except BaseException as error:
            self._broken = error
            raise
        self._drop_done()
        self._outstanding.append(Gather(turn, [memory, *shares], pending, self._of_streams()))
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="zero-gathers")
            self._watcher.start()
        return self._outstanding[-1]

    def _drop_done(self) -> bool:
        """Drops the gathers that are done. Returns whether other ranks came to any of them by themselves."""
        unprompted = False
        while self._outstanding and self._outstanding[0].done():
            gather = self._outstanding.popleft()
            gather.finish()
            unprompted |= not gather.was_told
        return unprompted

    def _watch(self) -> None:
        """Watches gathers, and calls `late` for those that wait too long. Ends when nothing is on its way, or the group is
        lost."""
        self._choose_device()
        grace_s, oldest, since = _GRACE_S, None, 0.0
        while True:
            time.sleep(min(_TURN_S, grace_s))
            with self._lock:
                try:
                    grace_s = _GRACE_S if self._drop_done() else grace_s
                except RuntimeError:  # the group is lost; the thread that waits for a gather is told
                    self._outstanding.clear()
                if not self._outstanding:
                    self._watcher = None
                    return
                if self._outstanding[0] is not oldest:
                    oldest, since = self._outstanding[0], time.monotonic()
                elif time.monotonic() - since > grace_s and not oldest.was_told:
                    oldest.was_told = True
                    self._late(oldest.turn)
                    grace_s = _SHORT_GRACE_S

    def wait_for_all(self) -> None:
        with self._lock:
            outstanding = [*self._outstanding]
        for gather in outstanding:
            gather.wait()

    def end_warmup(self) -> None:
        self._beside.end_warmup()

    def abandon(self) -> GroupBeside:
        """Forgets what is on its way over lost connections, and returns the group that had them."""
        with self._lock:
            self._outstanding.clear()
        return self._beside

    def close(self) -> None:
        """Waits for what is on its way, which all ranks have issued."""
        with contextlib.suppress(GroupLost):
            self.wait_for_all()
        self.abandon().close()
