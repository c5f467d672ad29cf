"""Moves parameters into flat memory, one chunk at a time, and out again.

[Note: flattening]
A chunk is allocated, its parameters are copied in and pointed at it, and their old storage goes, before the
next chunk is looked at: so the peak is the model and a chunk or two, not two models. If even one chunk does not
fit the accelerator beside the parameters, it is built on the host and moved once they are gone. Everything
here is detached: a flat buffer with a history would refuse in-place updates of its views later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Container, Iterable, Sequence

import torch

from accelerators.memory import format_bytes
from zero.memory.formats import DTYPES, ParamFormat, sum_dtype
from zero.memory.weights import Place, Weights

logger = logging.getLogger("zero")

NO_MEMORY = MemoryError, RuntimeError  # torch raises a plain RuntimeError if the host has no memory


class Flattener:
    """Moves the parameters of chunks into flat memory, and back if something fails."""

    def __init__(
        self, weights: Weights, tensors: Sequence[torch.nn.Parameter], formats: Sequence[ParamFormat], place: Place
    ) -> None:
        self.weights = weights
        self.tensors = tensors
        self._formats = formats
        self._place = place
        self.by_host: set[int] = set()  # parameters that were flattened by way of the host
        self.dtypes: dict[int, torch.dtype] = {}  # by parameter: the dtype in which it was read
        self._spare: torch.Tensor | None = None  # memory of a chunk that was rounded, of which the pages exist already
        self._moved: dict[int, torch.Tensor] = {}  # by parameter that has lost its memory: its values, until `settled`

    def size_of(self, chunk: int) -> tuple[int, torch.dtype]:
        """Returns the number of elements and the dtype that a chunk is read to: the dtype of its parameters, or that of sums if
        some are to be rounded."""
        dtype = DTYPES[self.weights.layout_ref.layout.chunks[chunk].dtype]
        rounded = any(self.tensors[param].dtype != dtype for param in self.weights.layout_ref.layout.chunks[chunk].params)
        return self.weights.layout_ref.layout.chunks[chunk].numel, sum_dtype(dtype) if rounded else dtype

    def read(self, chunk: int, fills: bool = True, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the chunk with the present values of its parameters, in `memory`, or else in memory that the caller may keep.
        A rank that gets the values from another one sets `fills` to False."""
        numel, dtype = self.size_of(chunk)
        num_bytes = numel * dtype.itemsize
        on_device = self._place.has_room_for(num_bytes)
        if not on_device and self._place.is_host:
            available = format_bytes(self._place.accelerator.memory().available)
            raise MemoryError(
                f"Cannot flatten the parameters: the next chunk needs {format_bytes(num_bytes)}, and {available} of host "
                f"memory are available to {self._place.num_ranks} ranks. Give smaller bucket_bytes, or more memory."
            )
        if memory is None:
            source, on_device = self._allocated(numel, dtype, on_device)
        else:
            source = memory
        fills |= not on_device  # the parameters lose their memory below, so the chunk must have their values
        end = 0
        for param in self.weights.layout_ref.layout.chunks[chunk].params:
            slot = self.weights.layout_ref.layout.slots[param]
            assert slot is not None
            self.dtypes[param] = self.tensors[param].dtype
            values = self._part(source, param)
            if fills:
                source[end : slot.span.start].zero_()
                if self.tensors[param].is_meta:
                    values.fill_(float("nan"))  # NaN until somebody writes to it
                else:
                    values.copy_(self.tensors[param].detach())
                end = slot.span.start + self._formats[param].numel
            if not on_device:
                # The device has room for the copy only once the parameter's own storage is gone.
                self._moved[param] = values
                self.tensors[param].data = torch.empty(0, dtype=self.tensors[param].dtype, device=self._place.device)
                self.by_host.add(param)
        if fills:
            source[end:].zero_()
        return source

    def nothing(self, chunk: int, awaited: Container[torch.nn.Parameter]) -> torch.Tensor | None:
        """Returns a stand-in for a chunk none of whose parameters has values yet; None for other chunks. The stand-in is NaN in
        memory of one number, or on the meta device if all are `awaited`, and so get values before they are read."""
        params = self.weights.layout_ref.layout.chunks[chunk].params
        if not all(self.tensors[param].is_meta for param in params):
            return None
        self.dtypes.update((param, self.tensors[param].dtype) for param in params)
        numel, dtype = self.size_of(chunk)
        if all(self.tensors[param] in awaited for param in params):
            return torch.empty(numel, dtype=dtype, device="meta")
        return torch.full((1,), float("nan"), dtype=dtype, device="cpu").expand(numel)

    def _allocated(self, numel: int, dtype: torch.dtype, on_device: bool) -> tuple[torch.Tensor, bool]:
        """Returns memory, and whether it is on the device: there if `on_device` asks for it and it can be allocated, or else on
        the host."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() >= numel and spare.dtype == dtype:
            is_there = spare.device == self._place.device
            if is_there or not on_device:
                return spare[:numel], is_there
        del spare  # freed before other memory is allocated
        with torch.inference_mode(False):  # steps will change this memory, or what is made of it
            if on_device:
                with contextlib.suppress(torch.OutOfMemoryError):  # the memory is fragmented, or another process was faster
                    return torch.empty(numel, dtype=dtype, device=self._place.device), True
            return torch.empty(numel, dtype=dtype, device="cpu"), False

    def write(self, chunk: int, source: torch.Tensor, given: bool = True) -> bool:
        """Gives the chunk's parameters memory with the values of `source`, rounded if need be. Returns whether that memory is
        `source` itself, which may be kept if it is `given`."""
        stays = self.weights.fill(chunk, source, self._place.device, given)
        for param in self.weights.layout_ref.layout.chunks[chunk].params:
            self._moved[param] = self._part(source, param)
            self.weights.attach(param, self.tensors[param], self._formats[param])
        return stays

    def _part(self, source: torch.Tensor, param: int) -> torch.Tensor:
        slot = self.weights.layout_ref.layout.slots[param]
        assert slot is not None
        form, start = self._formats[param], slot.span.start
        return form.unflatten(source[start : start + form.numel])

    def commit(self) -> None:
        """Ends the possibility to roll back: what was moved stays."""
        self._moved.clear()

    def rollback(self) -> None:
        """Gives what was moved its old values and dtypes, in memory of its own."""
        for param, values in self._moved.items():
            tensor = self.tensors[param]
            try:
                self.weights.detach(tensor, values.to(self._place.device, self.dtypes[param], copy=True))
            except NO_MEMORY:
                # Without room for a copy, a parameter on a device keeps the memory of `values`, which is its alone. On the host
                # it stays in flat memory, as its values may be nowhere else.
                if tensor.numel() != values.numel() or (values.device == self._place.device and not self._place.is_host):
                    self.weights.detach(tensor, values.to(self.dtypes[param]))
        self._moved.clear()

    def recycle(self, source: torch.Tensor) -> None:
        """Keeps memory for the next chunk."""
        self._spare = source

    def log(self, params: Iterable[int]) -> None:
        """Says of every optimizer group how its bytes were flattened: on the accelerator only if all of them were."""
        by_group: dict[int, list[int]] = {}
        for param in params:
            by_group.setdefault(self.weights.layout_ref.layout.params[param].group, []).append(param)
        for group, members in sorted(by_group.items()):
            if self.by_host.intersection(members):
                logger.info("Flattening param group %d on CPU (insufficient memory)", group)
            else:
                logger.info("Flattening param group %d on %s (sufficient memory)", group, self._place.device.type)
