"""The stages: what each shards, and when it sends. No other file knows what the number of a stage means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A row of the table: which states every rank holds whole, and whether gradients may wait for the end of an
    accumulation."""

    number: int
    shards_optimizer: bool  # masters and optimizer state: one share a rank, or whole on every rank
    shards_weights: bool  # one share a rank; the shares of others are gathered while an operator needs them
    accumulates_locally: bool  # gradients are added up whole on their rank until the declared boundary


STAGES = {
    0: Stage(0, shards_optimizer=False, shards_weights=False, accumulates_locally=True),
    1: Stage(1, shards_optimizer=True, shards_weights=False, accumulates_locally=True),
    2: Stage(2, shards_optimizer=True, shards_weights=False, accumulates_locally=False),
    3: Stage(3, shards_optimizer=True, shards_weights=True, accumulates_locally=False),
}


def stage_of(number: int) -> Stage:
    """Returns the stage of a number, or raises."""
    if isinstance(number, bool) or number not in STAGES:
        raise ValueError(f"Cannot use stage={number!r}: the stages are {', '.join(map(str, STAGES))}. Pass one of them.")
    return STAGES[number]
