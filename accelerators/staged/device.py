"""What the staged group asks of an accelerator. `accelerators.Accelerator` answers all of it for every torch device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class StagedDevice(Protocol):
    """The members of an accelerator that the staged group uses."""

    name: str

    @property
    def has_streams(self) -> bool:
        """Whether work can run beside other work of the same device."""

    def current_index(self) -> int: ...
    def set_index(self, index: int) -> None: ...
    def new_stream(self, index: int | None = None) -> Any: ...
    def current_stream(self, index: int | None = None) -> Any: ...
    def new_event(self, timing: bool = False) -> Any: ...
    def in_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor: ...


@contextlib.contextmanager
def on_index(device: StagedDevice, index: int) -> Iterator[None]:
    """Makes a device current for the length of a `with`; an event is made on the current one."""
    before = device.current_index()
    if before != index:
        device.set_index(index)
    try:
        yield
    finally:
        if before != index:
            device.set_index(before)
