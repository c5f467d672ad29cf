"""Whether a device needs the staged group, and its registration with torch."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import torch.distributed as dist

from accelerators.staged.device import StagedDevice

logger = logging.getLogger("accelerators")

NAME = "staged"
_NO_DEVICES = ("undefined", "fake", "mpi", "ucc", NAME)  # they name device types that they may not carry
_names = {NAME}  # of backends whose groups are staged ones
_served: dict[str, StagedDevice] = {}


def backend_for(device: StagedDevice) -> str:
    """The backend of torch.distributed that carries tensors of this device: its own where one is registered, else "staged"."""
    if not dist.is_available():
        return "none"
    backend = own_backend(device.name)
    if backend is None:
        serve(device)
    return backend or NAME


def own_backend(device_type: str) -> str | None:
    """What torch, or a plug-in that was imported, has for this type of device."""
    capability: dict[str, list[str]] = dist.Backend.backend_capability
    usual: str | None = dist.Backend.default_device_backend_map.get(device_type)
    for name in sorted(capability, key=lambda name: name != usual):
        if device_type in capability[name] and name not in _NO_DEVICES and dist.is_backend_available(name):
            return str(name)
    return None


def serve(device: StagedDevice) -> None:
    """Makes torch.distributed know "staged" for this device."""
    if device.name not in _served:
        logger.info(
            "Collectives of %s go through the host (%s): torch.distributed has no backend for that device", device.name, NAME
        )
    _served[device.name] = device
    if NAME not in dist.Backend.backend_capability:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", device.name])
    elif device.name not in dist.Backend.backend_capability[NAME]:
        dist.Backend.backend_capability[NAME].append(device.name)


def is_staged(backend: str) -> bool:
    """Whether groups of this backend are staged ones, so that the host waits for them."""
    return backend in _names


def add_name(backend: str) -> None:
    """Another backend whose groups are staged ones."""
    _names.add(backend)


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    from accelerators.staged.group import StagedGroup

    return StagedGroup(store, rank, size, timeout, _served)
