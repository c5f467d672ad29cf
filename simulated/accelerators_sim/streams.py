"""Streams and events as torch programs know them, on the lanes underneath."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from accelerators_sim import pinned
from accelerators_sim.current import Entered, current_device, current_lane, enter_lane, leave_lane
from accelerators_sim.lanes import Lane, Task, host, lanes
from accelerators_sim.torch_private import NAME

DEVICE_KIND = 20  # torch's number of the device type PrivateUse1


def device_index(device: Any) -> int:
    """Returns the index of `device`: an int, a string, a torch.device, or None for the current one."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    parsed = torch.device(device)
    if parsed.type != NAME:
        raise ValueError(
            f"Cannot use device {parsed} in torch.{NAME}: it serves devices of type {NAME}. Pass one of these, or an index."
        )
    return current_device() if parsed.index is None else parsed.index


class Stream(torch.Stream):
    """Work in the order in which it was issued. After 32 on a device, a new one shares the lane of an earlier one."""

    _entered: list[tuple[int, Entered | None]]

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            lane = lanes.find(kwargs["device_index"], kwargs["stream_id"])
        else:
            lane = lanes.take(device_index(device))
        return cls._on(lane)

    @classmethod
    def _on(cls, lane: Lane) -> Stream:
        stream: Stream = super().__new__(cls, stream_id=lane.stream_id, device_index=lane.index, device_type=DEVICE_KIND)
        stream._entered = []
        return stream

    @property
    def lane(self) -> Lane:
        return lanes.find(self.device_index, self.stream_id)

    def __repr__(self) -> str:
        return f"torch.{NAME}.Stream({self.lane})"

    def synchronize(self) -> None:
        """Waits on the host for everything issued so far."""
        synchronize_lane(self.lane)

    def query(self) -> bool:
        """Returns whether everything issued so far is done. Each call runs some put-off work, so polling comes to an end."""
        lane = self.lane
        with lanes.lock:
            if lane.pending:
                if not lanes.is_blocked(lane, lane.pending[0]):
                    lanes.run_to(lane.pending[0])
                return False
            host.learn(lane.snapshot())
        return True

    def wait_stream(self, stream: torch.Stream) -> None:
        with lanes.lock:
            self.lane.wait_lane(lane_of(stream))

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._entered.append((self.device_index, enter_lane(self.lane)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave_lane(*self._entered.pop())


def lane_of(stream: torch.Stream) -> Lane:
    """Returns the lane behind any stream of this device type, torch's generic ones included."""
    return lanes.find(stream.device_index, stream.stream_id)


def stream_of(lane: Lane) -> Stream:
    return Stream._on(lane)


class Event:
    """A point in a stream's work."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._lane: Lane | None = None  # the lane on which it was recorded last
        self._clock: dict[int, int] = {}
        self._task: Task | None = None  # the put-off work that ends where this event was recorded
        self._reached_at: float | None = None

    def __repr__(self) -> str:
        return f"torch.{NAME}.Event(done={self._done})"

    @property
    def _done(self) -> bool:
        return self._task is None or self._task.done

    def record(self, stream: torch.Stream | None = None) -> None:
        lane = current_lane(current_device()) if stream is None else lane_of(stream)
        with lanes.lock:
            self._lane = lane
            self._clock = lane.snapshot()
            self._task = lanes.put_off(lane, self._reach, set(), set()) if lane.pending else None
            if self._task is None:
                self._reach()

    def _reach(self) -> None:
        self._reached_at = time.perf_counter()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Orders work issued to `stream` from now on after this event; does nothing if it was never recorded."""
        lane = current_lane(current_device()) if stream is None else lane_of(stream)
        with lanes.lock:
            if self._lane is not None:
                lane.wait_for(self._lane, self._clock, self._task)

    def synchronize(self) -> None:
        """Waits on the host for this event."""
        if self._task is not None:
            lanes.run_to(self._task)
        if self._lane is not None:
            lanes.wait_host(self._lane, self._clock)
        pinned.watch_this_thread()

    def query(self) -> bool:
        """Returns whether the stream has come here. Each call runs some put-off work, so polling comes to an end."""
        with lanes.lock:
            if self._task is not None and not self._task.done:
                first = self._task.lane.pending[0]
                if not lanes.is_blocked(first.lane, first):
                    lanes.run_to(first)
                return False
            host.learn(self._clock)
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds of the host's clock between the moments at which the two were reached."""
        if not (self._timed and end_event._timed):
            raise ValueError(
                "Cannot measure the time between two events: one has no timing. Make both with enable_timing=True."
            )
        if self._reached_at is None or end_event._reached_at is None:
            raise ValueError(
                "Cannot measure the time between two events: one was not reached. Record both and synchronize first."
            )
        return (end_event._reached_at - self._reached_at) * 1e3


def synchronize_lane(lane: Lane) -> None:
    with lanes.lock:
        lanes.run_lane(lane)
        lanes.wait_host(lane, lane.snapshot())
    pinned.watch_this_thread()


def synchronize_device(index: int) -> None:
    with lanes.lock:
        lanes.run_all(index)
        for lane in lanes.of(index):
            if lane.count:
                lanes.wait_host(lane, lane.snapshot())
    pinned.watch_this_thread()
