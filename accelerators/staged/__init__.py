"""Collectives for devices that torch.distributed has no backend for: through the host, over gloo.

    torch.distributed.init_process_group(accelerators.current().communication_backend)

An accelerator without collectives of its own names this backend, "staged". Each collective is cut into chunks. A chunk is
copied to pinned host memory on a stream of the group, sent by gloo, and copied back on another one. While one chunk is on the
wire, the next one is copied out and the previous one is copied in. Where the device has no pinned memory, pageable memory
serves; where it has no streams, its one queue keeps the order.

This module finds out whether a device needs it, and registers it with torch. group.py is the process group, and pipeline.py has
what it sends through the host.
"""

from __future__ import annotations

import datetime
import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:  # or a torch without torch.distributed could not be asked
    from accelerators.staged.pipeline import StagedDevice

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
