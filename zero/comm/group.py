"""The ranks that train together: what they can do with tensors, how sums are added, and how all of them come to one answer.

    pending = group.reduce_scatter(bucket, torch.float32)  # all ranks call it; this one goes on at once
    share = pending.wait()                                 # its share of the sum, added in rank order: the same bits each time

`Group` is a protocol, as are its parts. zero/comm/torch_group.py implements it over torch.distributed, zero/comm/levels.py adds
in two levels or along families, and a test has ranks that are threads. Code above this room knows the protocols alone.

A sum may come as an `UnreducedResult`: the ranks' rows, which the reader adds as it passes over them. A sum that is computed
first would be written and read once more. The functions at the end of this file make all ranks agree, or fail together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from zero.errors import CheckpointFailed, RankFailed, RanksDiffer, ZeroError

Result = TypeVar("Result")


class Group(Protocol):
    """The ranks that train together.

    All ranks call the same collectives in the same order. Tensors and `all_gather_bytes` travel on separate wires, so the two
    orders do not depend on each other. With [1, 2, 3, 4] on rank 0 and [10, 20, 30, 40] on rank 1:

        reduce_scatter  [11, 22] on rank 0, [33, 44] on rank 1      each has its share of the sum
        all_to_all      [1, 2, 10, 20], [3, 4, 30, 40]              what reduce_scatter adds, not added
        all_reduce      [11, 22, 33, 44] on both
        all_gather      [1, 2, 30, 40] on both                      each wrote its own share before
        broadcast       [1, 2, 3, 4] on both
    """

    rank: int
    size: int

    # collectives of tensors, and of bytes

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """Adds all ranks' buckets, and gives this rank its share of the sum. It is taken in `sum_dtype`, in rank order; with
        several hosts, each host's ranks are added first. The contents of `bucket` are undefined once the result was waited
        for."""

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        """Gives this rank what `reduce_scatter` would add for it: every rank's stretch, side by side in rank order. The
        contents of `bucket` are undefined once the result was waited for."""

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """Gives all ranks the whole sum of their buckets, taken in `sum_dtype`, with the same bits on all ranks. A bucket
        outside the memory of `staging` may be written again at once."""

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Fills `bucket`, of which every rank has written its own share, with the shares of the others."""

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Gives all ranks rank 0's `tensor`, in place."""

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Returns every rank's message, by rank, of any length; waits for all ranks, with a time limit."""

    # memory that is sent from

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lends memory that this group can send from without a copy. It may be written again once `is_reusable` returns
        True."""

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        """Returns False while other ranks may still read what was sent from this memory of `staging`."""

    # other ways between the same ranks

    def new_wire(self) -> Wire:
        """Makes a wire for messages between two ranks, beside the collectives. A collective."""

    def beside(self) -> GroupBeside | None:
        """Makes another group of the same ranks; None if tensors come from other ranks as fast by messages. A collective."""

    # the parts of this group

    @property
    def inner(self) -> Group:
        """The ranks that states are in shares of: this group, or consecutive ranks of it; see zero/comm/levels.py."""

    @property
    def outer(self) -> Group | None:
        """The ranks that have the same share as this one; None if there is no other."""

    @property
    def levels(self) -> Levels | None:
        """The two levels in which this group adds; None if it adds in one."""

    @property
    def shared_host_memory(self) -> SharedHostMemory | None:
        """The access that ranks have to each other's host memory; None if each sees its own only."""

    @property
    def needs(self) -> Needs | None:
        """The channel on which ranks say what they need of others; None if the host waits for collectives."""

    # what ranks know of each other, and the end

    @property
    def phase(self) -> str:
        """The phase that `set_phase` was last given."""

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        """Says what this rank does from now on, so that others can report it if they miss this rank. If it ends by an error,
        `location` is called to say where. Not a collective, some microseconds."""

    def end_warmup(self) -> None:
        """Ends the longer time limit: the first step is agreed on. The shorter one holds from the next collective on, on all
        ranks."""

    def reconnect(self, base: Any) -> None:
        """Meets the same ranks again after the connections were lost, over the process group `base` or the one that it had."""

    def close(self) -> None:
        """Closes what this object made, but not a process group that it was given."""


class Pending(Protocol):
    """A collective on its way."""

    def done(self) -> bool:
        """Returns True if `wait` would not block the host."""

    def wait(self) -> torch.Tensor:
        """Returns the result, which the current stream of its device may use. On the host it is complete."""


@dataclass(frozen=True)
class TimeLimits:
    """The seconds that ranks wait for one of them before it counts as lost: until the end of the first step, in which ranks
    compile, and later."""

    first_s: float = 1800.0
    later_s: float = 60.0


# the parts of a group -------------------------------------------------------------------------------------------------


class Levels(Protocol):
    """A group that adds in two levels: the ranks of each host first, and then the hosts; see zero/comm/levels.py."""

    @property
    def across(self) -> Group:
        """The ranks that have the number of this one on their hosts."""

    def reduce_by_hosts(
        self, bucket: torch.Tensor, sum_dtype: torch.dtype, reduce_across: Callable[[torch.Tensor], Pending]
    ) -> Pending:
        """Reduces as `reduce_scatter`; `reduce_across` is given the sums of this host, to add those of the others `across`."""


class SharedHostMemory(Protocol):
    """The access that ranks of a group have to each other's host memory."""

    def rank0_view(self, memory: torch.Tensor) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Shows all ranks what rank 0 has in its `memory` of `staging`. That memory is lent again when all of them have left
        this block. A collective."""

    def common(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Makes memory of these sizes in bytes that all ranks read and write. It is freed when rank 0 drops it. A
        collective."""

    def trim(self) -> None:
        """Gives memory of `staging` that is not lent back to the system."""


class Needs(Protocol):
    """A channel on which ranks say what they need while a device waits for collectives; see [Note: devices that wait] in
    zero/comm/device_waits.py."""

    def say(self, need: Callable[[], str]) -> None:
        """Tells others what `need` returns while this rank's device waits for them. `need` is called in a thread."""

    def heed(self, act: Callable[[str], None]) -> None:
        """Registers `act`, which is called now and then with what was said last, in whatever thread of this rank waits for
        messages of any training."""

    def on_loss(self, act: Callable[[bool], None]) -> None:
        """Registers `act`, which is called before work on the device is broken off, in the thread that does that. It is given
        whether a collective failed there: one that is done then may have failed."""


class GroupBeside(Protocol):
    """A second group of the same ranks, with collectives in an order of their own, from any thread."""

    size: int

    def gather(self, share: torch.Tensor, into: torch.Tensor) -> Pending:
        """Fills `into` with what the other ranks have for `share`, in the places of their ranks."""

    def end_warmup(self) -> None: ...
    def reconnect(self, base: Any) -> None: ...
    def close(self) -> None: ...


ANYONES = 0  # the tag of messages that are received from any rank


class Wire(Protocol):
    """Messages between two ranks, in host memory, matched by tag. Threads may use it at the same time."""

    rank: int
    size: int
    limit_s: float  # the seconds that a rank waits for another one

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message: ...

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        """Receives a message. If the other rank does not send it within the time limit, waiting for it raises and the group
        is lost."""

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        """Receives a message with the tag ANYONES from any rank, without a time limit. It stays valid when the group is
        lost."""

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        """Raises what an error in a thread that cannot raise itself means for the group. `is_local`: this rank is the reason,
        and others, which may wait for it, are told."""

    def on_exit(self, end: Callable[[float], bool]) -> None:
        """Registers `end`, which is called if the program ends before the wire is closed, with the seconds within which it must
        end whatever waits for messages. `end` is held weakly, and returns whether it succeeded."""

    def close(self) -> None:
        """Closes the wire. Every message was received."""


class Message(Protocol):
    """Numbers that are being sent to one other rank, or received from it."""

    def wait(self) -> object:
        """Waits until the memory of the numbers may be used again."""


def checked(group: Any) -> Group:
    """Returns a group that is not torch's, after a check that it, and each group in it, has every member of its protocol."""
    for path, protocol in _PARTS.items():
        part = group
        for name in filter(None, path.split(".")):
            part = getattr(part, name, None)  # earlier parts were checked; without `levels`, there are no parts of levels
        missing = [name for name in _members(protocol) if not hasattr(part, name)]
        if missing and (part is not None or path == "inner"):
            subject = f"its {path}" if path else "it"
            raise TypeError(
                f"Cannot use group={group!r}: it is not a torch.distributed process group, and to be a zero Group {subject} "
                f"lacks {', '.join(missing)}. Pass what torch.distributed.new_group returned, or leave group out for all ranks."
            )
    result: Group = group
    return result


_PARTS: dict[str, type] = {  # the parts of a group that a training uses; all but `inner` may be None
    "": Group,
    "shared_host_memory": SharedHostMemory,
    "inner": Group,
    "inner.shared_host_memory": SharedHostMemory,
    "inner.levels": Levels,
    "inner.levels.across": Group,
    "outer": Group,
}


def _members(protocol: type) -> list[str]:
    """Returns the names that a protocol asks for."""
    return sorted({*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))})


# results and sums -----------------------------------------------------------------------------------------------------


class UnreducedResult:
    """A sum over ranks that is not computed yet: one row from each rank, which are added where the sum is needed."""

    def __init__(self, sum_dtype: torch.dtype) -> None:
        self.sum_dtype = sum_dtype

    def done(self) -> bool:
        return True

    def addends(self) -> Sequence[torch.Tensor]:
        """Waits for the stretches and returns them, in the order of ranks. They may be read until `release`."""
        raise NotImplementedError

    def release(self) -> None:
        """Ends the reading of the addends: their memory may be written again."""

    def wait(self) -> torch.Tensor:
        rows = self.addends()
        total = torch.empty(rows[0].numel(), dtype=self.sum_dtype, device=rows[0].device)
        add_rows(rows, total)
        self.release()
        return total


class SideBySide:
    """The stretches of all ranks side by side, not added."""

    def __init__(self, unreduced: UnreducedResult) -> None:
        self._unreduced = unreduced

    def done(self) -> bool:
        return self._unreduced.done()

    def wait(self) -> torch.Tensor:
        together = torch.cat(list(self._unreduced.addends()))
        self._unreduced.release()
        return together


class SingleRankResult(UnreducedResult):
    """The result of a single rank."""

    def __init__(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> None:
        super().__init__(sum_dtype)
        self._bucket = bucket

    def addends(self) -> Sequence[torch.Tensor]:
        return [self._bucket]

    def wait(self) -> torch.Tensor:
        return self._bucket.to(self.sum_dtype)


class CompletedResult:
    """A result that was complete at once."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


_STRETCH = 2**18  # the elements that are added up at once


def add_rows(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """Writes `factor` times the sum of the rows, one of which may be the target, or adds it to what is there. The sum is taken
    in the target's dtype, in the order of the rows, and on the host a stretch at a time, so that all passes but the first find
    it in the cache."""
    stretch = _STRETCH if target.is_cpu else max(1, target.numel())
    for start in range(0, target.numel(), stretch):
        part = slice(start, start + stretch)
        add_stretch([row[part] for row in rows], target[part], factor, adds)


def add_stretch(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """Adds as `add_rows` does, without cutting into stretches, for a caller that has cut one and passes over it again. If it
    were cut once more, a thread would read what another one wrote, from the cache of another core."""
    is_total = len(rows) == 1 and rows[0].dtype == target.dtype
    is_apart = adds or any(row.data_ptr() == target.data_ptr() for row in rows[1:])
    total = rows[0] if is_total else torch.empty_like(target) if is_apart else target
    in_one_pass = len(rows) > 1 and rows[0].dtype == rows[1].dtype == target.dtype
    if in_one_pass:
        torch.add(rows[0], rows[1], out=total)
    elif not is_total:
        total.copy_(rows[0])
    for row in rows[2 if in_one_pass else 1 :]:
        total.add_(row)
    if adds:
        target.add_(total, alpha=factor)
    elif is_total or is_apart or factor != 1.0:
        torch.mul(total, factor, out=target)


def sum_in_rank_order(pieces: torch.Tensor, num_ranks: int, sum_dtype: torch.dtype) -> torch.Tensor:
    """Returns the sum of `num_ranks` equal stretches, added one after the other so that its bits depend on nothing else."""
    rows = pieces.view(num_ranks, -1)
    total = torch.empty(rows.shape[1], dtype=sum_dtype, device=pieces.device)
    add_rows(list(rows), total)
    return total


def wait_into(pending: Pending, target: torch.Tensor, factor: float, adds: bool, add: Callable[..., None] = add_rows) -> None:
    """Waits for a result, and writes or adds `factor` times it to the target: straight from the rows if there are any."""
    if isinstance(pending, UnreducedResult):
        add(pending.addends(), target, factor, adds)
        pending.release()
    else:
        add([pending.wait()], target, factor, adds)


# one answer on all ranks ----------------------------------------------------------------------------------------------


_SUBJECT = "a save, a state_dict, a check or the like"
Failure = Callable[[Exception | None, Mapping[int, str], int], Exception]


def _rank_failed(error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    rank, text = next(iter(failed.items()))
    return error or RankFailed(
        f"Cannot shard: rank {rank} of {size} failed ({text.rstrip('.')}). Nothing was changed on the other ranks. Fix the "
        "error there, and call zero.shard again on all ranks."
    )


def run_on_all(group: Group, act: Callable[[], Result], failure: Failure = _rank_failed) -> Result:
    """Returns what `act` returns. If it fails on one rank all ranks raise, so that none waits for the others: the error that
    `failure` makes of this rank's error, the texts of all failed ranks and the number of ranks. A collective."""
    error, result = None, None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others are waiting to hear of it
        error = caught
    try:
        if not any(exchange_about(group, _SUBJECT, b"" if error is None else b"failed")):
            return result  # type: ignore[return-value]
        texts = exchange_texts(group, "" if error is None else f"{type(error).__name__}: {error}")
    except ZeroError as lost:
        raise error or lost from None
    exception = failure(error, {rank: text for rank, text in enumerate(texts) if text}, group.size)
    raise exception from (None if exception is error else error)


def all_or_none(group: Group, what: str, act: Callable[[], Result]) -> Result:
    """Returns what `act` returns. If it fails on some ranks, all of them raise the same error. A collective."""

    def failure(error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
        if isinstance(error, (ValueError, TypeError, FileNotFoundError, ZeroError)) and len(failed) == size:
            return error  # every rank has the same error
        where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items()).rstrip(".")
        return CheckpointFailed(f"Cannot complete {what.lower()}: it failed on {where}. Nothing was changed. Try it again.")

    before = group.phase
    group.set_phase(f"in {what.lower()}, which all ranks call")
    result = run_on_all(group, act, failure)
    group.set_phase(before)
    return result


def require_same_args(group: Group, what: str, **args: Any) -> None:
    """Raises on all ranks if they call it with different arguments. A collective."""
    texts = exchange_texts(group, json.dumps(args))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise RanksDiffer(
                f"Cannot begin {what.lower()}: it was called by rank 0 with {texts[0]} and by rank {rank} with {text}. "
                "Call it alike on all ranks."
            )


def exchange_about(group: Group, subject: str, message: bytes) -> list[bytes]:
    """Returns every rank's message, by rank. All ranks raise if they call it about different subjects."""
    messages = [entry.split(b"\0", 1) for entry in group.all_gather_bytes(subject.encode() + b"\0" + message)]
    first = messages[0][0]
    for rank, (other, *_) in enumerate(messages):
        if other != first:
            came = [
                f"{subject.decode(errors='replace')}{f' ({place.decode()})' if place else ''}"
                for (subject, *_), place in zip(messages, group.all_gather_bytes(group.phase.encode()), strict=True)
            ]
            raise RanksDiffer(
                f"Cannot go on: rank {rank} of {group.size} came to {came[rank]}, rank 0 to {came[0]}. Call step, zero_grad, "
                "operations on gradients and other collectives in the same order on all ranks, and as often."
            )
    return [rest for _, rest in messages]


def exchange_texts(group: Group, text: str) -> list[str]:
    """Returns every rank's text, by rank."""
    return [message.decode() for message in exchange_about(group, _SUBJECT, text.encode(errors="backslashreplace"))]


def first_difference(first: str, other: str, rank: int) -> str:
    """Returns the first line in which another rank's text differs from rank 0's. Of a long line, the part around the difference
    is shown."""
    firsts, others = first.split("\n"), other.split("\n")
    for first_line, other_line in itertools.zip_longest(firsts, others, fillvalue="nothing"):
        if first_line != other_line:
            if first_line not in others and other_line in firsts:
                return f"rank {rank} lacks {_around(first_line, 0)}, which rank 0 has"
            if other_line not in firsts and first_line in others:
                return f"rank 0 lacks {_around(other_line, 0)}, which rank {rank} has"
            one, another = first_line, other_line
            if first_line.startswith("group ") and other_line.startswith("group "):
                settings = zip(first_line.split(", "), other_line.split(", "), strict=False)
                one, another = next(((a, b) for a, b in settings if a != b), (first_line, other_line))
            place = next((index for index, (a, b) in enumerate(zip(one, another, strict=False)) if a != b), 0)
            one, another = (_around(text, place) for text in (one, another))
            return f"rank {rank} has {another}, rank 0 has {one}"
    return "they have the same parameters, in other places"


_SHOWN = 200  # characters of a line in an error


def _around(text: str, place: int) -> str:
    begin = 0 if len(text) <= _SHOWN or place < _SHOWN // 2 else place - _SHOWN // 2
    part = text[begin : begin + _SHOWN]
    return ("..." if begin else "") + part + ("..." if begin + _SHOWN < len(text) else "")


# backwards that exchange gradients ------------------------------------------------------------------------------------


class _Crossing(NamedTuple):
    """A backward that exchanged gradients between ranks that have parts of the same sequences."""

    task: int = -1  # the number of the backward among all of this process
    first: int = -1  # the first of the ranks that exchanged gradients


_latest = _Crossing()
_running: dict[weakref.ref[Any], int] = {}  # by backward that has crossed and still runs: the first of its ranks


def note_crossing(first: int) -> None:
    """Notes that the backward which runs exchanges gradients with the ranks of which this is the first."""
    global _latest
    task = torch._C._current_graph_task_id()
    if task != -1 and task != _latest.task:

        def end() -> None:
            """Does nothing: torch drops it with the backward, also with one that fails."""

        _running[weakref.ref(end, _running.pop)] = first
        torch.autograd.Variable._execution_engine.queue_callback(end)
    _latest = _Crossing(task, first)


def crossing_since(task: int) -> int:
    """Returns the first of the ranks with which a backward has exchanged gradients that has this number or began later, as one
    inside of it does, or that is around it, as one of which this one recomputes a part; -1 for none."""
    return _latest.first if _latest.task >= task else max([*_running.values()], default=-1)
