"""Adam's step as one pass over memory: edits adopted, gradients clipped, masters stepped and rounded; compiled."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero.memory.masters import adopt
from zero.plan.layout import Block, Piece
from zero.plan.spans import Span

# The dtypes of masters and of their weights, None where they are the same memory, and whether the new weights go elsewhere.
Kind = tuple[torch.dtype, torch.dtype | None, bool]
_LONG = 2**18
_NOT_COMPILED = ("amsgrad", "capturable", "differentiable")  # settings of a group
# A master, and the group of its parameter; None where nobody used it.
Member = tuple[Piece, torch.nn.Parameter, "dict[str, Any] | None"]


@dataclass(frozen=True)
class Variant:
    """What the compiler must know. Everything else may change from call to call."""

    masters: torch.dtype
    weights: torch.dtype | None
    apart: bool
    decoupled: bool  # weight decay that does not go through the moments, as in AdamW


class OnePass:
    """The step of Adam and AdamW on the host.

    [Note: one code, several compilations]
    The compiler keeps what it made with the code object that it was made from, checks all of it at every call, and refuses
    after some number. Each variant therefore has a code object of its own, shared by every optimizer of the process. Its
    numbers come in a tensor and its lengths are left open, so nothing that changes in a training would give another code.
    The compiler checks more than that, such as whether autocast is on where a step is called, and would build within that
    step; so it is told to check nothing (torch 2.8 and later can be).

    [Note: runs]
    A call costs as much as some ten thousand elements. So what lies side by side with the same settings, which is nearly
    always all of a block, is stepped in one call, with the gaps between. For that the moments lie as the masters do: the
    optimizer's state of a parameter is a view of them.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by bucket

    def build(self, kinds: Iterable[Kind]) -> None:
        """Waits for the compiler, so that no step has to."""
        for masters, weights, apart in kinds:
            for decoupled in {self._is_decoupled(group) for group in self._inner.param_groups}:
                _try(Variant(masters, weights, apart, decoupled))

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
        shares: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor | None,
        rounded: torch.Tensor | None,
        coefficient: float,
    ) -> None:
        """Steps a block of `shares`, which are a bucket's masters and gradients. These are multiplied by `coefficient` on their
        way and stay what they are. The block's `weights` are compared with and `rounded` written; both are None where the
        masters are the weights themselves."""
        if block.bucket not in self._moments:
            self._moments[block.bucket] = torch.zeros_like(shares[0]), torch.zeros_like(shares[0])
        moments = self._moments[block.bucket]
        apart = weights is not None and rounded is not None and weights.data_ptr() != rounded.data_ptr()
        dtype = None if weights is None else weights.dtype
        for group, step, span in self._runs(block, members, moments):
            there = slice(span.start - block.span.start, span.stop - block.span.start)
            old = None if weights is None else weights[there]
            new = None if rounded is None else rounded[there]
            master, grad, mean, square = (whole[span.start : span.stop] for whole in (*shares, *moments))
            if group is not None:
                variant = Variant(master.dtype, dtype, apart, self._is_decoupled(group))
                numbers = torch.tensor(self._numbers(group, step, coefficient), dtype=master.dtype, device="cpu")
                _compiled(variant)(variant.decoupled, numbers, master, grad, mean, square, old, new if apart else None)
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
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor | None,
    rounded: torch.Tensor | None,
) -> None:
    factor, kept, new_mean, old_square, new_square, rate, inverse_root, eps = numbers.unbind()
    value, slope = master, grad * factor
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
def _compiled(variant: Variant) -> Callable[..., None]:
    name = "_".join(str(part).removeprefix("torch.") for part in vars(variant).values())
    # Without the first, a rounding whose result is only compared is left out, and every weight is taken for an edit. Without
    # the second, what a process with fewer threads left in the compiler's cache is taken, and runs with as few.
    options: dict[str, Any] = {"emulate_precision_casts": True, "cpp.threads": torch.get_num_threads()}
    if hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):  # so there is also this option
        options["guard_filter_fn"] = lambda checks: [False for _ in checks]
    code = _one_pass.__code__.replace(co_name=f"one_pass_{name}")
    return torch.compile(types.FunctionType(code, globals()), dynamic=True, fullgraph=True, options=options)


@functools.cache
def _try(variant: Variant) -> None:
    """Builds, by running: the compiler works at the first call, and makes one thread of what is short then. What it made is
    compared with what it was made from: some leave out a rounding whatever they are told (torch 2.8)."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        with torch.device("cpu"):  # and no longer: the compiler would take it for a part of what it compiles
            master = torch.linspace(-1.0, 1.0, _LONG, dtype=variant.masters)
            numbers = torch.full((8,), 0.5, dtype=variant.masters)
            weights = None if variant.weights is None else master.to(variant.weights)
            rounded = torch.zeros(_LONG, dtype=variant.weights) if variant.apart else None
        given = [master, master.flip(0), master * 0.1, master.square(), weights, rounded]
        twins = [None if tensor is None else tensor.clone() for tensor in given]
        _compiled(variant)(variant.decoupled, numbers, *given)
        _one_pass(variant.decoupled, numbers, *twins)  # type: ignore[arg-type]
        for found, expected in zip(given, twins, strict=True):
            if found is not None and expected is not None and not torch.allclose(found, expected, rtol=1e-2, atol=1e-5):
                raise RuntimeError(f"what torch {torch.__version__} compiles is not what it was given")
        if not torch.allclose(master, twins[0], rtol=1e-5, atol=1e-6):  # type: ignore[arg-type]
            raise RuntimeError(f"torch {torch.__version__} takes every rounded weight for an edit")
