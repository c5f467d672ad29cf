"""Dtypes of weights and sums, and how a parameter's elements lie in flat memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zero.plan.layout import with_length

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums, masters and norms for weights of a dtype: never narrower than fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_NOT_ELEMENTWISE = {"step", "eta", "mu", "mu_product"}  # 0-dim entries of torch's own optimizers


def goes_with_elements(key: str, value: object, shape: torch.Size) -> bool:
    """Returns whether an entry of the state has a number for every element. A 0-dim shape does not tell, so the name does."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)  # a subclass has other bits than its elements show
    return plain and value.shape == shape and key not in _NOT_ELEMENTWISE  # type: ignore[attr-defined]


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype of a name. Raises ValueError if torch has none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Cannot read a tensor of dtype {name!r}: torch has none of that name. Use the torch that wrote it.")
    return dtype


@dataclass(frozen=True)
class ParamFormat:
    """The order of a parameter's elements in its slot: dense, in the order of its own strides, so that a channels-last
    weight stays channels-last. A parameter whose memory is not dense comes out contiguous."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # its dimensions from the slowest to the fastest; None if it is contiguous
    cut: tuple[int, tuple[int, ...]] | None = None  # the dimension and the lengths of parts, which lie one after the other

    @staticmethod
    def of(tensor: torch.Tensor) -> ParamFormat:
        shape, strides = tuple(tensor.shape), tensor.stride()
        # Strides are compared, as torch calls a tensor contiguous whatever the stride of a dimension of size 1, and chooses
        # kernels by that stride.
        if tensor.numel() == 0 or strides == torch.empty(shape, device="meta").stride():
            return ParamFormat(shape, None)
        order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -shape[dim], dim)))
        return ParamFormat(shape, order if tensor.permute(order).is_contiguous() else None)

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a tensor of this shape in the order of the slot, as a view if its memory allows."""
        if self.cut is not None:
            dim, lengths = self.cut
            return torch.cat([part.reshape(-1) for part in torch.split(tensor, list(lengths), dim)])
        return (tensor if self.order is None else tensor.permute(self.order)).reshape(-1)

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor whose elements, taken as those of a contiguous one, are what `flatten` returns."""
        return tensor if self.order is None and self.cut is None else self.flatten(tensor)

    def line_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `flatten` of a tensor of this shape. A stretch of the line is returned as it is."""
        return self.flatten(tensor) if tensor.shape == self.shape else tensor

    def shaped_like(self, target: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
        """Returns the values of a line in the shape of the target: a tensor of this shape, or a stretch of the line."""
        return self.unflatten(line) if target.shape == self.shape else line

    def view_at(self, line: torch.Tensor, start: int) -> torch.Tensor:
        """Returns the view of a slot that begins at `start` in a line, by one operation in place of two."""
        return line.as_strided(self.shape, self._strides, line.storage_offset() + start)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return self.unflatten(torch.empty(self.shape, device="meta").reshape(-1)).stride()

    def unflatten(self, line: torch.Tensor) -> torch.Tensor:
        """Returns the view of a slot in the shape and strides of the parameter; of several parts a copy."""
        if self.cut is not None:
            dim, lengths = self.cut
            shapes = [with_length(self.shape, dim, length) for length in lengths]
            lines = torch.split(line, list(map(math.prod, shapes)))
            return torch.cat([part.view(shape) for part, shape in zip(lines, shapes, strict=True)], dim)
        if self.order is None:
            return line.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return line.view([self.shape[dim] for dim in self.order]).permute(inverse)


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the indexes of tensors, grouped by device: operators on lists want tensors of one device."""
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(index)
    return list(indices.values())
