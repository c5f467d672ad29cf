"""An adapter for objects with DeepSpeed's abstract accelerator interface, for vendors who have one.

    accelerators.register("chip")(lambda: adapt(ChipAccelerator()))

Nothing of DeepSpeed is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol

import torch

from accelerators.interface import Accelerator, logger
from accelerators.memory import MemoryReading
from accelerators.streams import Event, InOrderEvent, InOrderStream, Stream


class DeepSpeedAccelerator(Protocol):
    """The methods of DeepSpeed 0.19.8's interface that are called."""

    Stream: Any  # None if the device has no streams
    Event: Any

    def is_available(self) -> bool: ...
    def is_synchronized_device(self) -> bool: ...
    def device_name(self, device_index: int | None) -> str: ...
    def device_count(self) -> int: ...
    def current_device(self) -> Any: ...
    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...
    def stream(self, stream: Any) -> Any: ...
    def current_stream(self, device_index: int | None = None) -> Any: ...
    def total_memory(self, device_index: int | None = None) -> int | None: ...
    def available_memory(self, device_index: int | None = None) -> int | None: ...
    def memory_allocated(self, device_index: int | None = None) -> int | None: ...
    def max_memory_allocated(self, device_index: int | None = None) -> int | None: ...
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None: ...
    def empty_cache(self) -> None: ...
    def manual_seed_all(self, seed: int) -> Any: ...
    def get_rng_state(self, device_index: int | None = None) -> Any: ...
    def set_rng_state(self, new_state: Any, device_index: int | None = None) -> None: ...
    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def get_compile_backend(self) -> str | None: ...
    def visible_devices_envs(self) -> list[str]: ...


_NEEDED = [*sorted(name for name in vars(DeepSpeedAccelerator) if not name.startswith("_")), "Event", "Stream"]
_HOST = "cpu"


def adapt(accelerator: DeepSpeedAccelerator) -> Accelerator:
    """Returns an accelerator that calls this object. Raises TypeError for a class, or an object that lacks methods."""
    if isinstance(accelerator, type):
        raise TypeError(f"Cannot adapt the class {accelerator.__name__}: an object is asked. Pass {accelerator.__name__}().")
    lacking = [name for name in _NEEDED if getattr(type(accelerator), name, _NEEDED) is _NEEDED]
    if lacking:
        raise TypeError(
            f"Cannot adapt a {type(accelerator).__name__}: of DeepSpeed's accelerator interface it lacks {', '.join(lacking)}. "
            "Add them, or subclass accelerators.Accelerator, which needs a name alone."
        )
    return AdaptedAccelerator(accelerator)


class AdaptedAccelerator(Accelerator):
    """An accelerator that calls an object with DeepSpeed's interface. It computes in a dtype to find out whether that works, as
    every accelerator does."""

    def __init__(self, accelerator: DeepSpeedAccelerator) -> None:
        super().__init__(accelerator.device_name(None))
        self._theirs = accelerator
        self.compile_backend = accelerator.get_compile_backend() or type(self).compile_backend
        self.visible_devices_variable = next(iter(accelerator.visible_devices_envs() or ()), None)

    def __repr__(self) -> str:
        return f"adapt({self._theirs!r})"

    # which device ------------------------------------------------------------------------------------------------

    def unavailable_reason(self) -> str | None:
        kind = type(self._theirs).__name__
        if not self._theirs.is_available():
            return f"{kind}.is_available() is False"
        return None if self.device_count() else f"{kind} has 0 devices"

    def device_count(self) -> int:
        count = int(self._theirs.device_count())
        return min(count, 1) if self.name == _HOST else count  # DeepSpeed counts NUMA nodes; to torch the host is one device

    def device(self, index: int | None = None) -> torch.device:
        if self.name != _HOST:
            return super().device(index)
        self._index(index)  # raises if there is no such device
        return torch.device(_HOST)

    def current_index(self) -> int:
        if self.name == _HOST:
            return 0
        current = self._theirs.current_device()
        if isinstance(current, (str, torch.device)) and not str(current).isdecimal():
            return torch.device(current).index or 0
        return int(current or 0)

    def set_index(self, index: int) -> None:
        index = self._check_index(index)
        if self.name != _HOST:
            self._theirs.set_device(index)

    # memory ------------------------------------------------------------------------------------------------------

    def read_memory(self, index: int) -> MemoryReading:
        accelerator = self._theirs
        return MemoryReading(
            total=_figure(accelerator.total_memory(index)),
            available=_figure(accelerator.available_memory(index)),
            allocated=_figure(accelerator.memory_allocated(index)),
            # DeepSpeed's peak of the host is the most that it happened to see, and no high-water mark.
            peak=None if self.name == _HOST else _figure(accelerator.max_memory_allocated(index)),
        )

    def reset_peak_memory(self, index: int | None = None) -> None:
        self._theirs.reset_peak_memory_stats(self._index(index))

    def empty_cache(self) -> None:
        self._theirs.empty_cache()

    # order -------------------------------------------------------------------------------------------------------

    @property
    def is_synchronous(self) -> bool:
        return bool(self._theirs.is_synchronized_device())

    def synchronize(self, index: int | None = None) -> None:
        self._theirs.synchronize(self._index(index))

    @cached_property
    def _has_streams(self) -> bool:
        return self._theirs.Stream is not None and self._theirs.Event is not None

    def new_stream(self, index: int | None = None) -> Stream:
        if not self._has_streams:
            return self._in_order_stream(self._index(index))
        stream: Stream = self._theirs.Stream(device=self.device(index))
        return stream

    def current_stream(self, index: int | None = None) -> Stream:
        if not self._has_streams:
            return self._in_order_stream(self._index(index))
        stream: Stream = self._theirs.current_stream(self._index(index))
        return stream

    def new_event(self, timing: bool = False) -> Event:
        if not self._has_streams:
            return InOrderEvent(self.synchronize)
        event: Event = self._theirs.Event(enable_timing=timing)
        return event

    @contextlib.contextmanager
    def in_stream(self, stream: Stream) -> Iterator[Stream]:
        if isinstance(stream, InOrderStream):
            yield stream
        else:
            with self._theirs.stream(stream):
                yield stream

    # numbers and host memory -------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._theirs.manual_seed_all(seed)

    def rng_state(self, index: int | None = None) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.name != _HOST:
            states[self.name] = self._theirs.get_rng_state(self._index(index))
        return states

    def set_rng_state(self, states: dict[str, torch.Tensor], index: int | None = None) -> None:
        torch.set_rng_state(states["cpu"])
        if self.name != _HOST and self.name in states:
            self._theirs.set_rng_state(states[self.name], self._index(index))

    @cached_property
    def can_pin(self) -> bool:
        try:
            return bool(self._theirs.pin_memory(torch.empty(1)).is_pinned())
        except RuntimeError as error:
            logger.warning("Host memory cannot be pinned for %s, pageable memory serves instead: %s", self.name, error)
            return False


def _figure(num_bytes: int | None) -> int | None:
    """Returns a figure as an int, as some objects give a float; None if it is unknown."""
    return None if num_bytes is None else int(num_bytes)
