"""Registered accelerators: records, and a table that imports them on first use."""

from __future__ import annotations

import difflib
import logging
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util

import torch

from accelerators.interface import Accelerator

logger = logging.getLogger("accelerators")

Factory = Callable[[], Accelerator]
FindEntryPoints = Callable[..., Iterable[metadata.EntryPoint]]

FROM_TORCH = "torch"  # the origin of a device that torch knows and that was not registered
_FROM_TORCH_PRIORITY = 20  # above the CPU, below what was registered

# An installed package offers its accelerator in one of these groups; which one says whether it may be taken unasked.
ENTRY_POINT_GROUPS = {"accelerators": 40, "accelerators.on_request": -1}


@dataclass(frozen=True)
class Registration:
    """An accelerator that can be used. Nothing of it is imported before it is first asked for."""

    name: str
    factory: Factory | str  # a class, a function without arguments, or "package.module:Class"
    priority: int = 50  # the usable one of highest priority is taken unasked; below cpu's 0: never unasked
    origin: str = "built in"  # where it was registered, for people
    needs: str | None = None  # a top-level module without which it cannot work; looked for, not imported

    def create(self) -> Accelerator:
        factory = pkgutil.resolve_name(self.factory) if isinstance(self.factory, str) else self.factory
        accelerator = factory()
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"its factory gave a {type(accelerator).__name__}, not an accelerators.Accelerator")
        return accelerator

    def is_same_as(self, other: Registration) -> bool:
        """True where registering the other one changes nothing."""
        factory, other_factory = self.factory, other.factory
        if isinstance(factory, str) != isinstance(other_factory, str):
            factory, other_factory = _import_path(factory), _import_path(other_factory)
        return factory == other_factory and self.priority == other.priority


@dataclass(frozen=True)
class Trial:
    """The result of trying a registration."""

    accelerator: Accelerator | None
    reason: str | None  # why it cannot be used
    cause: BaseException | None = None


class Candidate:
    """A registration and the result of trying it, which happens once, when it is first asked about."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self._trials: list[Trial] = []  # the first one counts
        self._tried_by: set[int] = set()  # threads that are trying it now

    def __repr__(self) -> str:
        status = (self.reason or "usable") if self._trials else "not tried yet"  # looking at a list of them tries none
        return f"Candidate({self.name!r}, priority={self.priority}, {status})"

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def priority(self) -> int:
        return self.registration.priority

    @property
    def origin(self) -> str:
        return self.registration.origin

    @property
    def usable(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it cannot be used here, or None when it can."""
        return self.trial.reason

    @property
    def accelerator(self) -> Accelerator:
        """The one object of this accelerator in the process, usable or not."""
        if self.trial.accelerator is None:
            raise ValueError(
                f"Cannot use accelerator {self.name}: {self.reason}. Install or repair what {self.origin} refers to, "
                "or use another: python -m accelerators shows which work here."
            ) from self.trial.cause
        return self.trial.accelerator

    @property
    def trial(self) -> Trial:
        # Two threads may both try; both leave with the first result. There is no lock that a fork could leave locked in the
        # child, as there would be in cached_property before Python 3.12.
        if self._trials:
            return self._trials[0]
        thread = threading.get_ident()
        if thread in self._tried_by:
            raise RuntimeError(
                f"Cannot choose the accelerator: whether {self.name} works is being tried at this moment. "
                "Ask for the accelerator in a method of it, not while it is imported or made."
            )
        self._tried_by.add(thread)
        try:
            self._trials.append(self._try())
        finally:
            self._tried_by.discard(thread)
        return self._trials[0]

    def _try(self) -> Trial:
        accelerator = None
        try:
            needs = self.registration.needs
            if needs is not None and needs not in sys.modules and util.find_spec(needs) is None:
                return Trial(None, f"{needs} is not installed")
            accelerator = self.registration.create()
            reason = accelerator.unavailable_reason()
            if reason is not None and not isinstance(reason, str):
                raise TypeError(f"unavailable_reason gave a {type(reason).__name__}, not a str or None")
            if reason is not None and not reason.strip():
                raise ValueError("unavailable_reason gave an empty text, which says neither that it works nor why not")
            return Trial(accelerator, None if reason is None else plain(reason))
        except KeyboardInterrupt:  # which is no failure
            raise
        # A plug-in is other people's code. It may fail in any way: some call exit() when they are imported, and a panic of Rust
        # is no Exception. None of that may break anything else.
        except BaseException as error:
            logger.debug("Accelerator %s failed", self.name, exc_info=True)
            failed = "failed to load" if accelerator is None else "failed when asked whether it is available"
            return Trial(accelerator, f"it {failed}: {words_of(error)}", error)


def words_of(error: BaseException | None) -> str:
    """Returns the kind and the text of a plug-in's error on one line; it may be one that fails to tell its text."""
    text = str(traceback.TracebackException(type(error), error, None))  # type: ignore[arg-type]
    return f"{type(error).__name__}: {plain(text)}"


def plain(text: str) -> str:
    """Returns a plug-in's words on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(text.split()))


_AMD = "'cuda', by which torch calls AMD's devices too"
_KINDS_OF_DEVICES = {
    "gpu": "'cuda' (NVIDIA, AMD), 'xpu' (Intel) or 'mps' (Apple)", "nvidia": "'cuda'", "amd": _AMD, "rocm": _AMD, "hip": _AMD,
    "intel": "'xpu'", "apple": "'mps'", "metal": "'mps'",
}  # fmt: skip
# Accelerators of this project in packages of their own, and what installs them.
_PACKAGES = {"sim": "pip install zero-accelerators-sim (in a checkout of this project: pip install ./simulated)"}


class Registry:
    """The table of candidates: built-in ones, those registered by call, and those of installed packages."""

    def __init__(self, built_in: Iterable[Registration], find_entry_points: FindEntryPoints = metadata.entry_points) -> None:
        self._candidates = {registration.name: Candidate(registration) for registration in built_in}
        self._find_entry_points = find_entry_points
        self._entry_points_read = False

    def __iter__(self) -> Iterator[Candidate]:
        """Every candidate, highest priority first; equal ones by name, so that the order is the same on all ranks. The device
        that torch names is among them, even if it is not registered."""
        self._read_entry_points()
        named = named_by_torch()
        if named is not None and named not in self._candidates:
            self.add(_of_torch(named))
        return iter(sorted(self._candidates.values(), key=lambda candidate: (-candidate.priority, candidate.name)))

    def add(self, registration: Registration) -> None:
        existing = self._candidates.get(registration.name)
        if not registration.name.isidentifier():
            raise ValueError(
                f"Cannot register accelerator '{registration.name}' from {registration.origin}: a name is one word. "
                "Use torch's name of the device."
            )
        if existing is None or existing.origin == FROM_TORCH:
            self._candidates[registration.name] = Candidate(registration)
        elif not existing.registration.is_same_as(registration):
            raise ValueError(
                f"Cannot register accelerator '{registration.name}' from {registration.origin}: that name is taken "
                f"({existing.origin}, priority {existing.priority}). Choose another, or remove one of the two."
            )

    def find(self, name: str, asked: str | None = None) -> Candidate:
        """The candidate of that name, or a ValueError that names the known ones and repeats the words that asked for it."""
        if name not in self._candidates:
            self._read_entry_points()
        if name not in self._candidates and _torch_has_device(name):
            self.add(_of_torch(name))
        if name not in self._candidates:
            near = difflib.get_close_matches(name, self._candidates, n=1, cutoff=0.6)
            hint = f" Did you mean '{near[0]}'?" if near else " Register your own with accelerators.register."
            known = ", ".join(sorted(self._candidates))
            if name in _KINDS_OF_DEVICES:
                raise ValueError(f"Cannot use {asked or name}: no device is called '{name}'. Use {_KINDS_OF_DEVICES[name]}.")
            if name in _PACKAGES and self._entry_points_read:
                raise ValueError(f"Cannot use {asked or name}: its package is not installed. Do: {_PACKAGES[name]}.")
            raise ValueError(f"Cannot use {asked or name}: no accelerator is named '{name}'. Use one of {known}.{hint}")
        return self._candidates[name]

    def _read_entry_points(self) -> None:
        if self._entry_points_read or os.environ.get("ACCELERATOR_AUTOLOAD", "1").strip() == "0":
            return
        for group, priority in ENTRY_POINT_GROUPS.items():
            for point in self._find_entry_points(group=group):
                package = point.dist.name if point.dist else None
                origin = f"entry point '{point.name}' of {package or 'an unknown package'}"
                try:
                    self.add(Registration(point.name.strip().lower(), point.value, priority, origin))
                except ValueError as error:
                    logger.warning("%s", error)
        self._entry_points_read = True  # last: a thread that comes here meanwhile reads them too, and misses none


def named_by_torch() -> str | None:
    """The type of accelerator that torch says this machine has; None where it has none, or says that it cannot be used."""
    named = torch.accelerator.current_accelerator()
    if named is None:
        return None
    try:
        is_available = getattr(torch.get_device_module(named), "is_available", None)
    except RuntimeError:  # without a module it cannot be used either, and then its row says why
        return named.type
    return named.type if is_available is None or is_available() else None


def _of_torch(name: str) -> Registration:
    return Registration(name, partial(Accelerator, name), _FROM_TORCH_PRIORITY, FROM_TORCH)


def _import_path(factory: Factory | str) -> str:
    if isinstance(factory, str):
        return factory
    return f"{factory.__module__}:{getattr(factory, '__qualname__', '')}"


def _torch_has_device(name: str) -> bool:
    """True for a device that torch knows by now, built in or renamed by a plug-in that somebody imported."""
    try:
        torch.device(name)
        torch.get_device_module(name)
    except RuntimeError:
        return False
    return True
