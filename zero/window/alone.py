"""Takes all gradients of a bucket at once, on a rank that sends to nobody.

Such a rank has no turn to wait for, so it opens no round that is filled piece by piece: at the end of a backward it has the
gradients of whole buckets. On the host, those of small buckets are laid end to end, several buckets in one call, and left to
the step as they are. Any other bucket is laid into a buffer and kept like a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import torch
from torch._utils import _flatten_dense_tensors

from zero.memory.formats import ParamFormat
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.layout import Span
from zero.window.inflight import InflightReductions

_FEW_ZEROS = 2**10  # the most elements of zeros that are kept for the gaps of a bucket
_START = itemgetter(0)
_TOGETHER = 2**16  # elements of small buckets that are laid end to end in one call, which takes as many more in memory

# Of a parameter that lies in one bucket: its number, the start in the bucket, and its gradient.
Arrived = tuple[int, int, torch.Tensor]


class WholeBuckets:
    """Takes gradients of whole buckets, without a round."""

    def __init__(
        self, layout_ref: LayoutRef, formats: Sequence[ParamFormat], staging: Staging, inflight: InflightReductions
    ) -> None:
        self._layout_ref = layout_ref
        self._formats = formats
        self._staging = staging
        self._inflight = inflight
        # By bucket: its gaps, and zeros for them.
        self._zeros: dict[int, tuple[Sequence[Span], Sequence[tuple[int, torch.Tensor]]]] = {}

    def add_up(self, gradients: dict[int, list[Arrived]], whole: Sequence[int]) -> Iterator[tuple[int, list[Arrived]]]:
        """Takes the gradients of these buckets, one bucket at a time or several small ones. Yields each time the parameters as
        bits, and the gradients, which are removed from `gradients`. The caller lets go of them before it goes on, as the next
        sums take memory."""
        layout, room, bits, taken = self._layout_ref.layout, _TOGETHER, 0, list[Arrived]()
        small, may_leave = dict[int, list[torch.Tensor]](), self._inflight.may_leave_row(whole)
        for bucket in whole:
            numel = layout.buckets[bucket].span.numel
            if numel > _TOGETHER or bucket not in may_leave:
                self._send(bucket, self._lines(bucket, gradients[bucket]))
                yield layout.params_in[bucket], gradients.pop(bucket)
                continue
            if numel > room:
                self._leave(small)
                yield bits, taken
                small, room, bits, taken = {}, _TOGETHER, 0, []
            small[bucket] = self._lines(bucket, gradients[bucket])
            taken += gradients.pop(bucket)
            bits |= layout.params_in[bucket]
            room -= numel
        if small:
            self._leave(small)
            yield bits, taken

    def _send(self, bucket: int, lines: list[torch.Tensor]) -> None:
        place, dtype = self._layout_ref.layout.buckets[bucket], self._layout_ref.dtype_of(bucket)
        buffer = self._staging.borrow(place.span.numel, dtype, place.family)
        torch.cat([line.reshape(-1) for line in lines], out=buffer)
        self._inflight.send(bucket, buffer, is_last=True)

    def _leave(self, small: Mapping[int, Sequence[torch.Tensor]]) -> None:
        lines = [line for of_bucket in small.values() for line in of_bucket]
        rows: torch.Tensor = _flatten_dense_tensors(lines)  # type: ignore[no-untyped-call]
        # With one line, `rows` may be the gradient itself, whose memory is the user's or part of a larger one.
        if len(lines) == 1:
            rows = rows.clone()
        numels = [self._layout_ref.layout.buckets[bucket].span.numel for bucket in small]
        for bucket, row in zip(small, torch.split(rows, numels), strict=True):
            self._inflight.leave_row(bucket, row)

    def _lines(self, bucket: int, gradients: Sequence[Arrived]) -> list[torch.Tensor]:
        """Returns what a bucket consists of, in order: gradients, whose elements are in the order of their slots, and zeros."""
        formats = self._formats
        lines = [(start, formats[param].in_order(grad)) for param, start, grad in gradients]
        lines += self._gaps_of(bucket, gradients[0][-1])
        lines.sort(key=_START)
        return [line for _, line in lines]

    def _gaps_of(self, bucket: int, like: torch.Tensor) -> Sequence[tuple[int, torch.Tensor]]:
        """Returns zeros for the gaps of a bucket, each with its start."""
        gaps = self._layout_ref.layout.gaps[bucket]
        known_gaps, zeros = self._zeros.get(bucket, ((), ()))
        if known_gaps is not gaps:  # each layout has its own
            zeros = [(gap.start, like.new_zeros(gap.numel)) for gap in gaps]
            if sum(gap.numel for gap in gaps) <= _FEW_ZEROS:
                self._zeros[bucket] = gaps, zeros
        return zeros
