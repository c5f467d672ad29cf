"""The choice of this process's accelerator: made once, by fixed rules, from a table of those that are known.

1. `accelerators.use("xpu:1")` in the program wins. What it names must work, or it raises with the reason.
2. Else ACCELERATOR=xpu in the environment. It must work, too.
3. Else the usable one of highest priority is taken: cuda 400, xpu 300, the plug-ins of the table 250, mps 200, what installed
   packages offer 40, another device that torch names 20, cpu 0, which always works.
4. The device of that type: the index that was asked for; else the launcher's LOCAL_RANK.

A name comes to an accelerator in four steps, each a class. A `Registration` is a record of the table, and imports nothing. A
`Candidate` tries it when it is first asked about, and keeps the result, a `Trial`: an accelerator, or the reason why there is
none. What `Selection` takes is `Selected`, with the reason for the choice.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata, util
from typing import TypeVar, overload

import torch

from accelerators.interface import Accelerator
from accelerators.launch import whole_number

logger = logging.getLogger("accelerators")

Factory = Callable[[], Accelerator]
FactoryType = TypeVar("FactoryType", bound=Factory)
FindEntryPoints = Callable[..., Iterable[metadata.EntryPoint]]

# the table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registration:
    """An entry of the table. Nothing of the accelerator is imported before it is first asked about."""

    name: str
    factory: Factory | str  # a class, a function without arguments, or "package.module:Class"
    priority: int = 50  # the highest usable one is taken unasked; below cpu's 0: on request only
    origin: str = "built in"  # where it was registered, for messages
    needs: str | None = None  # a top-level module that it needs, which is looked for and not imported

    def create(self) -> Accelerator:
        factory = pkgutil.resolve_name(self.factory) if isinstance(self.factory, str) else self.factory
        accelerator = factory()
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"its factory gave a {type(accelerator).__name__}, not an accelerators.Accelerator")
        return accelerator

    def is_same_as(self, other: Registration) -> bool:
        """Returns True if registering the other one would change nothing."""
        factory, other_factory = self.factory, other.factory
        if isinstance(factory, str) != isinstance(other_factory, str):
            factory, other_factory = _import_path(factory), _import_path(other_factory)
        return factory == other_factory and self.priority == other.priority


@dataclass(frozen=True)
class KnownPlugin:
    """The facts about a plug-in's device that torch cannot tell."""

    name: str  # torch's name of the device type
    plugin: str  # the module that adds the device to torch when it is imported
    communication_backend: str
    visible_devices_variable: str
    compile_backend: str = "inductor"
    priority: int = 250  # above mps and cpu, below what torch has built in

    def registration(self) -> Registration:
        needs = self.plugin.partition(".")[0]
        return Registration(self.name, partial(PluginAccelerator, self), self.priority, needs=needs)


class PluginAccelerator(Accelerator):
    """A device of the table below. Making one imports its plug-in.

    That a plug-in can be imported does not say that there is a device: the answers are those of torch after the import.
    """

    def __init__(self, known: KnownPlugin) -> None:
        import_module(known.plugin)
        super().__init__(known.name)
        self.communication_backend = known.communication_backend
        self.visible_devices_variable = known.visible_devices_variable
        self.compile_backend = known.compile_backend


KNOWN_PLUGINS = (
    KnownPlugin("npu", "torch_npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    KnownPlugin("hpu", "habana_frameworks.torch.core", "hccl", "HABANA_VISIBLE_MODULES", compile_backend="hpu_backend"),
    KnownPlugin("mlu", "torch_mlu", "cncl", "MLU_VISIBLE_DEVICES"),
    KnownPlugin("musa", "torch_musa", "mccl", "MUSA_VISIBLE_DEVICES"),
    KnownPlugin("gcu", "torch_gcu", "eccl", "TOPS_VISIBLE_DEVICES", compile_backend="topsgraph"),
    KnownPlugin("sdaa", "torch_sdaa", "tccl", "SDAA_VISIBLE_DEVICES"),
    # This device also answers as cuda, but its own name is the better choice, so its priority is above cuda's.
    KnownPlugin("supa", "torch_supa", "bccl", "SUPA_VISIBLE_DEVICES", priority=450),
)

BUILT_IN = (
    Registration("cuda", "accelerators.backends.cuda:CudaAccelerator", priority=400),
    Registration("xpu", "accelerators.backends.xpu:XpuAccelerator", priority=300),
    Registration("mps", "accelerators.backends.mps:MpsAccelerator", priority=200),
    Registration("cpu", "accelerators.backends.cpu:CpuAccelerator", priority=0),
    *(plugin.registration() for plugin in KNOWN_PLUGINS),
)

# The groups in which an installed package offers its accelerator, each with its priority: to be taken unasked, or on request.
ENTRY_POINT_GROUPS = {"accelerators": 40, "accelerators.on_request": -1}

FROM_TORCH = "torch"  # the origin of a device that torch knows and nobody registered
_FROM_TORCH_PRIORITY = 20  # above the CPU, and below everything that is registered to be taken unasked


# what a program calls -------------------------------------------------------------------------------------------------


def current() -> Accelerator:
    """Returns the accelerator of this process, which is chosen at the first call."""
    return _choice.current().accelerator


def use(wanted: str | Accelerator) -> Accelerator:
    """Chooses an accelerator by name (`"cuda:1"`) or object. Raises if the process has already chosen another one."""
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


def of(device: torch.device) -> Accelerator:
    """Returns the accelerator of a tensor's device: the one that was chosen if it is of that type, however it is registered,
    else the one that has torch's name for it."""
    chosen = _choice.chosen
    if chosen is not None and chosen.accelerator.name == device.type:
        return chosen.accelerator
    return get(device.type)


def candidates() -> list[Candidate]:
    """Lists every accelerator known here, highest priority first, with why it can or cannot be used."""
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


# the rules ------------------------------------------------------------------------------------------------------------


class Selection:
    """The choice of a process. It is made once and kept, so that all code gets the same accelerator."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.chosen: Selected | None = None

    def current(self) -> Selected:
        if self.chosen is None:  # nobody called `use`, which is rule 1
            request = requested_by(os.environ)
            if request is None:
                self.chosen = self._take_best()
            else:
                self.chosen = self._take_requested(request)
        return self.chosen

    def use(self, wanted: str | Accelerator) -> Selected:
        if self.chosen is not None and not self.chosen.matches(wanted):
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
        """Takes what rule 3 finds. If torch names a device and the CPU is taken all the same, a warning says why."""
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
        """Takes what rule 1 or 2 asks for, or raises with the reason."""
        candidate = self.registry.find(request.name, request.asked)
        if candidate.reason is not None:
            raise ValueError(
                f"Cannot use {request.asked}: {candidate.reason}. "
                "Install what it needs, or use another: python -m accelerators shows which work here."
            ) from candidate.trial.cause
        return self._take(candidate, request, request.asked)

    def _take(self, candidate: Candidate, request: Request | None, why: str) -> Selected:
        """Takes a candidate, and makes the device of rule 4 the current one."""
        accelerator = candidate.accelerator
        index_before = None
        index = choose_index(request, os.environ, accelerator.device_count())
        if index is not None:
            index_before = accelerator.current_index()
            accelerator.set_index(index)  # done before anything is allocated, or it would land on device 0 of every rank
        logger.info("Accelerator %s: %s", candidate.name, why)
        return Selected(accelerator, candidate.name, why, index_before)


@dataclass(frozen=True)
class Selected:
    """An accelerator, and why it was chosen."""

    accelerator: Accelerator
    name: str  # its name in the registry
    why: str
    index_before: int | None = None  # the device that was current before the choice

    def matches(self, wanted: str | Accelerator) -> bool:
        """Returns True if choosing `wanted` would change nothing."""
        if isinstance(wanted, Accelerator):
            return wanted is self.accelerator
        request = parse_request(wanted, f"accelerators.use({wanted!r})")
        return request is not None and request.name == self.name and request.index in (None, self.accelerator.current_index())


@dataclass(frozen=True)
class Request:
    """The accelerator that the user asked for, and in which words, so that an error can repeat them."""

    name: str
    index: int | None
    asked: str


def parse_request(text: str, asked: str) -> Request | None:
    """Reads `" CUDA:1 "` as cuda and 1. Returns None if the text is empty."""
    name, colon, index = (part.strip() for part in text.lower().partition(":"))
    if not name and not colon:
        return None
    if not name or (colon and not index.isdecimal()):
        raise ValueError(f"Cannot use {asked}: it is neither a name nor name:index. Write it like cuda or cuda:1.")
    return Request(name, int(index) if colon else None, asked)


def requested_by(environment: Mapping[str, str]) -> Request | None:
    """Reads ACCELERATOR, or DS_ACCELERATOR if that is unset or empty."""
    for variable in ("ACCELERATOR", "DS_ACCELERATOR"):
        request = parse_request(environment.get(variable, ""), f"{variable}={environment.get(variable, '')}")
        if request is not None:
            return request
    return None


def choose(candidates: Iterable[Candidate]) -> Candidate:
    """Returns the first usable candidate. They are in the order of priority, and the CPU is always usable."""
    usable: list[Candidate] = []
    for candidate in candidates:
        if usable and candidate.priority < usable[0].priority:
            break  # a candidate from here on cannot win, so it is not tried
        if candidate.usable:
            usable.append(candidate)
    if len(usable) > 1:
        names = ", ".join(candidate.name for candidate in usable)
        logger.info("Accelerators %s have the same priority; %s is taken. Set ACCELERATOR to choose.", names, usable[0].name)
    return usable[0]


def choose_index(request: Request | None, environment: Mapping[str, str], device_count: int) -> int | None:
    """Returns the index of the device that this process should use; None leaves the current one as it is.

    An index that the user names wins, then the launcher's LOCAL_RANK. If the launcher shows each rank one device of its own,
    its index is 0 on every rank.
    """
    if request is not None and request.index is not None:
        if request.index >= device_count:
            visible = f"{device_count} {request.name} {'is' if device_count == 1 else 'are'} visible here"
            raise ValueError(
                f"Cannot use {request.asked}: {visible}. "
                f"Use {request.name}:0{f' to {request.name}:{device_count - 1}' if device_count > 1 else ''}."
            )
        return request.index
    local_rank = whole_number(environment, "LOCAL_RANK")
    if local_rank is None:
        return None
    if device_count == 1:
        return 0
    if local_rank >= device_count:
        raise ValueError(
            f"Cannot use LOCAL_RANK={local_rank}: only {device_count} devices are visible here. "
            "Start one rank a device, or show each rank one device of its own."
        )
    return local_rank


# the candidates -------------------------------------------------------------------------------------------------------


class Registry:
    """The table of candidates: built-in ones, those registered by call, and those of installed packages."""

    def __init__(self, built_in: Iterable[Registration], find_entry_points: FindEntryPoints = metadata.entry_points) -> None:
        self._candidates = {registration.name: Candidate(registration) for registration in built_in}
        self._find_entry_points = find_entry_points
        self._entry_points_read = False

    def __iter__(self) -> Iterator[Candidate]:
        """Yields the candidates, highest priority first and equal ones by name: the order is the same on all ranks. The device
        that torch names is among them, even if nobody registered it."""
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
        """Returns the candidate of that name. If there is none, the error repeats `asked` and lists the known names."""
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
        self._entry_points_read = True  # set last: a thread that comes here meanwhile reads them as well, and misses none


class Candidate:
    """A registration, and the result of trying it. It is tried once, when it is first asked about."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self._trials: list[Trial] = []  # only the first one counts
        self._tried_by: set[int] = set()  # the threads that are trying it now

    def __repr__(self) -> str:
        status = (self.reason or "usable") if self._trials else "not tried yet"  # printing a list of candidates tries none
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
        """The reason why it cannot be used here, or None if it can."""
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
        # Two threads may both try, and both get the first result. A lock could be held while another thread forks, and stay
        # held in the child; cached_property has such a lock before Python 3.12.
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
        except KeyboardInterrupt:  # Ctrl-C says nothing about the accelerator
            raise
        # A plug-in is other people's code and may fail in any way: some call exit() when they are imported, and a panic of Rust
        # is no Exception. Its failure must not break anything else.
        except BaseException as error:
            logger.debug("Accelerator %s failed", self.name, exc_info=True)
            failed = "failed to load" if accelerator is None else "failed when asked whether it is available"
            return Trial(accelerator, f"it {failed}: {words_of(error)}", error)


@dataclass(frozen=True)
class Trial:
    """The result of trying a registration."""

    accelerator: Accelerator | None
    reason: str | None  # the reason for which it cannot be used; None if it can
    cause: BaseException | None = None


_AMD = "'cuda', by which torch calls AMD's devices too"
_KINDS_OF_DEVICES = {
    "gpu": "'cuda' (NVIDIA, AMD), 'xpu' (Intel) or 'mps' (Apple)", "nvidia": "'cuda'", "amd": _AMD, "rocm": _AMD, "hip": _AMD,
    "intel": "'xpu'", "apple": "'mps'", "metal": "'mps'",
}  # fmt: skip
# Accelerators of this project that are packages of their own, each with the command that installs it.
_PACKAGES = {"sim": "pip install zero-accelerators-sim (in a checkout of this project: pip install ./simulated)"}


def named_by_torch() -> str | None:
    """Returns the type of accelerator that torch says this machine has, or None if it has none, or says that it is unusable."""
    named = torch.accelerator.current_accelerator()
    if named is None:
        return None
    try:
        is_available = getattr(torch.get_device_module(named), "is_available", None)
    except RuntimeError:  # a device without a module is unusable, and its row says so
        return named.type
    return named.type if is_available is None or is_available() else None


def _of_torch(name: str) -> Registration:
    return Registration(name, partial(Accelerator, name), _FROM_TORCH_PRIORITY, FROM_TORCH)


def _torch_has_device(name: str) -> bool:
    """Returns True if torch knows the device by now: built in, or named by a plug-in that was imported."""
    try:
        torch.device(name)
        torch.get_device_module(name)
    except RuntimeError:
        return False
    return True


def _import_path(factory: Factory | str) -> str:
    if isinstance(factory, str):
        return factory
    return f"{factory.__module__}:{getattr(factory, '__qualname__', '')}"


def words_of(error: BaseException | None) -> str:
    """Returns the type and the text of a plug-in's error on one line, even if its own __str__ raises."""
    text = str(traceback.TracebackException(type(error), error, None))  # type: ignore[arg-type]
    return f"{type(error).__name__}: {plain(text)}"


def plain(text: str) -> str:
    """Returns a plug-in's words on one line, without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(text.split()))


_choice = Selection(Registry(BUILT_IN))
