"""The CPU: one device, whose memory is what the container leaves. Work is done when a call returns."""

from __future__ import annotations

import os
import sys

import torch

from accelerators.backends import host
from accelerators.interface import Accelerator
from accelerators.memory import MemoryReading


class CpuAccelerator(Accelerator):
    """The CPU as an accelerator."""

    name = "cpu"
    communication_backend = "gloo"
    compile_backend = "inductor"
    has_dlpack = True
    is_synchronous = True
    can_pin = False  # every page of it is host memory already
    has_streams = False

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._peak_was_reset = False

    def unavailable_reason(self) -> str | None:
        return None

    def device_count(self) -> int:
        """1: sockets and NUMA nodes share one address space, so to torch they are one device."""
        return 1

    def num_cores(self) -> int:
        """The cores that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def device(self, index: int | None = None) -> torch.device:
        self._index(index)
        return torch.device("cpu")  # as tensors say it: cpu has no index

    def current_index(self) -> int:
        return 0

    def read_memory(self, index: int) -> MemoryReading:
        if sys.platform == "linux":
            return host.read_linux(peak_was_reset=self._peak_was_reset)
        return host.read_elsewhere()

    def reset_peak_memory(self, index: int | None = None) -> None:
        self._index(index)
        if sys.platform == "linux":
            self._peak_was_reset = host.reset_peak_linux()

    def empty_cache(self) -> None:
        """Returns free pages that the C library keeps to the system, where it has a call for that."""
        if sys.platform == "linux":
            host.trim_heap()

    def synchronize(self, index: int | None = None) -> None:
        self._index(index)
