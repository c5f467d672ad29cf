"""The fallback for operators without a kernel of their own: the host's kernel runs on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerators_sim import backward, pinned
from accelerators_sim.calls import Call, Use
from accelerators_sim.current import with_generator
from accelerators_sim.lanes import Lane, lanes
from accelerators_sim.race import Access, byte_range
from accelerators_sim.settings import settings
from accelerators_sim.storage import block_of, is_sim
from accelerators_sim.waits import here


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator that has no kernel of its own."""
    call = Call(op, args, kwargs)
    lane, plan = call.lane, call.plan
    with lanes.lock:
        if backward.side_lanes_used():
            backward.note(lane)
        access = lane.issue(plan.name, here())
        if settings.races:
            _check_races(call, access)
        if plan.lateness and lanes.may_put_off(lane) and call.can_wait():
            result = call.put_off()
            remember_new(result, access)
            return result
        if lane.pending or settings.order == "random":
            settle(lane, call.uses)
        if plan.waits:
            lanes.run_lane(lane)
            lanes.wait_host(lane, lane.snapshot())
    result = with_generator(call.index, plan.random, call.keywords, call.run) if plan.random else call.run()
    remember_new(result, access)
    return result


def _check_races(call: Call, access: Access) -> None:
    for use in call.uses:
        if use.block is not None and use.block.history is not None and use.tensor.numel():
            use.block.history.use(*byte_range(use.tensor), use.written, access)
    for tensor in call.on_host:
        pinned.check_host_use(tensor, False, call.plan.name)


def settle(lane: Lane, uses: list[Use]) -> None:
    """Runs the put-off work that must come before a kernel with these arguments."""
    reads = {use.block.memory.data_ptr() for use in uses if use.block is not None and not use.written}
    writes = {use.block.memory.data_ptr() for use in uses if use.block is not None and use.written}
    lanes.settle(lane, reads, writes)


def remember_new(result: Any, access: Access) -> None:
    """Makes the call the writer of the memory that it allocated."""
    if isinstance(result, torch.Tensor):
        block = block_of(result) if is_sim(result) else None
        if block is not None and block.history is not None and block.history.untouched:
            block.history.use(0, block.num_bytes, True, access)
    elif isinstance(result, (list, tuple)):
        for item in result:
            remember_new(item, access)


def lowered_to(replacement: Any, change: Callable[..., tuple[Any, ...]] | None = None) -> Callable[..., Any]:
    """Returns a kernel that runs another operator, its arguments changed by `change`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(replacement, *(args if change is None else change(*args)), **kwargs)

    return kernel
