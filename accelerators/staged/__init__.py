"""Collectives for devices that torch.distributed has no backend for: through the host, over gloo.

    torch.distributed.init_process_group(accelerators.current().communication_backend)

An accelerator without collectives of its own names this backend, "staged". Each collective is cut into chunks. A chunk is
copied to pinned host memory on a stream of the group, sent by gloo, and copied back on another stream. While one chunk is on
the wire, the next one is copied out and the previous one is copied in. A device without pinned memory gets pageable memory; on
one without streams, its queue keeps the order.

This module finds out whether a device needs the backend, and registers it with torch. group.py is the process group: it says
what each collective reads, writes and asks of gloo. pipeline.py carries that out.
"""

from __future__ import annotations

import datetime
import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:  # it cannot be imported if torch has no torch.distributed
    from accelerators.staged.pipeline import StagedDevice

logger = logging.getLogger("accelerators")

NAME = "staged"
_NO_DEVICES = ("undefined", "fake", "mpi", "ucc", NAME)  # torch lists device types for these that they may not carry
_names = {NAME}  # the backends whose groups are staged ones
_served: dict[str, StagedDevice] = {}


def backend_for(device: StagedDevice) -> str:
    """Returns the backend of torch.distributed for this device: its own if one is registered, else "staged"."""
    if not dist.is_available():
        return "none"
    backend = own_backend(device.name)
    if backend is None:
        serve(device)
    return backend or NAME


def own_backend(device_type: str) -> str | None:
    """Returns the backend that torch, or a plug-in that was imported, has for this type of device; None if there is none."""
    capability: dict[str, list[str]] = dist.Backend.backend_capability
    usual: str | None = dist.Backend.default_device_backend_map.get(device_type)
    for name in sorted(capability, key=lambda name: name != usual):
        if device_type in capability[name] and name not in _NO_DEVICES and dist.is_backend_available(name):
            return str(name)
    return None


def serve(device: StagedDevice) -> None:
    """Registers "staged" with torch.distributed for this device."""
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
    """Returns True if groups of this backend are staged ones, so that the host waits for them."""
    return backend in _names


def add_name(backend: str) -> None:
    """Adds another backend whose groups are staged ones."""
    _names.add(backend)


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    from accelerators.staged.group import StagedGroup

    return StagedGroup(store, rank, size, timeout, _served)
