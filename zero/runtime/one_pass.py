"""Adam's step as one pass over memory: edits adopted, gradients clipped, masters stepped and rounded; compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero.memory.masters import adopt
from zero.plan.layout import Block, Piece
from zero.plan.spans import Span
from zero.runtime.compiled import LONG, build, compiled
from zero.runtime.sums import RowKind, total_of

# The dtypes of masters and of their weights, None where they are the same memory, and whether the new weights go elsewhere.
Kind = tuple[torch.dtype, torch.dtype | None, bool]
_NOT_COMPILED = ("amsgrad", "capturable", "differentiable")  # settings of a group
# A master, and the group of its parameter; None where nobody used it.
Member = tuple[Piece, torch.nn.Parameter, "dict[str, Any] | None"]


def row_kinds(kinds: Iterable[Kind], num_ranks: int) -> set[RowKind]:
    """Of what ranks send for such weights."""
    return {RowKind(weights or masters, num_ranks, masters) for masters, weights, apart in kinds if not apart}


def rows_that_wait(kinds: Iterable[Kind], num_ranks: int) -> set[RowKind]:
    """Those that take no more memory than their sum; see [Note: rows that wait]."""
    return {kind for kind in row_kinds(kinds, num_ranks) if kind.number * kind.rows.itemsize <= kind.total.itemsize}


class Variant(NamedTuple):
    """What the compiler must know. Everything else may change from call to call."""

    masters: torch.dtype
    weights: torch.dtype | None
    apart: bool
    decoupled: bool  # weight decay that does not go through the moments, as in AdamW
    rows: torch.dtype
    num_rows: int  # that the gradient is the sum of


class OnePass:
    """The step of Adam and AdamW on the host.

    [Note: runs]
    A call costs as much as some ten thousand elements. So what lies side by side with the same settings, which is nearly
    always all of a block, is stepped in one call, with the gaps between. For that the moments lie as the masters do: the
    optimizer's state of a parameter is a view of them.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by bucket

    def build(self, kinds: Iterable[Kind], num_ranks: int = 1) -> None:
        """Waits for the compiler, so that no step has to."""
        for kind in kinds:
            for decoupled in {self._is_decoupled(group) for group in self._inner.param_groups}:
                for rows, number, _ in {RowKind(kind[0], 1, kind[0]), *rows_that_wait([kind], num_ranks)}:
                    _build(Variant(*kind, decoupled, rows, number))

    def check(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raises where a group has a setting that the compiled step knows nothing of."""
        for group in groups:
            for name in _NOT_COMPILED:
                if group.get(name):
                    raise ValueError(
                        f"kernels='compiled' was asked for, but {name} has no compiled step, and a group of the optimizer sets "
                        "it. Use kernels='torch'."
                    )

    def release(self) -> None:
        self._moments.clear()

    @torch.no_grad()
    def step(
        self,
        block: Block,
        members: Iterable[Member],
        masters: torch.Tensor,
        rows: Sequence[torch.Tensor],
        weights: torch.Tensor | None,
        rounded: torch.Tensor | None,
        coefficient: float,
    ) -> None:
        """Steps a block of a bucket's `masters`. Their gradient is `coefficient` times the sum of `rows`, which stay what they
        are. The block's `weights` are compared with and `rounded` written; both are None where the masters are the weights
        themselves."""
        if block.bucket not in self._moments:
            self._moments[block.bucket] = torch.zeros_like(masters), torch.zeros_like(masters)
        moments = self._moments[block.bucket]
        apart = weights is not None and rounded is not None and weights.data_ptr() != rounded.data_ptr()
        dtype = None if weights is None else weights.dtype
        for group, step, span in self._runs(block, members, moments):
            there = slice(span.start - block.span.start, span.stop - block.span.start)
            old = None if weights is None else weights[there]
            new = None if rounded is None else rounded[there]
            master, mean, square, *grad = (whole[span.start : span.stop] for whole in (masters, *moments, *rows))
            if group is not None:
                variant = Variant(master.dtype, dtype, apart, self._is_decoupled(group), grad[0].dtype, len(grad))
                numbers = torch.tensor(self._numbers(group, step, coefficient), dtype=master.dtype, device="cpu")
                step_all = compiled(_one_pass, *variant)
                step_all(variant.decoupled, numbers, master, grad, mean, square, old, new if apart else None)
            elif old is not None and new is not None:
                adopt(old, master)
                new.copy_(master)

    def _runs(
        self, block: Block, members: Iterable[Member], moments: tuple[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[dict[str, Any] | None, float, Span]]:
        """Group, step and place of what is stepped alike, together all of the block."""
        found: list[tuple[dict[str, Any] | None, float, int]] = []  # with where each begins
        for piece, master, group in sorted(members, key=lambda member: member[0].in_share.start):
            step = 0.0 if group is None else self._advance(piece, master, moments)
            if not found or found[-1][0] is not group or found[-1][1] != step:
                found.append((group, step, piece.in_share.start if found else block.span.start))
        found = found or [(None, 0.0, block.span.start)]
        for (group, step, begin), (_, _, end) in itertools.pairwise([*found, (None, 0.0, block.span.stop)]):
            yield group, step, Span(begin, end)

    def _advance(self, piece: Piece, master: torch.nn.Parameter, moments: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Counts a step in the state of a master, which is made as torch makes it, or taken over from where it was."""
        state = self._inner.state[master]
        for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            own = moment[piece.in_share.start : piece.in_share.stop]
            if key not in state:
                state[key] = own.zero_()
            elif state[key].data_ptr() != own.data_ptr():
                state[key] = own.copy_(state[key])
        state["step"] = state["step"] + 1 if "step" in state else torch.tensor(1.0, device="cpu")
        return float(state["step"])

    def _is_decoupled(self, group: dict[str, Any]) -> bool:
        return bool(group.get("decoupled_weight_decay", isinstance(self._inner, torch.optim.AdamW)))

    def _numbers(self, group: dict[str, Any], step: float, coefficient: float) -> tuple[float, ...]:
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
        kept = 1.0 - lr * decay if self._is_decoupled(group) else decay
        rate, inverse_root = -lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5
        factor = -coefficient if group["maximize"] else coefficient
        return factor, kept, 1.0 - beta1, beta2, 1.0 - beta2, rate, inverse_root, float(group["eps"])


def _one_pass(
    decoupled: bool,
    numbers: torch.Tensor,
    master: torch.Tensor,
    rows: list[torch.Tensor],
    mean: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor | None,
    rounded: torch.Tensor | None,
) -> None:
    factor, kept, new_mean, old_square, new_square, rate, inverse_root, eps = numbers.unbind()
    value, slope = master, total_of(rows, master.dtype) * factor
    if weights is not None:  # an edit is where a weight is not its master's rounded value
        value = torch.where(weights != master.to(weights.dtype), weights.to(master.dtype), master)
    if decoupled:
        value = value * kept
    else:
        slope = slope + value * kept
    momentum = mean + (slope - mean) * new_mean
    energy = square * old_square + slope * slope * new_square
    value = value + rate * (momentum / (energy.sqrt() * inverse_root + eps))
    mean.copy_(momentum)
    square.copy_(energy)
    master.copy_(value)
    if weights is not None:
        (weights if rounded is None else rounded).copy_(value)


@functools.cache
def _build(variant: Variant) -> None:
    def example() -> list[Any]:
        master = torch.linspace(-1.0, 1.0, LONG, dtype=variant.masters)
        numbers = torch.full((8,), 0.5, dtype=variant.masters)
        weights = None if variant.weights is None else master.to(variant.weights)
        rounded = torch.zeros(LONG, dtype=variant.weights) if variant.apart else None
        rows = [master.flip(0).to(variant.rows) for _ in range(variant.num_rows)]
        return [variant.decoupled, numbers, master, rows, master * 0.1, master.square(), weights, rounded]

    build(_one_pass, variant, example)
