"""The backwards of this process: which runs, what follows its end, and with which ranks it exchanges gradients.

A backward that exchanged gradients is known by the first of its ranks as long as it runs, and until another one exchanges.
Ranks that have parts of the same sequences exchange gradients in their backwards (zero/comm/heads.py, which notes it here), so
they have to weigh their micro-batches alike. A window asks for its backwards as each ends, or settles inside of it, and ranks
compare that when they settle.

Torch gives every backward of a process a number that counts up, and names only the innermost that runs on this thread. A
backward that recomputes a part of a model, as checkpointing does, runs another one inside of itself; either may be the one that
exchanges, and either the one that the window knows. So for a window that knows of backward 7

    7 exchanged                      it is the latest, or runs still
    8, inside of 7, exchanged        it is later, so the latest is
    6, around 7, exchanged           it runs still: it is among those that run

and if only 5 exchanged, which has ended, nothing did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

running: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the innermost backward that runs on this thread; -1 if none does."""


def at_end(act: Callable[[], None]) -> None:
    """Calls `act` when the backward that runs, the innermost, has ended. If that fails, `act` is dropped and not called."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


class _Crossing(NamedTuple):
    """A backward that exchanged gradients between ranks that have parts of the same sequences."""

    task: int = -1  # the number of the backward among all of this process
    first: int = -1  # the first of the ranks that exchanged gradients


_latest = _Crossing()
_running: dict[weakref.ref[Any], int] = {}  # by backward that has crossed and still runs: the first of its ranks


def note_crossing(first: int) -> None:
    """Notes that the backward which runs exchanges gradients with the ranks of which this is the first."""
    global _latest
    task = running()
    if task != -1 and task != _latest.task:

        def end() -> None:
            """Does nothing: torch drops it with the backward, also with one that fails."""

        _running[weakref.ref(end, _running.pop)] = first
        at_end(end)
    _latest = _Crossing(task, first)


def crossing_since(task: int) -> int:
    """Returns the first of the ranks with which a backward has exchanged gradients that has this number or began later, as one
    inside of it does, or that is around it, as one of which this one recomputes a part; -1 for none."""
    return _latest.first if _latest.task >= task else max([*_running.values()], default=-1)
