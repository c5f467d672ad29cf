"""Every operator that has no kernel of its own: run by the host's kernel, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accelerators.simulated import backward, rng, torch_private
from accelerators.simulated.lanes import Lane, current_lane, host, lanes
from accelerators.simulated.place import here
from accelerators.simulated.race import Access
from accelerators.simulated.settings import settings
from accelerators.simulated.storage import (
    Block,
    adopt,
    block_of,
    host_view,
    is_sim,
    new_storage,
    replace_storage,
    view_of,
)

HOST = torch.device("cpu")

# Indices may lie on the host: torch itself moves them.
_MAY_MIX = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)


@dataclass(frozen=True)
class Plan:
    """What the schema of one operator says, read once."""

    name: str
    writes: frozenset[int]  # positions of arguments that it changes
    writes_names: frozenset[str]  # keyword arguments that it changes
    random: str  # how it takes a generator: "argument", "default" (it has none, and uses the host's), or ""
    waits: bool  # the shape or value of its result depends on data, for which the host must wait
    may_mix: bool

    @property
    def resizes(self) -> bool:
        return bool(self.writes_names)  # out= tensors take the shape of the result


_plans: dict[Any, Plan] = {}


def plan_of(op: Any) -> Plan:
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = _read_plan(op)
    return plan


def _read_plan(op: Any) -> Plan:
    arguments = op._schema.arguments
    changed = [(at, argument) for at, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]
    takes_generator = any(argument.name == "generator" for argument in arguments)
    random = torch.Tag.nondeterministic_seeded in op.tags
    return Plan(
        name=op._schema.name,
        writes=frozenset(at for at, argument in changed if not argument.kwarg_only),
        writes_names=frozenset(argument.name for _, argument in changed),
        random="" if not random else "argument" if takes_generator else "default",
        waits=torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags,
        may_mix=op._schema.name in _MAY_MIX,
    )


class Use:
    """One device tensor that a call was given."""

    __slots__ = ("block", "host", "tensor", "written")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, block: Block | None, written: bool) -> None:
        self.tensor = tensor
        self.host = host
        self.block = block
        self.written = written


class Call:
    """One call of an operator: its arguments as the host's kernel takes them, and what they were."""

    __slots__ = ("index", "keywords", "lane", "op", "plan", "positional", "uses")

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.plan = plan_of(op)
        self.uses: list[Use] = []
        self.index = -1
        writes, names = self.plan.writes, self.plan.writes_names
        self.positional = [self._lower(value, at in writes) for at, value in enumerate(args)]
        self.keywords = {name: self._lower(value, name in names) for name, value in kwargs.items()}
        if self.index < 0:
            self.index = _device_asked_for(args, kwargs)
        self.lane: Lane = current_lane(self.index)

    def _lower(self, value: Any, written: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._lower_tensor(value, written)
        if isinstance(value, (list, tuple)):
            if value and any(isinstance(item, torch.Tensor) for item in value):
                return [self._lower(item, written) for item in value]
            return value
        if isinstance(value, torch.device):
            return HOST if value.type == torch_private.NAME else value
        return value

    def _lower_tensor(self, tensor: torch.Tensor, written: bool) -> torch.Tensor:
        device = tensor.device
        if device.type != torch_private.NAME:
            if tensor.dim() and not self.plan.may_mix and device.type == "cpu":
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {self.plan.name} got a tensor of {tuple(tensor.shape)} on {device} "
                    f"besides those on {torch_private.NAME}. Move it with .to()."
                )
            return tensor
        if self.index < 0:
            self.index = device.index
        elif device.index != self.index:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self.plan.name} got tensors on "
                f"{torch_private.NAME}:{self.index} and {device}. Move one with .to()."
            )
        block = block_of(tensor)
        lowered = host_view(tensor, block)
        self.uses.append(Use(tensor, lowered, block, written))
        return lowered

    def run(self) -> Any:
        """The kernel on the host's memory, as early as its streams allow, and its results as device tensors."""
        result = self.op(*self.positional, **self.keywords)
        if self.plan.resizes:
            self._follow_resized()
        return self._raise_result(result)

    def _follow_resized(self) -> None:
        for use in self.uses:
            if use.written and (use.block is None or use.host.untyped_storage().data_ptr() != use.block.memory.data_ptr()):
                storage = new_storage(use.host.untyped_storage(), self.index)
                replace_storage(use.tensor, storage, use.host.size(), use.host.stride(), use.host.storage_offset())
            elif use.written and use.host.size() != use.tensor.size():
                storage = use.tensor.untyped_storage()
                replace_storage(use.tensor, storage, use.host.size(), use.host.stride(), use.host.storage_offset())

    def _raise_result(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self._raise_tensor(result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._raise_result(item) for item in result)
        return result

    def _raise_tensor(self, result: torch.Tensor) -> torch.Tensor:
        if result.device.type != "cpu":
            return result
        memory = result.untyped_storage()
        address = memory.data_ptr()
        for use in self.uses:
            if result is use.host:
                return use.tensor
            if use.block is not None and address == use.block.memory.data_ptr():
                return view_of(use.tensor, result.dtype, result.size(), result.stride(), result.storage_offset())
        return adopt(result, self.index)


def _device_asked_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    from accelerators.simulated.lanes import current_device

    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.device) and value.type == torch_private.NAME and value.index is not None:
            return value.index
    return current_device()


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operator that has none of its own."""
    call = Call(op, args, kwargs)
    lane, plan = call.lane, call.plan
    with lanes.lock:
        if backward.side_lanes_used():
            backward.note(lane)
        access = begin(lane, plan.name, call.uses)
        if plan.waits:
            lanes.run_lane(lane)
            host.learn(lane.snapshot())
    if plan.random:
        result = rng.with_generator(call.index, plan.random, call.keywords, call.run)
    else:
        result = call.run()
    if access is not None:
        remember_new(result, access)
    return result


def begin(lane: Lane, name: str, uses: list[Use]) -> Access:
    """Orders a call in its lane: its accesses are checked, and what must come before it is run."""
    access = lane.issue(name, here())
    if settings.races:
        for use in uses:
            if use.block is not None and use.block.history is not None and use.tensor.numel():
                use.block.history.use(*byte_range(use.tensor), use.written, access)
    if lane.pending or settings.order == "random":
        reads = {use.block.memory.data_ptr() for use in uses if use.block is not None and not use.written}
        writes = {use.block.memory.data_ptr() for use in uses if use.block is not None and use.written}
        lanes.settle(lane, reads, writes)
    return access


def remember_new(result: Any, access: Access) -> None:
    """Makes the call the writer of the memory that it allocated."""
    if isinstance(result, torch.Tensor):
        block = block_of(result) if is_sim(result) else None
        if block is not None and block.history is not None and block.history.untouched:
            block.history.use(0, block.num_bytes, True, access)
    elif isinstance(result, (list, tuple)):
        for item in result:
            remember_new(item, access)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first to its last."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def lowered_to(replacement: Any, change: Callable[..., tuple[Any, ...]] | None = None) -> Callable[..., Any]:
    """A kernel that runs another operator, its arguments changed by `change`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(replacement, *(args if change is None else change(*args)), **kwargs)

    return kernel
