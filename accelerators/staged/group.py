"""The process group "staged": collectives of tensors on any device, carried through the host by gloo.

It serves host tensors, too, as torch lets a group that is written in Python serve all devices or none. Collectives give the
results of gloo's; sums are taken in the tensor's dtype.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d  # the options of collectives are public nowhere else

from accelerators.staged.pipeline import (
    Chunk,
    Exchange,
    HostCall,
    Pipeline,
    Queues,
    StagedDevice,
    StagedWork,
    Transfer,
    flat,
    on_index,
)
from accelerators.tensor_bytes import as_bytes

TIME_LIMIT = datetime.timedelta(minutes=5)

ReduceOp: Any = dist.ReduceOp  # Any: torch's stubs say it is an enum, which it is not

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPES = frozenset((*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool))
_OPS = (
    *(ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX),
    *(ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR),
)

Tensors = list[torch.Tensor]
Call = Callable[[], Any]

# Any: torch's stubs give each collective several signatures, of which Python calls one.
_ProcessGroup: Any = dist.ProcessGroup


class StagedGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks that serves the host and `devices`, which are given by the name of their type."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta | None, devices: Mapping[str, StagedDevice]
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout or TIME_LIMIT)
        self._devices = dict(devices)
        self._queues: dict[torch.device, Queues] = {}
        self._pipeline = Pipeline()
        self._named = self._described = ""
        # Collectives of objects look up a backend, and find gloo. Those of tensors come through this class.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        for name in self._devices:
            self._register_backend(torch.device(name), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # torch's flight recorder asks it for its name

    # who it is

    def name(self) -> str:
        return "staged"

    def getBackendName(self) -> str:
        return self.name()

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

    def shutdown(self) -> None:
        """Destroys the group: collectives whose bytes have come end, and the others fail."""
        self._pipeline.close()
        super().shutdown()

    # how it carries

    def _start(self, name: str, on_host: Call, transfer: Transfer, result: Any, op: Any = ()) -> Any:
        """Starts a collective: `on_host` if all tensors are on the host, else `transfer`. `op` is checked for the latter."""
        where = next((tensor.device for tensor in (*transfer.reads, *transfer.writes) if tensor.device.type != "cpu"), None)
        work = StagedWork(name, result)
        if where is None:
            self._pipeline.put(HostCall(on_host, work))
            return work
        device, index = self._device(where), where.index or 0
        if op != ():
            _check_sum(name, op, (*transfer.reads, *transfer.writes)[0].dtype)
            if op is ReduceOp.AVG:
                transfer = transfer._replace(divisor=self._size)
        queues = self._queues_of(device, where)
        self._announce(name, queues, transfer)
        self._pipeline.put(self._exchange(device, index, queues, transfer, work))
        return work

    def _announce(self, name: str, queues: Queues, transfer: Transfer) -> None:
        """Does nothing, before a collective begins. A device that checks who uses which memory overrides it, and may raise."""

    def _exchange(self, *arguments: Any) -> Exchange:
        return Exchange(*arguments)

    def _device(self, where: torch.device) -> StagedDevice:
        if where.type not in self._devices:
            raise ValueError(
                f"Cannot run a collective on {where}: this group serves cpu and {', '.join(self._devices)}. Pass tensors there."
            )
        return self._devices[where.type]

    def _queues_of(self, device: StagedDevice, where: torch.device) -> Queues:
        if not device.has_streams:
            return Queues(None, None)
        if where not in self._queues:
            index = where.index or 0
            self._queues[where] = Queues(device.new_stream(index), device.new_stream(index))
        return self._queues[where]

    # collectives

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._all_reduce("all_reduce", [tensors] if isinstance(tensors, torch.Tensor) else tensors, options)

    def _all_reduce(self, name: str, tensors: Tensors, options: Any) -> Any:
        options = options or c10d.AllreduceOptions()
        op = _op_of(options)
        on_host = lambda: self._gloo.allreduce(tensors, options)  # noqa: E731
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return self._start(name, on_host, Transfer(tensors, tensors, _nothing), tensors)
        _sum_instead(options)
        carry = lambda chunk: self._gloo.allreduce([chunk.out], options)  # noqa: E731
        return _last([self._start(name, on_host, Transfer([x], [x], carry, in_place=True), tensors, op) for x in tensors])

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> Any:
        plain = c10d.AllreduceOptions()
        if options is not None:
            plain.reduceOp, plain.timeout = options.reduceOp, options.timeout
        return self._all_reduce("all_reduce_coalesced", tensors, plain)

    def broadcast(self, tensors: Tensors, options: Any = None) -> Any:
        options = options or c10d.BroadcastOptions()
        reads, writes = (tensors, []) if options.rootRank == self._rank else ([], tensors)
        carry = lambda chunk: self._gloo.broadcast([as_bytes(chunk.given if reads else chunk.out)], options)  # noqa: E731
        return self._start("broadcast", lambda: self._gloo.broadcast(tensors, options), Transfer(reads, writes, carry), tensors)

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        op, on_host = _op_of(options), lambda: self._gloo.reduce(tensors, options)
        writes = tensors if options.rootRank == self._rank else []
        if tensors[0].device.type != "cpu":
            _sum_instead(options)
        carry = lambda chunk: self._gloo.reduce([chunk.out], options)  # noqa: E731
        return self._start("reduce", on_host, Transfer(tensors, writes, carry, in_place=True), tensors, op)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        options = options or c10d.AllgatherOptions()
        on_host = lambda: self._gloo.allgather(outputs, inputs, options)  # noqa: E731
        return self._start("all_gather", on_host, self._gathering(inputs[0], outputs[0], options), outputs)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any = None, name: str = "all_gather_into_tensor"
    ) -> Any:
        options = options or c10d.AllgatherOptions()
        on_host = lambda: self._gloo._allgather_base(output, input, options)  # noqa: E731
        return self._start(name, on_host, self._gathering(input, self._rows(output), options), [output])

    def _gathering(self, given: torch.Tensor, rows: Sequence[torch.Tensor], options: Any) -> Transfer:
        carry = lambda chunk: self._gloo._allgather_base(as_bytes(chunk.out), as_bytes(chunk.given), options)  # noqa: E731
        return Transfer([given], rows, carry, self._size)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Any:
        rows = outputs[0] if outputs else []

        def carry(chunk: Chunk) -> Any:
            return self._gloo.gather([list(map(as_bytes, chunk.out_rows))] if rows else [], [as_bytes(chunk.given)], options)

        on_host = lambda: self._gloo.gather(outputs, inputs, options)  # noqa: E731
        return self._start("gather", on_host, Transfer(inputs, rows, carry, self._size), outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Any:
        rows = inputs[0] if inputs else []

        def carry(chunk: Chunk) -> Any:
            return self._gloo.scatter([as_bytes(chunk.out)], [list(map(as_bytes, chunk.given_rows))] if rows else [], options)

        on_host = lambda: self._gloo.scatter(outputs, inputs, options)  # noqa: E731
        return self._start("scatter", on_host, Transfer(rows, outputs, carry, self._size), outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Any:
        options = options or c10d.ReduceScatterOptions()
        on_host = lambda: self._gloo.reduce_scatter(outputs, inputs, options)  # noqa: E731
        return self._scatter_sum("reduce_scatter", on_host, outputs[0], inputs[0], options)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any = None, name: str = "reduce_scatter_tensor"
    ) -> Any:
        options = options or c10d.ReduceScatterOptions()
        on_host = lambda: self._gloo._reduce_scatter_base(output, input, options)  # noqa: E731
        return self._scatter_sum(name, on_host, output, self._rows(input), options)

    def _scatter_sum(self, name: str, on_host: Call, output: torch.Tensor, rows: Sequence[torch.Tensor], options: Any) -> Any:
        op = _op_of(options)
        if output.device.type != "cpu":
            _sum_instead(options)
        carry = lambda chunk: self._gloo._reduce_scatter_base(chunk.out, chunk.given, options)  # noqa: E731
        return self._start(name, on_host, Transfer(rows, [output], carry, self._size), [output], op)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        name = "all_gather_into_tensor_coalesced"
        return _last([self.all_gather_single(*pair, options, name) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        name = "reduce_scatter_tensor_coalesced"
        return _last([self.reduce_scatter_single(*pair, _copied(options), name) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], options: Any = None
    ) -> Any:
        options = options or c10d.AllToAllOptions()
        on_host = lambda: self._gloo.alltoall_base(output, input, output_sizes, input_sizes, options)  # noqa: E731
        if not output_sizes and not input_sizes:  # all ranks then exchange rows of one length
            transfer = self._exchanging(self._rows(input), self._rows(output), options)
            return self._start("all_to_all_single", on_host, transfer, [output])
        reads, writes = self._split(input, input_sizes), self._split(output, output_sizes)
        return self._start("all_to_all_single", on_host, self._uneven(reads, writes, options), [output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        options = options or c10d.AllToAllOptions()
        transfer = self._uneven(inputs, outputs, options)

        def on_host() -> Any:  # gloo takes a single tensor
            given, sizes = torch.cat([x.reshape(-1) for x in inputs]), [[x.numel() for x in side] for side in (outputs, inputs)]
            received = torch.empty(sum(sizes[0]), dtype=given.dtype, device="cpu")
            return _Then(self._gloo.alltoall_base(received, given, *sizes, options), lambda: _distribute(received, outputs))

        return self._start("all_to_all", on_host, transfer, outputs)

    def _exchanging(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], options: Any) -> Transfer:
        def carry(chunk: Chunk) -> Any:
            given, out = ([as_bytes(row).numel() for row in rows] for rows in (chunk.given_rows, chunk.out_rows))
            return self._gloo.alltoall_base(as_bytes(chunk.out), as_bytes(chunk.given), out, given, options)

        return Transfer(reads, writes, carry, self._size)

    def _uneven(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], options: Any) -> Transfer:
        """Exchanges pieces of different lengths. Ranks first agree on the longest, as all must cut into as many chunks."""
        local_numel = max(tensor.numel() for tensor in (*reads, *writes))

        def longest() -> int:
            most, wanted = torch.tensor([local_numel], device="cpu"), c10d.AllreduceOptions()
            wanted.reduceOp = ReduceOp.MAX
            self._pipeline.wait_for(self._gloo.allreduce([most], wanted))
            return int(most.item())

        return self._exchanging(reads, writes, options)._replace(longest=longest)

    def barrier(self, opts: Any = None) -> Any:  # torch passes this one by name
        plain = c10d.BarrierOptions()  # new options, as gloo refuses the device that torch puts in
        if opts is not None:
            plain.timeout = opts.timeout
        return self._start("barrier", lambda: self._gloo.barrier(plain), Transfer([], [], _nothing), None)

    # Messages between two ranks go to gloo at once, as they have no place in the order of collectives.

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        on_host = [tensor if tensor.device.type == "cpu" else flat(tensor).to("cpu") for tensor in tensors]
        return PointToPoint("send", tensors, self._gloo.send(on_host, target, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        if tensors[0].device.type == "cpu":
            return PointToPoint("recv", tensors, self._gloo.recv(tensors, source, tag))
        target = flat(tensors[0])
        device, received = self._device(target.device), torch.empty(target.numel(), dtype=target.dtype, device="cpu")

        def land() -> None:
            with on_index(device, target.device.index or 0):
                target.copy_(received)

        return PointToPoint("recv", tensors, self._gloo.recv([received], source, tag), land)

    # torch uses these names before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _rows(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.data.view(self._size, -1).unbind() if tensor.numel() else [tensor] * self._size

    def _split(self, tensor: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        sizes = sizes or [tensor.size(0) // self._size] * self._size
        return torch.split(tensor.data, sizes)


class PointToPoint(StagedWork):
    """A message that is going on. No thread carries it: `wait` copies what was received to the device."""

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


class _Then:
    """A work of gloo, and an action on its output that `wait` takes."""

    def __init__(self, carried: Any, act: Callable[[], None]) -> None:
        self._carried, self._act = carried, act

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        self._carried.wait(timeout) if timeout else self._carried.wait()
        self._act()

    def is_completed(self) -> bool:
        return bool(self._carried.is_completed())


def _distribute(received: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copies to each output its part of what came in one tensor."""
    for output, piece in zip(outputs, torch.split(received, [output.numel() for output in outputs]), strict=True):
        output.data.copy_(piece.view(output.shape))


def _op_of(options: Any) -> Any:
    """Returns the operation that the options ask for, or None if gloo lacks it. Theirs has ==, but cannot be found in a set."""
    return next((op for op in _OPS if options.reduceOp == op), None)


def _check_sum(name: str, op: Any, dtype: torch.dtype) -> None:
    """Raises if gloo cannot run the sum. That is before anything is sent, as a collective that fails later ends the group."""
    if op is None:
        raise ValueError(f"Cannot run {name}: gloo, which carries it, has no such operation. Use SUM and scale the result.")
    if dtype not in _DTYPES or (dtype == torch.bool and op is ReduceOp.AVG):
        raise TypeError(f"Cannot run {name}: gloo, which carries it, adds no {dtype}. Convert the tensor first.")


def _sum_instead(options: Any) -> None:
    """Makes a mean a sum, which the pipeline divides when it has come, as not all versions of gloo divide."""
    if _op_of(options) is ReduceOp.AVG:
        options.reduceOp = ReduceOp.SUM


def _copied(options: Any) -> Any:
    """Returns options for one reduce-scatter of several: each changes its own."""
    made = c10d.ReduceScatterOptions()
    if options is not None:
        made.reduceOp, made.timeout = options.reduceOp, options.timeout
    return made


def _nothing(chunk: Chunk) -> Any:
    raise AssertionError(f"a collective on host tensors was given a chunk of {chunk.out.numel()} elements")


def _last(works: list[Any]) -> Any:
    return works[-1]  # collectives end in order, so the last one ends last
