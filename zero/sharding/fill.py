"""This rank's shares from values that are in files: each rank reads what is its own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from zero.checkpoint.progress_bar import ProgressBar
from zero.comm.exchange import Failure, run_on_all
from zero.errors import CheckpointFailed, DiskFailed, GroupLost
from zero.memory.formats import ParamFormat
from zero.memory.values import Values, whole
from zero.plan.layout import Piece
from zero.plan.spans import Span
from zero.sharding.optimizer_state import lies_nowhere
from zero.sharding.state import ShardingState

_AT_ONCE = 2**20  # elements: what is read to the same memory again and again needs no new pages, and stays in a cache
LOAD_AGAIN = "Some of them may have been read by then. Load again before you go on."


class _Part(NamedTuple):
    """A stretch of a share, and what is read to it."""

    values: Values
    span: Span  # of the values, as they lie in their slot
    format: ParamFormat
    line: Callable[[], torch.Tensor]  # which it fills


@torch.no_grad()
def fill(sharding: ShardingState, values: Mapping[torch.Tensor, Values], remedy: str = LOAD_AGAIN) -> list[torch.nn.Parameter]:
    """Reads the values of those of these parameters that are in shares, and returns these. Where a rank fails to read, all
    ranks raise once the others have read; values that were read by then are the same on all ranks. A collective."""
    sharding.publisher.begin()
    parts = dict(_parts_by_param(sharding, values))
    num_elements = sum(part.span.numel for each in parts.values() for part in each)
    with ProgressBar("loading", num_elements, sharding.group.rank == 0, "elements") as bar:

        def read() -> None:
            for line, numbers in _read_ahead(_pieces(part for each in parts.values() for part in each)):
                line.copy_(numbers)
                bar.advance(line.numel())

        failure = partial(failed_on, remedy)
        try:
            run_on_all(sharding.group, read, failure)
        finally:
            try:
                publish(sharding, failure)
            finally:
                sharding.publisher.end()
    sharding.placer.weights.note_written(*parts)
    return list(parts)


def _parts_by_param(
    sharding: ShardingState, values: Mapping[torch.Tensor, Values]
) -> Iterator[tuple[torch.nn.Parameter, list[_Part]]]:
    """This rank's shares of each parameter that has values and is in shares."""
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
    """What is read at a time."""

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
    """Each piece with its values, while a thread reads the next one: a disk waits for nobody then."""
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
    if isinstance(error, DiskFailed) and len(failed) == size:
        return error  # which all of them see
    where = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in failed.items())
    return CheckpointFailed(f"Cannot {what}: it failed on {where}. {remedy}")


def publish(
    sharding: ShardingState, failure: Failure, write: Callable[[int], None] = lambda _: None, writes_all: bool = False
) -> None:
    """Publishes every rank's shares as the weights of all ranks, each bucket once `write` has filled it. `writes_all`: that
    replaces all masters and states. Where it fails on a rank, the others go on to the end, and all raise then. A collective."""
    layout, masters = sharding.layout_ref.layout, sharding.masters
    masters.is_whole &= not writes_all

    def send_all() -> None:
        waiting = deque(map(layout.blocks, range(len(layout.buckets))))
        try:
            for bucket in range(len(layout.buckets)):
                write(bucket)
                masters.publish(waiting[0])
                sharding.publisher.send(waiting.popleft())
            masters.streams.flush()
        except BaseException:
            masters.abandon()
            with contextlib.suppress(GroupLost):
                for blocks in waiting:  # as the others do
                    sharding.publisher.send(blocks)
            raise
        finally:
            sharding.publisher.wait(sum(1 << index for index, slot in enumerate(layout.slots) if slot is not None))

    run_on_all(sharding.group, send_all, failure)
    masters.is_whole |= writes_all
