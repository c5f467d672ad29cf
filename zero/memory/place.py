"""Where the memory of weights is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerators import Accelerator


@dataclass(frozen=True)
class Place:
    """Where chunks live, and how many ranks share that memory."""

    accelerator: Accelerator
    device: torch.device
    num_ranks: int = 1

    @property
    def is_host(self) -> bool:
        return self.device.type == "cpu"

    def has_room_for(self, num_bytes: int) -> bool:
        available = self.accelerator.memory(self.device.index).available
        return available is None or num_bytes <= available // self.num_ranks
