"""What all ranks do, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from zero.comm.exchange import exchange_texts
from zero.comm.group import Group
from zero.errors import CheckpointFailed, RanksDiffer, ZeroError

Result = TypeVar("Result")


def agreed(group: Group, what: str, act: Callable[[], Result]) -> Result:
    """What `act` gives. Where it fails on some ranks all of them raise, and say the same."""
    group.set_phase(f"in {what.lower()}")
    error, result = None, None
    try:
        result = act()
    except Exception as raised:  # noqa: BLE001 - whatever it is, the others are waiting to hear of it
        error = raised
    texts = exchange_texts(group, "" if error is None else f"{type(error).__name__}: {error}")
    told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if isinstance(error, (ValueError, TypeError, FileNotFoundError, ZeroError)) and len(told) == len(texts):
        raise error  # which all of them see
    if told:
        where = "; ".join(told)
        raise CheckpointFailed(f"{what} was asked for, but it failed on {where}. Nothing was changed by it.") from error
    return result  # type: ignore[return-value]


def require_same_args(group: Group, what: str, **asked: Any) -> None:
    """Raises on all ranks where they call it with different arguments."""
    texts = exchange_texts(group, json.dumps(asked))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise RanksDiffer(
                f"{what} was asked for, but by rank 0 with {texts[0]} and by rank {rank} with {text}. Call it alike on all."
            )
