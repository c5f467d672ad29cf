"""The device's memory: blocks of host memory that device storages own, counted to the byte.

[Note: who keeps memory alive] A device storage holds its `Block` in a Python attribute, which torch keeps for as long
as the storage lives. When the last tensor on it goes, the block goes and its bytes are given back. Work that was put
off holds the block's host memory and not the block: what the user freed counts as free, yet no pointer ever dangles.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakValueDictionary

import torch

from accelerators.memory import format_bytes
from accelerators_sim import torch_private
from accelerators_sim.capabilities import check_dtype
from accelerators_sim.current import current_lane
from accelerators_sim.lanes import Lane
from accelerators_sim.race import History
from accelerators_sim.settings import settings

_set = torch.ops.aten.set_.source_Storage_storage_offset
_alias = torch.ops.aten.alias.default
_view_dtype = torch.ops.aten.view.dtype
_no_bytes = torch.empty(0, dtype=torch.uint8)


class Account:
    """The bytes of one device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.allocated = 0
        self.peak = 0

    def check(self, num_bytes: int) -> None:
        """Raises where the device has no room for `num_bytes` more."""
        free = settings.memory_bytes - self.allocated
        if num_bytes > free:
            raise torch.OutOfMemoryError(
                f"SIM out of memory. Cannot allocate {format_bytes(num_bytes)} ({num_bytes} bytes) on sim:{self.index}: "
                f"{free} bytes of its {settings.memory_bytes} are free and {self.allocated} are allocated. "
                "Free tensors, or give the device more (SIM_MEMORY)."
            )

    def add(self, num_bytes: int) -> None:
        # Plain attribute arithmetic, as Python switches threads and collects garbage between calls, of which there are none.
        self.allocated += num_bytes
        if self.allocated > self.peak:
            self.peak = self.allocated


accounts: list[Account] = []


# By the address where a storage on it begins, as `with_own_storage` makes some that begin inside.
_by_address: WeakValueDictionary[int, Block] = WeakValueDictionary()


class Block:
    """One allocation on the device."""

    __slots__ = ("__weakref__", "account", "history", "lane", "memory", "num_bytes", "typed")

    def __init__(self, index: int, memory: torch.UntypedStorage) -> None:
        self.num_bytes = 0  # set before anything can raise, as __del__ gives back what was taken
        self.history: History | None = None
        self.account = accounts[index]
        self.account.check(memory.nbytes())
        self.lane: Lane = current_lane(index)  # memory belongs to the stream that asked for it, as in torch's caching allocator
        self.memory = memory
        self.typed: dict[torch.dtype, torch.Tensor] = {}
        self.lane.allocate()
        self.num_bytes = memory.nbytes()
        self.account.add(self.num_bytes)
        if settings.races:
            self.history = History(self.num_bytes, self.lane.number)
        _by_address[memory.data_ptr()] = self

    def __del__(self) -> None:
        if self.num_bytes and not sys.is_finalizing():
            self.account.allocated -= self.num_bytes
            if self.history is not None and self.history.shared:
                self.lane.bury(self.history)

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all of the block as a flat host tensor."""
        tensor = self.typed.get(dtype)
        if tensor is None:
            tensor = self.typed[dtype] = flat(self.memory, dtype)
        return tensor


def flat(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Returns host memory as a flat host tensor."""
    tensor = _view_dtype.redispatch(torch_private.CPU_KEYS, _no_bytes, dtype)
    result: torch.Tensor = _set.redispatch(torch_private.CPU_KEYS, tensor, memory, 0, [memory.nbytes() // dtype.itemsize], [1])
    return result


def is_sim(tensor: torch.Tensor) -> bool:
    return tensor.device.type == torch_private.NAME


def block_of(tensor: torch.Tensor) -> Block | None:
    """Returns the block under a device tensor; None where it has no bytes."""
    storage = tensor.untyped_storage()
    block: Block | None = getattr(storage, "_sim_block", None)
    if block is None and storage.nbytes():
        # Torch's own C++ has made a second storage on this memory, which it does to write a storage to a file.
        block = _by_address[storage.data_ptr()]
        start = storage.data_ptr() - block.memory.data_ptr()
        storage._sim_block, storage._sim_start = block, start  # type: ignore[attr-defined]
    return block


def host_view(tensor: torch.Tensor, block: Block | None) -> torch.Tensor:
    """Returns a device tensor as a host tensor on the same memory, which it keeps alive."""
    if block is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    offset = tensor.storage_offset() + torch_private.start_in_block(tensor.untyped_storage()) // tensor.element_size()
    return block.base(tensor.dtype).as_strided(tensor.size(), tensor.stride(), offset)


def with_own_storage(stretch: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on a stretch of a block, with a storage that is no longer."""
    block = block_of(stretch)
    if block is None or not stretch.numel():
        return stretch
    start = torch_private.start_in_block(stretch.untyped_storage()) + int(stretch.storage_offset()) * stretch.element_size()
    storage = torch_private.storage_at(block.memory.data_ptr() + start, stretch.device, stretch.nbytes)
    storage._sim_block, storage._sim_start = block, start  # type: ignore[attr-defined]
    _by_address[storage.data_ptr()] = block
    return tensor_on(storage, _prototype(stretch.device.index, stretch.dtype), stretch.size(), stretch.stride(), 0)


def new_storage(memory: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
    """Returns a device storage that takes over host memory."""
    num_bytes = memory.nbytes()
    block = Block(index, memory) if num_bytes else None
    storage = torch_private.storage_at(memory.data_ptr(), torch.device(torch_private.NAME, index), num_bytes)
    storage._sim_block = block  # type: ignore[attr-defined]
    return storage


def adopt(host: torch.Tensor, index: int) -> torch.Tensor:
    """Makes a device tensor of a host tensor that no other code uses."""
    prototype = _prototype(index, host.dtype)  # made first, as it raises for a dtype that was taken away
    storage = new_storage(host.untyped_storage(), index)
    return tensor_on(storage, prototype, host.size(), host.stride(), host.storage_offset())


def tensor_on(storage: torch.UntypedStorage, prototype: torch.Tensor, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    fresh = _alias.redispatch(torch_private.CPU_KEYS, prototype)
    tensor: torch.Tensor = _set.redispatch(torch_private.CPU_KEYS, fresh, storage, offset, size, stride)
    return tensor


def view_of(tensor: torch.Tensor, dtype: torch.dtype, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    """Returns another tensor on a device tensor's storage, at an offset in its block."""
    storage = tensor.untyped_storage()
    offset -= torch_private.start_in_block(storage) // dtype.itemsize
    return tensor_on(storage, _prototype(tensor.device.index, dtype), size, stride, offset)


def replace_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    """Puts a device tensor on another storage of its device."""
    result: torch.Tensor = _set.redispatch(torch_private.CPU_KEYS, tensor, storage, offset, size, stride)
    return result


# By device and dtype: a tensor of no elements, from which every other one is made.
_prototypes: dict[tuple[int, torch.dtype], torch.Tensor] = {}
_byte_prototypes: dict[int, torch.Tensor] = {}


def _prototype(index: int, dtype: torch.dtype) -> torch.Tensor:
    prototype = _prototypes.get((index, dtype))
    if prototype is None:
        check_dtype(dtype, settings.without)
        if index not in _byte_prototypes:
            _byte_prototypes[index] = torch_private.empty_byte_tensor(index)
        prototype = _view_dtype.redispatch(torch_private.CPU_KEYS, _byte_prototypes[index], dtype)
        _prototypes[index, dtype] = prototype
    return prototype


def forget_prototypes() -> None:
    """Makes the next tensor of each dtype ask again whether the device has it."""
    _prototypes.clear()
