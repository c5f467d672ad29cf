"""Values that are made when they are read: those of a file, and casts, joins and views of them.

Any stretch can be read by itself. If a stretch cannot be computed alone, as of a transposed matrix, the rows that contain it
are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero.plan.layout import Span, with_length


class Values(Protocol):
    """A tensor that need not exist: its numbers are computed or read from a file, a stretch at a time, and come on the host."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def read(self) -> Callable[[Span], torch.Tensor]:
        """A function that returns a stretch of the values, flattened in row-major order, as a tensor of one dimension."""


@dataclass(frozen=True)
class Held:
    """The values of a tensor."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, span: Span) -> torch.Tensor:
        return self.tensor.detach().cpu().reshape(-1)[span.start : span.stop]


@dataclass(frozen=True)
class Cast:
    """Values in another dtype."""

    of: Values
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, span: Span) -> torch.Tensor:
        return self.of.read(span).to(self.dtype)


@dataclass(frozen=True)
class Joined:
    """Several values, one after the other along a dimension."""

    of: Sequence[Values]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.of[0].shape
        return with_length(first, self.dim, sum(each.shape[self.dim] for each in self.of))

    @property
    def dtype(self) -> torch.dtype:
        return self.of[0].dtype

    def read(self, span: Span) -> torch.Tensor:
        # The number of elements of each value for one index of the dimensions before.
        lengths = [math.prod(each.shape[self.dim :]) for each in self.of]
        starts = [0, *itertools.accumulate(lengths)]
        parts, position = [], span.start
        while position < span.stop:
            index, inside = divmod(position, starts[-1])
            number = next(n for n, stop in enumerate(starts[1:]) if inside < stop)
            stop = min(span.stop, index * starts[-1] + starts[number + 1])
            begin = index * lengths[number] + inside - starts[number]
            parts.append(self.of[number].read(Span(begin, begin + stop - position)))
            position = stop
        return torch.cat(parts or [torch.empty(0, dtype=self.dtype, device="cpu")]) if len(parts) != 1 else parts[0]


@dataclass
class Viewed:
    """A view of other values. `shadow` is on the meta device, with the view's size, stride and offset."""

    of: Values
    shadow: torch.Tensor
    _rows: tuple[Span, torch.Tensor] | None = field(default=None, repr=False)  # the rows that were read last

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.shadow.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, span: Span) -> torch.Tensor:
        start = int(self.shadow.storage_offset())
        if self.shadow.is_contiguous():
            return self.of.read(span.shifted(start))
        if not span.numel:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        row_numel = math.prod(self.shape[1:])
        first, last = span.start // row_numel, -(-span.stop // row_numel)
        rows = self.shadow[first:last]
        is_interleaved = self.shadow.stride(0) < _extent(self.shadow[0]).numel
        needed = _extent(self.shadow if is_interleaved else rows)
        seen, memory = self._covering(needed)
        begin = int(memory.storage_offset()) + int(rows.storage_offset()) - seen.start
        line = memory.as_strided(rows.shape, rows.stride(), begin).reshape(-1)
        return line[span.start - first * row_numel : span.stop - first * row_numel]

    def _covering(self, needed: Span) -> tuple[Span, torch.Tensor]:
        """Returns values that contain a span, and their own span. The last ones are kept: each row of a transposed matrix needs
        the whole matrix."""
        known = self._rows
        if known is None or known[0].overlap(needed) != needed:
            self._rows = None  # freed before more is read
            self._rows = known = needed, self.of.read(needed)
        return known


def _extent(shadow: torch.Tensor) -> Span:
    """Returns the span from the first to the last element of a shadow."""
    start = int(shadow.storage_offset())
    return Span(start, start + 1 + sum((size - 1) * by for size, by in zip(shadow.shape, shadow.stride(), strict=True)))


def whole(values: Values) -> torch.Tensor:
    return values.read(Span(0, math.prod(values.shape))).reshape(values.shape)
