"""MPS, Apple's GPU: one device, one queue, and memory that it shares with the host."""

from __future__ import annotations

import torch

from accelerators.interface import Accelerator
from accelerators.memory import MemoryReading


class MpsAccelerator(Accelerator):
    """Apple's GPU."""

    name = "mps"
    compile_backend = "inductor"
    is_synchronous = False  # the host goes on while the queue runs
    has_streams = False  # there is one queue, and no second one beside it

    def unavailable_reason(self) -> str | None:
        if not torch.backends.mps.is_built():
            return f"this torch is built without MPS (torch {torch.__version__})"
        if not torch.backends.mps.is_available():
            return f"torch.backends.mps.is_available() is False (torch {torch.__version__})"
        return None

    def device_count(self) -> int:
        return 1 if torch.backends.mps.is_available() else 0

    def current_index(self) -> int:
        return 0

    def read_memory(self, index: int) -> MemoryReading:
        total = torch.mps.recommended_max_memory()
        allocated = torch.mps.current_allocated_memory()
        return MemoryReading(total, max(0, total - allocated), allocated, peak=None)  # torch keeps no high-water mark here

    # The functions of torch.mps take no index.

    def synchronize(self, index: int | None = None) -> None:
        self._index(index)
        torch.mps.synchronize()

    def rng_state(self, index: int | None = None) -> dict[str, torch.Tensor]:
        self._index(index)
        return {"cpu": torch.get_rng_state(), "mps": torch.mps.get_rng_state()}

    def set_rng_state(self, states: dict[str, torch.Tensor], index: int | None = None) -> None:
        self._index(index)
        torch.set_rng_state(states["cpu"])
        if "mps" in states:
            torch.mps.set_rng_state(states["mps"])
