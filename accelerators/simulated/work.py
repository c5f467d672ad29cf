"""What a collective of simulated devices gives while it is on its way."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerators.simulated.current import current_lane
from accelerators.simulated.lanes import Lane, Task, lanes
from accelerators.simulated.settings import settings

_Work: Any = dist.Work


class StagedWork(_Work):  # type: ignore[misc]
    """A collective on its way. To wait is for the current stream; the host goes on."""

    def __init__(self, carried: Any, lane: Lane, task: Task, result: Any) -> None:
        super().__init__()
        self._carried = carried
        self._clock = lane.snapshot()
        self._lane = lane
        self._task = task
        self._result = result

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if settings.order == "eager" or self._carried.is_completed():
            self._carried.wait()  # a failure that is known is raised here and not at some later operator
        with lanes.lock:
            current_lane(self._lane.index).wait_for(self._lane, self._clock, self._task)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._carried.is_completed())

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Several:
    """Several works of gloo as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
