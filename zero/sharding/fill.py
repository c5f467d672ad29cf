"""Fills this rank's shares with values from files. Each rank reads only its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from zero.checkpoint.progress import ProgressBar
from zero.errors import CheckpointFailed, DiskFailed
from zero.memory.formats import ParamFormat
from zero.memory.values import Values, whole
from zero.plan.layout import Block, Piece, Span
from zero.sharding.optimizer_state import lies_nowhere
from zero.sharding.publish import by_bucket, publish
from zero.sharding.state import ShardingState

# Elements that are read at once: the memory is used again and again, so it needs no new pages and stays in a cache.
_AT_ONCE = 2**20
LOAD_AGAIN = "Some of them may have been read by then. Load again before you go on."


class _Part(NamedTuple):
    """A stretch of a share, and the values that are read to it."""

    values: Values
    span: Span  # the place in `values`, in the order of their slot
    format: ParamFormat
    line: Callable[[], torch.Tensor]  # returns the memory to fill


@torch.no_grad()
def fill(sharding: ShardingState, values: Mapping[torch.Tensor, Values], remedy: str = LOAD_AGAIN) -> list[torch.nn.Parameter]:
    """Reads the values of the parameters that are in shares, and returns those parameters. If a rank fails to read, all ranks
    raise once the others have read; values that were read by then are the same on all ranks. A collective."""
    parts = dict(_parts_by_param(sharding, values))
    batches = by_bucket(sharding)

    def written() -> Iterator[Sequence[Block]]:
        try:
            _read(sharding, [part for each in parts.values() for part in each])
        finally:
            for blocks in batches:
                sharding.masters.publish(blocks)
                yield blocks

    params = sum(1 << index for index, tensor in enumerate(sharding.params.tensors) if tensor in parts)
    masters = ["masters"]
    failure = partial(failed_on, remedy)
    prepare, cause = sharding.publisher.follow_edits, "a load of weights"
    publish(sharding, batches, prepare, written(), cause, failure, params=params, kinds=masters, replaces=masters)
    sharding.placer.weights.note_written(*parts)
    return list(parts)


def _read(sharding: ShardingState, parts: Sequence[_Part]) -> None:
    num_elements = sum(part.span.numel for part in parts)
    with ProgressBar("loading", num_elements, sharding.group.rank == 0, "elements") as bar:
        for line, numbers in _read_ahead(_pieces(parts)):
            line.copy_(numbers)
            bar.advance(line.numel())


def _parts_by_param(
    sharding: ShardingState, values: Mapping[torch.Tensor, Values]
) -> Iterator[tuple[torch.nn.Parameter, list[_Part]]]:
    """Yields each parameter that has values and is in shares, with this rank's parts of it."""
    formats, streams = sharding.window.grad_ops.formats, sharding.masters.streams

    def line_of(piece: Piece, master: torch.Tensor, param_format: ParamFormat) -> torch.Tensor:
        streams.use(piece.bucket)
        return param_format.line_of(master)

    for index, tensor in enumerate(sharding.params.tensors):
        if tensor in values and not lies_nowhere(sharding, index):
            form = formats[index]
            yield tensor, [
                _Part(values[tensor], piece.in_param, form, partial(line_of, piece, master, form))
                for piece, master in sharding.masters.of(index)
            ]
    for tensor, form, pieces in sharding.placer.weights.frozen_pieces():
        if tensor in values:
            yield tensor, [_Part(values[tensor], in_param, form, memory.detach) for in_param, memory in pieces]


class _Piece(NamedTuple):
    """The values that are read at a time, and the memory that they are read to."""

    line: Callable[[], torch.Tensor]
    read: Callable[[], torch.Tensor]


def _pieces(parts: Iterable[_Part]) -> Iterator[_Piece]:
    for part in parts:
        span, values = part.span, part.values
        if part.format.order is not None:
            yield _Piece(part.line, partial(_in_slot, part))
            continue
        for start in range(0, span.numel, _AT_ONCE):
            stretch = Span(span.start + start, min(span.stop, span.start + start + _AT_ONCE))
            yield _Piece(partial(_stretch_of, part.line, start, stretch.numel), partial(values.read, stretch))


def _stretch_of(line: Callable[[], torch.Tensor], start: int, numel: int) -> torch.Tensor:
    return line()[start : start + numel]


def _in_slot(part: _Part) -> torch.Tensor:
    return part.format.flatten(whole(part.values))[part.span.start : part.span.stop]


def _read_ahead(pieces: Iterable[_Piece]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields memory and values of each piece, while a thread reads the next one, so that the disk is never idle."""
    with ThreadPoolExecutor(1, "zero-reader") as reader:
        before: tuple[_Piece, Future[torch.Tensor]] | None = None
        for piece in pieces:
            coming = piece, reader.submit(piece.read)
            if before is not None:
                yield before[0].line(), before[1].result()
            before = coming
        if before is not None:
            yield before[0].line(), before[1].result()


def failed_on(
    remedy: str, error: Exception | None, failed: Mapping[int, str], size: int, what: str = "read weights"
) -> Exception:
    """Returns the error that all ranks raise if some of them failed, as `run_on_all` asks for it."""
    if isinstance(error, DiskFailed) and len(failed) == size:
        return error  # every rank has the same error
    where = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in failed.items())
    return CheckpointFailed(f"Cannot {what}: it failed on {where}. {remedy}")
