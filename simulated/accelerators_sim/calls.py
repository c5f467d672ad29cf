"""One call of an operator on the device: its arguments for the host's kernel, and its results as device tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from accelerators_sim import torch_private
from accelerators_sim.current import current_device, current_lane
from accelerators_sim.lanes import Lane, lanes
from accelerators_sim.plans import plan_of
from accelerators_sim.storage import Block, adopt, block_of, host_view, new_storage, replace_storage, view_of

HOST = torch.device("cpu")
_NUMBERS = (bool, int, float, complex)



def _as_tensor(number: complex, args: tuple[Any, ...]) -> torch.Tensor:
    """Makes a tensor of a number that torch gives in place of one: in the dtype of the other tensor, or, if that cannot have
    such numbers, in the dtype that torch takes for them."""
    other = next((value.dtype for value in args if isinstance(value, torch.Tensor)), torch.bool)
    return torch.scalar_tensor(number, dtype=torch.result_type(torch.empty(1, dtype=other, device="cpu"), number), device="cpu")


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

    __slots__ = ("index", "keywords", "lane", "on_host", "op", "plan", "positional", "uses")

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.plan = plan_of(op)
        self.uses: list[Use] = []
        self.on_host: list[torch.Tensor] = []  # scalars and indices on the host, which are read when the kernel is issued
        self.index = -1
        writes, names, tensors = self.plan.writes, self.plan.writes_names, self.plan.tensors
        self.positional = [
            _as_tensor(value, args) if isinstance(value, _NUMBERS) and position in tensors
            else self._lower(value, position in writes)
            for position, value in enumerate(args)
        ]
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
                    f"Expected all tensors to be on the same device, but {self.plan.name} got one on "
                    f"{device} of {tuple(tensor.shape)} besides those on {torch_private.NAME}. Move it with .to()."
                )
            self.on_host.append(tensor)
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

    def can_wait(self) -> bool:
        """Returns whether the call may run late: host tensors of no dimensions are read when it is issued, others are not."""
        return not any(tensor.dim() for tensor in self.on_host)

    def run(self) -> Any:
        """Runs the kernel on the host's memory, as early as its streams allow. Returns its results as device tensors."""
        result = self.op(*self.positional, **self.keywords)
        if self.plan.resizes:
            self._follow_resized()
        return self._raise_result(result)

    def put_off(self) -> Any:
        """Queues the kernel in its lane, and gives device tensors that it will fill."""
        reads = {use.block.memory.data_ptr() for use in self.uses if use.block is not None}
        if self.on_host:
            numbers = {id(tensor): tensor.clone() for tensor in self.on_host}
            self.positional = [_replaced(value, numbers) for value in self.positional]
            self.keywords = {name: _replaced(value, numbers) for name, value in self.keywords.items()}
        if self.plan.lateness == "in place":
            lanes.put_off(self.lane, functools.partial(self.op, *self.positional, **self.keywords), reads, reads)
            return next((use.tensor for use in self.uses if use.written), None) if self.op._schema.returns else None
        keywords = {name: _without_data(value) for name, value in self.keywords.items()}
        shapes = self.op(*(_without_data(value) for value in self.positional), **keywords)
        results = [None if shape is None else _unfilled(shape, self.index) for shape in _as_list(shapes)]
        blocks = [None if result is None else block_of(result) for result in results]
        targets = [None if result is None else host_view(result, block) for result, block in zip(results, blocks, strict=True)]
        writes = {block.memory.data_ptr() for block in blocks if block is not None}
        compute = functools.partial(self.op, *self.positional, **self.keywords)

        def fill() -> None:
            for target, made in zip(targets, _as_list(compute()), strict=True):
                if target is not None:
                    target.copy_(made)

        lanes.put_off(self.lane, fill, reads, writes)
        return results[0] if isinstance(shapes, torch.Tensor) else type(shapes)(results)

    def _follow_resized(self) -> None:
        for use in self.uses:
            if use.written and (use.block is None or use.host.untyped_storage().data_ptr() != use.block.memory.data_ptr()):
                storage = new_storage(use.host.untyped_storage(), self.index)
                replace_storage(use.tensor, storage, use.host.size(), use.host.stride(), use.host.storage_offset())
            elif use.written and use.host.size() != use.tensor.size():
                storage = use.tensor.untyped_storage()
                offset = use.host.storage_offset() - torch_private.start_in_block(storage) // use.host.element_size()
                replace_storage(use.tensor, storage, use.host.size(), use.host.stride(), offset)

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
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.device) and value.type == torch_private.NAME and value.index is not None:
            return value.index
    return current_device()


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """Returns an argument with some of its tensors replaced."""
    return [_replaced(item, by) for item in value] if isinstance(value, list) else by.get(id(value), value)


def _as_list(result: Any) -> list[Any]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _without_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A tensor of no dimensions counts less than others when torch chooses a result's dtype, even without data.
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list):
        return [_without_data(item) for item in value]
    return value


def _unfilled(shape: torch.Tensor, index: int) -> torch.Tensor:
    host = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")
    torch_private.overwrite(host.data_ptr(), host.untyped_storage().nbytes())  # NaN shows that it was read too early
    return adopt(host, index)
