"""N ranks in one process: threads that do the arithmetic of a real group, without a network.

Autograd runs all hooks of a device other than the CPU on one thread, where N ranks would wait for each other for ever. So
several ranks here serve host tensors only. One rank is the library's own group of one.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from zero.comm.group import ANYONES, Group, GroupBeside, Message, Pending, Wire
from zero.comm.levels import SoloGroup
from zero.comm.results import CompletedResult, sum_in_rank_order
from zero.errors import GroupLost

Result = TypeVar("Result")


class _Meeting:
    """The n-th collective of a wire: what every rank has brought, until the last one has taken it."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.missing = size
        self.untaken = size


class _Channel:
    """What ranks wait at for each other, until one of them leaves."""

    def __init__(self, time_limit_s: float) -> None:
        self.time_limit_s = time_limit_s
        self._changed = threading.Condition()
        self._lost: str | None = None

    def abandon(self, reason: str) -> None:
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()


class _Wire(_Channel):
    """One ordered channel between the ranks."""

    def __init__(self, size: int, time_limit_s: float) -> None:
        super().__init__(time_limit_s)
        self._size = size
        self._meetings: dict[int, _Meeting] = {}

    def bring(self, number: int, rank: int, what: Any) -> None:
        with self._changed:
            meeting = self._meetings.setdefault(number, _Meeting(self._size))
            meeting.brought[rank] = what
            meeting.missing -= 1
            self._changed.notify_all()

    def complete(self, number: int) -> bool:
        with self._changed:
            meeting = self._meetings.get(number)  # None once all ranks have taken it
            return self._lost is not None or meeting is None or meeting.missing == 0

    def take(self, number: int) -> list[Any]:
        with self._changed:
            meeting = self._meetings[number]
            arrived = self._changed.wait_for(lambda: meeting.missing == 0 or self._lost, self.time_limit_s)
            if meeting.missing and not arrived:
                absent = [rank for rank, what in enumerate(meeting.brought) if what is None]
                self._lost = f"ranks {absent} did not come to collective {number} within {self.time_limit_s} s"
                self._changed.notify_all()
            if meeting.missing:
                raise GroupLost(f"Cannot run a collective of {self._size} ranks: {self._lost}. Start the ranks again.")
            brought = meeting.brought
            meeting.untaken -= 1
            if meeting.untaken == 0:
                del self._meetings[number]
            return brought


class _Arrival:
    """A collective that is done when all ranks brought their part."""

    def __init__(self, wire: _Wire, number: int, finish: Callable[[list[Any]], torch.Tensor]) -> None:
        self._wire, self._number, self._finish = wire, number, finish

    def done(self) -> bool:
        return self._wire.complete(self._number)

    def wait(self) -> torch.Tensor:
        return self._finish(self._wire.take(self._number))


class _PostOffice(_Channel):
    """Messages of two ranks, from any of the wires between them."""

    def __init__(self, time_limit_s: float) -> None:
        super().__init__(time_limit_s)
        # By wire, rank of the receiver, tag, and sender if it is named.
        self._boxes: dict[tuple[Any, ...], deque[torch.Tensor]] = {}

    def send(self, address: tuple[Any, ...], values: torch.Tensor) -> None:
        with self._changed:
            self._boxes.setdefault(address, deque()).append(values)
            self._changed.notify_all()

    def take(self, address: tuple[Any, ...], is_limited: bool) -> torch.Tensor:
        limit_s = self.time_limit_s if is_limited else None
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._boxes.get(address) or self._lost, limit_s)
            box = self._boxes.get(address)
            if not box:
                why = self._lost if arrived else f"it did not come within {self.time_limit_s} s"
                raise GroupLost(f"Cannot receive a message: {why}. Start the ranks again.")
            values = box.popleft()
            if not box:
                del self._boxes[address]
            return values


class _Letter:
    """A message to this rank."""

    def __init__(self, take: Callable[[], torch.Tensor], memory: torch.Tensor) -> None:
        self._take = take
        self._memory = memory

    def wait(self) -> None:
        self._memory.copy_(self._take())


class _LoopbackWire:
    """Messages between two ranks that are threads."""

    def __init__(self, number: int, rank: int, size: int, office: _PostOffice) -> None:
        self.rank = rank
        self.size = size
        self.limit_s = office.time_limit_s
        self._number = number
        self._office = office

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message:
        sender = None if tag == ANYONES else self.rank
        self._office.send((self._number, rank, tag, sender), values.clone())
        return CompletedResult(values)

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        return _Letter(partial(self._office.take, (self._number, self.rank, tag, rank), True), memory)

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        return _Letter(partial(self._office.take, (self._number, self.rank, ANYONES, None), False), memory)

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        raise error

    def on_exit(self, end: Callable[[float], bool]) -> None: ...

    def close(self) -> None: ...


class LoopbackGroup:
    """One rank of several in this process; see `run_ranks`."""

    shared_host_memory = None
    outer = levels = needs = None

    def __init__(self, rank: int, tensors: _Wire, messages: _Wire, size: int, office: _PostOffice) -> None:
        self.rank = rank
        self.size = size
        self.phase = ""
        self._wires = {"tensors": tensors, "messages": messages}
        self._next = {"tensors": 0, "messages": 0}
        self._office = office
        self._num_wires = 0

    @property
    def inner(self) -> Group:
        return self

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        numel = bucket.numel() // self.size
        share = slice(self.rank * numel, (self.rank + 1) * numel)
        return self._meet(bucket, lambda all_: sum_in_rank_order(torch.cat([one[share] for one in all_]), self.size, sum_dtype))

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        return self._meet(bucket, lambda all_: torch.cat([one.view(self.size, -1)[self.rank] for one in all_]))

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        return self._meet(bucket, lambda all_: sum_in_rank_order(torch.cat(all_), self.size, sum_dtype))

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        numel = bucket.numel() // self.size

        def fill(all_: list[torch.Tensor]) -> torch.Tensor:
            bucket.copy_(torch.cat(all_))
            return bucket

        return self._meet(bucket[self.rank * numel : (self.rank + 1) * numel], fill)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return self._meet(tensor, lambda all_: tensor if self.rank == 0 else tensor.copy_(all_[0]))

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        number = self._bring("messages", message)
        return self._wires["messages"].take(number)

    def new_wire(self) -> Wire:
        self._num_wires += 1
        return _LoopbackWire(self._num_wires, self.rank, self.size, self._office)

    def beside(self) -> GroupBeside | None:
        return None

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return True  # the collective was waited for before anybody asks

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        self.phase = phase

    def end_warmup(self) -> None:
        """Does nothing: there is one time limit here."""

    def reconnect(self, base: Any) -> None:
        raise ValueError(
            f"Cannot rebuild a loopback group of {self.size} ranks: its ranks are threads, which end together. "
            "Make another group and shard again."
        )

    def close(self) -> None:
        for wire in self._wires.values():
            wire.abandon(f"rank {self.rank} left the group")
        self._office.abandon(f"rank {self.rank} left the group")

    def _meet(self, tensor: torch.Tensor, finish: Callable[[list[torch.Tensor]], torch.Tensor]) -> Pending:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"Cannot use a tensor on {tensor.device} in a loopback group of {self.size} ranks: its ranks are threads, and "
                "autograd runs the hooks of such a device on one thread. Use host tensors, or a process a rank."
            )
        # A snapshot is sent, as the sender may give its buffer to the next bucket when its own wait has returned.
        return _Arrival(self._wires["tensors"], self._bring("tensors", tensor.clone()), finish)

    def _bring(self, wire: str, what: Any) -> int:
        number = self._next[wire]
        self._next[wire] += 1
        self._wires[wire].bring(number, self.rank, what)
        return number


def loopback(size: int, time_limit_s: float = 60.0) -> list[Group]:
    """The groups of `size` ranks, for one thread each."""
    if size == 1:
        return [solo()]
    tensors, messages, office = _Wire(size, time_limit_s), _Wire(size, time_limit_s), _PostOffice(time_limit_s)
    return [LoopbackGroup(rank, tensors, messages, size, office) for rank in range(size)]


_SOON_S = 0.2


def _wait_for_endings(time_limit_s: float) -> None:
    """Waits until trainings that were let go have ended, each in a thread of its own, which serves other ranks until then.

    By what `threading` lists and not by `join`: another rank's thread may have been listed and not run yet, and Python joins
    none of those. One that ends waits for the others, of which one may lie in a circle, as an exception that was caught leaves:
    the collector is called for it, once."""
    begun, has_collected = time.monotonic(), False
    while time.monotonic() < begun + time_limit_s and any(thread.name == "zero.release" for thread in threading.enumerate()):
        if not has_collected and time.monotonic() > begun + _SOON_S:
            gc.collect()
            has_collected = True
        time.sleep(0.0005)


def solo() -> SoloGroup:
    """The group of a single rank."""
    return SoloGroup()


def run_ranks(size: int, program: Callable[[Group], Result], time_limit_s: float = 60.0) -> list[Result]:
    """Runs `program` as each of `size` ranks and returns what each gave. An error is raised; one that is more than the loss
    of the others comes first."""
    groups = loopback(size, time_limit_s)

    def one(group: Group) -> Result:
        try:
            return program(group)
        finally:
            _wait_for_endings(time_limit_s)
            group.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, group) for group in groups]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, GroupLost)), errors[0])
    return [future.result() for future in futures]
