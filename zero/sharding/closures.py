"""Steps with a closure: it is called once, or as often as the optimizer needs a loss and its gradients.

[Note: evaluations] LBFGS calls its closure several times a step, each time with other weights. Each rank steps its own
masters, from the loss and from sums that are those of all ranks together; see [Note: LBFGS in shares]. So all ranks call their
closures equally often, and tell each other before each call. Between two calls the weights are what the masters are, as after
a step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zero.comm.exchange import exchange_texts
from zero.errors import GroupLost, RanksDiffer
from zero.optim.traits import evaluates
from zero.plan.layout import Block
from zero.runtime.grads.phase import Phase
from zero.runtime.step.updater import StepDecision
from zero.sharding.build import reduction
from zero.sharding.state import ShardingState
from zero.sharding.step import decide, step, torn_by_failure


def step_with(state: ShardingState, closure: Callable[[], Any] | None) -> tuple[Any, StepDecision | None]:
    """Steps with a closure. Returns what the closure returned the first time, and what was decided. A collective."""
    if evaluates(state.updater.inner):
        return _Evaluations(state, closure).step()
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    return loss, step(state)


class _Evaluations:
    """The calls of the closure in one step."""

    def __init__(self, state: ShardingState, closure: Callable[[], Any] | None) -> None:
        if closure is None:
            raise ValueError(
                f"Cannot step {type(state.updater.inner).__name__} without a closure: it evaluates the loss several times. "
                "Call step(closure) with a function that clears gradients, sends a loss backward and returns it."
            )
        self._state = state
        self._closure = closure
        self._layout = state.layout_ref.layout
        self._blocks: list[Block] = []
        self._losses: list[Any] = []
        self._decision: StepDecision | None = None

    def step(self) -> tuple[Any, StepDecision | None]:
        state = self._state
        with torn_by_failure(state), _version_ended(state):
            self._call()  # LBFGS begins with it, and it finds out what is trained from this step on
            state.window.sync.count_step()
            self._layout = state.layout_ref.layout
            buckets = range(len(self._layout.buckets))
            self._blocks = [block for bucket in buckets for block in self._layout.blocks(bucket)]
            over_ranks = self._over_ranks if self._layout.num_shares > 1 else None
            # Torn until all evaluations are done: between two of them weights are at a point that the optimizer only tries.
            state.masters.wholeness.begin(f"step {state.window.sync.step}")
            state.updater.step_by_evaluations(self._evaluate, self._agreed, over_ranks)
            self._agree(goes_on=False)
            self._finish()
            state.masters.wholeness.end()
        state.loss_scaler.update(True)
        state.window.sync.set_phase("before a backward")
        return self._losses[0], self._decision

    def _evaluate(self) -> Any:
        state = self._state
        if state.window.phase is Phase.STEPPING:
            self._agree(goes_on=True)
            self._finish()
            self._call()
            if state.layout_ref.layout is not self._layout:
                raise ValueError(
                    "Cannot evaluate: a parameter became trainable in the middle of a step of LBFGS. Set requires_grad before "
                    "step(closure)."
                )
        coefficient = 1.0 if self._decision is None else self._decision.coefficient
        self._begin()
        state.updater.take_gradients(self._blocks, state.window.used, coefficient)
        return self._of_all_ranks(float(self._losses[-1]))

    def _call(self) -> None:
        state = self._state
        with torch.enable_grad():
            loss = self._closure()
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._decision = decide(state)
        if state.window.phase is not Phase.SETTLED:
            raise ValueError("Cannot evaluate: the closure sent no loss backward. Call backward() in it, on every rank.")

    def _begin(self) -> None:
        """Begins to write masters."""
        state = self._state
        state.publisher.begin()
        state.publisher.follow_edits()
        state.window.move_to(Phase.STEPPING)

    def _finish(self) -> None:
        """Publishes the present masters as the weights of all ranks."""
        state = self._state
        state.masters.publish(self._blocks)
        state.publisher.send(self._blocks)
        state.window.grad_ops.forget_norms()
        state.publisher.wait(sum(1 << slot.param for slot in self._layout.slots if slot is not None))
        state.publisher.end()
        state.window.move_to(Phase.STEPPED)

    def _of_all_ranks(self, loss: float) -> float:
        """Reduces a loss over the ranks as gradients are reduced."""
        numbers = state_numbers(self._state, loss, "the loss of an evaluation")
        return sum(numbers) * reduction(self._state.config, len(numbers))

    def _over_ranks(self, number: float) -> list[float]:
        """What each of those that share the states has."""
        return state_numbers(self._state, number, "a sum over all parameters")[: self._layout.num_shares]

    def _agreed(self, outline: dict[str, Any]) -> dict[str, Any]:
        """What one remembers that has masters."""
        outlines = map(json.loads, exchange_texts(self._state.group, json.dumps(outline)))
        return next(filter(None, outlines), {})

    def _agree(self, goes_on: bool) -> None:
        if len(set(state_numbers(self._state, float(goes_on), "another evaluation"))) != 1:
            raise RanksDiffer(
                f"Cannot finish this step: after {len(self._losses)} evaluations some ranks want another and others do not, "
                "because their hardware or libraries round differently. Use the same on every rank, or another optimizer."
            )


@contextlib.contextmanager
def _version_ended(state: ShardingState) -> Iterator[None]:
    """Ends the version of the weights that an evaluation broke off in, as the other ranks do, which read it."""
    try:
        yield
    except BaseException:
        if state.window.phase is Phase.STEPPING:
            with contextlib.suppress(GroupLost):
                state.publisher.end()
        raise


def state_numbers(state: ShardingState, number: float, subject: str) -> list[float]:
    return [numbers[0] for numbers in state.window.grad_ops.exchange_numbers([number], subject)]
