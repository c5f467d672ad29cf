"""Host memory that chunks pass through: a few buffers, which are used again and again."""

from __future__ import annotations

import contextlib
import queue
from typing import Any

import torch

from accelerators.staged.device import StagedDevice, on_index

NUM_BUFFERS = 3  # one is copied out, one is on the wire, one is copied in
_LEAST_BYTES = 1 << 16


class Buffer:
    """Pinned host memory where the device can pin, and the event after which the device no longer reads it."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None
        self._device: StagedDevice | None = None
        self._read: tuple[int, Any] | None = None

    def take(self, device: StagedDevice, num_bytes: int) -> torch.Tensor:
        """`num_bytes` of it, to be written by the host or by a copy; waits until the device has read what it held."""
        self.wait()
        if self._bytes is None or self._device is not device or self._bytes.numel() < num_bytes:
            size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _LEAST_BYTES
            self._bytes, self._device = device.pin(torch.empty(size, dtype=torch.uint8, device="cpu")), device
        return self._bytes[:num_bytes]

    def read_until(self, index: int, event: Any) -> None:
        """A copy from it is under way on device `index`, and ends with `event`."""
        self._read = index, event

    def wait(self) -> None:
        if self._read is not None and self._device is not None:
            index, event = self._read
            with on_index(self._device, index):
                event.synchronize()
        self._read = None


class Buffers:
    """The buffers of a group. Who takes one waits while all of them are in use."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._free.put(Buffer())

    def take(self) -> Buffer:
        return self._free.get()

    def wait(self) -> None:
        """Until the device has read all of them. Nobody uses them any more."""
        for _ in range(NUM_BUFFERS):
            with contextlib.suppress(RuntimeError):  # a device that failed was told about where it did
                self.take().wait()

    def give_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)
