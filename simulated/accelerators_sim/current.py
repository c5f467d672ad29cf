"""The device and the lane that a thread is on, in backward too, and the random numbers that its work draws.

There is one generator a device, so that a device's state is its own and the host's draws do not move it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from accelerators_sim import backward, torch_private
from accelerators_sim.lanes import Lane, lanes
from accelerators_sim.settings import settings

Entered = tuple[Lane, int]  # a lane that the user chose, and the backward node in which; 0 for none


class _Thread(threading.local):
    device = 0
    chosen_in_backward = (0, 0)

    def __init__(self) -> None:
        self.entered: dict[int, Entered] = {}  # by device


_thread = _Thread()
generators: list[torch.Generator] = []


def current_device() -> int:
    node = torch_private.current_node()
    if node is None:
        return _thread.device
    chosen, where = _thread.chosen_in_backward
    return chosen if where == id(node) else torch_private.device_of_node(node, _thread.device)


def set_current_device(index: int) -> None:
    # [Note: the device in backward] Torch's engine puts a thread on the device of each node's stream, and a guard
    # written in Python can only answer with the stream of device 0. So in backward the node itself is asked, unless the
    # user chose another device in one of its hooks.
    node = torch_private.current_node()
    if node is None:
        _thread.device = index
    else:
        _thread.chosen_in_backward = (index, id(node))


def engine_set_device(index: int) -> None:
    """Switches the device, as torch's own guards ask. In a backward it does nothing: what the guards say then is not true of a
    device that is written in Python."""
    if torch_private.graph_task() == -1:
        _thread.device = index


def current_lane(index: int) -> Lane:
    """Returns the lane for work on device `index` that this thread issues."""
    entered = _thread.entered.get(index)
    if entered is not None:
        lane, node = entered
        if not node or node == _node():
            return lane
        del _thread.entered[index]  # the hook that set it is over, and torch puts each node on its own stream
    return backward.lane_of_node(index) if backward.side_lanes_used() else lanes.default(index)


def enter_lane(lane: Lane) -> Entered | None:
    """Makes `lane` this thread's current one on its device; returns what to hand to `leave_lane`."""
    before = _thread.entered.get(lane.index)
    if lane.stream_id:
        backward.expect_side_lanes()
    if backward.side_lanes_used():
        backward.note(current_lane(lane.index))  # a node was made for an operator that enters the stream before its kernel runs
    _thread.entered[lane.index] = (lane, _node())
    return before


def leave_lane(index: int, before: Entered | None) -> None:
    if before is None:
        _thread.entered.pop(index, None)
    else:
        _thread.entered[index] = before


def _node() -> int:
    # The node's number is kept and not the node, a reference to which would keep its saved tensors alive.
    node = torch_private.current_node()
    return 0 if node is None else id(node)


def make_generators(device_count: int) -> None:
    generators.extend(torch.Generator().manual_seed(torch.initial_seed()) for _ in range(device_count))


def with_generator(index: int, how: str, keywords: dict[str, Any], call: Callable[[], Any]) -> Any:
    """Runs a random operator on the generator of its device."""
    if settings.lacks("rng") or keywords.get("generator") is not None:
        return call()
    generator = generators[index]
    if how == "argument":
        keywords["generator"] = generator
        return call()
    # Operators such as native_dropout take no generator and use the host's: it stands in for the device's meanwhile.
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return call()
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)
