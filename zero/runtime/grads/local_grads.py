"""What this rank adds to a window: gradients in buckets, and others that wait on this rank."""

from __future__ import annotations

import torch

from zero.memory.formats import sum_dtype
from zero.plan.scaling import Scaling
from zero.runtime.reduce.buckets import Reducer


class LocalGrads:
    """This rank's contribution since ranks last synchronized."""

    def __init__(self, reducer: Reducer, scaling: Scaling) -> None:
        self.collected = 0  # parameters whose gradient is in a bucket
        self.accumulated = 0  # parameters of which several gradients are added up before any is sent
        self.pending: dict[int, torch.Tensor] = {}  # gradients that wait here, in the dtype of sums
        self.weights: list[float] = []  # of the micro-batches so far, where they have any
        self.is_none = False  # the user said that this rank has no contribution
        self._reducer = reducer
        self._scaling = scaling

    def add(self, index: int, grad: torch.Tensor, may_collect: bool, synchronizes: bool, lent: bool) -> None:
        """Puts a gradient into its bucket if it `may_collect` it; else keeps it here. A `lent` gradient is copied."""
        multiplier, bit = self._scaling.multiplier, 1 << index
        if multiplier == 0.0:
            grad = torch.zeros_like(grad)  # what counts nothing adds nothing, not even the NaN of a mean over no tokens
        if not synchronizes:
            self.accumulated |= bit
            may_collect = may_collect and self._reducer.accumulates_fp32(index)
        waiting = self.pending.pop(index, None)
        if waiting is not None:
            grad, multiplier = waiting.add_(grad, alpha=1.0 if multiplier is None else multiplier), None
        if may_collect:
            self.collected |= bit
            self._reducer.collect(index, grad, multiplier, apart=bool(self.accumulated & bit))
            self._reducer.advance()
        else:
            wide = grad.to(sum_dtype(grad.dtype), copy=lent)
            self.pending[index] = wide if multiplier is None else wide * multiplier

    def has(self, index: int) -> bool:
        return bool(self.collected >> index & 1) or index in self.pending

    def drop(self, index: int) -> None:
        """Drops a gradient that the user removed."""
        self.collected &= ~(1 << index)
        self.pending.pop(index, None)
        self._reducer.drop_param(index)

    def collect_pending(self, index: int, user_grad: torch.Tensor | None, total_weight: float | None) -> None:
        """Puts the waiting gradients of a parameter, and the user's own gradient, into its bucket."""
        pending = self.pending.pop(index, None)
        if pending is not None:
            self._reducer.collect(index, pending)
        if user_grad is not None:
            self._reducer.collect(index, user_grad, self._scaling.user_grad_factor(total_weight))

    def reset(self) -> None:
        self.collected, self.accumulated, self.is_none = 0, 0, False
        self.pending, self.weights = {}, []
