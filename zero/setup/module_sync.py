"""The parts of a model that no optimizer manages: frozen parameters, buffers and the inputs of its forward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerators.tensor_bytes import as_bytes
from zero.comm.group import Group
from zero.comm.levels import holders_of, seats_of
from zero.config.schema import ZeroConfig
from zero.memory.addresses import overlapping, storage_of
from zero.memory.formats import DTYPES
from zero.memory.leaves import local_of
from zero.setup.parts import Parts
from zero.setup.selection import ManagedParams, fp32_islands

logger = logging.getLogger("zero")


def sync_module_states(model: nn.Module, chosen: ManagedParams, group: Group, parts: Parts) -> None:
    """Copies rank 0's frozen parameters and buffers to all ranks, and a part, with its buffers, from the first rank that holds
    it. Of a group that knows no parts each rank keeps its own."""
    if group.size == 1:
        return
    unplaced = chosen.frozen
    laid_out = {id(leaf) for index, leaf in enumerate(chosen.leaves) if index not in unplaced}
    frozen = [(name, param) for name, param in model.named_parameters() if id(param) not in laid_out]
    tensors: dict[int, tuple[str, torch.Tensor, int]] = {}
    tensors |= {id(param): (name, param, parts.family_of(param)) for name, param in frozen}
    for name, table, key, family in _buffers_of(model, parts):
        buffer = table[key]
        if buffer is not None:
            tensors.setdefault(id(buffer), (name, buffer, family))
    odd = []
    with torch.no_grad():
        for name, tensor, family in tensors.values():
            place = _memory_of(local_of(tensor))
            if place is None:
                odd.append(name)
            elif place.numel() and not place.is_meta and family <= len(seats_of(group)):
                _broadcast_bits(holders_of(group, family), place)
    if odd:
        logger.warning("Not copied from rank 0, as they are not plain dense tensors: %s", ", ".join(odd))


def _buffers_of(model: nn.Module, parts: Parts) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str, int]]:
    """Yields the name of each buffer, where it lies, and the family of the ranks that hold the same of it."""
    for prefix, module in model.named_modules():
        for name in module._buffers:
            yield f"{prefix}.{name}" if prefix else name, module._buffers, name, parts.family_of_buffers(module)


class Buffers:
    """The buffers that a model had when it was sharded, kept equal on all ranks that hold the same.

    [Note: buffers] DDP sends rank 0's buffers before a forward that follows one which reduces gradients. A forward is no
    collective: ranks may take different branches, or skip one. But it is between two steps that buffers change, and a step all
    ranks take together. So they are sent when a step has settled its window, where each rank knows of all others that they
    come too, and each forward until the next step begins with the same.
    """

    def __init__(self, model: nn.Module, group: Group, parts: Parts) -> None:
        self._group = group
        self._places = list(_buffers_of(model, parts))

    def text(self) -> str:
        """Returns a line for each buffer that is there now, to be compared with other ranks'."""
        return "\n".join(f"buffer {name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor, _ in self._present())

    @torch.no_grad()
    def take_rank0s(self) -> None:
        """Makes all of them rank 0's, and those of parts their first holder's, in as few messages as there are dtypes and
        devices. A collective."""
        if self._group.size == 1:
            return
        alike: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for _, tensor, family in self._present():
            place = _memory_of(tensor)
            if place is not None and place.numel() and not place.is_meta:
                alike.setdefault((family, place.dtype, place.device), []).append(place)
        for (family, *_), places in alike.items():
            packed = torch.cat([place.resolve_conj().resolve_neg().reshape(-1) for place in places])
            holders = holders_of(self._group, family)
            _broadcast_bits(holders, packed)
            if holders.rank:
                for place, piece in zip(places, torch.split(packed, [place.numel() for place in places]), strict=True):
                    place.copy_(piece.view(place.shape))

    def _present(self) -> list[tuple[str, torch.Tensor, int]]:
        present = ((full, table.get(name), family) for full, table, name, family in self._places)
        return list({id(tensor): (full, tensor, family) for full, tensor, family in present if tensor is not None}.values())


def frozen_to_share(
    model: nn.Module, device: torch.device, keep_whole_numel: int, parts: Parts
) -> tuple[list[str], list[nn.Parameter]]:
    """Returns the frozen parameters that can be in shares: of a dtype that weights have, and with memory of their own. Small
    ones stay whole, unless they have no memory yet."""
    in_storage: dict[int, list[torch.Tensor]] = {}
    tensors = [*map(local_of, model.parameters()), *model.buffers()]
    for tensor in tensors:
        if _memory_of(tensor) is not None and (tensor.device == device or tensor.is_meta):
            in_storage.setdefault(storage_of(tensor), []).append(tensor)

    def may_be_shared(param: nn.Parameter) -> bool:
        numel = math.prod(parts.spec_of(param).longest(local_of(param).shape))
        is_large = numel > keep_whole_numel or (param.is_meta and numel > 0)
        return is_large and not param.requires_grad and param.dtype in DTYPES.values()

    apart = {id(tensor) for together in in_storage.values() if overlapping(together) is None for tensor in together}
    named = [(name, local_of(param)) for name, param in model.named_parameters() if may_be_shared(param)]
    named = [(name, param) for name, param in named if id(param) in apart]
    return [name for name, _ in named], [param for _, param in named]


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the memory of a tensor as one with each element once, which can be written; None if there is no such
    memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized or tensor.is_nested:
        return None
    place = tensor.detach()
    for dim in reversed(range(place.dim())):
        if place.stride(dim) == 0 and place.shape[dim]:  # the tensor is expanded along this dimension
            place = place.select(dim, 0)
    return None if overlapping([place]) else place


class MetaBuffers:
    """Buffers that were on the meta device. They get memory, full of NaN or zeros, which somebody has to write to."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._places: dict[str, tuple[weakref.ref[nn.Module], str, weakref.ref[torch.Tensor], int]] = {}
        placed: dict[int, torch.Tensor] = {}  # by id of the buffer before, which several modules may have
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                new = placed.get(id(buffer))
                if new is None:
                    new = torch.empty_like(buffer, device=device).fill_(float("nan") if buffer.is_floating_point() else 0)
                    placed[id(buffer)] = new
                    where = weakref.ref(module), name, weakref.ref(new), new._version
                    self._places[f"{prefix}.{name}" if prefix else name] = where
                module._buffers[name] = new

    def unwritten(self) -> list[str]:
        """Returns the names of those that have no values yet. A copy of one that is all NaN has none either."""
        for full_name, (module, name, first, version) in list(self._places.items()):
            owner = module()
            buffer = None if owner is None else owner._buffers.get(name)
            if buffer is None or not _lacks_values(buffer, first(), version):
                del self._places[full_name]
        return list(self._places)


def _lacks_values(buffer: torch.Tensor, first: torch.Tensor | None, version: int) -> bool:
    if _is_wide(buffer):
        return buffer.numel() > 0 and bool(buffer.isnan().all())
    return buffer is first and buffer._version == version


def restorer_of_dtypes(model: nn.Module) -> Callable[[], None]:
    """Returns what gives frozen parameters and buffers the dtypes that they have now. What was rounded meanwhile stays so."""
    tensors = [*(param for param in model.parameters() if not param.requires_grad), *model.buffers()]
    dtypes = [tensor.dtype for tensor in tensors]

    def restore() -> None:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)

    return restore


def cast_frozen(model: nn.Module, config: ZeroConfig) -> None:
    """Casts frozen parameters like the rest of the model. It comes late, as it rounds."""
    islands = fp32_islands(model, config.keep_fp32)
    for param in model.parameters():
        if config.dtype is not None and _is_wide(param) and id(param) not in islands and not param.requires_grad:
            param.data = param.data.to(DTYPES[config.dtype])


def _is_wide(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is a float of at least 16 bits. One of 8 bits is quantized, and belongs to a layer that knows
    its scale."""
    return tensor.is_floating_point() and tensor.element_size() > 1


# Pickles of our hooks become this hook that does nothing, which can be read without this package.
NO_HOOK = getattr, (contextlib.nullcontext(), "__exit__")


class _CastInputs:
    """A hook that casts floating inputs to the dtype of weights, as long as some have it. A copy of a module takes it along, in
    another process too, and may be cast back. A file of a module has none, and is read without this package."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        if all(param.dtype != self.dtype for param in module.parameters()):
            return None
        cast: tuple[Any, Any] = _Casting(self.dtype).of((inputs, named))
        return cast

    def __deepcopy__(self, memo: Any) -> _CastInputs:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_HOOK


def _send_to_process(hook: _CastInputs) -> tuple[Any, ...]:
    return _CastInputs, (hook.dtype,)


ForkingPickler.register(_CastInputs, _send_to_process)


def cast_inputs(model: nn.Module, config: ZeroConfig) -> RemovableHandle | None:
    """Casts floating-point inputs of the model's own forward to the dtype of the configuration, if that asks for it."""
    if not config.cast_inputs or config.dtype is None:
        return None
    hook = _CastInputs(DTYPES[config.dtype])
    # Called by the class, as a ScriptModule runs its hooks but has no method to register one.
    return nn.Module.register_forward_pre_hook(model, hook, prepend=True, with_kwargs=True)


class _Casting:
    """Casts floating tensors wherever they lie in tuples, lists, dicts and dataclasses. Of these, one in which nothing is cast
    stays the object that it is, as a forward may leave something there for its caller; one may contain itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._done: dict[int, tuple[Any, Any]] = {}  # by id of a container: the container, and what it becomes
        self._num_cast = 0

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_cast = _is_wide(value) and value.dtype != self._dtype
            self._num_cast += is_cast
            return value.to(self._dtype) if is_cast else value
        before = self._num_cast
        make = tuple if type(value) is tuple else getattr(value, "_make", None)
        if isinstance(value, tuple) and make is not None:
            cast = make([self.of(item) for item in value])
            return value if self._num_cast == before else cast
        is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if not is_data and not isinstance(value, (list, MutableMapping)):
            return value
        if id(value) not in self._done:
            # Made by calling its type if possible, as torch does not compile a copy.
            cast = type(value)(value) if type(value) in (list, dict) else copy.copy(value)
            self._done[id(value)] = value, cast
            self._fill(cast, value)
            self._done[id(value)] = value, value if self._num_cast == before else cast
        cast = self._done[id(value)][1]
        self._num_cast += cast is not value
        return cast

    def _fill(self, cast: Any, value: Any) -> None:
        if isinstance(value, (list, MutableMapping)):
            for key, item in enumerate(value) if isinstance(value, list) else value.items():
                cast[key] = self.of(item)
        else:
            for each in dataclasses.fields(value):
                # Assigned so because the dataclass may be frozen.
                object.__setattr__(cast, each.name, self.of(getattr(value, each.name)))


def cast_buffers(model: nn.Module, config: ZeroConfig) -> None:
    """Casts floating buffers to `buffer_dtype`, except those that stay in fp32."""
    if config.buffer_dtype is None:
        return
    kept = re.compile("|".join(_kept_buffers(model, config.keep_fp32_buffers)) or "(?!)")
    for name, buffer in model.named_buffers():
        if _is_wide(buffer):
            buffer.data = buffer.data.to(torch.float32 if kept.search(name) else DTYPES[config.buffer_dtype])


def _kept_buffers(model: nn.Module, patterns: tuple[str, ...] | None) -> list[str]:
    """Returns the patterns of buffers that stay in fp32. A module's own list, which transformers' models have, holds below that
    module."""
    if patterns is not None:
        return [pattern.replace("*", ".*") for pattern in patterns]
    kept = []
    for prefix, module in model.named_modules():
        for pattern in getattr(module, "_keep_in_fp32_modules_strict", None) or ():
            within = f"^{re.escape(prefix)}\\..*" if prefix else ""
            kept.append(within + pattern.replace("*", ".*"))
    return kept


def _broadcast_bits(group: Group, tensor: torch.Tensor) -> None:
    """Broadcasts rank 0's bits of a tensor, as bytes: backends differ in the dtypes that they carry."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    group.broadcast(as_bytes(dense)).wait()
    if dense is not tensor:
        tensor.copy_(dense)
