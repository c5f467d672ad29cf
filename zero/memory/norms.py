"""Norms of tensors, and of tensors in parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

import accelerators
from accelerators.streams import Stream
from zero.memory.formats import by_device

PIECE = 2**15  # elements that one thread adds up by itself, whatever the number of threads


def squares_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Returns the square of the norm of each tensor."""
    return squares_and(tensors, ())[0]


def squares_and(tensors: Sequence[torch.Tensor], beside: Sequence[torch.Tensor]) -> tuple[list[float], list[list[float]]]:
    """Returns the square of the norm of each tensor, and the numbers of each of some vectors `beside` them. All come to the
    host in one transfer for each device."""
    of_pieces, numbers = squares_of_pieces(tensors, beside)
    return [sum(squares, 0.0) for squares in of_pieces], numbers


def squares_of_pieces(
    tensors: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()
) -> tuple[list[list[float]], list[list[float]]]:
    """Does the same with a list of squares for each tensor, of the norms of short pieces. torch adds millions of squares one
    after the other, which is wrong in the third digit."""
    ends = [tensor.numel() - tensor.numel() % PIECE for tensor in tensors]
    cut = list(zip(tensors, ends, strict=True))
    pieces = [torch.linalg.vector_norm(tensor[:end].view(-1, PIECE), dim=1) for tensor, end in cut if end]
    rests = _norms([tensor[end:] if end else tensor for tensor, end in cut], 2.0)
    numbers = iter(on_host([*pieces, *rests, *beside]))
    of_pieces = [next(numbers) if end else [] for end in ends]
    squares = [[norm * norm for norm in (*begin, *next(numbers))] for begin in of_pieces]
    return squares, list(numbers)


def norm_of_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Returns the norm of all tensors of one device together, in this dtype and there, so that nobody waits for it."""
    ends = [tensor.numel() - tensor.numel() % PIECE for tensor in tensors]
    cut = list(zip(tensors, ends, strict=True))
    pieces = [torch.linalg.vector_norm(tensor[:end].view(-1, PIECE), dim=1) for tensor, end in cut if end]
    rests = torch._foreach_norm([tensor[end:] for tensor, end in cut])
    return norm_of_norms(torch.cat([*pieces, *(rest.view(1) for rest in rests)]).to(dtype))


def norm_of_norms(norms: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Does on a device what `joined` does, for a vector or each column of a matrix: norms are divided by the largest first, so
    that no power overflows."""
    if order == 0.0:
        return norms.sum(0)
    largest = norms.amax(0)
    if order == math.inf:
        return largest
    unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    norm: torch.Tensor = torch.linalg.vector_norm(norms / unit, order, dim=0) * unit
    return norm


def norms_of(tensors: Sequence[torch.Tensor], order: float = 2.0) -> list[float]:
    """Returns the norm of each tensor, as numbers on the host."""
    return [norm for [norm] in on_host(_norms(tensors, order))]


def _norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Returns norms on the devices of their tensors, by one call for each device."""
    norms = [torch.empty(0)] * len(tensors)
    for indices in by_device(tensors):
        for index, norm in zip(indices, torch._foreach_norm([tensors[index] for index in indices], order), strict=True):
            norms[index] = norm.view(1)
    return norms


def on_host(vectors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Returns the numbers of vectors, with one transfer for each device. They become fp64 only on the host: not every device
    has it. The host waits for what was issued so far, of which these are the last."""
    values: list[list[float]] = [[]] * len(vectors)
    for indices in by_device(vectors):
        numbers = iter(torch.cat([vectors[index] for index in indices]).tolist())  # `cat` of mixed dtypes gives the widest
        for index in indices:
            values[index] = list(itertools.islice(numbers, vectors[index].numel()))
    return values


def joined(norms: Sequence[float], order: float) -> float:
    """Returns the norm of something from the norms of its parts. Only numbers of at most 1 are raised to the order, which
    cannot overflow."""
    if len(norms) == 1:
        return norms[0]
    if any(math.isnan(norm) for norm in norms):
        return math.nan  # `max` would drop it in some orders
    if order == 0.0:
        return sum(norms)
    largest = max(norms, default=0.0)
    if order == math.inf or largest in (0.0, math.inf):
        return largest
    return float(largest * sum((norm / largest) ** order for norm in norms) ** (1.0 / order))


class KeptNumber(NamedTuple):
    """A number on a device that is read again later, perhaps in another stream than the one that it was computed in. The user's
    program orders its streams by the tensors that it passes between them; it does not know of what is kept."""

    number: torch.Tensor
    stream: Stream

    @classmethod
    def of_each(cls, numbers: Mapping[int, torch.Tensor]) -> dict[int, KeptNumber]:
        """Returns numbers of one device as those that the current stream has computed."""
        stream = _current_stream(next(iter(numbers.values())).device)
        return {key: cls(number, stream) for key, number in numbers.items()}

    def copy(self) -> torch.Tensor:
        current = _current_stream(self.number.device)
        if current == self.stream:
            return self.number.clone()
        current.wait_stream(self.stream)
        copy = self.number.clone()
        self.stream.wait_stream(current)  # it gets the memory of the number back, to use it for something else
        return copy


def _current_stream(device: torch.device) -> Stream:
    return accelerators.of(device).current_stream(device.index)
