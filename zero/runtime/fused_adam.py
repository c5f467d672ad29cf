"""Adam's step by torch's fused kernel, a stretch at a time, so that all passes but the first find it in the cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zero.comm.group import add_rows
from zero.memory.masters import exact, same_bits
from zero.memory.rows import add_scaled
from zero.plan.spans import Span
from zero.runtime.one_pass import Elements, Gradient, Settings

# Elements at a time: as many for each thread, or a part of all where that is more, as calls cost time and scratch memory.
_LEAST_STRETCH, _MOST_STRETCHES = 2**16, 16
_REGISTER = 64  # elements: a multiple of what the kernel computes at a time


class FusedAdam:
    """To the bit what torch's optimizer does with whole parameters: its kernel is given each by itself, since it computes the
    last few elements, which fill no register, in another way; and a stretch that ends within one ends where a register does."""

    name = "fused"
    lacks = ("differentiable",)

    def step(self, settings: Settings, gradient: Gradient, elements: Elements) -> None:
        masters, moments, weights, rounded, pieces = elements
        most = max(_LEAST_STRETCH * torch.get_num_threads(), masters.numel() // _MOST_STRETCHES)
        kernel, sizes = _kernel_of(settings), _cut(pieces, masters.numel(), most)
        lengths = [sum(own) for own in sizes]
        slopes = torch.empty_like(masters[:most])
        scratch = None if weights is None else torch.empty_like(weights[:most])
        olds, news = ([] if whole is None else torch.split(whole, lengths) for whole in (weights, rounded))
        rows, kept = ([torch.split(whole, lengths) for whole in wholes] for wholes in (gradient.rows, moments))
        for number, master in enumerate(torch.split(masters, lengths)):
            if scratch is not None:
                rounds_to = scratch[: master.numel()].copy_(master)
                if not same_bits(olds[number], rounds_to):
                    master.copy_(exact(olds[number], master))
            slope = slopes[: master.numel()]
            add_scaled(add_rows, [parts[number] for parts in rows], slope, gradient.factors)
            kernel(sizes[number], master, slope, *(parts[number] for parts in kept))
            if news:
                news[number].copy_(master)


def _cut(pieces: Sequence[Span], numel: int, most: int) -> list[list[int]]:
    """Stretches of at most so many elements; of each the lengths of gaps and pieces in turn: a gap, a piece, and so on up to
    the last gap."""
    found, begin = list[list[int]](), 0
    starts, stops = [piece.start for piece in pieces], [piece.stop for piece in pieces]
    while begin < numel:
        stop = min(numel, begin + most)
        last = bisect_left(starts, stop) - 1
        if last >= 0 and stop < stops[last]:
            stop -= (stop - starts[last]) % _REGISTER
        sizes, end = list[int](), begin
        for piece in pieces[bisect_right(stops, begin) : bisect_left(starts, stop)]:
            own = Span(max(begin, piece.start), min(stop, piece.stop))
            sizes += (own.start - end, own.numel)
            end = own.stop
        found.append([*sizes, stop - end])
        begin = stop
    return found


def _kernel_of(settings: Settings) -> Callable[..., None]:
    options = settings._asdict()
    step, (beta1, beta2) = torch.tensor(options.pop("step"), dtype=torch.float32, device="cpu"), options.pop("betas")
    adam = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    kernel = partial(adam, beta1=beta1, beta2=beta2, **options)

    def run(sizes: list[int], *tensors: torch.Tensor) -> None:
        """Steps the pieces between gaps of masters, slopes and moments."""
        masters, slopes, means, squares, *greatest = (torch.split(whole, sizes)[1::2] for whole in tensors)
        kernel(masters, slopes, means, squares, greatest[0] if greatest else (), [step] * len(masters))

    return run
