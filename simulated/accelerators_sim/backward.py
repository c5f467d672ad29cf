"""The stream that a backward node runs on: that of its forward, as in torch's own engine.

Torch's engine asks the device guard for the stream when it makes a node, and waits between nodes whose streams differ. A guard
written in Python cannot answer (a stream does not fit a ctypes result), so both are done here: nodes are known by the sequence
number that torch gave them just before the forward kernel ran.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from accelerators_sim import torch_private
from accelerators_sim.lanes import Lane, lanes

_MOST_NODES = 100_000  # nodes of graphs that were never run backward are forgotten beyond this


class _Forward:
    """The nodes that were made off the default streams. Empty, and never asked, in programs that use no others."""

    def __init__(self) -> None:
        self.used = False
        self.lane_of: OrderedDict[int, Lane] = OrderedDict()
        self.last_issuer: dict[int, Lane] = {}  # by device, outside of backward


class _Thread(threading.local):
    sequence = 0

    def __init__(self) -> None:
        self.task = -1
        self.last: dict[int, Lane] = {}  # by device: the lane on which the last node of this task ran
        self.used: dict[int, set[Lane]] = {}  # by device: the lanes on which any node of it ran


_forward = _Forward()
_thread = _Thread()


def side_lanes_used() -> bool:
    return _forward.used


def expect_side_lanes() -> None:
    _forward.used = True


def note(lane: Lane) -> None:
    """Notes the lane of an operator; called for every one, once side streams are in use."""
    sequence = torch_private.next_sequence_number()
    if torch_private.graph_task() == -1 and sequence:  # with 0, this thread never made a node, so no backward of it will come
        _forward.last_issuer[lane.index] = lane
    if sequence == _thread.sequence:
        return  # no node was made for this operator
    _thread.sequence = sequence
    _forward.lane_of[sequence - 1] = lane
    while len(_forward.lane_of) > _MOST_NODES:
        _forward.lane_of.popitem(last=False)


def lane_of_node(index: int) -> Lane:
    """Returns the lane for work of this thread outside of any `with stream`."""
    task = torch_private.graph_task()
    if task == -1:
        return lanes.default(index)
    caller = _forward.last_issuer.get(index) or lanes.default(index)
    node = torch_private.current_node()
    lane = _forward.lane_of.get(node._sequence_nr(), caller) if node is not None else caller
    if lane.index != index:
        lane = caller
    if task != _thread.task:
        _thread.task, _thread.last, _thread.used = task, {}, {}
    before = _thread.last.get(index)
    if before is None:
        before = caller
        used = _thread.used[index] = set()
        # What backward made may be used on the caller's stream when backward returns.
        torch_private.at_end_of_backward(lambda: _rejoin(caller, used))
    if lane is not before:
        lane.wait_lane(before)
    _thread.last[index] = lane
    _thread.used[index].add(lane)
    return lane


def _rejoin(caller: Lane, used: set[Lane]) -> None:
    for lane in used - {caller}:
        caller.wait_lane(lane)
