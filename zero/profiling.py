"""Whatever a step does has a name in a profiler, and what it is done to: `zero.reduce bucket 7`. A clock adds up its time.

Nothing is named, and no name is made, unless a profiler or a clock looks. torch.profiler and torch.autograd.profiler.emit_nvtx
both look.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from accelerators import Accelerator
from accelerators.streams import Event

STOPS = ("ready", "collect", "reduce", "keep", "settle", "step", "publish")

_MANY = 10_000  # the moments that are kept apart; once there are so many they are added up, even if nobody reads them

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Clock:
    """Measures where the time of a training goes. Every moment belongs to the innermost stop that is running, and to no other.

    Moments are marked by events of the device, in the order of its work, so that the host waits for nothing until the times are
    read. Of threads that run at the same time, the one that began a stop last counts.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._going_on: list[str] = []
        self._marks: list[tuple[str | None, Event]] = []  # marks, each with the name of what went on from it
        self._ms: dict[str, float] = {}

    def begin(self, name: str) -> None:
        self._going_on.append(name)
        self._mark()

    def end(self) -> None:
        self._going_on.pop()
        self._mark()
        if len(self._marks) > _MANY:
            self.read()

    def read(self) -> dict[str, float]:
        """Returns milliseconds by name, since the clock was made. Waits for the device."""
        if self._going_on:
            self._mark()
        if self._marks:
            self._accelerator.synchronize()  # waiting for the last mark is not enough, as hooks may have marked other streams
        for (name, begun), (_, ended) in itertools.pairwise(self._marks):
            if name is not None:
                self._ms[name] = self._ms.get(name, 0.0) + begun.elapsed_time(ended)
        del self._marks[: None if not self._going_on else -1]
        return dict(self._ms)

    def _mark(self) -> None:
        event = self._accelerator.new_event(timing=True)
        event.record()
        self._marks.append((self._going_on[-1] if self._going_on else None, event))


class Timed:
    """A class with stops, which are timed while it has a clock."""

    clock: Clock | None = None


Owner = TypeVar("Owner", bound=Timed)


Subject = Callable[..., str]


def stop(
    name: str, subject: Subject = lambda *_, **__: ""
) -> Callable[[Callable[Concatenate[Owner, Given], Result]], Callable[Concatenate[Owner, Given], Result]]:
    """Makes a method a stop, which a profiler shows as `zero.name` and a clock times. With neither it costs a fraction of a
    microsecond. `subject` is called as the method is, and returns what this call is about."""

    def labelled(method: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
        @functools.wraps(method)
        def shown(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
            if self.clock is None and not profiler._is_profiler_enabled:
                return method(self, *args, **kwargs)
            with during(name, self.clock, lambda: subject(self, *args, **kwargs)):
                return method(self, *args, **kwargs)

        return shown

    return labelled


def first_of(subjects: Sequence[str]) -> str:
    """Names several subjects by the first of them, and says how many others there are."""
    first, *others = dict.fromkeys(subjects) or [""]
    return f"{first} and {len(others)} more" if others else first


_unseen = contextlib.nullcontext()


def in_profile(name: str, subject: Subject, *given: Any) -> contextlib.AbstractContextManager[object]:
    """Shows a profiler what runs inside as `zero.name`, and what `subject` returns if it is given these. No clock times it."""
    if not profiler._is_profiler_enabled:
        return _unseen
    return torch.profiler.record_function(f"zero.{name} {subject(*given)}".rstrip())


@contextlib.contextmanager
def during(name: str, clock: Clock | None, subject: Subject = lambda: "") -> Iterator[None]:
    """Gives what runs inside a name, as a stop has."""
    with in_profile(name, subject):
        if clock is None:
            yield
            return
        clock.begin(name)
        try:
            yield
        finally:
            clock.end()
