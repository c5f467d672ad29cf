"""Copies: between devices, and between a device and the host, which need not be done when the call returns.

[Note: which copies are put off] A non_blocking copy between a device and *pinned* host memory: it reads and writes when its
stream comes to it, never earlier. From pageable memory the host is read at once (the driver stages it) and the device is
written late; to pageable memory the host waits. A blocking copy makes the host wait for its stream. `strict` treats all
host memory as pinned.
"""

from __future__ import annotations

import torch

from accelerators_sim import backward, pinned
from accelerators_sim.current import current_lane
from accelerators_sim.lanes import Lane, host, lanes
from accelerators_sim.race import Access, History, byte_range
from accelerators_sim.settings import settings
from accelerators_sim.storage import Block, block_of, host_view, is_sim
from accelerators_sim.waits import here, is_carrying

_NAME = "aten::copy_"


class End:
    """One end of a copy: a tensor, on the device or on the host, and its memory."""

    def __init__(self, tensor: torch.Tensor, non_blocking: bool) -> None:
        self.tensor = tensor
        self.on_device = is_sim(tensor)
        self.block: Block | None = block_of(tensor) if self.on_device else None
        self.view = host_view(tensor, self.block) if self.on_device else tensor
        self.watched: History | None = None if self.on_device else pinned.watch(tensor, non_blocking)

    @property
    def address(self) -> int:
        return self.view.untyped_storage().data_ptr()

    @property
    def history(self) -> History | None:
        return self.block.history if self.block is not None else self.watched

    def use(self, writes: bool, access: Access) -> None:
        if self.on_device and is_carrying():
            return
        if settings.races and self.history is not None and self.tensor.numel():
            self.history.use(*byte_range(self.tensor), writes, access)

    def check_host(self, writes: bool) -> None:
        """Checks that the host itself may use this end now."""
        if settings.races and self.watched is not None and self.tensor.numel():
            self.watched.check(*byte_range(self.tensor), writes, host.access(_NAME))


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Runs `target.copy_(source)` if at least one of them is on a device."""
    if source.numel() == 0:
        return target
    non_blocking = non_blocking and not settings.lacks("streams")
    with lanes.lock:
        start, end = End(source, non_blocking), End(target, non_blocking)
        if start.on_device and end.on_device:
            _copy_on_devices(start, end)
        else:
            _copy_with_host(start, end, non_blocking)
    return target


def copy_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.size() != source.size():
        target.resize_(source.size())
    return copy_from(source, target)


def _copy_on_devices(start: End, end: End) -> None:
    lane = current_lane(start.tensor.device.index)
    other = current_lane(end.tensor.device.index)
    if other is not lane:
        lane.wait_lane(other)  # torch's rule: the copy runs on the source's stream, between two waits for the target's
    _issue(lane, start, end)
    if lane.pending and lanes.is_blocked(lane):
        source, target = start.view, end.view
        lanes.put_off(lane, lambda: target.copy_(source), {start.address}, {end.address})
    else:
        lanes.settle(lane, {start.address}, {end.address})
        end.view.copy_(start.view)
    if other is not lane:
        other.wait_lane(lane)


def _copy_with_host(start: End, end: End, non_blocking: bool) -> None:
    device_end, host_end = (start, end) if start.on_device else (end, start)
    lane = current_lane(device_end.tensor.device.index)
    to_host = start.on_device
    if non_blocking and host_end.watched is not None:
        _issue(lane, start, end)
        pinned.mark_in_flight(host_end.tensor)
        source, target = start.view, end.view
        # The views keep both memories alive until the copy ran.
        lanes.put_off(lane, lambda: target.copy_(source), {start.address}, {end.address})
        return
    host_end.check_host(writes=to_host)
    if non_blocking and not to_host:
        _issue(lane, start, end)
        staged, target = start.view.clone(), end.view
        lanes.put_off(lane, lambda: target.copy_(staged), set(), {end.address})
        return
    _issue(lane, start, end)
    lanes.run_lane(lane)
    end.view.copy_(start.view)
    lanes.wait_host(lane, lane.snapshot())


def _issue(lane: Lane, start: End, end: End) -> None:
    if backward.side_lanes_used():
        backward.note(lane)
    access = lane.issue(_NAME, here())
    start.use(False, access)
    end.use(True, access)
