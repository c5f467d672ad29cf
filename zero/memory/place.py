"""The place of the memory of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerators import Accelerator


@dataclass(frozen=True)
class Place:
    """The device that chunks live on, and the number of ranks that share its memory."""

    accelerator: Accelerator
    device: torch.device
    num_ranks: int = 1

    @property
    def is_host(self) -> bool:
        return self.device.type == "cpu"

    def has_room_for(self, num_bytes: int) -> bool:
        available = self.accelerator.memory(self.device.index).available
        return available is None or num_bytes <= available // self.num_ranks
