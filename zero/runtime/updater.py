"""Stops 5 and 6: judge the settled gradients, and let the user's optimizer step on this rank's shares."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zero.errors import NonFinite
from zero.memory.masters import Masters
from zero.runtime.agreement import set_bits
from zero.runtime.params import Params
from zero.runtime.shares import GradientShares


@dataclass(frozen=True)
class Verdict:
    """What all ranks do with the gradients of a window."""

    apply: bool
    grad_norm: float  # of the true gradients, before clipping


@dataclass(frozen=True)
class Rules:
    """What the gradients are judged by."""

    clip: float | None = None
    on_nonfinite: str = "propagate"  # or "skip", "raise"


class Updater:
    def __init__(
        self, params: Params, shares: GradientShares, masters: Masters, inner: torch.optim.Optimizer, rules: Rules
    ) -> None:
        self.rules = rules
        self._params = params
        self._shares = shares
        self._masters = masters
        self._inner = inner

    def judge(self) -> Verdict:
        """Finite or not, and how long: from the settled sums, with the same answer on every rank."""
        norm = self._shares.total_norm()
        if not math.isfinite(norm) and self.rules.on_nonfinite != "propagate":
            if self.rules.on_nonfinite == "raise":
                raise self.nonfinite(norm)
            return Verdict(False, norm)
        if self.rules.clip is not None:
            coefficient = self.rules.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does it
            self._shares.shard.multiply(min(1.0, coefficient) if not math.isnan(coefficient) else coefficient)
            self._shares.forget_norms()
        return Verdict(True, norm)

    def step(self, used: int) -> None:
        """Stop 6, on the masters of what was used; torch leaves a parameter without gradient alone, and its state."""
        fed = []
        for param in set_bits(used):
            for piece, master in self._masters.of(param):
                master.grad = self._shares.shard.piece(piece)
                fed.append(master)
        try:
            with self.masters_in_groups():
                _step_without_hooks(self._inner)
        finally:
            for master in fed:
                master.grad = None

    @contextlib.contextmanager
    def masters_in_groups(self) -> Iterator[None]:
        """Exchanges the parameters in the user's own groups for the masters, and puts them back whatever happens."""
        groups = self._inner.param_groups
        kept = [group["params"] for group in groups]
        index = self._params.index
        try:
            for group, params in zip(groups, kept, strict=True):
                known = [index[id(param)] for param in params if id(param) in index]
                group["params"] = [master for param in known for _, master in self._masters.of(param)]
            yield
        finally:
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params

    def forget_state(self) -> None:
        """Takes the masters' state out of the user's optimizer, which would keep it alive."""
        for pieces in self._masters.pieces.values():
            for _, master in pieces:
                self._inner.state.pop(master, None)

    def nonfinite(self, norm: float) -> NonFinite:
        """The error that names what is not finite."""
        return NonFinite(
            f"A step was asked for, but the norm of the gradients is {norm} ({', '.join(self._nonfinite_names())}). "
            "Nothing was applied. Find where it began, or set on_nonfinite to 'skip' or 'propagate'."
        )

    def _nonfinite_names(self) -> list[str]:
        norms = ((name, self._shares.norm(index, 2.0).item()) for index, name in enumerate(self._params.names))
        return [name for name, norm in norms if not math.isfinite(norm)][:5]


def _step_without_hooks(inner: torch.optim.Optimizer) -> None:
    """Those around its step are run by the optimizer that the user holds, once; around this one they would run again."""
    own = vars(inner).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):  # put there by somebody, who wants it to be called
        own()
        return
    step = type(inner).step
    getattr(step, "__wrapped__", step)(inner) if getattr(step, "hooked", False) else step(inner)
