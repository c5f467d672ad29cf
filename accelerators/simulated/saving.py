"""`torch.save`, `torch.load` and `copy.deepcopy`, which make storages where torch has no allocator for this device."""

from __future__ import annotations

from typing import Any

import torch

from accelerators.simulated import torch_private
from accelerators.simulated.lanes import current_device, lanes
from accelerators.simulated.storage import new_storage


def _tag(storage: Any) -> str | None:
    device = storage.device
    return str(device) if device.type == torch_private.NAME else None


def _restore(storage: Any, location: Any) -> torch.UntypedStorage | None:
    device = torch.device(location) if str(location).split(":")[0] == torch_private.NAME else None
    if device is None:
        return None
    return new_storage(storage, current_device() if device.index is None else device.index)


_clone_elsewhere = torch.UntypedStorage.clone


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type != torch_private.NAME:
        return _clone_elsewhere(self)
    block = getattr(self, "_sim_block", None)
    lanes.run_all(self.device.index)  # rare, so the simplest wait that is right
    memory = torch.UntypedStorage(0) if block is None else _clone_elsewhere(block.memory)
    return new_storage(memory, self.device.index)


def register() -> None:
    torch.serialization.register_package(5, _tag, _restore)
    torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
