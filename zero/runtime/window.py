"""What `.grad` is between two steps, and how ranks settle it.

[Note: window]
A window is what lies between two `zero_grad`s. As in plain torch, a step does not clear it: who steps twice
applies the same gradients twice, who forgets `zero_grad` goes on adding to them.

When a backward synchronises, its first gradient puts a stand-in into the `.grad` of every parameter; each
gradient then leaves for its bucket as it comes. Settling makes what was reduced so far final: ranks tell each
other what they sent and what they found in `.grad`, run what is missing, and from then on `.grad` is None
exactly where no rank had a gradient. A window may be settled, added to, and settled again.

What the user does to `.grad` cannot be told to us, so we look: at the first gradient of a backward and at every
settling each `.grad` is compared with what was put there. None everywhere: the user cleared it. A tensor of the
user's own replaces ours, and is this rank's local gradient.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from zero.comm.group import Group
from zero.errors import RanksDiffer, ZeroError
from zero.plan.layout import FlatLayout
from zero.runtime.agreement import Agreement, Codec, Counts, agree, set_bits
from zero.runtime.boundary import Boundary
from zero.runtime.params import Params
from zero.runtime.reducer import Reducer
from zero.runtime.shares import GradientShares
from zero.runtime.standin import StandIn


@dataclass
class Since:
    """What this rank did since the last settling."""

    touched: int = 0  # parameters whose gradient was collected
    local: int = 0  # parameters whose gradient was kept here
    overridden: int = 0  # parameters in whose .grad the user put something during the window
    aside: dict[int, torch.Tensor] = field(default_factory=dict)  # local gradients that wait for this backward to add to them
    clears: int = 0  # times the user cleared all .grad while rounds were unsettled
    weights: list[float] = field(default_factory=list)  # of the micro-batches so far, where they have any
    quiet: bool = False  # said that it has no contribution
    failed: bool = False
    in_backward: bool = False


    @property
    def anything(self) -> bool:
        """True when other ranks must hear of it before it can be thrown away."""
        return bool(self.touched or self.clears or self.weights or self.quiet or self.failed)

    @property
    def unsettled(self) -> bool:
        return self.anything or bool(self.local or self.overridden)


@dataclass(frozen=True)
class Found:
    """What `.grad` was found to hold."""

    local: tuple[int, ...]  # this rank's own gradients, not collected yet
    removed: int
    replaced: int


class Settler:
    """Tells the other ranks what this one has done and found, and hears it from them."""

    def __init__(self, group: Group, params: Params, layout: FlatLayout, digest: bytes) -> None:
        self.size = group.size
        self.step = 0
        self._settles = 0
        self._group = group
        self._params = params
        self._layout = layout
        self._codec = Codec(len(params.tensors), len(layout.buckets))
        self._digest = digest

    def agree(self, occasion: str, window: Window, found: Found) -> Agreement:
        since, reducer = window.since, window.reducer
        local = sum(1 << index for index in found.local)
        counts = Counts(
            occasion=occasion,
            step=self.step,
            settles=self._settles,
            digest=self._digest,
            sent=reducer.sent,
            clears=since.clears,
            weight=sum(since.weights),
            weighted=bool(since.weights),
            contributed=bool(since.touched or local or since.quiet or since.weights),
            failed=since.failed,
            used=since.touched | local,
            put=window.put,
            removed=found.removed,
            replaced=found.replaced,
            open=reducer.open_buckets,
            wide=reducer.wide_buckets,
            later=sum({1 << bucket for index in found.local for bucket in self._layout.buckets_of(index)}),
            order=reducer.arrival_order,
        )
        messages = self._group.exchange(self._codec.pack(counts))
        self._settles += 1
        return agree([self._codec.unpack(message) for message in messages], reducer.order, self._params.names)


class Window:
    def __init__(self, params: Params, reducer: Reducer, shares: GradientShares, boundary: Boundary, settler: Settler) -> None:
        self.params = params
        self.reducer = reducer
        self.shares = shares
        self.boundary = boundary
        self.settler = settler
        self.used = 0  # parameters that some rank had a gradient for, as agreed when the window last settled
        self.put = 0  # parameters whose .grad holds a stand-in of ours
        self.multiplier: float | None = None  # what gradients to come are multiplied with: a weight, a loss scale they lack
        self.since = Since()
        self._hooks_at_work = threading.RLock()  # backwards of several threads may meet here
        self._stand_ins = [StandIn(param, index, params.names[index], shares) for index, param in enumerate(params.tensors)]

    # in backward -------------------------------------------------------------------------------------------------

    def before(self, index: int) -> None:
        """Autograd is about to write a gradient: what it adds to must be a real tensor, or nothing."""
        with self._hooks_at_work:
            self._note_backward()
            self._take_away(index)

    def _take_away(self, index: int) -> None:
        since, param = self.since, self.params.tensors[index]
        held = param.grad
        if held is self._stand_ins[index]:
            self.params.set_grad(index, None if self.multiplier is not None else since.aside.pop(index, None))
        elif self.put >> index & 1 and not since.overridden >> index & 1:
            if held is None and self._everything_cleared():
                self._forget_cleared()
            else:
                since.overridden |= 1 << index
                since.aside.pop(index, None)
        if self.multiplier is not None and held is not None and not isinstance(held, StandIn):
            since.aside[index] = held  # what is weighted must not be mixed with what is yet to be
            self.params.set_grad(index, None)

    def ready(self, index: int) -> None:
        """Stop 1: autograd and the user's hooks are done with a gradient."""
        with self._hooks_at_work:
            self._receive(index)

    def _receive(self, index: int) -> None:
        since, param = self.since, self.params.tensors[index]
        grad = param.grad
        overridden = since.overridden >> index & 1
        if grad is None:  # the graph gave an undefined gradient
            self.params.set_grad(index, self._stand_ins[index] if self.put >> index & 1 and not overridden else None)
            return
        if grad.layout != torch.strided:
            since.failed = True
            raise ValueError(
                f"The gradient of {self.params.names[index]} is sparse, but sharded training adds dense ones. "
                "Use sparse=False in the module that it belongs to."
            )
        if overridden or since.clears or not self.boundary.synchronises:
            self._keep_local(index, grad.detach())
            return
        if self.put != self.params.all:
            self._put_stand_ins(index)
        self.reducer.collect(index, grad.detach(), self.multiplier)
        since.touched |= 1 << index
        self.params.set_grad(index, self._stand_ins[index])
        self.reducer.advance()

    def _keep_local(self, index: int, grad: torch.Tensor) -> None:
        """An ordinary `.grad`, which waits for the settling; of a narrow dtype in that of sums, so that adding loses nothing.

        Where a stand-in is out already, it stays, and the gradient waits beside it.
        """
        self.since.local |= 1 << index
        wide = self.params.widen(index, grad)
        if self.multiplier is not None:
            wide.mul_(self.multiplier)
        before = self.since.aside.pop(index, None)
        if before is not None:
            wide = before.add_(wide)
        if self.put >> index & 1 and not self.since.overridden >> index & 1:
            self.since.aside[index] = wide
            self.params.set_grad(index, self._stand_ins[index])
        elif wide is not grad:
            self.params.set_grad(index, wide)

    def _note_backward(self) -> None:
        """Counts backwards for the declared accumulation.

        [Note: no end of backward] The callback runs when the innermost backward ends, and never after an exception: good
        enough to count with, since a wrong count moves a communication to another time and changes no result.
        """
        if not self.since.in_backward:
            self.since.in_backward = True
            self.boundary.backwards += 1
            torch.autograd.Variable._execution_engine.queue_callback(self._note_backward_end)

    def _note_backward_end(self) -> None:
        self.since.in_backward = False

    def _put_stand_ins(self, current: int) -> None:
        """Into every `.grad`, since code that clips asks each parameter whether it has one before it does anything else."""
        for index, param in enumerate(self.params.tensors):
            if index == current or self.put >> index & 1:
                continue
            if param.grad is not None:
                self.since.aside[index] = param.grad
            self.params.set_grad(index, self._stand_ins[index])
        self.put = self.params.all

    # settling ----------------------------------------------------------------------------------------------------

    def settle(self, occasion: str) -> None:
        """Makes the sums final; a collective."""
        found = self._look()
        agreement = self.settler.agree(occasion, self, found)
        since, reducer = self.since, self.reducer
        used_here = since.touched | sum(1 << index for index in found.local)
        with torch.no_grad():
            reducer.catch_up(agreement)
            if agreement.error is not None:
                self.forget()
                raise agreement.error
            if agreement.discard:
                self.used = 0
                self.shares.clear()
            for index in set_bits(agreement.removed | agreement.replaced):
                self.shares.zero(index)
            for index in found.local:
                self._collect_local(index)
            reducer.send_rest(agreement)
            if agreement.weight is not None:
                self.shares.shard.multiply(self.settler.size / agreement.weight if agreement.weight else 0.0)
        reducer.learn(agreement, used_here)
        self.shares.forget_norms()
        self.used = self.used & ~agreement.removed | agreement.used
        self.since = Since(in_backward=since.in_backward)
        self._put_where_used()

    def settle_once(self, occasion: str) -> None:
        """Settles, unless nothing happened since the last time."""
        if self.since.unsettled:
            self.settle(occasion)

    def end(self, occasion: str = "zero_grad") -> None:
        """Throws the gradients away; a collective where rounds of them are on their way."""
        error: ZeroError | None = None
        if self.since.anything:
            agreement = self.settler.agree(occasion, self, Found((), 0, 0))
            with torch.no_grad():
                self.reducer.catch_up(agreement)
            self.reducer.learn(agreement, self.since.touched)
            error = agreement.error
        self.forget()
        if isinstance(error, RanksDiffer):  # that a rank failed is no news to ranks that clear
            raise error

    def forget(self) -> None:
        """Forgets every gradient of this window on this rank."""
        self.reducer.drop()
        self.shares.clear()
        self.used = self.put = 0
        self.multiplier = None
        self.since = Since()
        self.boundary.end_window()
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, None)

    def _look(self) -> Found:
        """Compares every `.grad` with what was put there."""
        if self.put and self._everything_cleared():
            self._forget_cleared()
        local, removed, replaced = [], 0, 0
        for index, param in enumerate(self.params.tensors):
            grad, put = param.grad, self.put >> index & 1
            if grad is None:
                removed |= put << index
            elif not isinstance(grad, StandIn):
                local.append(index)
                replaced |= put << index
            elif index in self.since.aside:
                local.append(index)
        for index in set_bits(removed | replaced):
            self.since.aside.pop(index, None)
            self.since.touched &= ~(1 << index)
            self.reducer.drop_param(index)
        return Found(tuple(local), removed, replaced)

    def _collect_local(self, index: int) -> None:
        grad = self.params.tensors[index].grad
        if grad is not None and not isinstance(grad, StandIn):
            self.reducer.collect(index, grad.detach())
        aside = self.since.aside.pop(index, None)
        if aside is not None:
            self.reducer.collect(index, aside.detach())

    def _everything_cleared(self) -> bool:
        return all(param.grad is None for param in self.params.tensors)

    def _forget_cleared(self) -> None:
        """The user cleared every `.grad` by a way that we are not told of, such as `model.zero_grad()`.

        What this rank sent of the old window pairs with what the others sent, so those rounds must still be made
        equal. That waits for the settling; until then new gradients stay in `.grad`.
        """
        unsettled = self.since.touched or self.since.quiet
        clears = self.since.clears + 1 if unsettled else self.since.clears
        self.reducer.drop()
        self.shares.clear()
        self.used = self.put = 0
        self.since = Since(clears=clears, in_backward=self.since.in_backward)
        self.boundary.end_window()

    def _put_where_used(self) -> None:
        used = set(set_bits(self.used))
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, self._stand_ins[index] if index in used else None)
        self.put = self.used
