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
from collections.abc import Callable, Sequence

import torch

from zero.errors import RanksDiffer
from zero.plan.scaling import Scaling
from zero.runtime.agreement import set_bits
from zero.runtime.boundary import Boundary
from zero.runtime.params import Params
from zero.runtime.reducer import Reducer
from zero.runtime.settler import Found, Settler, Since
from zero.runtime.shares import GradientShares
from zero.runtime.standin import StandIn

Lay = Callable[[Sequence[int]], Sequence[int]]  # gives parameters a place on the line, and returns their new buckets


class Window:
    def __init__(
        self, params: Params, reducer: Reducer, shares: GradientShares, boundary: Boundary, settler: Settler, lay: Lay
    ) -> None:
        self.params = params
        self.reducer = reducer
        self.shares = shares
        self.boundary = boundary
        self.settler = settler
        self.scaling = Scaling()
        self.used = 0  # parameters that some rank had a gradient for, as agreed when the window last settled
        self.put = 0  # parameters whose .grad holds a stand-in of ours
        self.since = Since()
        self._hooks_at_work = threading.RLock()  # backwards of several threads may meet here
        self._lay = lay
        self._stand_ins: list[StandIn] = []
        shares.settle_through(self.settle_once)

    def welcome(self) -> None:
        """Makes stand-ins for parameters that have none yet."""
        for index in range(len(self._stand_ins), len(self.params.tensors)):
            self._stand_ins.append(StandIn(self.params.tensors[index], index, self.params.names[index], self.shares))

    # in backward -------------------------------------------------------------------------------------------------

    def before(self, index: int) -> None:
        """Autograd is about to write a gradient: what it adds to must be a real tensor, or nothing."""
        with self._hooks_at_work:
            self._note_backward()
            self._take_away(index)

    def notice(self) -> None:
        """Looks whether the user cleared the window, before something that belongs to the next one is noted."""
        if self.put and self._everything_cleared():
            self._forget_cleared()

    def _take_away(self, index: int) -> None:
        since, param = self.since, self.params.tensors[index]
        held = param.grad
        self.params.restore(index)
        if held is self._stand_ins[index]:
            self.params.set_grad(index, None if self.scaling.multiplier is not None else since.aside.pop(index, None))
        elif held is None and self.put and self._everything_cleared():
            self._forget_cleared()
        elif self.put >> index & 1 and not since.overridden >> index & 1:
            since.overridden |= 1 << index
            since.aside.pop(index, None)
        if self.scaling.multiplier is not None and held is not None and not isinstance(held, StandIn):
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
        if overridden or not self.boundary.synchronises:
            self._keep_local(index, grad.detach())
            return
        if not since.placed:
            self.put_stand_ins(index)
        if since.clears or not self._laid_out(index):
            self._keep_local(index, grad.detach())
            return
        if self.scaling.multiplier == 0.0:
            grad.detach().zero_()  # what counts nothing adds nothing, not even the NaN of a mean over no tokens
        self.reducer.collect(index, grad.detach(), self.scaling.multiplier)
        since.touched |= 1 << index
        self.params.set_grad(index, self._stand_ins[index])
        self.reducer.advance()

    def _keep_local(self, index: int, grad: torch.Tensor) -> None:
        """An ordinary `.grad`, which waits for the settling; of a narrow dtype in that of sums, so that adding loses nothing.

        Where a stand-in is out already, it stays, and the gradient waits beside it.
        """
        self.since.local |= 1 << index
        wide = self.params.widen(index, grad)
        if self.scaling.multiplier is not None:
            wide = wide.mul_(self.scaling.multiplier) if self.scaling.multiplier else wide.zero_()
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
            self.settler.aliases.notice()
            self.boundary.backwards += 1
            torch.autograd.Variable._execution_engine.queue_callback(self._note_backward_end)

    def _note_backward_end(self) -> None:
        self.since.in_backward = False

    def put_stand_ins(self, current: int | None = None) -> None:
        """Into every `.grad`, since code that clips asks each parameter whether it has one before it does anything else."""
        self.since.placed = True
        for index, param in enumerate(self.params.tensors):
            if self.put >> index & 1 or not param.requires_grad or param.dtype != self._stand_ins[index].dtype:
                continue  # of another dtype: exchanged behind our back, without our hooks, as settling will find
            self.put |= 1 << index
            if index != current:
                if param.grad is not None:
                    self.since.aside[index] = param.grad
                self.params.set_grad(index, self._stand_ins[index])

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
                reducer.learn(agreement, used_here)
                self.forget()
                self.since.over = True
                raise agreement.error
            if agreement.discard:
                self.used = 0
                self.shares.clear()
                reducer.flight.factor = self.scaling.at_keeping(False)
            for index in set_bits(agreement.removed | agreement.replaced):
                self.shares.zero(index)
            fresh = [index for index in set_bits(agreement.used) if not self._laid_out(index)]
            new = self._lay(fresh) if fresh else ()
            wide = agreement.wide | sum(1 << bucket for bucket in new) & reducer.line.narrow_buckets
            for index in found.local:
                self._collect_local(index)
            reducer.send_rest((*agreement.rest, *new), wide)
            if not self.since.settled or agreement.discard:
                self.shares.shard.multiply(self.scaling.at_settling(agreement.weight))
        reducer.learn(agreement, used_here)
        self.shares.forget_norms()
        self.used = self.used & ~agreement.removed | agreement.used
        self.since = Since(in_backward=since.in_backward, settled=bool(self.used))
        self.reducer.flight.factor = self.scaling.at_keeping(self.since.settled)
        self._put_where_used()

    def settle_once(self, occasion: str) -> None:
        """Settles, unless nothing happened since the last time."""
        if self.since.unsettled:
            self.settle(occasion)

    def end(self, to_zeros: bool = False) -> None:
        """Throws the gradients away, or makes those that there are zeros, which count as gradients of the next window.

        A collective, unless the window was settled, or ended by an error, and nothing came since. A rank that has nothing
        cannot know whether the others have: it may have failed before its first gradient, and this is how they hear of it.
        """
        self.notice()
        kept, error = sum(1 << index for index in set_bits(self.used) if self.params.tensors[index].grad is not None), None
        found = self._look() if to_zeros else Found((), 0, 0)
        if self.since.unsettled or found.local or not (self.since.settled or self.since.over):
            agreement = self.settler.agree("zero_grad", self, found)
            with torch.no_grad():
                self.reducer.catch_up(agreement)
            self.reducer.learn(agreement, self.since.touched)
            kept = self.used & ~agreement.removed | agreement.used
            error = agreement.error
        self.forget()
        if isinstance(error, RanksDiffer):  # that a rank failed is no news to ranks that clear
            raise error
        if to_zeros:
            self.used = kept
            self._put_where_used()

    def forget(self) -> None:
        """Forgets every gradient of this window on this rank."""
        self.reducer.drop()
        self.shares.clear()
        self.used = self.put = 0
        self.scaling.weight = None
        self.reducer.flight.factor = self.scaling.at_keeping(False)
        self.since = Since()
        self.boundary.end_window()
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, None)

    def _look(self) -> Found:
        """Compares every `.grad` with what was put there."""
        self.notice()
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

    def _laid_out(self, index: int) -> bool:
        return self.reducer.line.layout.slots[index] is not None

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
        self.scaling.weight = None
        self.reducer.flight.factor = self.scaling.at_keeping(False)
        self.since = Since(clears=clears, in_backward=self.since.in_backward)
        self.boundary.end_window()

    def _put_where_used(self) -> None:
        used = set(set_bits(self.used))
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, self._stand_ins[index] if index in used else None)
        self.put = self.used
