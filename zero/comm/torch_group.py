"""Collectives of torch.distributed. No other file calls them.

`TorchGroup` is the `Group` of zero/comm/group.py, where each of its methods is described. The path of a collective:

    1. `_start`     issues it on the wire for tensors, and returns torch's work; nothing waits
    2. a `Pending`  goes to the caller, who does something else meanwhile
    3. `wait_for`   makes the host or the current stream wait; on the host in turns, in which alarms of other ranks are heard
    4. `guarded`    is around both calls: an error ends the group until it is connected anew, and names the rank that is lost

[Note: wires] Everything goes over process groups of our own, made at construction, so that no collective of ours can pair with
one of the user. Tensors have one group. Host messages have another, over gloo, because a rank that is behind on tensors must
still be able to say so. A collective that gloo has begun cannot be cancelled before its time limit is over, and the limit is
fixed when a process group is made. So there are two pairs of groups: one with a long limit for the first step, in which ranks
compile, and one with a short limit for all later steps.

[Note: which collective] Gloo adds bf16 in bf16, so 256 + 1 gives 256, and its reduce-scatter is slow. Exchanging the pieces and
adding them in fp32 is exact, and two to four times as fast. Its all-gather is slower than one broadcast from each owner.
Backends of accelerators have native collectives that are fast, and exact when they are given the dtype to add in.

[Note: both ways] Gloo sends a message only once the receiver has said that it has a place for it. The receiver says so on the
connection on which it sends to that rank, behind all that it is sending there. So a rank that comes late to a collective sends
first and receives when that has gone, and a link carries one direction at a time. On gloo tensors have two groups, so two ranks
have two connections: one for what goes to the higher rank, one for the lower. Broadcasts take them in turns.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from accelerators import Accelerator
from accelerators.staged import is_staged
from accelerators.tensor_bytes import from_bytes, host_bytes
from zero.comm import health
from zero.comm.device_waits import DeviceWaits, do_needed, evened, has_failed, with_counts
from zero.comm.group import ANYONES, Group, GroupBeside, Message, Needs, Pending, TimeLimits, Wire
from zero.comm.health import Phases, RankMonitor, StoreClient
from zero.comm.results import CompletedResult, SideBySide, SingleRankResult, UnreducedResult
from zero.comm.torch_world import Purpose, end, free_groups, new_group, new_group_beside, ranks_of, set_limit, store_client
from zero.errors import GroupLost

_FAREWELL_S = 2.0  # the seconds in which other ranks may end their programs too
_NEVER_SENT = 2**31 - 1  # a tag that no message has
_AT_ONCE = datetime.timedelta(milliseconds=1)

logger = logging.getLogger("zero")

Result = TypeVar("Result")

# torch 2.13 renamed these two, and warns of the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_FRAME_BYTES = 1024  # nearly every message fits into these bytes, its length included
_REMEDY = "Start the ranks again from a checkpoint, or go on with rebuild() if all of them are still there."
_NO_WORLD = "torch.distributed is not initialised. Call init_process_group first."
_NO_LIMIT_S = 1e8  # the time limit on wires: a request of another rank may come at any time, or never
_TURN = datetime.timedelta(seconds=0.5)  # the time of a wait between two looks for another rank's alarm
Parts = Sequence[Sequence[int]]  # ranks by their numbers in a group
# Elements of the collectives that connect ranks. A backend chooses an algorithm by size, and each algorithm connects anew.
_SIZES = (1, 2**15)
_MARGIN_S = 15.0  # the seconds by which the watchdog of a backend, which ends the process, comes later than our own limit
_NUM_QUEUES, _ENOUGH_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8  # the variable, and its default
_TOUCH = datetime.timedelta(seconds=0.2)  # the time that a closed connection may take to say so


class TorchGroup:
    """Once a rank is known to be lost every collective of the group raises, until it is connected anew.

    It is a group over torch.distributed: of all ranks, of those given, or, as a part of another group, of this rank's part.
    """

    shared_host_memory = None
    outer = levels = None
    phases: Phases | None = None  # the memory in which ranks write what they do; None if they write to the store

    def __init__(
        self, accelerator: Accelerator, base: Any, limits: TimeLimits, whole: TorchGroup | None = None, parts: Parts = ()
    ) -> None:
        self._of, self._parts = whole, parts  # the group that this is a part of, and all its parts, as numbers in it
        self._ranks = self._ranks_of(base)  # the numbers in the world of this group's ranks
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._accelerator = accelerator
        self._limits = limits
        self._needs: DeviceWaits | None = self._needs_of_device() if whole is None else whole._needs
        if self._needs is not None:
            self._needs.groups.add(self)
        self._lost: str | None = None
        self._message_wires: list[TorchWire] = []
        self._connect()
        health.opened(self)

    @property
    def _whole(self) -> TorchGroup:
        return self if self._of is None else self._of._whole

    @property
    def _backend(self) -> str:
        return self._accelerator.communication_backend

    @property
    def inner(self) -> Group:
        return self

    @property
    def ranks(self) -> Sequence[int]:
        """The numbers in the world of this group's ranks."""
        return self._ranks

    @property
    def carries_host_tensors(self) -> bool:
        return self._backend == "gloo"

    @property
    def _host_waits(self) -> bool:
        """True if the host waits for collectives, in turns; False if a stream of the device does."""
        return self._backend == "gloo" or is_staged(self._backend)

    def _ranks_of(self, base: Any) -> list[int]:
        return ranks_of(base) if self._of is None else next(part for part in self._all_parts if dist.get_rank() in part)

    @property
    def _all_parts(self) -> list[list[int]]:
        return [[self._of._ranks[number] for number in part] for part in self._parts] if self._of else [self._ranks]

    # tensors -----------------------------------------------------------------------------------------------------

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return SingleRankResult(bucket, sum_dtype)
        if not self._host_waits and bucket.dtype == sum_dtype:
            share = torch.empty(bucket.numel() // self.size, dtype=sum_dtype, device=bucket.device)
            work = self._start(_scatter_sum, share, bucket)
            return CollectiveWork(self, [work], lambda: share)
        return self._exchange(bucket, sum_dtype)

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        return CompletedResult(bucket) if self.size == 1 else SideBySide(self._exchange(bucket, bucket.dtype))

    def _exchange(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> AllToAllReduce:
        both_ways = self._wires.back is not self._wires.tensors
        return AllToAllReduce(self, partial(self._start, dist.all_to_all_single), bucket, sum_dtype, both_ways)

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return SingleRankResult(bucket, sum_dtype)
        total = bucket.to(sum_dtype, copy=True)
        return CollectiveWork(self, [self._start(dist.all_reduce, total)], lambda: total)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        return CompletedResult(bucket) if self.size == 1 else self.gather(bucket.view(self.size, -1)[self.rank], bucket)

    def gather(self, share: torch.Tensor, into: torch.Tensor) -> Pending:
        if not self._host_waits:
            return CollectiveWork(self, [self._start(_gather_into, into, share)], lambda: into)
        rows = [share if rank == self.rank else row for rank, row in enumerate(into.view(self.size, -1))]
        works = [self._start(dist.broadcast, bits(row), src=self._ranks[i], back=i % 2 == 1) for i, row in enumerate(rows)]
        return CollectiveWork(self, works, lambda: into)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        if self.size == 1:
            return CompletedResult(tensor)
        return CollectiveWork(self, [self._start(dist.broadcast, bits(tensor), src=self._ranks[0])], lambda: tensor)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        return True  # callers ask only after they have waited for the buffer's collective

    # messages to all ranks ---------------------------------------------------------------------------------------

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        if self.size == 1:
            return [message]
        return self._gather_all(message) if self._needs is None else evened(self._gather_all(with_counts(message)))

    def _gather_all(self, message: bytes) -> list[bytes]:
        # Gloo ends the process if ranks send different sizes, so the first message has a fixed size and says how much follows.
        framed = len(message).to_bytes(8, "little") + message
        heads = self._gather(framed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0"))
        lengths = [8 + int.from_bytes(head[:8], "little") for head in heads]
        rest = max(lengths) - _FRAME_BYTES
        tails = self._gather(framed[_FRAME_BYTES:].ljust(rest, b"\0")) if rest > 0 else [b""] * self.size
        return [(head + tail)[8:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]

    def _gather(self, message: bytes) -> list[bytes]:
        local = from_bytes(message, torch.uint8)
        everyone = torch.empty(self.size * len(message), dtype=torch.uint8, device="cpu")
        begin = partial(_gather_into, everyone, local, group=self._wires.messages, async_op=True)
        work = self.guarded(partial(unrecorded, begin))
        while not self.guarded(lambda: self._comes(work)):
            do_needed()
        return [bytes(host_bytes(row)) for row in everyone.view(self.size, -1)]

    @property
    def phase(self) -> str:
        return self._watch.phase

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        self._watch.note(phase, location, self.phases)

    # waiting, and what a failure ends ----------------------------------------------------------------------------

    def _start(self, collective: Callable[..., Any], *arguments: Any, back: bool = False, **options: Any) -> Any:
        wires = self._wires.back if back else self._wires.tensors
        begin = partial(collective, *arguments, group=wires, async_op=True, **options)
        work = self.guarded(partial(unrecorded, begin) if self._host_waits else begin)
        if self._needs is not None:
            self._needs.add(work, wires.group_name)
        return work

    def wait_for(self, work: Any) -> None:
        """Waits until the output of a collective on tensors can be used on the current stream."""
        self.guarded((lambda: self._in_turns(work)) if self._host_waits else partial(wait_in_stream, work))

    def wait_for_message(self, work: Any) -> None:
        self.begin(lambda limit_s, _: work.wait(datetime.timedelta(seconds=limit_s)))

    def begin(self, call: Callable[[float, object], Any]) -> Any:
        return self.guarded(lambda: call(self._limit_s(), self._watch))

    def _in_turns(self, work: Any) -> None:
        """Waits in turns, and looks between two for an alarm of another rank. If a rank is lost, gloo tells only those that
        exchange messages with it in this collective; the others wait for these, and would never hear of it."""
        while not self._comes(work):
            pass

    def _comes(self, work: Any) -> bool:
        """Waits for a collective or a message, for one turn, and returns whether it has come."""
        try:
            work.wait(_TURN)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises the cause if the work failed; returns if it has just completed
                return True
            if self._watch.is_alarmed():
                raise
            return False
        return True

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Returns what `call` returns. Its failure ends the group, and every later call raises with the first cause."""
        self._watch.check_process()
        if self._lost is not None:
            raise GroupLost(f"Cannot run a collective: this group was lost before: {self._lost}. {_REMEDY}")
        try:
            if self._is_over:  # some collectives of torch do not notice it
                raise RuntimeError("torch.distributed was ended")
            return call()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and not self._is_over:
                raise
            self._lost = self._cause_of(error)
            if not self._is_over:
                self._break_off(self._lost)
            what = f"a collective of {self.size} ranks on rank {self._whole.rank}, {self.phase}"
            raise GroupLost(f"Cannot run {what}: {self._lost}. {_REMEDY}") from error

    def _cause_of(self, error: Exception) -> str:
        if self._is_over:
            return "torch.distributed was ended since the group was made, so close() what trains before that"
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return self._watch.diagnose(f"it failed ({first_line})", self._whole._is_gone)

    def _is_gone(self, rank: int) -> bool:
        """Returns True if the connection to a rank is closed."""
        try:
            group = (self._prompt if self._wires is self._patient else self._patient).messages  # these wires are idle
            touch = dist.irecv(torch.empty(1, device="cpu"), src=self._ranks[rank], group=group)
            assert touch is not None  # torch returns None only to ranks outside of the group
            touch.wait(_TOUCH)
        except RuntimeError as error:
            return not any(late in str(error) for late in ("imed out", "timeout"))  # gloo may have given up others
        return False

    @property
    def _is_over(self) -> bool:
        return not dist.is_initialized() or self._world is not dist.group.WORLD

    # messages of two ranks, and a device that waits --------------------------------------------------------------

    def new_wire(self) -> Wire:
        process_group = self._free_wire() or self.guarded(partial(self._new_group, "gloo", _NO_LIMIT_S))
        give_back, report = partial(free_groups.keep, self._purpose), self._watch.report_exit
        self._message_wires.append(TorchWire(self, self._limits.later_s, process_group, give_back, report))
        return self._message_wires[-1]

    def _free_wire(self) -> Any:
        """Returns a kept process group if all ranks have kept the same one, else None. They may differ: some may have lost
        theirs, or closed their trainings in another order."""
        kept = free_groups.take(self._purpose)
        names = self.all_gather_bytes(b"" if kept is None else kept.group_name.encode())
        if kept is None or len(set(names)) == 1:
            return kept
        return dist.destroy_process_group(kept)

    def beside(self) -> GroupBeside | None:
        """Returns a group beside this one, or None. None also if the device was given few queues: on one rank a collective may
        wait in a queue behind one of the other group, and on another rank that one behind this one, for ever."""
        if self._host_waits or self.size == 1:
            return None
        num_queues = os.environ.get(_NUM_QUEUES, "")
        if num_queues.isdecimal() and int(num_queues) < _ENOUGH_QUEUES:
            if self.rank == 0:
                logger.warning(
                    "Weights at stage 3 are sent through the host: with %s=%s, collectives of two groups can "
                    "deadlock in one queue of the device. Unset it to send weights by collectives.", _NUM_QUEUES, num_queues
                )  # fmt: skip
            return None
        return self.part([range(self.size)])

    def even(self, issued: Callable[[], tuple[int, int]], issue: Callable[[int, int], None]) -> None:
        if self._needs is not None:
            self._needs.even(self._wires.tensors.group_name, issued, issue)

    @property
    def needs(self) -> Needs | None:
        return self._needs

    def _needs_of_device(self) -> DeviceWaits | None:
        if self._host_waits or self.size == 1:
            return None
        choose_device = partial(self._accelerator.set_index, self._accelerator.current_index())
        return DeviceWaits(choose_device, self._limit_s, self._lose_device)

    def _limit_s(self) -> float:
        return self._limits.first_s if self._wires is self._patient else self._limits.later_s

    def _lose_device(self, noticed: str) -> None:
        """Ends the group, as a collective on the device will not end. Called by the thread that watches the device."""
        assert self._needs is not None
        watch = self._watch
        cause = watch.diagnose(noticed, self._is_gone)
        with self._needs.restarting:
            if not self._needs.is_watched_by(watch):  # the group was rebuilt meanwhile
                return
            logger.error("Cannot run collectives on rank %d, %s: %s. %s", self.rank, self.phase, cause, _REMEDY)
            self._break_off(cause)

    def _break_off(self, why: str) -> None:
        """Aborts the collectives of this group and its parts that are on the device; all these groups are lost then. Weights
        that did not come are noted as torn before a caller hears of the loss. Ending the groups then waits for no device."""
        if self._needs is None:
            return
        with self._needs.restarting:
            groups = list(self._needs.groups)
            for group in groups:
                group._lost = group._lost or why
            tensors = (group._patient.tensors for group in groups)
            self._needs.break_off([each for each in tensors if each is not None])

    # connecting --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        health.prepare()
        if not self._host_waits:
            os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # otherwise some connections are made at first use
        self._world: object = dist.group.WORLD  # the world that this group is of, and ends with; None once the group is closed
        if self._of is None:
            number = self._number()
            self._names = map(f"zero {number} of {self._ranks}, {{}}".format, itertools.count())
            self._watch = self._new_watch(number)
            if self._needs is not None:
                self._needs.restart(self._watch)  # what was noticed on the older connections no longer counts
            self._watch.wait_for_start(self._limits.first_s, lambda rank: health.words_of(store_client(), self._ranks[rank]))
        self._watch = self._whole._watch
        self._patient, self._prompt = self._new_wires(self._limits)
        self._wires = self._patient  # the wires in use; the other pair is idle, and tells which rank is lost
        self._lost = None
        if not self._host_waits and self.size > 1:
            self._meet_all()
        self.all_gather_bytes(b"")  # otherwise a rank that closes at once would break off connections that others still make

    def _meet_all(self) -> None:
        """Runs every kind of collective once, while all ranks are here. A backend connects ranks when they first use a kind,
        and the host waits for the others then. Later they might come to it only after something that needs this rank."""
        device = self._accelerator.device()
        for numel in _SIZES:
            whole, share = (torch.zeros(number, device=device) for number in (numel * self.size, numel))
            for begin in (
                partial(self._start, dist.all_to_all_single, torch.empty_like(whole), whole),
                partial(self._start, _scatter_sum, share, whole),
                partial(self._start, _gather_into, whole, share),
                partial(self._start, dist.all_reduce, whole),
                partial(self._start, dist.broadcast, whole, src=self._ranks[0]),
            ):
                self.wait_for(begin())
        self._accelerator.synchronize()

    def beyond(self, ranks: Sequence[int]) -> TorchGroup:
        """Makes a group of these ranks of the world, as this one is made. A collective of them."""
        return TorchGroup(self._accelerator, list(ranks), self._limits)

    def part(self, parts: Parts) -> TorchGroup:
        """Makes a group of each of these parts, and returns the one that this rank is in. A collective."""
        return TorchGroup(self._accelerator, None, self._limits, self, parts)

    def reconnect(self, base: Any) -> None:
        if not dist.is_initialized():
            raise ValueError(f"Cannot rebuild: {_NO_WORLD}")
        ranks = self._ranks_of(self._ranks if base is None else base)
        if len(ranks) != self.size or ranks.index(dist.get_rank()) != self.rank:
            raise ValueError(
                f"Cannot rebuild with ranks {ranks}: this is rank {self.rank} of {self.size}, and each has its own shares. "
                "Pass a group of as many, in the same order; or shard anew and load a checkpoint."
            )
        self._watch.report_rebuild()
        while self._message_wires:  # otherwise ranks that wait for a message of this one would wait for the whole time limit
            self._message_wires.pop().break_off()
        self._watch.close()
        if self._of is None:
            self._break_off("it is rebuilt")  # with its parts: before they connect again, the device is waited for
        self._give_up("it is rebuilt")()
        self._ranks = ranks
        self._connect()

    def _new_wires(self, limits: TimeLimits) -> tuple[Wires, Wires]:
        """Makes the wires for the first step, and those for all later steps."""
        patient = self._new_tensors(limits.first_s + (0 if self._host_waits else _MARGIN_S))
        # Collectives of a native backend can be aborted, so its limit may change. Its groups are expensive, so one serves both.
        prompt = self._new_tensors(limits.later_s) if self._host_waits else patient
        return patient._replace(messages=self._new_group("gloo", limits.first_s)), prompt._replace(
            messages=self._new_group("gloo", limits.later_s)
        )

    def _new_tensors(self, limit_s: float) -> Wires:
        tensors = self._new_group(self._backend, limit_s)
        return Wires(tensors, None, self._new_group("gloo", limit_s) if self.carries_host_tensors else tensors)

    def _new_group(self, backend: str, limit_s: float) -> Any:
        if (self._of or self).size == dist.get_world_size():  # all ranks of the world make all parts
            return new_group(self._all_parts, self._ranks, backend, limit_s)
        return new_group_beside(self._ranks, backend, limit_s, f"{next(self._whole._names)} {self._ranks}")

    def _number(self) -> int:
        """Returns n for the n-th group of these ranks. All count the same one: no rank makes the next before all made this."""
        ranks = ",".join(map(str, self._ranks))
        return (store_client().count(f"zero groups of {ranks}", self._limits.first_s) - 1) // self.size

    def _new_watch(self, number: int) -> RankMonitor:
        client = store_client()
        below = client.store
        while isinstance(below, PrefixStore):
            below = below.underlying_store
        is_cheap = self.size > 1 and not isinstance(below, FileStore)  # one rank has no reader; a file store only grows
        atexit.unregister(end)
        atexit.register(end)  # anew, as the function that was registered last runs first
        store = StoreClient(PrefixStore(f"zero group {number} of {self._ranks}", client.store), client)
        return RankMonitor(store, self.rank, self.size, is_cheap, self.phases)

    def end_warmup(self) -> None:
        if not self._host_waits and self._wires is not self._prompt:
            self._limit_tensors(self._limits.later_s)
        self._wires = self._prompt

    def _limit_tensors(self, limit_s: float) -> None:
        """Sets the time limit for tensors of a native backend, which has one group for the first step and for later ones."""
        set_limit(self._prompt.tensors, limit_s + _MARGIN_S)

    @property
    def _purpose(self) -> Purpose:
        return Purpose(dist.group.WORLD, tuple(self._ranks), os.getpid())

    # the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._needs is not None and self._watch.is_of_this_process and not self._is_over:
            self._needs.wait_for_all()
        if self._of is None:
            if self._needs is not None:
                self._needs.tell_last()
            self._watch.close()
        if not self._watch.is_of_this_process:  # a forked process has this object, but not the threads of its wires
            return
        was_lost = self._lost is not None or self._whole._lost is not None
        end_wires = self._give_up("it was closed")
        if was_lost:
            health.close_within_limit([end_wires])
        else:
            end_wires()

    def release(self) -> Callable[[], None]:
        return partial(exit_all, self._message_wires, self._give_up("the program ends"))

    def _give_up(self, why: str) -> Callable[[], None]:
        """Forgets the wires. Returns a function that ends them, unless they ended with the world."""
        is_over, wires, self._lost = self._is_over, [self._patient, self._prompt], self._lost or why
        if self._needs is not None and self._wires.tensors is not None:
            self._needs.leave(self._wires.tensors.group_name)
        self._world = None
        self._patient = self._prompt = self._wires = Wires(None, None, None)
        return lambda: wires.clear() if is_over else end_wires(wires)


# wires, results of collectives, and messages of two ranks -------------------------------------------------------------


class Wires(NamedTuple):
    """The process groups for tensors, for host messages, and for tensors that go the other way; see [Note: both ways]."""

    tensors: Any
    messages: Any
    back: Any


def end_wires(wires: list[Wires]) -> None:
    """Destroys the groups of wires. With a native backend this waits for collectives that are on the device."""
    for group in {id(group): group for them in wires for group in them if group is not None}.values():
        dist.destroy_process_group(group)
    wires.clear()


class Owner(Protocol):
    """The group that began a collective."""

    rank: int
    size: int

    def wait_for(self, work: Any) -> None: ...


def wait_in_stream(work: Any) -> None:
    """Makes the current stream wait for a collective."""
    work.wait()
    if has_failed(work):
        raise RuntimeError("it failed on its device")


class CollectiveWork:
    """The collectives of one call, whose output `finish` returns once all of them have come."""

    def __init__(self, owner: Owner, works: list[Any], finish: Callable[[], torch.Tensor]) -> None:
        self._owner, self._works, self._finish = owner, works, finish

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        for work in self._works:
            self._owner.wait_for(work)
        return self._finish()


class _Move(NamedTuple):
    """An exchange with some ranks: what comes from these, and what is sent to others meanwhile."""

    work: Any
    come: torch.Tensor
    place: torch.Tensor  # the memory that `come` is copied to
    sent: torch.Tensor


class AllToAllReduce(UnreducedResult):
    """The stretches that all ranks sent to this one, to be added. In the bucket they take the place of what this rank sent."""

    def __init__(
        self, owner: Owner, exchange: Callable[..., Any], bucket: torch.Tensor, sum_dtype: torch.dtype, both_ways: bool
    ) -> None:
        super().__init__(sum_dtype)
        self._owner, self._parts, rank, size = owner, bucket.view(owner.size, -1), owner.rank, owner.size
        # `exchange` takes one stretch of memory, so a rank between the first and the last also sends to itself.
        below, above, others = range(rank), range(rank + 1, size), range(int(rank == 0), size - int(rank == size - 1))
        ways = [(above, below), (below, above)] if both_ways else [(others, others)]
        self._moves = [self._begin(exchange, *way, back=bool(number)) for number, way in enumerate(ways)]

    def _begin(self, exchange: Callable[..., Any], to: range, source: range, back: bool) -> _Move:
        sent, place = (bits(self._parts[ranks.start : ranks.stop].view(-1)) for ranks in (to, source))
        come, numel = torch.empty_like(place), bits(self._parts).shape[1]
        sizes = [[numel * (rank in ranks) for rank in range(self._owner.size)] for ranks in (source, to)]
        return _Move(exchange(come, sent, *sizes, back=back), come, place, sent)

    def done(self) -> bool:
        return all(bool(move.work.is_completed()) for move in self._moves)

    def addends(self) -> Sequence[torch.Tensor]:
        for move in self._moves:
            self._owner.wait_for(move.work)
        for move in self._moves:  # copied only now, as one exchange may still be sending from the place of another
            move.place.copy_(move.come)
        self._moves.clear()
        return list(self._parts)


class WireOwner(Owner, Protocol):
    """The group that a wire belongs to."""

    def guarded(self, call: Callable[[], Any]) -> Any: ...

    def wait_for_message(self, work: Any) -> None: ...


class _Receipt:
    """A message that this rank receives. If it does not come, the group is lost."""

    def __init__(self, owner: WireOwner, receive: Callable[[], Any]) -> None:
        self._owner = owner
        self._work = owner.guarded(receive)

    def wait(self) -> None:
        self._owner.wait_for_message(self._work)


class _Sending:
    """A message that this rank sends. If it could not be sent, `wait` raises."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._work: Any = None
        self._error: RuntimeError | None = None
        try:
            self._work = send()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._work.wait()


class TorchWire:
    """Messages over a process group of gloo that has no time limit of its own."""

    def __init__(
        self,
        owner: WireOwner,
        limit_s: float,
        process_group: Any,
        give_back: Callable[[Any], None],
        report: Callable[[Exception], None],
    ) -> None:
        self.rank, self.size, self.limit_s = owner.rank, owner.size, limit_s
        self._owner = owner
        self._process_group = process_group
        self._give_back = give_back
        self._report = report  # tells other ranks the reason for which this one ends
        self._end: weakref.WeakMethod[Callable[[float], bool]] | None = None

    def on_exit(self, end: Callable[[float], bool]) -> None:
        self._end = weakref.WeakMethod(end)

    def exit(self) -> None:
        """Ends what uses this wire. If a thread still waits on it, the process group is never freed: that would wake the thread
        while the interpreter ends."""
        end = None if self._end is None else self._end()
        if end is not None and not end(_FAREWELL_S):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._process_group))

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message:
        return _Sending(lambda: unrecorded(lambda: self._process_group.send([bits(values)], rank, tag)))

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        return _Receipt(self._owner, lambda: unrecorded(lambda: self._process_group.recv([bits(memory)], rank, tag)))

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        return unrecorded(lambda: self._process_group.recv_anysource([memory], ANYONES))  # type: ignore[no-any-return]

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        def again() -> None:
            if is_local:
                self._report(error)
                self.break_off()
            raise error

        self._owner.guarded(again)
        raise error

    def break_off(self) -> None:
        """Ends all waits of ranks on this wire, by a receive that runs out of time: gloo then closes all connections."""
        if self._process_group is None:  # the wire was closed, and another training may use its process group by now
            return
        other = int(self.rank == 0)
        with contextlib.suppress(RuntimeError):
            self._process_group.recv([torch.empty(1, device="cpu")], other, _NEVER_SENT).wait(_AT_ONCE)

    def close(self) -> None:
        self._end = None
        process_group, self._process_group = self._process_group, None
        self._give_back(process_group)


def exit_all(wires: Sequence[TorchWire], then: Callable[[], None]) -> None:
    """Calls `exit` of all wires as the program ends, and then `then`."""
    for wire in wires:
        wire.exit()
    then()


def unrecorded(call: Callable[[], Result]) -> Result:
    """Returns what `call` returns, which torch's profiler does not see. A receive that waits for whatever another rank sends
    outlives every profile, and new weights may be on their way when one stops; see [Note: works that outlive a profile] in
    accelerators/staged/pipeline.py."""
    torch._C._autograd._enable_record_function(False)
    try:
        return call()
    finally:
        torch._C._autograd._enable_record_function(True)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor, to be moved as it is, in a dtype that every backend can send: some have no 16-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
