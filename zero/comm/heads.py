"""Heads of attention exchanged between the ranks that have a part of each sequence, by one operator that autograd and compilers
know: each rank gives its tokens of all heads, and gets all tokens of its heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import accelerators
from accelerators.staged import is_staged
from zero.comm.backwards import note_crossing
from zero.comm.torch_world import ranks_along


class Row(NamedTuple):
    """The ranks that have the parts of the same sequences, in the order of the parts."""

    ranks: tuple[int, ...]
    group: Any

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def place(self) -> int:
        """The number of this rank's part."""
        return self.ranks.index(dist.get_rank()) if self.size > 1 else 0

    @property
    def name(self) -> str:
        return "_".join(map(str, self.ranks))


_ALIGNED = 16  # a multiple of these bytes may be the start of numbers of any kind
_rows: dict[str, Row] = {}  # by the name that operators in graphs use
_exchanges = Counter[str]()  # by the same name: how often the operator ran, or was planned


def row_along(mesh: Any) -> Row:
    """Returns the row of this rank along a DeviceMesh of one dimension or a process group; for None that of this rank alone.
    Not a collective."""
    if mesh is None:
        return Row((dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,), None)
    ranks = ranks_along(mesh)
    if len(ranks) > 1 and dist.get_rank() not in ranks:
        raise ValueError(
            f"Cannot use a mesh of ranks {list(ranks)} on rank {dist.get_rank()}: this rank is not in it. Pass the mesh that "
            "this rank is in, as mesh['sp']."
        )
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    if ranks_along(group) != ranks:
        raise ValueError(
            f"Cannot take ranks {list(ranks)} for the parts of sequences in this order: torch exchanges between them as "
            f"{list(ranks_along(group))}. Make the mesh with its ranks in that order."
        )
    row = Row(ranks, group)
    _rows[row.name] = row
    return row


def planned_row(size: int) -> Row:
    """Returns a row of so many ranks that are not there, for tensors of the meta device. Not a collective."""
    row = Row(tuple(range(size)), None)
    _rows.setdefault(row.name, row)
    return row


def by_heads(parts: Sequence[torch.Tensor], row: Row) -> list[torch.Tensor]:
    """Returns all tokens of this rank's heads, `[..., H/n, n*S, D]`, of its tokens of all heads, `[..., H, S, D]`, for each of
    several tensors. Differentiable. A collective of the row, as its backward is."""
    return list(_exchange(list(parts), row.name, True, False)) if row.size > 1 else list(parts)


def by_tokens(parts: Sequence[torch.Tensor], row: Row) -> list[torch.Tensor]:
    """Returns this rank's tokens of all heads, of all tokens of its heads: the inverse of `by_heads`."""
    return list(_exchange(list(parts), row.name, False, False)) if row.size > 1 else list(parts)


def exchanges_along(row: Row) -> int:
    """Returns how often this process exchanged heads along a row. The operator counts, so compiled forwards do as others."""
    return _exchanges[row.name]


def gathered_along(part: torch.Tensor, row: Row) -> torch.Tensor:
    """Returns the parts of integers that the ranks of a row have of each sequence, side by side along the last dimension. A
    collective of the row."""
    if row.size == 1:
        return part
    return torch.cat(_all_gather(part, row.group, row.size), -1)


def numbers_of_all(numbers: Sequence[int], group: Any) -> list[list[int]]:
    """Returns the numbers that each rank of a process group gives; of the world for None. A collective."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return [list(numbers)]
    device = accelerators.current().device() if _stays_on_device(group) else torch.device("cpu")
    given = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    return [row.tolist() for row in _all_gather(given, group, dist.get_world_size(group))]


def _stays_on_device(group: Any) -> bool:
    backend = str(dist.get_backend(group))
    return backend != "gloo" and not is_staged(backend)


def _all_gather(part: torch.Tensor, group: Any, size: int) -> list[torch.Tensor]:
    gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(gathered, part.contiguous(), group=group)
    return gathered


@torch.library.custom_op("zero::exchange_heads", mutates_args=())
def _exchange(parts: list[torch.Tensor], row: str, to_heads: bool, in_backward: bool) -> list[torch.Tensor]:
    """Sends one message to each rank, with a piece of each tensor: some of its heads, or some of its tokens."""
    ranks = _rows[row]
    _exchanges[row] += 1
    if in_backward:
        note_crossing(min(ranks.ranks))
    cut = -3 if to_heads else -2
    pieces = [torch.unflatten(part, cut, (ranks.size, -1)).movedim(cut - 1, 0) for part in parts]
    given, places = _message(pieces)
    for piece, place in zip(pieces, places, strict=True):
        _piece_in(given, place, piece).copy_(piece)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=ranks.group)
    del given  # freed now, as the result needs as much memory
    joined = []
    for piece, place in zip(pieces, places, strict=True):
        came = _piece_in(taken, place, piece)
        joined.append(came.movedim(0, -3).flatten(-3, -2) if to_heads else came.movedim(0, -4).flatten(-4, -3))
    if len(joined) == 1:
        return [joined[0].contiguous()]
    return [each.clone(memory_format=torch.contiguous_format) for each in joined]  # empty ones would be views of one message


def _message(pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Returns memory for a message to each rank, with bytes for a piece of each tensor, and where each begins."""
    places, stop = [], 0
    for piece in pieces:
        places.append(stop)
        stop += -(-piece[0].nbytes // _ALIGNED) * _ALIGNED
    return torch.empty(len(pieces[0]), max(stop, _ALIGNED), dtype=torch.uint8, device=pieces[0].device), places


def _piece_in(message: torch.Tensor, place: int, piece: torch.Tensor) -> torch.Tensor:
    """Returns a view of a message as a piece of its shape."""
    return torch.unflatten(message[:, place : place + piece[0].nbytes].view(piece.dtype), 1, piece.shape[1:])


@_exchange.register_fake
def _(parts: list[torch.Tensor], row: str, to_heads: bool, in_backward: bool) -> list[torch.Tensor]:
    size = _rows[row].size
    _exchanges[row] += 1
    shapes = []
    for part in parts:
        *batch, heads, tokens, width = part.shape
        heads, tokens = (heads // size, tokens * size) if to_heads else (heads * size, tokens // size)
        shapes.append((*batch, heads, tokens, width))
    return [part.new_empty(shape) for part, shape in zip(parts, shapes, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.row, ctx.to_heads, _ = inputs


def _back(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    return list(_exchange(list(grads), ctx.row, not ctx.to_heads, True)), None, None, None


_exchange.register_autograd(_back, setup_context=_save)
