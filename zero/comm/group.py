"""What ranks do together, as the rest of the system sees it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from zero.errors import RankFailed, RanksDiffer, ZeroError

Result = TypeVar("Result")

_STRETCH = 2**18  # elements


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


class Group(Protocol):
    """The ranks that train together.

    All ranks call the same collectives in the same order. Host messages (`exchange`) and tensors travel on
    separate wires, so the two orders do not depend on each other.
    """

    rank: int
    size: int

    @property
    def doing(self) -> str:
        """What was noted last."""

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """This rank's share of the sum of all ranks' buckets, taken in `sum_dtype`, in rank order. Once that was waited for
        `bucket` may have anything in it."""

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        """The whole sum of all ranks' buckets, taken in `sum_dtype`, with the same bits on all ranks."""

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Fills `bucket`, of which every rank has written its own share, with the shares of the others."""

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Rank 0's `tensor`, on all ranks, in place."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank, of any length; waits for all ranks, with a time limit."""

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that this group can send without copying it first. It may be written again when `is_read` says so."""

    def is_read(self, buffer: torch.Tensor) -> bool:
        """False while other ranks may still read what was sent from this memory of `staging`."""

    def note(self, doing: str, place: Callable[[], str] | None = None) -> None:
        """Says what this rank does from now on, for others to read if they miss it; if it ends by an error meanwhile, the
        method `place` is asked where in that it was. No collective, some microseconds."""

    def hurry(self) -> None:
        """A step is agreed on; with the first one the shorter time limit holds, from the next collective on, on all ranks."""

    def reconnect(self, base: Any) -> None:
        """Meets the same ranks again after the connections were lost, over the process group `base` or the one that it had."""

    def close(self) -> None:
        """Lets go of what this object made; never of a group that it was given."""


class Sharing(Protocol):
    """What a group offers besides, whose ranks see each other's memory of the host."""

    def shown(self, memory: torch.Tensor) -> contextlib.AbstractContextManager[torch.Tensor]:
        """What rank 0 has in its memory of `staging`, for all to read: that is not lent again before all have left this. A
        collective."""

    def tidy(self) -> None:
        """Gives the system what of `staging` is not lent."""


def sharing_of(group: Group) -> Sharing | None:
    """The group, if it is one that offers that, as most do not."""
    found: Any = group
    return found if hasattr(group, "shown") else None


def checked(group: Any) -> Group:
    """A group of somebody's own making."""
    if not all(hasattr(group, name) for name in ("rank", "size", "reduce_scatter", "all_gather", "exchange")):
        raise TypeError(
            f"group={group!r} was passed, which is neither a torch.distributed process group nor a zero Group. "
            "Pass what torch.distributed.new_group returned, or leave it out for all ranks."
        )
    found: Group = group
    return found


class Added:
    """The sum of a stretch of every rank, which are added where it is needed."""

    def __init__(self, sum_dtype: torch.dtype) -> None:
        self.sum_dtype = sum_dtype

    def done(self) -> bool:
        return True

    def rows(self) -> Sequence[torch.Tensor]:
        """The stretches, in the order of ranks. Waits for them; they may be read until `finish`."""
        raise NotImplementedError

    def finish(self) -> None:
        """They were read."""

    def wait(self) -> torch.Tensor:
        rows = self.rows()
        total = torch.empty(rows[0].numel(), dtype=self.sum_dtype, device=rows[0].device)
        add_rows(rows, total)
        self.finish()
        return total


class Alone(Added):
    """That of a single rank."""

    def __init__(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> None:
        super().__init__(sum_dtype)
        self._bucket = bucket

    def rows(self) -> Sequence[torch.Tensor]:
        return [self._bucket]

    def wait(self) -> torch.Tensor:
        return self._bucket.to(self.sum_dtype)


class Ready:
    """A result that was there at once."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


def sum_in_rank_order(pieces: torch.Tensor, num_ranks: int, sum_dtype: torch.dtype) -> torch.Tensor:
    """The sum of `num_ranks` equal stretches, added one after the other so that its bits depend on nothing else."""
    rows = pieces.view(num_ranks, -1)
    total = torch.empty(rows.shape[1], dtype=sum_dtype, device=pieces.device)
    add_rows(list(rows), total)
    return total


def add_rows(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """Writes `factor` times the sum of the rows, one of which may be the target, or adds it to what is there. The sum is taken
    in the target's dtype, in the order of the rows, and on the host a stretch at a time, so that all passes but the first find
    it in the cache."""
    stretch = _STRETCH if target.is_cpu else max(1, target.numel())
    for start in range(0, target.numel(), stretch):
        part = slice(start, start + stretch)
        add_stretch([row[part] for row in rows], target[part], factor, adds)


def add_stretch(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """The same, all of it at a time, for who has cut a stretch and passes over it again: cut once more, a thread would find
    what another one wrote, in the cache of another core."""
    is_total = len(rows) == 1 and rows[0].dtype == target.dtype
    is_apart = adds or any(row.data_ptr() == target.data_ptr() for row in rows[1:])
    total = rows[0] if is_total else (torch.empty_like(target) if is_apart else target).copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
    if adds:
        target.add_(total, alpha=factor)
    elif is_total or is_apart or factor != 1.0:
        torch.mul(total, factor, out=target)


def wait_into(pending: Pending, target: torch.Tensor, factor: float, adds: bool, add: Callable[..., None] = add_rows) -> None:
    """Waits, and writes or adds `factor` times the result: straight from the rows where there are any."""
    if isinstance(pending, Added):
        add(pending.rows(), target, factor, adds)
        pending.finish()
    else:
        add([pending.wait()], target, factor, adds)


def exchange_about(group: Group, subject: str, message: bytes) -> list[bytes]:
    """Every rank's message, by rank; where ranks came for different subjects, all of them raise."""
    told = [theirs.split(b"\0", 1) for theirs in group.exchange(subject.encode() + b"\0" + message)]
    first = told[0][0]
    for rank, (theirs, *_) in enumerate(told):
        if theirs != first:
            came = [
                f"{subject.decode(errors='replace')}{f' ({place.decode()})' if place else ''}"
                for (subject, *_), place in zip(told, group.exchange(group.doing.encode()), strict=True)
            ]
            raise RanksDiffer(
                f"Rank {rank} of {group.size} came to {came[rank]}, rank 0 to {came[0]}. All ranks must call step, zero_grad, "
                "operations on gradients and other collectives in the same order, and as often."
            )
    return [rest for _, rest in told]


def exchange_texts(group: Group, text: str) -> list[str]:
    """Every rank's text, by rank."""
    return [message.decode() for message in exchange_about(group, "a save, a state_dict, a check or the like", text.encode())]


def first_difference(first: str, other: str, rank: int) -> str:
    """The first line in which rank 0's text differs from another rank's, and of that the first words that differ."""
    for mine, theirs in itertools.zip_longest(first.split("\n"), other.split("\n"), fillvalue="nothing"):
        if mine != theirs:
            one, another = mine, theirs
            if mine.startswith("group ") and theirs.startswith("group "):
                settings = zip(mine.split(", "), theirs.split(", "), strict=False)
                one, another = next(((a, b) for a, b in settings if a != b), (mine, theirs))
            return f"rank {rank} has {another!r:.200}, rank 0 has {one!r:.200}"
    return "they have the same parameters, in other places"


def together(group: Group, act: Callable[[], Result]) -> Result:
    """What `act` gives; where it fails on one rank, all of them raise, so that none waits for what will not come."""
    try:
        result = act()
    except Exception as error:
        with contextlib.suppress(ZeroError):
            group.exchange(b"\1")
            exchange_texts(group, f"{type(error).__name__}: {error}")
        raise
    if any(message != b"\0" for message in group.exchange(b"\0")):
        for rank, text in enumerate(exchange_texts(group, "")):
            if text:
                raise RankFailed(f"Rank {rank} of {group.size} could not do its part of the sharding, so nobody did: {text}")
    return result
