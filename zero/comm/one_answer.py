"""All ranks come to one answer: they go on alike, or all raise. Whatever fails on one of them is said on all, and none waits.

    place = run_on_all(group, make_folder)           # every rank's own result; if one rank fails, all raise
    all_or_none(group, "The load", read)             # the same, for a call that changes nothing unless it works everywhere
    require_same_args(group, "a save", tag=tag)      # raises on all ranks unless all were given the same
    texts = exchange_texts(group, text)              # every rank's text, by rank

Every function here is a collective of bytes, `Group.all_gather_bytes`, and none touches a tensor.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zero.comm.group import Group
from zero.errors import CheckpointFailed, RankFailed, RanksDiffer, ZeroError

Result = TypeVar("Result")

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
