"""What `.grad` is between two steps, and how ranks settle it.

[Note: window]
A window is what lies between two `zero_grad`s. As in plain torch, a step does not clear it: who steps twice
applies the same gradients twice, who forgets `zero_grad` goes on adding to them.

The first gradient of a backward puts a `ShardedGrad` for the global gradient into the `.grad` of every parameter, and
there it stays whatever happens to the gradients behind it: those of a backward that synchronises leave for their
buckets as they come, those of another wait here, beside the `ShardedGrad`s. Settling makes everything that came so far
final: ranks tell each other what they sent and what they found in `.grad`, send what is missing, and from then on
`.grad` is None exactly where no rank had a gradient. A window may be settled, added to, and settled again.

What the user does to `.grad` cannot be told to us, so we look: before each gradient and at every settling `.grad` is
compared with what was put there. None everywhere: the user cleared it. None in one place: that gradient is gone. A
tensor of the user's own replaces what was there, is this rank's local gradient, and counts as it stands.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

import torch

from zero.errors import RanksDiffer
from zero.memory.formats import sum_dtype
from zero.plan.bits import set_bits
from zero.plan.grad_scaling import Scaling
from zero.runtime.grads.grad_ops import ShardedGradOps
from zero.runtime.grads.sync_policy import SyncPolicy
from zero.runtime.grads.window_state import WindowState
from zero.runtime.params.grad_proxy import ShardedGrad
from zero.runtime.params.table import Params
from zero.runtime.profiling import Timed, stop
from zero.runtime.reduce.buckets import Reducer
from zero.runtime.sync.agreement import Agreement, Counts, GradEdits
from zero.runtime.sync.exchange import WindowSync

_TORN = "this rank's share of the weights may be stepped in part: load a checkpoint to have them whole"
_HELD_BY_US = 2  # references: the table's, and that of the question

Lay = Callable[[Sequence[int]], Sequence[int]]  # gives parameters a place on the line, and returns their new buckets


class Window(Timed):
    def __init__(
        self, params: Params, reducer: Reducer, shares: ShardedGradOps, boundary: SyncPolicy, settler: WindowSync, lay: Lay
    ) -> None:
        self.params = params
        self.reducer = reducer
        self.grad_ops = shares
        self.policy = boundary
        self.sync = settler
        self.scaling = Scaling()
        self.used = 0  # parameters that some rank had a gradient for, as agreed when the window last settled
        self.has_proxy = 0  # parameters whose .grad holds a `ShardedGrad` of ours
        self.state = WindowState()
        self.place_params = lay
        self._proxies: list[ShardedGrad] = []
        self._lock = threading.RLock()  # backwards of several threads may meet here
        shares.bind(self.settle_once)

    def register(self) -> None:
        """Makes `ShardedGrad`s for parameters that have none yet."""
        for index in range(len(self._proxies), len(self.params.tensors)):
            self._proxies.append(self._new_proxy(index))

    def _new_proxy(self, index: int) -> ShardedGrad:
        return ShardedGrad(self.params.tensors[index], index, self.params.names[index], self.grad_ops)

    # in backward -------------------------------------------------------------------------------------------------

    def before_grad(self, index: int) -> None:
        """Autograd is about to write a gradient; it finds nothing to add to, so that what it writes is that and no more."""
        with self._lock:
            self._make_way(index)
            self.state.writing[index] = threading.get_ident()

    def _make_way(self, index: int) -> None:
        self._scan_grad(index)
        self._note_backward()
        self.params.set_grad(index, None)

    def check_cleared(self) -> None:
        """Looks whether the user cleared the window, before something that belongs to the next one is noted."""
        if self.has_proxy and self._everything_cleared():
            self._forget_cleared()

    @stop("ready")
    def grad_ready(self, index: int) -> None:
        """Stop 1: autograd and the user's hooks are done with a gradient."""
        with self._lock:
            grad = self.params.tensors[index].grad
            if grad is None or isinstance(grad, ShardedGrad):  # an undefined gradient, or another thread's backward took it
                self.params.set_grad(index, self._proxies[index] if self.has_proxy >> index & 1 else None)
            else:
                self._take(index, grad.detach() if grad.requires_grad else grad)
            self.state.writing.pop(index, None)

    @stop("ready")
    def hand_over(self, index: int, grad: torch.Tensor) -> None:
        """The same, for one that does not come by way of `.grad`, and is lent for the length of this call."""
        with self._lock:
            self._make_way(index)
            self._take(index, grad.detach(), lent=True)

    def _take(self, index: int, grad: torch.Tensor, lent: bool = False) -> None:
        since = self.state
        if grad.layout != torch.strided:
            since.failed = True
            raise ValueError(
                f"The gradient of {self.params.names[index]} is sparse, but sharded training adds dense ones. "
                "Use sparse=False in the module that it belongs to."
            )
        if not since.proxies_installed:
            self.install_proxies()
        self.params.set_grad(index, self._proxies[index])
        self.has_proxy |= 1 << index
        multiplier = self.scaling.multiplier
        if multiplier == 0.0:
            grad = torch.zeros_like(grad)  # what counts nothing adds nothing, not even the NaN of a mean over no tokens
        edited = (since.removed or since.replaced) and (since.removed | since.replaced) >> index & 1
        collects = not edited and not since.clears and self._is_placed(index)
        if not self.policy.synchronises:
            since.accumulated |= 1 << index
            collects = collects and self.reducer.accumulates_fp32(index)
        waiting = since.pending.pop(index, None)
        if waiting is not None:
            grad, multiplier = waiting.add_(grad, alpha=1.0 if multiplier is None else multiplier), None
        if collects:
            since.collected |= 1 << index
            self.reducer.collect(index, grad, multiplier, apart=bool(since.accumulated >> index & 1))
            self.reducer.advance()
        else:  # it waits in the dtype of sums, so that adding to it loses nothing
            wide = grad.to(sum_dtype(grad.dtype), copy=lent)
            since.pending[index] = wide if multiplier is None else wide * multiplier

    def _scan_grad(self, index: int) -> None:
        """Takes note of what the user did to one `.grad`, and of a tensor that he put there."""
        since, held, bit = self.state, self.params.tensors[index].grad, 1 << index
        if held is self._proxies[index]:
            return
        if isinstance(held, ShardedGrad):
            since.failed = True
            raise ValueError(
                f"The gradient of {self.params.names[index]} was set to that of {held.label}"
                f"{' in an earlier window' if held.param == index else ''}, but a .grad stands for shares of its own window "
                "only. Pass what optimizer.whole_grad(parameter) gives, on all ranks."
            )
        if held is None:
            if not self.has_proxy & bit:
                return
            if self._everything_cleared():
                self._forget_cleared()
                return
            since.removed |= bit
        else:
            since.replaced |= bit & self.has_proxy
            since.user_grads[index] = held.detach()
        if self.has_proxy & bit:
            since.collected &= ~bit
            since.pending.pop(index, None)
            self.reducer.drop_param(index)
        if held is None:
            since.user_grads.pop(index, None)

    def _note_backward(self) -> None:
        """Counts backwards for the declared accumulation.

        [Note: no end of backward] The callback runs when the innermost backward ends, and never after an exception: good
        enough to count with, since a wrong count moves a communication to another time and changes no result.
        """
        if self.state.in_backward and not self.has_proxy and set(self.state.writing.values()) <= {threading.get_ident()}:
            # another one broke off at its first gradient
            self.state.failed |= not self._everything_cleared()
            self.state.in_backward = False
        if not self.state.in_backward:
            self.state.in_backward, self.state.proxies_installed = (
                True,
                False,
            )  # some may have become trainable since the last one
            self.sync.tracker.check_model()
            self.policy.backwards += 1
            self.sync.set_phase("in a backward", self.location)
            torch.autograd.Variable._execution_engine.queue_callback(self._note_backward_end)

    def _note_backward_end(self) -> None:
        self.state.in_backward, self.params.reached = False, None
        self.sync.set_phase("after a backward")

    def annotate_error(self, error: BaseException) -> None:
        """Adds to an error of a backward or an update where in it that was, on Pythons that can."""
        place, step = self.location(), self.sync.step
        if place and hasattr(error, "add_note"):
            error.add_note(
                f"This was in {f'step {step}' if self.state.mid_update else f'a backward of step {step + 1}'}{place}."
            )

    def location(self) -> str:
        """Where a backward is that broke off: at the parameter whose gradient, or a hook of it, was at work, or after it."""
        reached, since = self.params.reached, self.state
        if since.mid_update:
            return f", in the update ({_TORN})"
        if reached is None:
            return ""
        arrived = (since.collected >> reached & 1 or reached in since.pending) and reached not in since.writing
        return f", {'after' if arrived else 'at'} parameter {self.params.names[reached]!r}"

    def install_proxies(self) -> None:
        """Into every `.grad`, since code that clips asks each parameter whether it has one before it does anything else.

        Not where autograd is about to write, in this thread or in another: it would add to what it finds.
        """
        self.state.proxies_installed = True
        for index, param in enumerate(self.params.tensors):
            if self.has_proxy >> index & 1 or index in self.state.writing or not param.requires_grad:
                continue
            if param.dtype == self._proxies[index].own_dtype:  # else exchanged behind our back, as settling will find
                self._scan_grad(index)
                self.params.set_grad(index, self._proxies[index])
                self.has_proxy |= 1 << index

    # settling ----------------------------------------------------------------------------------------------------

    @stop("settle")
    def settle(self, occasion: str) -> None:
        """Makes the sums final; a collective."""
        found = self._scan_grads()
        agreement = self._agree(occasion, found)
        since, reducer = self.state, self.reducer
        used_here = since.collected | found.local
        with torch.no_grad():
            reducer.send_missing_rounds(agreement.rounds, keep=not agreement.discard)
            if agreement.error is not None:
                self._learn(agreement, used_here)
                self._follow(agreement)
                self.forget()
                self.state.aborted = True
                raise agreement.error
            if agreement.discard:
                self.used = 0
                self.grad_ops.clear()
                reducer.inflight.factor = self.scaling.accumulate_factor(False)
            for index in set_bits(agreement.removed | agreement.replaced):
                self.grad_ops.zero(index)
            fresh = [index for index in set_bits(agreement.used) if not self._is_placed(index)]
            new = self.place_params(fresh) if fresh else ()
            wide = agreement.wide | sum(1 << bucket for bucket in new) & reducer.line.narrow_buckets
            for index in set_bits(found.local):
                self._collect_local(index, agreement.weight)
            reducer.flush((*agreement.rest, *new), wide)
            if not self.state.synchronized or agreement.discard:
                self.grad_ops.shard.multiply(self.scaling.sync_factor(agreement.weight))
        self._learn(agreement, used_here)
        self.grad_ops.forget_norms()
        self.used = self.used & ~agreement.removed | agreement.used
        self.state = WindowState(in_backward=since.in_backward, synchronized=bool(self.used))
        self.scaling.weight = None  # what comes now is no part of that mean
        self.reducer.inflight.factor = self.scaling.accumulate_factor(self.state.synchronized)
        self._install_where_used()

    def _agree(self, occasion: str, found: GradEdits) -> Agreement:
        """Tells the other ranks what this one has done and found, and hears it from them. A collective."""
        since, reducer, layout, counting = self.state, self.reducer, self.reducer.line.layout, self.policy.counting
        # What waited is in the dtype of sums, so it travels in that, on all ranks.
        later = sum({1 << bucket for index in set_bits(found.local) for bucket in layout.buckets_of(index)})
        counts = Counts(
            occasion=occasion,
            sent=reducer.sent,
            clears=since.clears,
            weight=sum(since.weights),
            weighted=bool(since.weights),
            contributed=bool(since.collected or found.local or since.no_contribution or since.weights),
            failed=since.failed or since.backward_failed,
            kept=since.synchronized,
            changes=self.grad_ops.changes,
            micro_steps=0 if counting is None else counting.micro_steps,
            used=since.collected | found.local,
            put=self.has_proxy,
            removed=found.removed,
            replaced=found.replaced,
            open=reducer.open_buckets,
            wide=reducer.fp32_buckets | later & reducer.line.narrow_buckets,
            later=later,
            order=reducer.arrival_order,
        )
        return self.sync.synchronize(counts, reducer.order, self.location())

    def _learn(self, agreement: Agreement, used_here: int) -> None:
        """A failure teaches nothing about which buckets to send in which order."""
        self.reducer.update_order(agreement.order, agreement.used if agreement.error is None else 0, used_here)

    def settle_once(self, occasion: str) -> int:
        """Settles, unless nothing happened since the last time; says which parameters have a gradient."""
        if self.state.needs_sync:
            self.settle(occasion)
        return self.used

    def end(self, to_zeros: bool = False) -> None:
        """Throws the gradients away, or makes those that there are zeros, which count as gradients of the next window.

        A collective, unless a step has used the window, or an error that all know of ended it, and nothing came since. Anybody
        else cannot know what the others have: this rank may have failed alone, and this is how they hear of it.
        """
        self.check_cleared()
        cleared = sum(1 << index for index in set_bits(self.used) if self.params.tensors[index].grad is None)
        kept, error = self.used & ~cleared, None
        found = self._scan_grads() if to_zeros else GradEdits(0, 0, 0)
        if self.state.needs_sync or found.local or not (self.state.consumed or self.state.aborted):
            agreement = self._agree("zero_grad", found)
            with torch.no_grad():
                self.reducer.send_missing_rounds(agreement.rounds, keep=not agreement.discard)
            self._learn(agreement, self.state.collected)
            self._follow(agreement)
            kept = self.used & ~agreement.removed | agreement.used
            error = agreement.error
        self.forget()
        self.sync.set_phase("before a backward")
        if isinstance(error, RanksDiffer):  # that a rank failed is no news to ranks that clear
            raise error
        if to_zeros:
            self.used = kept
            self._install_where_used()

    def _follow(self, agreement: Agreement) -> None:
        if agreement.starts_over and self.policy.counting is not None:
            self.policy.counting.begin()

    def forget(self) -> None:
        """Forgets every gradient of this window on this rank."""
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, None)
        self._begin(WindowState())

    def _forget_cleared(self) -> None:
        """The user cleared every `.grad` by a way that we are not told of, such as `model.zero_grad()`.

        What this rank sent of the old window pairs with what the others sent, so those rounds must still be made
        equal. That waits for the settling; until then new gradients wait too.
        """
        unsettled = self.state.collected or self.state.no_contribution or self.state.pending
        clears = self.state.clears + 1 if unsettled else self.state.clears
        self._begin(WindowState(clears=clears))

    def _begin(self, since: WindowState) -> None:
        """A new window, once every .grad is None."""
        self.state, self.params.reached = since, None
        self.reducer.drop()
        self.reducer.inflight.forget_nonfinite()
        self.grad_ops.clear()
        self.used = self.has_proxy = 0
        self.scaling.weight = None
        self.reducer.inflight.factor = self.scaling.accumulate_factor(False)
        self.policy.end_window()
        for index in range(len(self._proxies)):
            if sys.getrefcount(self._proxies[index]) > _HELD_BY_US:  # by somebody who has a gradient of the old window
                self._proxies[index].ended = True
                self._proxies[index] = self._new_proxy(index)

    def _scan_grads(self) -> GradEdits:
        """Compares every `.grad` with what was put there."""
        self.check_cleared()
        for index in range(len(self.params.tensors)):
            self._scan_grad(index)
        since = self.state
        return GradEdits(sum(1 << index for index in {*since.pending, *since.user_grads}), since.removed, since.replaced)

    def _is_placed(self, index: int) -> bool:
        return self.reducer.line.layout.slots[index] is not None

    def _collect_local(self, index: int, total_weight: float | None) -> None:
        aside, own = self.state.pending.pop(index, None), self.state.user_grads.pop(index, None)
        if aside is not None:
            self.reducer.collect(index, aside)
        if own is not None:
            self.reducer.collect(index, own, self.scaling.user_grad_factor(total_weight))

    def _everything_cleared(self) -> bool:
        return all(param.grad is None for param in self.params.tensors)

    def _install_where_used(self) -> None:
        used = set(set_bits(self.used))
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, self._proxies[index] if index in used else None)
        self.has_proxy = self.used
