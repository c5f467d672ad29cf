"""Adam's step by torch's fused kernel, a stretch at a time, so that all passes but the first read from the cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zero.comm.results import add_stretch
from zero.memory.deferred_sum import add_scaled
from zero.memory.masters import exact, same_bits
from zero.plan.layout import Span
from zero.runtime.kernels.adam_step import Elements, Gradient, Part, Settings
from zero.runtime.kernels.native import step_adam
from zero.runtime.kernels.sums import stretch_of

_REGISTER = 64  # elements: a multiple of what the kernel computes at once


class FusedAdam:
    """The `Kernel` that gives the bits of torch's optimizer on whole parameters. Torch's fused one is called for each parameter
    by itself, since it computes the last few elements, which fill no register, differently; a stretch that ends within a
    parameter ends at a register. What lies in lists is one stretch: calls would cost more than its elements."""

    name = "fused"
    lacks = ("differentiable",)

    def step(self, settings: Settings, parts: Sequence[Part]) -> None:
        kernel = _kernel_of(settings)
        for gradient, elements in parts:
            self._step(kernel, gradient, elements)

    @staticmethod
    def step_lists(settings: Settings, slopes: Sequence[torch.Tensor], stepped: list[list[torch.Tensor]]) -> None:
        _kernel_of(settings)(slopes, stepped)

    def _step(self, kernel: Callable[..., None], gradient: Gradient, elements: Elements) -> None:
        masters, _, weights, rounded, parameters = elements
        pieces, tensors = zip(*parameters(), strict=True)
        most = stretch_of(masters.numel())
        stretches = _cut(pieces, masters.numel(), most)
        lengths = [sum(stretch.sizes) for stretch in stretches]
        slopes = torch.empty_like(masters[:most])
        scratch = None if weights is None else torch.empty_like(weights[:most])
        olds, news = ([] if whole is None else torch.split(whole, lengths) for whole in (weights, rounded))
        rows = [torch.split(row, lengths) for row in gradient.rows]
        for number, master in enumerate(torch.split(masters, lengths)):
            if scratch is not None:
                rounds_to = scratch[: master.numel()].copy_(master)
                if not same_bits(olds[number], rounds_to):
                    exact(olds[number], master, out=master)
            slope = slopes[: master.numel()]
            add_scaled(add_stretch, [chunks[number] for chunks in rows], slope, gradient.factors)
            kernel(torch.split(slope, stretches[number].sizes)[1::2], stretches[number].cut_out(tensors))
            if news:
                news[number].copy_(master)


class _Stretch(NamedTuple):
    """Elements that are stepped by one call."""

    sizes: list[int]  # the elements of gaps and pieces in turn: a gap, a piece, and so on up to the last gap
    # The number of each piece, and the part of it that lies in the stretch; None if all of it does, which needs no cut.
    pieces: list[tuple[int, Span | None]]

    def cut_out(self, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Returns lists of the masters in this stretch, and then of each kind of moments."""
        per_piece = [
            tensors[index] if span is None else [whole[span.start : span.stop] for whole in tensors[index]]
            for index, span in self.pieces
        ]
        return [list(of_one_kind) for of_one_kind in zip(*per_piece, strict=True)]


def _cut(pieces: Sequence[Span], numel: int, most: int) -> list[_Stretch]:
    """Cuts a line into stretches of at most `most` elements."""
    stretches, begin = list[_Stretch](), 0
    starts, stops = [piece.start for piece in pieces], [piece.stop for piece in pieces]
    while begin < numel:
        stop = min(numel, begin + most)
        last = bisect_left(starts, stop) - 1
        if last >= 0 and stop < stops[last]:
            stop -= (stop - starts[last]) % _REGISTER
        stretch, end = _Stretch([], []), begin
        for index in range(bisect_right(stops, begin), bisect_left(starts, stop)):
            first, behind = max(begin, starts[index]), min(stop, stops[index])
            stretch.sizes.extend((first - end, behind - first))
            is_whole = behind - first == stops[index] - starts[index]
            stretch.pieces.append((index, None if is_whole else Span(first, behind).shifted(-starts[index])))
            end = behind
        stretch.sizes.append(stop - end)
        stretches.append(stretch)
        begin = stop
    return stretches


def _kernel_of(settings: Settings) -> Callable[..., None]:
    """Returns torch's kernel with these settings: it is given by name all that are not taken out here."""
    options = settings._asdict()
    step, (beta1, beta2) = torch.tensor(options.pop("step"), dtype=torch.float32, device="cpu"), options.pop("betas")
    adam = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    kernel = partial(adam, beta1=beta1, beta2=beta2, **options)

    def run(slopes: Sequence[torch.Tensor], stepped: list[list[torch.Tensor]]) -> None:
        """Steps masters and moments, each parameter by itself."""
        if slopes:
            masters, means, squares, *greatest = stepped
            kernel(masters, slopes, means, squares, greatest[0] if greatest else (), [step] * len(masters))

    return run


class CompiledAdam:
    """The `Kernel` that is one pass over memory, in C++."""

    name = "compiled"
    lacks = ("amsgrad", "capturable", "differentiable")
    step_lists = None  # a call for each block costs this kernel less

    def step(self, settings: Settings, parts: Sequence[Part]) -> None:
        numbers = _numbers(settings)
        for gradient, (masters, moments, weights, rounded, _) in parts:
            factors = (*gradient.factors, -1.0) if settings.maximize else gradient.factors
            step_adam(numbers, settings.decoupled, gradient.rows, factors, masters, moments, weights, rounded)


def _numbers(settings: Settings) -> tuple[float, ...]:
    """Returns the numbers of a step in the order of `Numbers` in native.cpp."""
    lr, decay, (beta1, beta2) = settings.lr, settings.weight_decay, settings.betas
    kept = 1.0 - lr * decay if settings.decoupled else decay
    rate, inverse_root = -lr / (1.0 - beta1**settings.step), (1.0 - beta2**settings.step) ** -0.5
    return kept, 1.0 - beta1, beta2, 1.0 - beta2, rate, inverse_root, settings.eps
