"""The accelerator that this process chose, and the table it was chosen from."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, overload

from accelerators.backends import BUILT_IN
from accelerators.interface import Accelerator
from accelerators.registry import FROM_TORCH, Candidate, Factory, Registration, Registry, named_by_torch
from accelerators.selection import Request, check, choose, choose_index, parse_request, requested_by

logger = logging.getLogger("accelerators")

FactoryType = TypeVar("FactoryType", bound=Factory)


@dataclass(frozen=True)
class Selected:
    """An accelerator, and why it was chosen."""

    accelerator: Accelerator
    name: str  # that it is registered under
    why: str
    index_before: int | None = None  # the current device before the choice made another one current

    def is_what(self, wanted: str | Accelerator) -> bool:
        """Whether choosing `wanted` would change nothing."""
        if isinstance(wanted, Accelerator):
            return wanted is self.accelerator
        request = parse_request(wanted, f"accelerators.use({wanted!r})")
        return request is not None and request.name == self.name and request.index in (None, self.accelerator.current_index())


class Selection:
    """The choice of a process. It is made once and kept, so that all code gets the same answer."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.chosen: Selected | None = None

    def current(self) -> Selected:
        if self.chosen is None:
            request = requested_by(os.environ)
            if request is None:
                self.chosen = self._take_best()
            else:
                self.chosen = self._take_requested(request)
        return self.chosen

    def use(self, wanted: str | Accelerator) -> Selected:
        if self.chosen is not None and not self.chosen.is_what(wanted):
            raise ValueError(
                f"Cannot use {wanted!r}: this process already uses {self.chosen.name} ({self.chosen.why}). "
                "Call accelerators.use() before anything else asks for the accelerator."
            )
        if self.chosen is None:
            self.chosen = self._take_wanted(wanted)
        return self.chosen

    @contextlib.contextmanager
    def using(self, wanted: str | Accelerator) -> Iterator[Selected]:
        before = self.chosen
        self.chosen = inside = self._take_wanted(wanted)
        try:
            yield inside
        finally:
            self.chosen = before
            if inside.index_before is not None:
                inside.accelerator.set_index(inside.index_before)

    def _take_best(self) -> Selected:
        best, named = choose(self.registry), named_by_torch()
        if named is not None and best.name == named and best.origin == FROM_TORCH:
            return self._take(best, None, "the accelerator that torch names")
        taken = self._take(best, None, "the usable one of highest priority")
        if named is not None and taken.accelerator.name == "cpu":
            other = self.registry.find(named)
            reason = other.reason or "it is taken on request only"
            logger.warning(
                "Accelerator %s is used although torch names %s: %s. Set ACCELERATOR=%s to use that one, or ACCELERATOR=%s.",
                *(taken.name, named, reason, named, taken.name),
            )
        return taken

    def _take_wanted(self, wanted: str | Accelerator) -> Selected:
        if isinstance(wanted, str):
            request = parse_request(wanted, f"accelerators.use({wanted!r})")
            if request is None:
                raise ValueError(f"Cannot use {wanted!r}: it names no accelerator. Pass a name such as 'cpu'.")
            return self._take_requested(request)
        if not isinstance(wanted, Accelerator):
            raise TypeError(f"Cannot use {wanted!r}: it is a {type(wanted).__name__}. Pass the name of an accelerator.")
        reason = wanted.unavailable_reason()
        if reason is not None:
            raise ValueError(f"Cannot use {wanted!r}: {reason}. Make it available, or use another accelerator.")
        return Selected(wanted, wanted.name, "an object passed to accelerators.use")

    def _take_requested(self, request: Request) -> Selected:
        candidate = self.registry.find(request.name, request.asked)
        check(candidate, request)
        return self._take(candidate, request, request.asked)

    def _take(self, candidate: Candidate, request: Request | None, why: str) -> Selected:
        accelerator = candidate.accelerator
        index_before = None
        index = choose_index(request, os.environ, accelerator.device_count())
        if index is not None:
            index_before = accelerator.current_index()
            accelerator.set_index(index)  # before anything is allocated, or it would land on device 0 of every rank
        logger.info("Accelerator %s: %s", candidate.name, why)
        return Selected(accelerator, candidate.name, why, index_before)


_choice = Selection(Registry(BUILT_IN))


def current() -> Accelerator:
    """The accelerator of this process, chosen at the first call."""
    return _choice.current().accelerator


def use(wanted: str | Accelerator) -> Accelerator:
    """Chooses an accelerator by name (`"cuda:1"`) or object. Raises when the process has already chosen another one."""
    return _choice.use(wanted).accelerator


@contextlib.contextmanager
def using(wanted: str | Accelerator) -> Iterator[Accelerator]:
    """Uses another accelerator inside a `with`; for tests and tools."""
    with _choice.using(wanted) as inside:
        yield inside.accelerator


def get(name: str) -> Accelerator:
    """Returns the accelerator of that name, usable or not, without choosing it."""
    request = parse_request(_text(name, "accelerators.get"), f"accelerators.get({name!r})")
    if request is None or request.index is not None:
        raise ValueError(f"Cannot get accelerator {name!r}: that is not a plain name. Pass one such as 'cpu'.")
    return _choice.registry.find(request.name).accelerator


def candidates() -> list[Candidate]:
    """Every accelerator known here, highest priority first, with why it can or cannot be used."""
    return list(_choice.registry)


def chosen() -> Selected:
    """Returns the current accelerator, the name it is registered under, and why it was chosen."""
    return _choice.current()


@overload
def register(name: str, factory: Factory | str, *, priority: int = 50) -> Factory | str: ...
@overload
def register(name: str, *, priority: int = 50) -> Callable[[FactoryType], FactoryType]: ...
def register(name: str, factory: Factory | str | None = None, *, priority: int = 50) -> object:
    """Adds an accelerator: `register("mydev", MyDevice)`, with `"package.module:Class"`, or as a class decorator."""
    if factory is None:

        def decorate(decorated: FactoryType) -> FactoryType:
            register(name, decorated, priority=priority)
            return decorated

        return decorate
    clean = _text(name, "accelerators.register").strip().lower()
    if not isinstance(priority, int):
        raise TypeError(f"Cannot register {clean} with priority {priority!r}: it is not an int. Pass an int.")
    if not isinstance(factory, str) and not callable(factory):
        raise TypeError(f"Cannot register {factory!r} as {clean}: it cannot be called. Pass a class.")
    where = factory if isinstance(factory, str) else f"{factory.__module__}.{getattr(factory, '__qualname__', repr(factory))}"
    _choice.registry.add(Registration(clean, factory, priority, origin=f"accelerators.register ({where})"))
    return factory


def _text(name: object, function: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"Cannot call {function}({name!r}): a name is not a {type(name).__name__}. Pass a str.")
    return name
