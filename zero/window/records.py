"""The phases of a window, the records of what it notes of gradients, and the part that steps masters ahead of it.

zero/window/window.py says how they belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from zero.memory.norms import KeptNumber
from zero.window.grads import GradChanges
from zero.window.rounds import Place

Take = Callable[[bool], bool]  # takes a gradient from `.grad`; given True, it may leave it there and then returns True


class Phase(Enum):
    """The state of a window. *News* is a gradient, a weight, `no_contribution`, or an edit of `.grad`."""

    EMPTY = "empty"  # nothing came since the reset: no sums, or zeros that the user asked for
    OPEN = "open"  # other ranks must hear of news; sums are partial
    SETTLED = "settled"  # sums are final, nothing is on its way; `.grad` holds a proxy exactly where some rank had a gradient
    REOPENED = "reopened"  # as OPEN for what came since a settling; the sums from before are final, and news are added to them
    # Masters of some buckets are stepped in a backward, and weights are those of before: only the rest of that backward and the
    # step may come, as masters cannot take anything else in any more.
    AHEAD = "ahead"
    STEPPING = "stepping"  # an update has begun, and weights are written in part
    STEPPED = "stepped"  # a step has used the sums, if there were any, and nothing came since
    FAILED = "failed"  # this rank refused a gradient or met a broken backward, which others must hear of
    TORN = "torn"  # an update broke off, which others must hear of; weights are stepped in part
    ABORTED = "aborted"  # all ranks know of an error that ended the window; otherwise as EMPTY


NEEDS_SYNC = frozenset({Phase.OPEN, Phase.REOPENED, Phase.AHEAD, Phase.FAILED, Phase.TORN})

# The phases that may follow each phase, by event.
_RESET = {Phase.EMPTY}
# The user cleared `.grad` on this rank; the others must still hear of rounds that were sent.
_CLEARED = {Phase.EMPTY, Phase.OPEN}
_NEWS = {Phase.OPEN, Phase.FAILED}
_MORE_NEWS = {Phase.REOPENED, Phase.FAILED}
_SETTLING = {Phase.EMPTY, Phase.SETTLED, Phase.ABORTED}
TRANSITIONS: dict[Phase, set[Phase]] = {
    Phase.EMPTY: {*_RESET, *_CLEARED, *_NEWS, *_SETTLING, Phase.STEPPED},
    Phase.OPEN: {*_RESET, *_CLEARED, *_NEWS, *_SETTLING, Phase.AHEAD},
    Phase.SETTLED: {*_RESET, *_MORE_NEWS, *_SETTLING, Phase.STEPPING, Phase.STEPPED},
    Phase.REOPENED: {*_RESET, *_CLEARED, *_MORE_NEWS, *_SETTLING},
    Phase.AHEAD: {Phase.STEPPING, Phase.TORN},  # a settling that a step calls changes nothing of it
    Phase.STEPPING: {Phase.STEPPED, Phase.TORN},
    Phase.STEPPED: {*_RESET, *_NEWS, *_MORE_NEWS, *_SETTLING},  # a step may have had sums, or none
    Phase.FAILED: {*_RESET, *_CLEARED, Phase.FAILED, Phase.ABORTED},
    Phase.TORN: {*_RESET, Phase.TORN, Phase.ABORTED},  # a user who clears `.grad` does not end it, as the others have not heard
    Phase.ABORTED: {*_RESET, *_NEWS, *_SETTLING},
}


@dataclass
class SinceReset:
    """The notes since the last reset, which outlive a settling; `used` and `stepped` are alike on all ranks. Whether sums are
    final is in `Scaling`, as factors depend on it."""

    used: int = 0  # parameters that some rank had a gradient for, as agreed at the last settling
    # The parameters in `used` that a step changes: all but those of this rank's own that only other ranks used.
    stepped: int = 0
    proxied: int = 0  # parameters whose .grad holds a `ShardedGrad` of ours
    # Norms of settled gradients, by order and parameter.
    norms: dict[float, dict[int, KeptNumber]] = field(default_factory=dict)
    changes: GradChanges = field(default_factory=GradChanges)  # the user's changes of settled gradients


@dataclass
class SinceSettling:
    """Every note here is of this rank alone, and the others hear of it only at the next settling, which makes new ones."""

    collected: int = 0  # parameters whose gradient is in a bucket
    accumulated: int = 0  # parameters of which several gradients are added up before any is sent
    pending: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients that wait on this rank, in the dtype of sums
    weights: list[float] = field(default_factory=list)  # the weights of the micro-batches so far, if they have any
    is_none: bool = False  # the user called `no_contribution`
    has_proxies: bool = False  # every trainable parameter's .grad holds a proxy
    writing: dict[int, int] = field(default_factory=dict)  # parameters whose .grad autograd is writing, each with the thread
    removed: int = 0  # parameters whose .grad the user set to None
    replaced: int = 0  # parameters whose .grad the user set to a tensor of his own
    user_grads: dict[int, torch.Tensor] = field(default_factory=dict)  # the tensors that the user set, by parameter
    row: int = -1  # the first of the ranks with which a backward exchanged gradients, as those of one sequence do; -1: none
    task: int = -1  # the number of this window's latest backward

    @property
    def edited(self) -> int:
        return self.removed | self.replaced

    @property
    def has_gradient(self) -> bool:
        return bool(self.collected or self.pending)


@dataclass(slots=True)
class InBackward:
    """The notes of the backward that runs, from its first gradient on. If it ends by an exception they stay, until they are
    found by the next backward, a settling or a reset."""

    has_begun: bool = False
    is_short: bool = False  # gradients that come now may take the short path
    stay: tuple[int, int] | None = None  # the thread and the backward whose gradients may stay in `.grad` for now, if any may
    # The parameter whose .grad autograd writes now, and the thread, if the gradient may stay.
    written: tuple[int, int] | None = None
    # The gradients that stayed in `.grad`, in the order in which they came.
    left: dict[int, tuple[Take, Place | None]] = field(default_factory=dict)

    def leave_short_path(self) -> None:
        self.is_short, self.stay = False, None


class MastersAhead(Protocol):
    """The part that steps masters of buckets while backward goes on: zero/sharding/ahead.py."""

    def offer(self, buckets: Sequence[int]) -> None: ...
    def forget_offers(self) -> None: ...
    def next_ready(self, has_landed: Callable[[int], bool]) -> int | None: ...
    def start(self, bucket: int, factor: float) -> None: ...
    def hold_weights(self) -> None: ...
    def has(self, bucket: int) -> bool: ...
    def finish(self) -> None: ...
    def check_settings(self) -> None: ...
    def check_weights(self) -> None: ...
    def end(self) -> None: ...
    def tear(self) -> None: ...
    def close(self) -> None: ...
