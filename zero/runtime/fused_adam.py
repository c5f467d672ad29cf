"""Adam's step by torch's fused kernel, a stretch at a time, so that all passes but the first find it in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zero.memory.masters import exact, same_bits
from zero.plan.spans import Span
from zero.runtime.one_pass import Elements, Gradient, Settings
from zero.runtime.sums import add_scaled

_STRETCH, _THREADS_STRETCH = 2**17, 2**16  # elements, and at least so many for each thread; 22 bytes of each are in the cache


class FusedAdam:
    """To the bit what torch's optimizer does with whole parameters: its kernel is given each by itself, since it computes the
    last few elements, which fill no register, in another way; and a stretch ends where a register does."""

    name = "fused"
    lacks = ("differentiable",)

    def step(self, settings: Settings, gradient: Gradient, elements: Elements) -> None:
        masters, moments, weights, rounded, pieces = elements
        stretch = max(_STRETCH, _THREADS_STRETCH * torch.get_num_threads())
        slope = torch.empty_like(masters[:stretch])
        scratch = None if weights is None else torch.empty_like(weights[:stretch])
        olds, news = ([] if whole is None else torch.split(whole, stretch) for whole in (weights, rounded))
        rows, kept = ([torch.split(whole, stretch) for whole in wholes] for wholes in (gradient.rows, moments))
        kernel, sizes = _kernel_of(settings), _cut(pieces, masters.numel(), stretch)
        for number, master in enumerate(torch.split(masters, stretch)):
            if scratch is not None:
                scratch = scratch[: master.numel()].copy_(master)
                if not same_bits(olds[number], scratch):
                    master.copy_(exact(olds[number], master))
            slope = slope[: master.numel()]
            add_scaled([parts[number] for parts in rows], slope, gradient.factors)
            kernel(sizes[number], master, slope, *(parts[number] for parts in kept))
            if news:
                news[number].copy_(master)


def _cut(pieces: Sequence[Span], numel: int, stretch: int) -> list[list[int]]:
    """Of each stretch the lengths of gaps and pieces in turn, as they lie: a gap, a piece, and so on up to the last gap."""
    sizes: list[list[int]] = [[] for _ in range(0, numel, stretch)]
    ends = [number * stretch for number in range(len(sizes))]  # of what is there so far
    for piece in pieces:
        for part in piece.cut(stretch):
            number = part.start // stretch
            sizes[number] += (part.start - ends[number], part.numel)
            ends[number] = part.stop
    for number, end in enumerate(ends):
        sizes[number].append(min(numel, (number + 1) * stretch) - end)
    return sizes


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
