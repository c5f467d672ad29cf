"""The device's own process group, as the device of a vendor has one: the staged group, with a record of who uses what.

    dist.init_process_group("simccl")      # once the device is up; alone, not as "cpu:gloo,sim:simccl"

When a collective is called its tensors count as used by the group's stream, as NCCL's kernels use them. So the race detector
sees a collective's reads and writes at once, wherever the threads that carry it out may be. `SIM_WITHOUT=group` takes the group
away: the device is then one that torch.distributed knows nothing of.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from accelerators import selection, staged
from accelerators.staged.group import StagedGroup
from accelerators.staged.pipeline import Exchange, Queues, StagedWork, Transfer
from accelerators_sim.copies import End
from accelerators_sim.current import current_lane
from accelerators_sim.lanes import Lane, lanes
from accelerators_sim.settings import settings
from accelerators_sim.streams import lane_of
from accelerators_sim.torch_private import NAME
from accelerators_sim.waits import carrying, here

BACKEND = "simccl"


class SimulatedGroup(StagedGroup):
    """The process group of the simulated device."""

    def name(self) -> str:
        return BACKEND

    def _announce(self, name: str, queues: Queues, transfer: Transfer) -> None:
        _check(name, transfer)
        if queues.incoming is None or not settings.races:
            return
        lane: Lane = lane_of(queues.incoming)
        caller = current_lane(lane.index)
        with lanes.lock:
            # The wait is noted and not queued: the copies wait for it when they are made, and those of an earlier collective
            # must not.
            lane.wait_for(caller, caller.snapshot(), None)
            access = lane.issue(f"the collective {name}", here())
            for tensor in transfer.reads:
                End(tensor, non_blocking=True).use(False, access)
            for tensor in transfer.writes:
                End(tensor, non_blocking=True).use(True, access)

    def shutdown(self) -> None:
        self._pipeline.close()
        for queues in self._queues.values():  # nothing of the group writes any more, and the host knows
            lane = lane_of(queues.incoming)
            with lanes.lock:
                lanes.wait_host(lane, lane.snapshot())
        super().shutdown()

    def _exchange(self, device: Any, index: int, queues: Queues, transfer: Transfer, work: StagedWork) -> Exchange:
        # For the race detector the collective reads until the program waits, so what it reads is kept until then, as by NCCL:
        # torch's functional collectives drop their input at once.
        work.keep(transfer.reads)
        return SimulatedExchange(device, index, queues, transfer, work)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        _need_op(tensors, options)
        return super().allreduce(tensors, options)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: Any, options: Any = None) -> Any:
        _need_op(outputs, options)
        return super().reduce_scatter(outputs, inputs, options)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any = None, name: str = "reduce_scatter_tensor"
    ) -> Any:
        _need_op(output, options)
        return super().reduce_scatter_single(output, input, options, name)

    _reduce_scatter_base = reduce_scatter_single


class SimulatedExchange(Exchange):
    """A collective of that group, which tells the race detector what it uses."""

    def _abandon(self) -> None:
        super()._abandon()
        if self._queues.incoming is not None:
            lane = lane_of(self._queues.incoming)
            with carrying(), lanes.lock:
                lanes.wait_host(lane, lane.snapshot())

    @contextlib.contextmanager
    def _in_stream(self, stream: Any) -> Iterator[bool]:
        with carrying(), super()._in_stream(stream) as is_async:
            yield is_async


def _check(name: str, transfer: Transfer) -> None:
    if name.startswith("reduce_scatter"):
        _need("reduce_scatter", name)
    if name.endswith("coalesced"):
        _need("coalesced", name)
    dtypes = {tensor.dtype for tensor in (*transfer.reads, *transfer.writes)}
    if torch.bfloat16 in dtypes:
        _need("bf16_collectives", f"{name} of bfloat16")
    if name.startswith("all_gather") and torch.int64 in dtypes:
        _need("int64_gather", "all_gather of int64")


def _need_op(tensors: Any, options: Any) -> None:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    if options is not None and options.reduceOp == dist.ReduceOp.AVG and any(tensor.device.type == NAME for tensor in tensors):
        _need("avg", "ReduceOp.AVG")


def _need(capability: str, what: str) -> None:
    if settings.lacks(capability):
        raise RuntimeError(
            f"Cannot run {what}: the simulated device's collectives lack it (SIM_WITHOUT={capability}). Use another."
        )


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout, {NAME: selection.get(NAME)})


def register() -> None:
    """Makes torch.distributed know the backend, or forget it where the device is told to lack it."""
    if settings.lacks("group"):
        dist.Backend.backend_capability.pop(BACKEND, None)
        return
    staged.add_name(BACKEND)
    if BACKEND not in dist.Backend.backend_capability:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", NAME])
