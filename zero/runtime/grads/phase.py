"""The phases of a window, and which may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A phase of a window. `move_to` of the window allows the transitions below only."""

    IDLE = "idle"  # nothing came since the window began
    COLLECTING = "collecting"  # something came that other ranks must hear of
    FAILED = "failed"  # this rank failed in a backward, which other ranks must hear of
    SETTLED = "settled"  # all sums are final
    STEPPING = "stepping"  # an update has begun
    STEPPED = "stepped"  # a step has used the sums, and nothing came since
    TORN = "torn"  # an update failed in the middle, which other ranks must hear of
    ABORTED = "aborted"  # an error that all ranks know of ended the window


NEEDS_SYNC = frozenset({Phase.COLLECTING, Phase.FAILED, Phase.TORN})

# Every phase ends in a new window: by `zero_grad`, or where the user cleared every `.grad` himself. Of a torn update all ranks
# must hear before: what this rank clears alone does not end that phase.
_NEW_WINDOW = {Phase.IDLE, Phase.COLLECTING}
_MORE_CAME = {Phase.COLLECTING, Phase.FAILED}
_SYNCHRONIZED = {Phase.IDLE, Phase.SETTLED, Phase.ABORTED}

TRANSITIONS: dict[Phase, set[Phase]] = {
    Phase.IDLE: {*_NEW_WINDOW, *_MORE_CAME, *_SYNCHRONIZED, Phase.STEPPED},
    Phase.COLLECTING: {*_NEW_WINDOW, *_MORE_CAME, *_SYNCHRONIZED},
    Phase.FAILED: {*_NEW_WINDOW, Phase.FAILED, Phase.ABORTED},
    Phase.SETTLED: {*_NEW_WINDOW, *_MORE_CAME, *_SYNCHRONIZED, Phase.STEPPING, Phase.STEPPED},
    Phase.STEPPING: {Phase.STEPPED, Phase.TORN},
    Phase.STEPPED: {*_NEW_WINDOW, *_MORE_CAME, *_SYNCHRONIZED},
    Phase.TORN: {Phase.TORN, Phase.IDLE, Phase.ABORTED},
    Phase.ABORTED: {*_NEW_WINDOW, *_MORE_CAME, *_SYNCHRONIZED},
}
