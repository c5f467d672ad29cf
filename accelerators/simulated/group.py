"""The process-group backend "staged": collectives of simulated devices, carried through the host by gloo.

    dist.init_process_group("staged")      # once the device is up; alone, not as "cpu:gloo,sim:staged"

Host tensors go to gloo as they are. A device's tensors are copied to the host when the collective is issued and back
when somebody waits. Each group has a stream of its own on each device, as NCCL does: it waits for the caller's stream,
and the work that is returned makes the stream that waits for it wait. So the race detector sees a collective's reads and
writes, and results that nobody waited for stay unwritten.

Process groups are otherwise spoken of in zero/comm/torch_group.py only. This file and its works are the exception, because a
device that no backend of torch serves has to bring its own.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d  # the options of collectives are public nowhere else

from accelerators.simulated.copies import End
from accelerators.simulated.current import current_lane
from accelerators.simulated.lanes import Lane, Task, lanes
from accelerators.simulated.place import here
from accelerators.simulated.settings import settings
from accelerators.simulated.storage import block_of, host_view, is_sim
from accelerators.simulated.torch_private import NAME, WATCH_KEY, below_autograd, excluding
from accelerators.simulated.work import Several, StagedWork

BACKEND = "staged"
TIME_LIMIT = datetime.timedelta(minutes=5)

Tensors = list[torch.Tensor]
Carry = Callable[[Tensors, Tensors], Any]  # a collective of gloo, given host inputs and outputs


# Any: torch's stubs give each collective several signatures, of which Python calls one.
_ProcessGroup: Any = dist.ProcessGroup


class StagedGroup(_ProcessGroup):  # type: ignore[misc]
    """One group of ranks. It serves host tensors too, as torch lets a Python group serve all devices or none."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta | None) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout or TIME_LIMIT)
        self._lanes: dict[int, Lane] = {}
        self._under_way: deque[tuple[Task, Any]] = deque()  # what is still to land, and what gloo makes of it
        self._named = ""
        self._described = ""
        # Object collectives and barriers look a backend up; the collectives themselves come through this class.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._register_backend(torch.device(NAME), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # which torch's flight recorder asks for its name

    # who it is

    def name(self) -> str:
        return BACKEND

    getBackendName = name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._named

    def setGroupName(self, name: str) -> None:
        self._named = name

    _set_group_name = setGroupName

    def _set_group_desc(self, description: str) -> None:
        self._described = description

    group_name = property(getGroupName)

    @property
    def group_desc(self) -> str:
        return self._described

    def _get_sequence_number_for_group(self) -> int:
        return int(self._gloo._get_sequence_number_for_group())

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()

    # how it carries

    def _start(self, name: str, carry: Carry, inputs: Tensors, outputs: Tensors, result: Any) -> Any:
        tensors = [*inputs, *outputs]
        index = next((tensor.device.index for tensor in tensors if is_sim(tensor)), None)
        if index is None:
            return carry(inputs, outputs)
        _check(name, tensors)
        with lanes.lock, torch.no_grad(), below_autograd(), excluding(WATCH_KEY):
            lane = self._lane(index)
            lane.wait_lane(current_lane(index))
            ends = {id(tensor): End(tensor, non_blocking=True) for tensor in tensors}
            self._order(name, lane, [ends[id(tensor)] for tensor in inputs], [ends[id(tensor)] for tensor in outputs])
            on_host = {key: end.view.clone(memory_format=torch.contiguous_format) for key, end in ends.items()}
            carried = carry([on_host[id(tensor)] for tensor in inputs], [on_host[id(tensor)] for tensor in outputs])
            written = {id(tensor) for tensor in outputs}

            def land() -> None:
                carried.wait()
                for key in written:
                    ends[key].view.copy_(on_host[key])

            addresses = {ends[key].address for key in written}
            task = lanes.put_off(lane, land, set(), addresses, carried.is_completed)
            while self._under_way and self._under_way[0][0].done:
                self._under_way.popleft()
            self._under_way.append((task, carried))
            return StagedWork(carried, lane, task, result)

    def shutdown(self) -> None:
        """The group is destroyed: what has come lands, and what has not never will. To keep it would keep connections."""
        with lanes.lock, torch.no_grad(), below_autograd(), excluding(WATCH_KEY):
            for task, carried in self._under_way:
                with contextlib.suppress(RuntimeError):  # it failed
                    if task.action is not None and carried.is_completed():
                        task.action()
                task.action = task.has_come = None
            self._under_way.clear()
            for lane in self._lanes.values():  # nothing of it writes any more, and the host knows
                lanes.wait_host(lane, lane.snapshot())
        super().shutdown()

    def _lane(self, index: int) -> Lane:
        if index not in self._lanes:
            self._lanes[index] = lanes.take(index)
        return self._lanes[index]

    def _order(self, name: str, lane: Lane, reads: list[End], writes: list[End]) -> None:
        access = lane.issue(f"the collective {name}", here())
        for end in reads:
            end.use(False, access)
        for end in writes:
            end.use(True, access)
        # Its inputs are sent now: if sending waited until somebody needs the result, ranks would wait for each other.
        lanes.settle(lane, {end.address for end in (*reads, *writes)}, set())

    # collectives

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        options = options or c10d.AllreduceOptions()
        finish = _summing(options, self._size, tensors)
        return finish(self._start("all_reduce", lambda _, out: self._gloo.allreduce(out, options), tensors, tensors, tensors))

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> Any:
        _need("coalesced", "all_reduce_coalesced")
        options = options or c10d.AllreduceCoalescedOptions()
        return self._start(
            "all_reduce_coalesced", lambda _, out: self._gloo.allreduce_coalesced(out, options), tensors, tensors, tensors
        )

    def broadcast(self, tensors: Tensors, options: Any = None) -> Any:
        options = options or c10d.BroadcastOptions()
        inputs = tensors if options.rootRank == self._rank else []
        return self._start("broadcast", lambda _, out: self._gloo.broadcast(out, options), inputs, tensors, tensors)

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        return self._start("reduce", lambda _, out: self._gloo.reduce(out, options), tensors, tensors, tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        options = options or c10d.AllgatherOptions()
        _need_gather(inputs)
        return self._start(
            "all_gather", lambda given, out: self._gloo.allgather([out], given, options), inputs, outputs[0], outputs
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Any:
        options = options or c10d.AllgatherOptions()
        _need_gather([input])
        carry: Carry = lambda given, out: self._gloo._allgather_base(out[0], given[0], options)  # noqa: E731
        return self._start("all_gather_into_tensor", carry, [input], [output], [output])

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Any:
        carry: Carry = lambda given, out: self._gloo.gather([out] if out else [], given, options)  # noqa: E731
        return self._start("gather", carry, inputs, outputs[0] if outputs else [], outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Any:
        carry: Carry = lambda given, out: self._gloo.scatter(out, [given] if given else [], options)  # noqa: E731
        return self._start("scatter", carry, inputs[0] if inputs else [], outputs, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Any:
        _need("reduce_scatter", "reduce_scatter")
        options = options or c10d.ReduceScatterOptions()
        finish = _summing(options, self._size, outputs)
        carry: Carry = lambda given, out: self._gloo.reduce_scatter(out, [given], options)  # noqa: E731
        return finish(self._start("reduce_scatter", carry, inputs[0], outputs, outputs))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Any:
        _need("reduce_scatter", "reduce_scatter_tensor")
        options = options or c10d.ReduceScatterOptions()
        finish = _summing(options, self._size, [output])
        carry: Carry = lambda given, out: self._gloo._reduce_scatter_base(out[0], given[0], options)  # noqa: E731
        return finish(self._start("reduce_scatter_tensor", carry, [input], [output], [output]))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        _need("coalesced", "all_gather_into_tensor_coalesced")
        return _last([self.all_gather_single(output, input, options) for output, input in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        _need("coalesced", "reduce_scatter_tensor_coalesced")
        return _last(
            [self.reduce_scatter_single(output, input, options) for output, input in zip(outputs, inputs, strict=True)]
        )

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], options: Any = None
    ) -> Any:
        options = options or c10d.AllToAllOptions()
        carry: Carry = lambda given, out: self._gloo.alltoall_base(out[0], given[0], output_sizes, input_sizes, options)  # noqa: E731
        return self._start("all_to_all_single", carry, [input], [output], [output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        # Gloo has it for one tensor only: the pieces are sent one by one, in rounds in which each rank sends to another one.
        def carry(given: Tensors, out: Tensors) -> Any:
            works = []
            out[self._rank].copy_(given[self._rank])
            for step in range(1, self._size):
                to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                works += [self._gloo.send([given[to]], to, step), self._gloo.recv([out[source]], source, step)]
            return Several(works)

        return self._start("all_to_all", carry, inputs, outputs, outputs)

    def barrier(self, opts: Any = None) -> Any:  # torch passes this one by name
        plain = c10d.BarrierOptions()  # without the device that torch put in, which gloo does not know
        if opts is not None:
            plain.timeout = opts.timeout
        return self._gloo.barrier(plain)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        return self._start("send", lambda given, _: self._gloo.send(given, target, tag), tensors, [], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        return self._start("recv", lambda _, out: self._gloo.recv(out, source, tag), [], tensors, tensors)

    # What torch called these before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _summing(options: Any, size: int, outputs: Tensors) -> Callable[[Any], Any]:
    # Gloo takes AVG and gives the sum, so it is asked for the sum and the division is done here, on the stream that waits.
    if options.reduceOp != dist.ReduceOp.AVG or not any(is_sim(tensor) for tensor in outputs):
        return lambda work: work
    _need("avg", "ReduceOp.AVG")
    options.reduceOp = dist.ReduceOp.SUM

    def divide(work: StagedWork) -> StagedWork:
        views = [host_view(tensor, block_of(tensor)) for tensor in outputs]
        with lanes.lock:
            work._task = lanes.put_off(work._lane, lambda: [view.div_(size) for view in views], set(), work._task.writes)
        return work

    return divide


def _last(works: list[Any]) -> Any:
    return works[-1]  # they share a stream, so the last one is done after all others


def _check(name: str, tensors: Tensors) -> None:
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        _need("bf16_collectives", f"{name} of bfloat16")


def _need_gather(inputs: Tensors) -> None:
    if any(is_sim(tensor) and tensor.dtype == torch.int64 for tensor in inputs):
        _need("int64_gather", "all_gather of int64")


def _need(capability: str, what: str) -> None:
    if settings.lacks(capability):
        raise RuntimeError(
            f"{what} was asked for, but the simulated device's collectives have none (SIM_WITHOUT={capability}). Use another."
        )


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


def register() -> None:
    """Makes torch.distributed know the backend; once the device is up it does."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", NAME])
