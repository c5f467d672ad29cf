"""`torch.sim`: the full face of a device module, less what was taken away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from accelerators_sim.current import current_device, current_lane, enter_lane, generators, leave_lane, set_current_device
from accelerators_sim.lanes import lanes
from accelerators_sim.settings import settings
from accelerators_sim.storage import accounts
from accelerators_sim.streams import (
    Event,
    Stream,
    device_index,
    lane_of,
    stream_of,
    synchronize_device,
)
from accelerators_sim.torch_private import NAME


def _account(device: Any) -> Any:
    return accounts[device_index(device)]


# devices


def device_count() -> int:
    return settings.devices


def set_device(device: Any) -> None:
    index = device_index(device)
    if not 0 <= index < settings.devices:
        raise RuntimeError(
            f"Cannot use device {NAME}:{index}: there are {settings.devices}. Use 0 to {settings.devices - 1}."
        )
    set_current_device(index)


class device:
    """Makes a device the current one of this thread for the length of a `with`."""

    def __init__(self, device: Any) -> None:
        self.index = device_index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *error: object) -> None:
        set_current_device(self.before)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="simulated device", total_memory=settings.memory_bytes, index=device_index(device))


def synchronize(device: Any = None) -> None:
    synchronize_device(device_index(device))


# streams


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    lane = stream.lane
    before = enter_lane(lane)  # kept here and not by the stream, which several threads may enter at a time
    try:
        with device(stream.device):
            yield
    finally:
        leave_lane(lane.index, before)


def current_stream(device: Any = None) -> Stream:
    return stream_of(current_lane(device_index(device)))


def default_stream(device: Any = None) -> Stream:
    return stream_of(lanes.default(device_index(device)))


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        enter_lane(lane_of(stream))


# memory


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return settings.memory_bytes - _account(device).allocated, settings.memory_bytes


def memory_allocated(device: Any = None) -> int:
    return int(_account(device).allocated)


def max_memory_allocated(device: Any = None) -> int:
    return int(_account(device).peak)


def reset_peak_memory_stats(device: Any = None) -> None:
    account = _account(device)
    account.peak = account.allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    account = _account(device)
    return {"allocated_bytes.all.current": account.allocated, "allocated_bytes.all.peak": account.peak}


def empty_cache() -> None:
    """Waits for the device, as the driver does before it takes memory back; nothing is kept for later. What the program knows
    to be done is no more than before."""
    lanes.run_all(current_device())


# numbers


def manual_seed(seed: int) -> None:
    generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return generators[current_device()].initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return generators[device_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    generators[device_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(generators, new_states, strict=True):
        generator.set_state(state)


def is_bf16_supported() -> bool:
    return not settings.lacks("bf16")


def get_amp_supported_dtype() -> list[torch.dtype]:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return [dtype for capability, dtype in kinds.items() if not settings.lacks(capability)]


_ALWAYS: dict[str, Any] = {
    "device": device,
    "device_count": device_count,
    "current_device": current_device,
    "set_device": set_device,
    "get_device_name": lambda device=None: "simulated device",
    "get_device_properties": get_device_properties,
    "empty_cache": empty_cache,
    "get_amp_supported_dtype": get_amp_supported_dtype,
    "is_available": lambda: True,
    "is_bf16_supported": is_bf16_supported,
    "is_initialized": lambda: True,
    "_is_in_bad_fork": lambda: False,  # the memory is the host's, which a fork copies
    "manual_seed_all": manual_seed_all,  # torch.manual_seed warns about a device without it
}

_BY_CAPABILITY: dict[str, dict[str, Any]] = {
    "streams": {
        "Stream": Stream,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
    },
    "events": {"Event": Event},
    "synchronize": {"synchronize": synchronize},
    "memory_figures": {
        "mem_get_info": mem_get_info,
        "memory_allocated": memory_allocated,
        "max_memory_allocated": max_memory_allocated,
        "memory_reserved": memory_allocated,
        "max_memory_reserved": max_memory_allocated,
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": reset_peak_memory_stats,
    },
    "rng": {
        "manual_seed": manual_seed,
        "initial_seed": initial_seed,
        "get_rng_state": get_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
    },
}

_CAPABILITY_OF: dict[str, str] = {name: capability for capability, names in _BY_CAPABILITY.items() for name in names}


class DeviceModule(ModuleType):
    """Looks each name up when it is used, so that what is taken away is absent meanwhile."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _ALWAYS:
            function: Callable[..., Any] = _ALWAYS[name]
            return function
        capability = _CAPABILITY_OF.get(name)
        if capability is None or settings.lacks(capability):
            why = f" (SIM_WITHOUT={capability})" if capability else ""
            raise AttributeError(f"module 'torch.{NAME}' has no attribute '{name}'{why}")
        wanted: Callable[..., Any] = _BY_CAPABILITY[capability][name]
        return wanted

    def __dir__(self) -> list[str]:
        present = [name for name, capability in _CAPABILITY_OF.items() if not settings.lacks(capability)]
        return sorted({*super().__dir__(), *_ALWAYS, *present})
