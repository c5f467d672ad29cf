"""The operators that a device must have of its own: making, viewing, resizing and moving to another storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerators_sim import operators, torch_private
from accelerators_sim.capabilities import check_dtype
from accelerators_sim.copies import copy_and_resize, copy_from
from accelerators_sim.current import current_device, current_lane
from accelerators_sim.lanes import lanes
from accelerators_sim.settings import settings
from accelerators_sim.storage import accounts, adopt, block_of, new_storage, replace_storage
from accelerators_sim.waits import here


def _index(device: torch.device | None) -> int:
    index = current_device() if device is None or device.index is None else device.index
    if not 0 <= index < len(accounts):
        raise RuntimeError(
            f"Cannot use device {torch_private.NAME}:{index}: there are {len(accounts)}. "
            f"Use 0 to {len(accounts) - 1}, or set SIM_DEVICES."
        )
    return index


def _new(
    size: Any, stride: Any, dtype: torch.dtype | None, device: torch.device | None, pin_memory: bool | None
) -> torch.Tensor:
    index = _index(device)
    dtype = dtype or torch.get_default_dtype()
    if pin_memory:
        raise RuntimeError(
            f"Cannot pin memory on {torch_private.NAME}:{index}: only host memory is pinned. Leave pin_memory out."
        )
    check_dtype(dtype, settings.without)
    # The room is checked before the host is asked for memory, as a request beyond the device's size may take all of the host's.
    span = 0 if 0 in size else 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    accounts[index].check(span * dtype.itemsize)
    tensor = adopt(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), index)
    if settings.races:
        # No operator ran, yet the memory is this stream's: another stream must use it after this.
        with lanes.lock:  # a lane's count may be another thread's too
            operators.remember_new(tensor, current_lane(index).issue("aten::empty", here()))
    return tensor


def empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    stride = _stride_of(size, memory_format)
    return _new(size, stride, dtype, device, pin_memory)


def empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return _new(size, stride, dtype, device, pin_memory)


def _stride_of(size: Any, memory_format: torch.memory_format | None = None) -> tuple[int, ...]:
    if memory_format is None or memory_format in (torch.contiguous_format, torch.preserve_format):
        stride, step = [], 1
        for extent in reversed(size):
            stride.append(step)
            step *= max(int(extent), 1)
        return tuple(reversed(stride))
    return torch.empty(size, device="meta", memory_format=memory_format).stride()


def resize_(self: torch.Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    stride = _stride_of(size, memory_format)
    numel = torch.Size(size).numel()
    storage = self.untyped_storage()
    if (self.storage_offset() + numel) * self.element_size() <= storage.nbytes():
        return replace_storage(self, storage, size, stride, self.storage_offset())
    index = self.device.index
    grown = torch.empty(numel, dtype=self.dtype)
    block = block_of(self)
    if block is not None:
        lanes.run_lane(current_lane(index))
        start, size = torch_private.start_in_block(storage), self.element_size()
        kept = min(grown.numel(), storage.nbytes() // size)
        grown[:kept].copy_(block.base(self.dtype)[start // size :][:kept])
    return replace_storage(self, new_storage(grown.untyped_storage(), index), size, stride, 0)


def set_storage(self: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    return replace_storage(self, source, [source.nbytes() // self.element_size()], [1], 0)


def set_storage_offset(
    self: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    return replace_storage(self, source, size, stride or _stride_of(size), offset)


def set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return replace_storage(self, source.untyped_storage(), source.size(), source.stride(), source.storage_offset())


def set_nothing(self: torch.Tensor) -> torch.Tensor:
    return replace_storage(self, new_storage(torch.empty(0).untyped_storage(), self.device.index), [0], [1], 0)


def record_stream(self: torch.Tensor, stream: torch.Stream) -> None:
    """Makes the allocator wait for `stream` before it gives this memory out again."""
    if settings.lacks("record_stream"):
        raise NotImplementedError(
            "Cannot run record_stream: the simulated device has none (SIM_WITHOUT=record_stream). "
            "Keep a reference until an event."
        )
    block = block_of(self)
    if block is not None and block.history is not None:
        block.history.excused.add(lanes.find(stream.device_index, stream.stream_id).number)


def choose_attention(*args: Any, **kwargs: Any) -> int:
    return 0  # attention that is made of ordinary operators


def _with_bias_sizes(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    transposed, groups = rest[3], rest[5]
    bias_size = weight.size(1) * groups if transposed else weight.size(0)
    return (grad, input, weight, [bias_size], *rest)


def _on_host(view: Any) -> Callable[..., torch.Tensor]:
    # The host's kernel for a view reads sizes only, and makes its result on the storage that it is given, on whatever device
    # that is.
    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = view.redispatch(torch_private.CPU_KEYS, *args, **kwargs)
        return result

    return kernel


def kernels() -> dict[str, Callable[..., Any]]:
    """Returns the kernels that are registered besides the fallback, by the name of their operator."""
    aten = torch.ops.aten
    table: dict[str, Callable[..., Any]] = {
        "_copy_from": copy_from,
        "_copy_from_and_resize": copy_and_resize,
        "_fused_sdp_choice": choose_attention,
        "convolution_backward_overrideable": operators.lowered_to(aten.convolution_backward.default, _with_bias_sizes),
        "convolution_overrideable": operators.lowered_to(aten.convolution.default),
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "record_stream": record_stream,
        "resize_": resize_,
        "set_": set_nothing,
        "set_.source_Storage": set_storage,
        "set_.source_Storage_storage_offset": set_storage_offset,
        "set_.source_Tensor": set_tensor,
    }
    for name in ("as_strided", "view", "_reshape_alias", "unfold"):
        table[name] = _on_host(getattr(aten, name).default)
    # Torch would cut these into several calls, one for each tensor or after an allocation. The host's kernel takes them whole.
    for op in torch_private.operators(torch_private.is_made_of_pieces):
        table.setdefault(torch_private.registered_name(op), operators.lowered_to(op))
    return table
