"""What ranks do together, as the rest of the system sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class TimeLimits:
    """Seconds after which a rank that does not come is missing: in the first step, in which ranks compile, and later."""

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
        """What rank 0 has in its memory of `staging`, for all to read: that is not lent again before all have left this. A
        collective."""

    def common(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Memory of so many bytes each that all ranks read and write. It goes when rank 0 lets go of it. A collective."""

    def trim(self) -> None:
        """Gives the system what of `staging` is not lent."""


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
        """What waits for this one is lost with the group where the other rank does not come within its time limit."""

    def receive_from_any(self, memory: torch.Tensor) -> Message:
        """One with the tag ANYONES, from whichever rank. Without a time limit, and whatever becomes of the group."""

    def fail(self, error: RuntimeError) -> NoReturn:
        """A message failed in a thread that cannot say so: raises what that means for the group."""

    def on_exit(self, end: Callable[[float], bool]) -> None:
        """If the program ends before this is closed, `end` is called with a number of seconds, within which it ends whatever
        waits for messages. It is held weakly, and says whether it did."""

    def close(self) -> None:
        """Every message was received."""


class Group(Protocol):
    """The ranks that train together.

    All ranks call the same collectives in the same order. Host messages (`exchange`) and tensors travel on
    separate wires, so the two orders do not depend on each other.
    """

    rank: int
    size: int

    @property
    def shared_host_memory(self) -> SharedHostMemory | None:
        """What ranks see of each other's host memory; None where each sees its own only."""

    @property
    def phase(self) -> str:
        """What `set_phase` was last given."""

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """This rank's share of the sum of all ranks' buckets, taken in `sum_dtype`, in rank order. Once that was waited for
        `bucket` may have anything in it."""

    def all_to_all(self, bucket: torch.Tensor) -> Pending:
        """Every rank's stretch for this one, side by side in rank order: what `reduce_scatter` adds. Once that was waited for
        `bucket` may have anything in it."""

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """The whole sum of all ranks' buckets, taken in `sum_dtype`, with the same bits on all ranks."""

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Fills `bucket`, of which every rank has written its own share, with the shares of the others."""

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Rank 0's `tensor`, on all ranks, in place."""

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank, of any length; waits for all ranks, with a time limit."""

    def new_wire(self) -> Wire:
        """For messages of two ranks, beside the collectives. A collective."""

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that this group can send without copying it first. It may be written again when `is_read` says so."""

    def is_read(self, buffer: torch.Tensor) -> bool:
        """False while other ranks may still read what was sent from this memory of `staging`."""

    def set_phase(self, phase: str, location: Callable[[], str] | None = None) -> None:
        """Says what this rank does from now on, for others to read if they miss it; if it ends by an error meanwhile, the
        method `location` is asked where in that it was. No collective, some microseconds."""

    def end_warmup(self) -> None:
        """A step is agreed on; with the first one the shorter time limit holds, from the next collective on, on all ranks."""

    def reconnect(self, base: Any) -> None:
        """Meets the same ranks again after the connections were lost, over the process group `base` or the one that it had."""

    def close(self) -> None:
        """Lets go of what this object made; never of a group that it was given."""


def checked(group: Any) -> Group:
    """Returns a group that is not torch's, once it is known to have every member of the protocol."""
    missing = [name for name in _MEMBERS if not hasattr(group, name)]
    if missing:
        raise TypeError(
            f"Cannot use group={group!r}: it is no torch.distributed process group, and to be a zero Group it lacks "
            f"{', '.join(missing)}. Pass what torch.distributed.new_group returned, or leave group out for all ranks."
        )
    found: Group = group
    return found


_MEMBERS = sorted({*Group.__annotations__, *(name for name in vars(Group) if not name.startswith("_"))})
