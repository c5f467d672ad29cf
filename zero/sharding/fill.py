"""This rank's shares from values that are in files: each rank reads what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from zero.checkpoint.progress_bar import ProgressBar
from zero.comm.exchange import run_on_all
from zero.errors import CheckpointFailed
from zero.memory.formats import ParamFormat
from zero.memory.values import Values, whole
from zero.plan.spans import Span
from zero.sharding.optimizer_state import lies_nowhere
from zero.sharding.state import ShardingState

LOAD_AGAIN = "Some of them may have been read by then. Load again before you go on."


@torch.no_grad()
def fill(parts: ShardingState, values: Mapping[torch.Tensor, Values], remedy: str = LOAD_AGAIN) -> list[torch.nn.Parameter]:
    """Reads the values of those of these parameters that are in shares, and returns these. Where a rank fails to read, all
    ranks raise once the others have read; values that were read by then are the same on all ranks. A collective."""
    parts.publisher.begin()
    filled: list[torch.nn.Parameter] = []
    with ProgressBar("loading", sum(map(torch.Tensor.numel, values)), parts.group.rank == 0, "elements") as bar:

        def read() -> None:
            for tensor in _fill_shares(parts, values):
                filled.append(tensor)
                bar.advance(tensor.numel())

        try:
            run_on_all(parts.group, read, partial(failed_on, remedy))
        finally:
            publish(parts)
            parts.publisher.end()
    for tensor in filled:
        parts.placer.weights.note_written(tensor)
    return filled


def _fill_shares(parts: ShardingState, values: Mapping[torch.Tensor, Values]) -> Iterator[torch.nn.Parameter]:
    """Fills the shares, and yields each parameter that is done."""
    formats = parts.window.grad_ops.formats
    for index, tensor in enumerate(parts.params.tensors):
        if tensor in values and not lies_nowhere(parts, index):
            read = _reader(values[tensor], formats[index])
            for piece, master in parts.masters.of(index):
                parts.masters.streams.use(piece.bucket)
                master.copy_(formats[index].shaped_like(master, read(piece.in_param)))
            yield tensor
    for tensor, param_format, pieces in parts.placer.weights.frozen_pieces():
        if tensor in values:
            read = _reader(values[tensor], param_format)
            for in_param, memory in pieces:
                memory.copy_(read(in_param))
            yield tensor


def _reader(values: Values, param_format: ParamFormat) -> Callable[[Span], torch.Tensor]:
    """Returns a function that reads a stretch of a parameter as it lies in its slot."""
    if param_format.order is None:
        return values.read
    return lambda span: param_format.flatten(whole(values))[span.start : span.stop]


def failed_on(remedy: str, error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return CheckpointFailed(f"Cannot read weights: it failed on {where}. {remedy}")


def publish(parts: ShardingState) -> None:
    """Publishes what was written to every rank's shares as the weights of all ranks."""
    layout = parts.layout_ref.layout
    for bucket in range(len(layout.buckets)):
        for block in layout.blocks(bucket):
            parts.masters.publish(block)
            parts.publisher.send([block])
    parts.masters.streams.flush()
    parts.publisher.wait(sum(1 << index for index, slot in enumerate(layout.slots) if slot is not None))
    parts.mid_update = False
