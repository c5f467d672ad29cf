"""Small exchanges between ranks: what they are about, and what runs on all ranks or fails on all."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import TypeVar

from zero.comm.group import Group
from zero.errors import RankFailed, RanksDiffer, ZeroError

Result = TypeVar("Result")


def exchange_about(group: Group, subject: str, message: bytes) -> list[bytes]:
    """Every rank's message, by rank; where ranks came for different subjects, all of them raise."""
    told = [theirs.split(b"\0", 1) for theirs in group.all_gather_bytes(subject.encode() + b"\0" + message)]
    first = told[0][0]
    for rank, (theirs, *_) in enumerate(told):
        if theirs != first:
            came = [
                f"{subject.decode(errors='replace')}{f' ({place.decode()})' if place else ''}"
                for (subject, *_), place in zip(told, group.all_gather_bytes(group.phase.encode()), strict=True)
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


def run_on_all(group: Group, act: Callable[[], Result]) -> Result:
    """What `act` gives; where it fails on one rank, all of them raise, so that none waits for what will not come."""
    try:
        result = act()
    except Exception as error:
        with contextlib.suppress(ZeroError):
            group.all_gather_bytes(b"\1")
            exchange_texts(group, f"{type(error).__name__}: {error}")
        raise
    if any(message != b"\0" for message in group.all_gather_bytes(b"\0")):
        for rank, text in enumerate(exchange_texts(group, "")):
            if text:
                raise RankFailed(f"Rank {rank} of {group.size} could not do its part of the sharding, so nobody did: {text}")
    return result
