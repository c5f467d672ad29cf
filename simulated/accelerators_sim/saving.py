"""`torch.save`, `torch.load`, `copy.deepcopy` and bare storages, which torch makes where it has no allocator for this device.

Left to itself it would call a null pointer there, so the two ways to a new storage are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerators_sim import torch_private
from accelerators_sim.current import current_device
from accelerators_sim.lanes import lanes
from accelerators_sim.storage import new_storage


def _tag(storage: Any) -> str | None:
    device = storage.device
    return str(device) if device.type == torch_private.NAME else None


def _restore(storage: Any, location: Any) -> torch.UntypedStorage | None:
    device = torch.device(location) if str(location).split(":")[0] == torch_private.NAME else None
    if device is None:
        return None
    return new_storage(storage, current_device() if device.index is None else device.index)


_clone_elsewhere: Callable[[Any], torch.UntypedStorage] = torch.UntypedStorage.clone


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type != torch_private.NAME:
        return _clone_elsewhere(self)
    block = getattr(self, "_sim_block", None)
    lanes.run_all(self.device.index)  # the simplest wait that is right, as this is rare
    memory = torch.empty(0).untyped_storage()
    if block is not None:
        start = torch_private.start_in_block(self)
        memory = block.base(torch.uint8)[start : start + self.nbytes()].clone().untyped_storage()
    return new_storage(memory, self.device.index)


def _new(kind: type, *args: Any, device: Any = None, **options: Any) -> Any:
    if device is None or torch.device(device).type != torch_private.NAME:
        return _new_elsewhere(kind, *args, **({} if device is None else {"device": device}), **options)
    index = torch.device(device).index
    size = args[0] if args else 0
    return new_storage(torch.empty(size, dtype=torch.uint8).untyped_storage(), current_device() if index is None else index)


_new_elsewhere: Callable[..., Any] = torch.UntypedStorage.__new__


def register() -> None:
    torch.serialization.register_package(5, _tag, _restore)
    torch.UntypedStorage.clone = _clone  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.__new__ = _new  # type: ignore[method-assign, assignment]
