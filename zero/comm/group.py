"""The protocols of what ranks do together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class TimeLimits:
    """Seconds after which a rank that does not come is missing: until the end of the first step, in which ranks compile, and
    later."""

    first_s: float = 1800.0
    later_s: float = 60.0


class Pending(Protocol):
    """A collective on its way."""

    def done(self) -> bool:
        """True when `wait` would not block the host."""

    def wait(self) -> torch.Tensor:
        """The result, usable on the current stream; on host tensors it is there when this returns."""


class SharedHostMemory(Protocol):
    """What the ranks of a group see of each other's host memory."""

    def rank0_view(self, memory: torch.Tensor) -> contextlib.AbstractContextManager[torch.Tensor]:
        """What rank 0 has in its memory of `staging`, for all ranks to read. That memory is lent again when all of them have
        left this. A collective."""

    def common(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Memory of these sizes in bytes that all ranks read and write. It is freed when rank 0 drops it. A collective."""

    def trim(self) -> None:
        """Gives memory of `staging` that is not lent back to the system."""


ANYONES = 0  # the tag of messages that are received from any rank


class Message(Protocol):
    """Numbers that are being sent to one other rank, or received from it."""

    def wait(self) -> object:
        """When this returns their memory may be used again."""


class Wire(Protocol):
    """Messages between two ranks, in host memory, matched by tag. Threads may use it at the same time."""

    rank: int
    size: int
    limit_s: float  # how long a rank waits for another one

    def send(self, values: torch.Tensor, rank: int, tag: int) -> Message: ...

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Message:
        """Receives a message. Where the other rank does not send it within the time limit, waiting for it raises and the group
        is lost."""

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        """Receives a message with the tag ANYONES from any rank, without a time limit. It stays valid when the group is
        lost."""

    def fail(self, error: RuntimeError, is_local: bool = False) -> NoReturn:
        """Raises what an error in a thread that cannot raise itself means for the group. `is_local`: this rank is the reason,
        and others, which may wait for it, are told."""

    def on_exit(self, end: Callable[[float], bool]) -> None:
        """Has `end` called if the program ends before this is closed, with the seconds within which it must end whatever waits
        for messages. It is held weakly, and returns whether it could."""

    def close(self) -> None:
        """Closes the wire. Every message was received."""


class GroupBeside(Protocol):
    """The same ranks as those of a group, with collectives in an order of their own, from any thread."""

    size: int

    def gather(self, share: torch.Tensor, into: torch.Tensor) -> Pending:
        """Fills `into` with what the other ranks have for `share`, in the places of their ranks."""

    def end_warmup(self) -> None: ...
    def reconnect(self, base: Any) -> None: ...
    def close(self) -> None: ...


class Needs(Protocol):
    """A channel on which ranks say what they need, where a device waits for collectives; see [Note: devices that wait]."""

    def say(self, need: Callable[[], str]) -> None:
        """Has others told what `need` returns while this rank's device waits for them. It is called in a thread."""

    def heed(self, act: Callable[[str], None]) -> None:
        """Has `act` called with what was said last, every now and then, in whatever thread of this rank waits for messages of
        any training."""

    def on_loss(self, act: Callable[[bool], None]) -> None:
        """Has `act` called before what is on the device is broken off, in whatever thread does that, and with whether some
        collective failed there: one that is done then may have failed."""


class Levels(Protocol):
    """A group that adds in two levels: the ranks of each host first, and then the hosts; see zero/comm/two_levels.py."""

    @property
    def across(self) -> Group:
        """The ranks that have the number of this one on their hosts."""

    def reduce_by_hosts(
        self, bucket: torch.Tensor, sum_dtype: torch.dtype, reduce_across: Callable[[torch.Tensor], Pending]
    ) -> Pending:
        """`reduce_scatter`, where `reduce_across` is given the sums of this host to add those of the others `across`."""


class Group(Protocol):
    """The ranks that train together.

    All ranks call the same collectives in the same order. Host messages (`exchange`) and tensors travel on
    separate wires, so the two orders do not depend on each other.
    """

    rank: int
    size: int

    @property
    def inner(self) -> Group:
        """The ranks that states are in shares of: this group, or consecutive ranks of it; see zero/comm/hybrid.py."""

    @property
    def outer(self) -> Group | None:
        """The ranks that have the same share as this one; None where there is no other."""

    @property
    def levels(self) -> Levels | None:
        """How this group adds in two levels; None where it adds in one."""

    @property
    def shared_host_memory(self) -> SharedHostMemory | None:
        """What ranks see of each other's host memory; None where each sees its own only."""

    @property
    def needs(self) -> Needs | None:
        """The channel on which ranks say what they need of others; None where the host waits for collectives."""

    @property
    def phase(self) -> str:
        """What `set_phase` was last given."""

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """This rank's share of the sum of all ranks' buckets, taken in `sum_dtype`, in rank order; or of several hosts, of each
        first. The contents of `bucket` are undefined once the result was waited for."""

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        """Every rank's stretch for this one, side by side in rank order: what `reduce_scatter` adds. Once that was waited for
        `bucket` may have anything in it."""

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """The whole sum of all ranks' buckets, taken in `sum_dtype`, with the same bits on all ranks. What is no memory of
        `staging` may be written again at once."""

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Fills `bucket`, of which every rank has written its own share, with the shares of the others."""

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Rank 0's `tensor`, on all ranks, in place."""

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank, of any length; waits for all ranks, with a time limit."""

    def new_wire(self) -> Wire:
        """Makes a wire for messages between two ranks, beside the collectives. A collective."""

    def beside(self) -> GroupBeside | None:
        """Makes another group of the same ranks; None where tensors come from other ranks as fast by messages. A collective."""

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that this group can send from without a copy. It may be written again once `is_reusable` returns True."""

    def is_reusable(self, buffer: torch.Tensor) -> bool:
        """False while other ranks may still read what was sent from this memory of `staging`."""

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        """Says what this rank does from now on, so that others can report it if they miss this rank. If it ends by an error,
        `location` is called to say where. No collective, some microseconds."""

    def end_warmup(self) -> None:
        """Ends the longer time limit: the first step is agreed on. The shorter one holds from the next collective on, on all
        ranks."""

    def reconnect(self, base: Any) -> None:
        """Meets the same ranks again after the connections were lost, over the process group `base` or the one that it had."""

    def close(self) -> None:
        """Closes what this object made, but not a process group that it was given."""


def checked(group: Any) -> Group:
    """Returns a group that is not torch's, after a check that it, and each group in it, has every member of its protocol."""
    for path, protocol in _PARTS.items():
        part = group
        for name in filter(None, path.split(".")):
            part = getattr(part, name, None)  # what was checked before has it; where there are no levels they have no part
        missing = [name for name in _members(protocol) if not hasattr(part, name)]
        if missing and (part is not None or path == "inner"):
            subject = f"its {path}" if path else "it"
            raise TypeError(
                f"Cannot use group={group!r}: it is no torch.distributed process group, and to be a zero Group {subject} lacks "
                f"{', '.join(missing)}. Pass what torch.distributed.new_group returned, or leave group out for all ranks."
            )
    result: Group = group
    return result


_PARTS: dict[str, type] = {  # of a group that a training uses; all but `inner` may be None
    "": Group,
    "shared_host_memory": SharedHostMemory,
    "inner": Group,
    "inner.shared_host_memory": SharedHostMemory,
    "inner.levels": Levels,
    "inner.levels.across": Group,
    "outer": Group,
}


def _members(protocol: type) -> list[str]:
    """The names that a protocol asks for."""
    return sorted({*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))})
