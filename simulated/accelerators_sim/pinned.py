"""Pinned host memory, and the host's own part in races.

Torch lets no Python device say how host memory is pinned, so the host's kernels for `is_pinned`, `pin_memory` and
`empty(pin_memory=True)` are exchanged: pinned memory is ordinary memory that carries a mark.

[Note: how the host is seen] While memory is pinned, every operator of a thread that used the device passes a dispatch key that
torch keeps free, autograd threads included. Operators on memory that a copy may still use are checked. Making a NumPy
array or a list of it counts as reading. Not seen: an array made earlier, threads that never used the device, and what C++
reads bare.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch

from accelerators_sim import torch_private
from accelerators_sim.lanes import HOST_NUMBER, host, lanes
from accelerators_sim.plans import plan_of
from accelerators_sim.race import History, byte_range
from accelerators_sim.settings import settings
from accelerators_sim.torch_private import WATCH_KEY
from accelerators_sim.waits import is_carrying

# Host operators that neither read nor write their arguments. They pass by the watch, as torch makes tensors of its own with
# them, which must not become Python objects on the way.
_TOUCH_NOTHING = (
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "detach_", "empty_like", "expand",
    "expand_as", "flatten", "full_like", "is_pinned", "is_same_size", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "permute", "rand_like", "randn_like",
    "record_stream", "select", "set_", "size", "slice", "split", "split_with_sizes", "squeeze", "stride", "t", "transpose",
    "unbind", "unfold", "unsqueeze", "view", "view_as", "zeros_like",
)  # fmt: skip


# The last operators that run before numpy() and tolist() take the memory.
_READ_BARE = ("aten::resolve_conj", "aten::resolve_neg")


class _Watched:
    """Host memory that copies may use late, by address."""

    def __init__(self) -> None:
        self.alive = 0  # the number of pinned allocations; while there are any, threads are watched
        self.in_flight: dict[int, History] = {}
        self.host_version = 0
        self.registered: Any = None


class _Thread(threading.local):
    watched = False


_watched = _Watched()
_thread = _Thread()


class _Mark:
    """Tells when pinned memory goes."""

    __slots__ = ("address", "history")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.history = History(storage.nbytes(), HOST_NUMBER)
        self.address = storage.data_ptr()
        _watched.alive += 1

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        _watched.alive -= 1
        _watched.in_flight.pop(self.address, None)  # the address may be another tensor's next


def num_alive() -> int:
    """Returns how many pieces of pinned memory there are now."""
    return _watched.alive


def _mark_of(tensor: torch.Tensor) -> _Mark | None:
    mark: _Mark | None = getattr(tensor.untyped_storage(), "_sim_pinned", None)
    return mark


def mark(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes() and getattr(storage, "_sim_pinned", None) is None:
        storage._sim_pinned = _Mark(storage)  # type: ignore[attr-defined]
    watch_this_thread()
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return _mark_of(tensor) is not None


def watch(tensor: torch.Tensor, non_blocking: bool) -> History | None:
    """Returns the past of host memory that a copy is about to use, if copies of it may be put off."""
    if settings.strict and non_blocking:
        mark(tensor)
    pinned_mark = _mark_of(tensor)
    return None if pinned_mark is None else pinned_mark.history


def mark_in_flight(tensor: torch.Tensor) -> None:
    """Notes that a copy of this host memory was put off: from now on the host's own uses of it are checked."""
    pinned_mark = _mark_of(tensor)
    if pinned_mark is not None and settings.races:
        _watched.in_flight[tensor.untyped_storage().data_ptr()] = pinned_mark.history
    watch_this_thread()


def watch_this_thread() -> None:
    if not _thread.watched and settings.races and _watched.alive:
        if _watched.registered is None:
            _watched.registered = _register_watch()
        _thread.watched = True
        torch_private.include_key(WATCH_KEY, True)


# the host's own operators --------------------------------------------------------------------------------------------

_composite: dict[Any, bool] = {}


def watch_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs before every operator of a watched thread."""
    if not _watched.in_flight or not settings.races:
        if not _watched.alive:
            _thread.watched = False
            torch_private.include_key(WATCH_KEY, False)
        with torch_private.excluding(WATCH_KEY):
            return op(*args, **kwargs)
    if _watched.host_version != host.version:
        _watched.host_version = host.version
        _forget_done()
    composite = _composite.get(op)
    if composite is None:
        composite = torch_private.is_composite(op.name()) and op._schema.name not in _READ_BARE
        _composite[op] = composite
    touched = _in_flight(op, args, kwargs)
    if not composite:
        for tensor, written in touched:
            check_host_use(tensor, written, op._schema.name)
    with torch_private.excluding(WATCH_KEY):
        result = op(*args, **kwargs)
    if touched and composite:
        # A composite operator may have been a mere view: reshape, to and contiguous read only if they had to copy.
        made = {tensor.untyped_storage().data_ptr() for tensor in _tensors(result)}
        for tensor, written in touched:
            if written or _address(tensor) not in made:
                check_host_use(tensor, written, op._schema.name)
    return result


def _in_flight(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """Returns the host tensors, among an operator's arguments, that a copy may still use, and whether it writes them."""
    plan = plan_of(op)
    tensors = [(item, index in plan.writes) for index, value in enumerate(args) for item in _tensors(value)]
    tensors += [(item, name in plan.writes_names) for name, value in kwargs.items() for item in _tensors(value)]
    if any(tensor.device.type == torch_private.NAME for tensor, _ in tensors):
        return []  # the device's own kernel orders it
    return [(tensor, written) for tensor, written in tensors if _address(tensor) in _watched.in_flight]


def check_host_use(tensor: torch.Tensor, written: bool, operator: str) -> None:
    """Raises if the host now reads or writes memory that a copy may still write or read."""
    history = _watched.in_flight.get(_address(tensor)) if _watched.in_flight else None
    if history is not None and tensor.numel():
        history.check(*byte_range(tensor), written, host.access(operator))


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # a wrapper of torch.func, or another subclass without memory; the wrapped tensor comes by itself


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def _forget_done() -> None:
    # Work that the host waited for is no longer in flight. Another thread may find the same, and memory may go meanwhile.
    known = host.clock
    for address, history in list(_watched.in_flight.items()):
        is_done = all(known.get(access.number, 0) >= access.count for access, _ in history.accesses())
        if is_done and _watched.in_flight.get(address) is history:  # by now, the address may be another tensor's
            _watched.in_flight.pop(address, None)


# the exchanged kernels -----------------------------------------------------------------------------------------------


def _register_watch() -> Any:
    # Done at the first pinned memory, as three thousand operators take 0.2 s. Each has a kernel of its own, because torch finds
    # no Python fallback while a dispatch mode is on, such as those of torch.compile.
    library = torch_private.new_library("aten")
    for op in torch_private.operators(lambda name: name.removeprefix("aten::").partition(".")[0] not in _TOUCH_NOTHING):
        library.impl(torch_private.registered_name(op), functools.partial(watch_host, op), WATCH_KEY)
    return library


def _wait_for_driver() -> None:
    """Waits as a driver does that takes memory. Threads of a group stand for the device itself, and wait for nothing."""
    if not is_carrying():
        lanes.run_blocked()


def register(library: Any, fallbacks: Any) -> None:
    host_empty = torch.library.get_kernel("aten::empty.memory_format", "CPU")
    host_strided = torch.library.get_kernel("aten::empty_strided", "CPU")

    def pinned_empty(size: Any, **options: Any) -> torch.Tensor:
        pin = options.get("pin_memory") and not settings.lacks("pin")
        if pin:
            options["pin_memory"] = False
            _wait_for_driver()
        made: torch.Tensor = host_empty.call_boxed(torch_private.CPU_KEYS, size, **options)
        return mark(made) if pin else made

    def pinned_strided(size: Any, stride: Any, **options: Any) -> torch.Tensor:
        pin = options.get("pin_memory") and not settings.lacks("pin")
        if pin:
            options["pin_memory"] = False
            _wait_for_driver()
        made: torch.Tensor = host_strided.call_boxed(torch_private.CPU_KEYS, size, stride, **options)
        return mark(made) if pin else made

    def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        made = torch.empty_like(tensor, pin_memory=True, memory_format=torch.contiguous_format)
        return made.copy_(tensor)

    library.impl("empty.memory_format", pinned_empty, "CPU", allow_override=True)
    library.impl("empty_strided", pinned_strided, "CPU", allow_override=True)
    library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU", allow_override=True)
    library.impl("_pin_memory", pin_memory, "CPU", allow_override=True)
    fallbacks.fallback(torch.library.fallthrough_kernel, WATCH_KEY)
