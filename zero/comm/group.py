"""The ranks that train together, as protocols: all of them call the same collectives in the same order.

    pending = group.reduce_scatter(bucket, torch.float32)  # all ranks call it; this one goes on at once
    share = pending.wait()                                 # its share of the sum, added in rank order: the same bits each time

`Group` is a protocol, as are its parts. zero/comm/torch_group.py implements it over torch.distributed, zero/comm/levels.py adds
in two levels or along families, and a test has ranks that are threads. Code above this room knows the protocols alone.
zero/comm/results.py has what collectives give, and zero/comm/one_answer.py how all ranks agree, or fail together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch


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

    def even(self, issued: Callable[[], tuple[int, int]], issue: Callable[[int, int], None]) -> None:
        """Evens ranks out before their devices wait for other collectives, if devices wait: each message to all ranks tells
        what `issued` returns, an epoch and how much of it, and `issue` is called with the most. Both are held weakly."""

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
