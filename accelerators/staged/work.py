"""What a collective returns while it is going on."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerators.staged.device import StagedDevice

# Any: torch's stubs give some methods several signatures, of which Python calls one.
_Work: Any = dist.Work


class StagedWork(_Work):  # type: ignore[misc]
    """A collective that is going on. The host waits until the last copy back was issued, and the current stream waits for the
    copy."""

    def __init__(self, name: str, result: Any) -> None:
        super().__init__()
        self.what = name
        self._result = result
        self.finished = threading.Event()
        self._error: BaseException | None = None
        self._arrival: tuple[StagedDevice, int, Any] | None = None

    # the pipeline says

    def arrive(self, device: StagedDevice, index: int, event: Any) -> None:
        """The results are there once `event` of that device has come."""
        self._arrival = device, index, event

    def fail(self, error: BaseException) -> None:
        """The results will not come. The first error counts."""
        self._error = self._error or error

    def finish(self) -> None:
        self.finished.set()

    # the caller asks

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.finished.wait(timeout.total_seconds() if timeout else None):  # torch passes zero for no limit
            raise RuntimeError(f"Timed out: {self.what} did not end within {timeout}.")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self._arrival is not None:
            device, index, event = self._arrival
            device.current_stream(index).wait_event(event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """True when `wait` would not block the host."""
        return self.finished.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        """Waits first: a future of torch knows nothing of the streams of every device."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class PointToPoint(StagedWork):
    """A message that is going on. It has no thread: whatever waits for it copies what is received to the device."""

    def __init__(self, name: str, result: Any, carried: Any, land: Any = None) -> None:
        super().__init__(name, result)
        self._carried, self._land = carried, land

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._carried.wait(timeout) if timeout else self._carried.wait()
        if self._land is not None:
            land, self._land = self._land, None
            land()
        return True

    def is_completed(self) -> bool:
        return bool(self._carried.is_completed())

    def is_success(self) -> bool:
        return self.is_completed()


class Then:
    """A work of gloo, and what is done with its output."""

    def __init__(self, carried: Any, act: Callable[[], None]) -> None:
        self._carried, self._act = carried, act

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        self._carried.wait(timeout) if timeout else self._carried.wait()
        self._act()

    def is_completed(self) -> bool:
        return bool(self._carried.is_completed())


def distribute(received: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Gives every output its part of what came in one tensor."""
    for output, piece in zip(outputs, torch.split(received, [output.numel() for output in outputs]), strict=True):
        output.data.copy_(piece.view(output.shape))
