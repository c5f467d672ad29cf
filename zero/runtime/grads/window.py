"""What `.grad` is between two steps, and how ranks settle it.

[Note: window] A window is what lies between two `zero_grad`s. As in plain torch a step does not clear it: stepping twice
applies the same gradients twice, and without `zero_grad` gradients go on adding up.

The first gradient of a backward puts a `ShardedGrad` into the `.grad` of every parameter. Gradients of a backward that
synchronises go to their buckets as they come; those of another wait here. Settling makes everything that came so far final:
ranks tell each other what they sent and what they found in `.grad`, and send what is missing. From then on `.grad` is None
exactly where no rank had a gradient. A window may be settled, added to, and settled again.

Nothing reports what a user does to `.grad`. So before each gradient and at every settling `.grad` is compared with what was put
there. None everywhere: the user cleared it. None in one place: that gradient is dropped. A tensor of the user's own replaces
what was there: it is this rank's local gradient, and counts as it stands.

[Note: short path] Nearly every gradient is the first one of its parameter in a window that nobody has touched, and goes to the
one bucket that it has a place in. `hooks_of` does that much in two flat functions, while `_is_short` says that the window is
such a one. Whatever else comes takes the long path, which gives the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from zero.errors import RanksDiffer
from zero.plan.layout import set_bits
from zero.plan.scaling import Scaling
from zero.runtime.grads.grad_attribute import Edit, GradAttribute
from zero.runtime.grads.grad_ops import ShardedGradOps
from zero.runtime.grads.local_grads import LocalGrads
from zero.runtime.grads.phase import NEEDS_SYNC, TRANSITIONS, Phase
from zero.runtime.grads.sync_policy import SyncPolicy
from zero.runtime.params.grad_proxy import ShardedGrad
from zero.runtime.params.table import Params
from zero.runtime.profiling import Timed, stop
from zero.runtime.reduce.buckets import Reducer
from zero.runtime.sync.agreement import Agreement, Counts, GradEdits
from zero.runtime.sync.exchange import WindowSync

_TORN = "this rank's share of the weights may be stepped in part: load a checkpoint to have them whole"

PlaceParams = Callable[[Sequence[int]], Sequence[int]]  # gives parameters memory, and returns their new buckets


class Window(Timed):
    """All gradients between two steps: takes them in, settles them with the other ranks, and ends with `zero_grad`."""

    takes_short_path = True  # where it can; the long one gives the same bits

    def __init__(
        self,
        params: Params,
        reducer: Reducer,
        grad_ops: ShardedGradOps,
        policy: SyncPolicy,
        sync: WindowSync,
        scaling: Scaling,
        place_params: PlaceParams,
    ) -> None:
        self.params = params
        self.reducer = reducer
        self.grad_ops = grad_ops
        self.policy = policy
        self.sync = sync
        self.scaling = scaling
        self.place_params = place_params
        self.grads = GradAttribute(params, grad_ops)
        self.local = LocalGrads(reducer, scaling)
        self.phase = Phase.IDLE
        self.used = 0  # parameters that some rank had a gradient for, as agreed when the window last settled
        self.clears = 0  # times the user cleared every .grad while rounds were not synchronized
        self.in_backward = False
        self._is_short = False  # whether gradients that come now may take the short path
        self._lock = threading.RLock()  # backwards of several threads may meet here
        self._settling = threading.get_ident(), False  # in which thread, and whether it does now
        grad_ops.bind(self.settle_once)
        if reducer.needs is not None:
            reducer.needs.heed(self._send_needed)

    # phases ------------------------------------------------------------------------------------------------------

    def move_to(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"a window went from {self.phase} to {phase}"
        self.phase = phase

    def note(self) -> None:
        """Notes that something came that other ranks must be told."""
        if self.phase not in NEEDS_SYNC:
            self.move_to(Phase.COLLECTING)

    def _fail(self) -> None:
        self._is_short = False
        if self.phase is not Phase.TORN:
            self.move_to(Phase.FAILED)

    @property
    def backward_failed(self) -> bool:
        """Whether a backward has ended by an exception."""
        return self.in_backward and torch._C._current_graph_task_id() == -1

    @property
    def needs_sync(self) -> bool:
        """True when other ranks must hear of the window before it can be used, or thrown away."""
        return self.phase in NEEDS_SYNC or self.backward_failed

    # in backward -------------------------------------------------------------------------------------------------

    def hooks_of(self, index: int) -> tuple[Callable[[object], None], Callable[[object, object], None]]:
        """Returns what autograd calls before and after it writes a parameter's gradient; see [Note: short path]."""
        param, bit, strided = self.params.tensors[index], 1 << index, torch.strided
        window, lock, grads, local, reducer = self, self._lock, self.grads, self.local, self.reducer
        scaling, policy, set_grad, thread = self.scaling, self.policy, self.params.set_grad, threading.get_ident
        form = self.grad_ops.formats[index]
        place: tuple[int, int, torch.dtype] | None = None  # found by the long path, and then for good

        def before(_: object) -> None:
            with lock:
                if window._is_short and param.grad is grads.proxies[index]:
                    set_grad(index, None)
                    grads.writing[index] = thread()
                else:
                    window.before_grad(index)

        def ready(_: object, __: object) -> None:
            nonlocal place
            with lock:
                grad: Any = param.grad
                if window._is_short and place is not None and policy.synchronises and scaling.multiplier is None:
                    bucket, start, dtype = place
                    is_plain = type(grad) is torch.Tensor and grad.dtype is dtype and grad.layout is strided
                    # A round is opened for what it takes alone, or it would be sent empty.
                    filling = reducer.round_of(bucket) if is_plain and not grad.requires_grad else None
                    if filling is not None and not filling.filled & bit:
                        set_grad(index, grads.proxies[index])
                        form.view_at(filling.buffer, start).copy_(grad)
                        filling.filled |= bit
                        grads.has_proxy |= bit
                        local.collected |= bit
                        del grads.writing[index]
                        if filling.awaited & filling.filled == filling.awaited:
                            reducer.advance()
                        return
                window.grad_ready(index)
                place = place or reducer.place_of(index)

        return before, ready

    def before_grad(self, index: int) -> None:
        """Empties `.grad`, which autograd is about to write, so that it adds to nothing."""
        with self._lock:
            self._make_way(index)
            self.grads.writing[index] = threading.get_ident()

    def _make_way(self, index: int) -> None:
        self._scan_grad(index)
        self._note_backward()
        self.grads.remove(index)

    def check_cleared(self) -> None:
        """Looks whether the user cleared `.grad`, before something of the next window is noted."""
        if self.grads.was_cleared:
            self._forget_cleared()

    @stop("ready")
    def grad_ready(self, index: int) -> None:
        """Stop 1: autograd and the user's hooks are done with a gradient."""
        with self._lock:
            grad = self.params.tensors[index].grad
            if grad is None or isinstance(grad, ShardedGrad):  # an undefined gradient, or another thread's backward took it
                self.grads.put_back(index)
            else:
                self._take(index, grad.detach() if grad.requires_grad else grad)
            self.grads.writing.pop(index, None)

    @stop("ready")
    def hand_over(self, index: int, grad: torch.Tensor) -> None:
        """Takes a gradient that does not come by `.grad`. It is lent for the length of this call."""
        with self._lock:
            self._make_way(index)
            self._take(index, grad.detach(), lent=True)

    def _take(self, index: int, grad: torch.Tensor, lent: bool = False) -> None:
        if grad.layout != torch.strided:
            self._fail()
            raise ValueError(
                f"Cannot collect the gradient of {self.params.names[index]}: it is sparse, and only dense ones are summed. "
                "Use sparse=False in the module that it belongs to."
            )
        if not self.grads.is_complete:
            self.install_proxies()
        self.grads.install(index)
        self.note()
        is_new = not (self.grads.edited or self.clears or self.local.pending or self.local.accumulated)
        is_watched = self.clock is not None or profiler._is_profiler_enabled
        self._is_short = is_new and self.takes_short_path and self.phase is Phase.COLLECTING and not is_watched
        may_collect = not self.grads.edited >> index & 1 and not self.clears and self.reducer.is_placed(index)
        self.local.add(index, grad, may_collect, self.policy.synchronises, lent)

    def _scan_grad(self, index: int) -> None:
        try:
            edit = self.grads.scan(index)
        except ValueError:
            self._fail()
            raise
        if edit is not Edit.NONE:
            self._is_short = False
        if edit is Edit.CLEARED_ALL:
            self._forget_cleared()
        elif edit is Edit.CHANGED:
            self.note()
            self.local.drop(index)

    def _note_backward(self) -> None:
        """Counts backwards for the declared accumulation.

        [Note: no end of backward] The callback runs when the innermost backward ends, and never after an exception: good
        enough to count with, since a wrong count moves a communication to another time and changes no result.
        """
        grads = self.grads
        if self.in_backward and not grads.has_proxy and set(grads.writing.values()) <= {threading.get_ident()}:
            # another one broke off at its first gradient
            if not grads.is_cleared:
                self._fail()
            self.in_backward = False
        if not self.in_backward:
            self.in_backward, grads.is_complete = True, False  # some may have become trainable since the last one
            self.sync.tracker.check_model()
            self.policy.counting.note_backward(divides=self.scaling.weight is None)
            self.sync.set_phase("in a backward", self.location)
            torch.autograd.Variable._execution_engine.queue_callback(self._note_backward_end)

    def _note_backward_end(self) -> None:
        self.in_backward, self._is_short, self.params.reached = False, False, None
        self.sync.set_phase("after a backward")

    def annotate_error(self, error: BaseException) -> None:
        """Adds to an error of a backward or an update where it happened, on Pythons that have notes."""
        location, step = self.location(), self.sync.step
        if location and hasattr(error, "add_note"):
            during = f"step {step}" if self.phase is Phase.TORN else f"a backward of step {step + 1}"
            error.add_note(f"This was in {during}{location}.")

    def location(self) -> str:
        """Says where a backward stopped: at a parameter whose gradient or hook was running, or after that."""
        reached = self.params.reached
        if self.phase is Phase.TORN:
            return f", in the update ({_TORN})"
        if reached is None:
            return ""
        arrived = self.local.has(reached) and reached not in self.grads.writing
        return f", {'after' if arrived else 'at'} parameter {self.params.names[reached]!r}"

    def install_proxies(self) -> None:
        """Puts a `ShardedGrad` into every `.grad`, since code that clips first asks each parameter whether it has a
        gradient."""
        self.grads.is_complete = True
        for index in range(len(self.params.tensors)):
            if self.grads.can_install(index):
                self._scan_grad(index)
                self.grads.install(index)

    # settling ----------------------------------------------------------------------------------------------------

    @stop("settle")
    def settle(self, occasion: str) -> None:
        """Makes the sums final; a collective."""
        edits = self._scan_grads()
        agreement = self._agree(occasion, edits)
        reducer, used_here = self.reducer, self.local.collected | edits.local
        with torch.no_grad():
            reducer.send_missing_rounds(agreement.rounds, keep=not agreement.discard)
            if agreement.error is not None:
                self._follow(agreement, used_here)
                self.forget()
                self.move_to(Phase.ABORTED)
                raise agreement.error
            if agreement.discard:
                self.used = 0
                self.grad_ops.clear()
                self.scaling.begin()
            for index in set_bits(agreement.removed | agreement.replaced):
                self.grad_ops.zero(index)
            fresh = [index for index in set_bits(agreement.used) if not self.reducer.is_placed(index)]
            new = self.place_params(fresh) if fresh else ()
            wide = agreement.wide | sum(1 << bucket for bucket in new) & reducer.layout_ref.narrow_buckets
            for index in set_bits(edits.local):
                self.local.collect_pending(index, self.grads.user_grads.pop(index, None), agreement.weight)
            reducer.flush((*agreement.rest, *new), wide)
            if not self.scaling.is_settled:
                self.grad_ops.shard.multiply(self.scaling.sync_factor(agreement.weight))
        self._follow(agreement, used_here)
        self.grad_ops.forget_norms()
        self.used = self.used & ~agreement.removed | agreement.used
        self.local.reset()
        self.grads.forget_edits()
        self.clears = 0
        self.move_to(Phase.SETTLED if self.used else Phase.IDLE)
        self.scaling.begin(is_settled=bool(self.used))
        self.grads.install_where(self.used)

    def _agree(self, occasion: str, edits: GradEdits) -> Agreement:
        """Tells the other ranks what this one has done and found, and hears it from them. A collective."""
        local, reducer, layout = self.local, self.reducer, self.reducer.layout_ref.layout
        # What waited is in the dtype of sums, so it travels in that, on all ranks.
        later = sum({1 << bucket for index in set_bits(edits.local) for bucket in layout.buckets_of(index)})
        counts = Counts(
            occasion=occasion,
            sent=reducer.sent,
            clears=self.clears,
            weight=sum(local.weights),
            weighted=bool(local.weights),
            contributed=bool(local.collected or edits.local or local.is_none or local.weights),
            failed=self.phase in (Phase.FAILED, Phase.TORN) or self.backward_failed,
            kept=self.scaling.is_settled,
            changes=self.grad_ops.changes,
            micro_steps=self.policy.counting.micro_steps,
            used=local.collected | edits.local,
            put=self.grads.has_proxy,
            removed=edits.removed,
            replaced=edits.replaced,
            open=reducer.open_buckets,
            wide=reducer.fp32_buckets | later & reducer.layout_ref.narrow_buckets,
            later=later,
            order=reducer.arrival_order,
        )
        self._settling = threading.get_ident(), True
        try:
            return self.sync.synchronize(counts, reducer.order, self.location())
        finally:
            self._settling = threading.get_ident(), False

    def _send_needed(self, need: str) -> None:
        """Sends what the device of another rank waits for, while this rank waits for a message: where all settle, or where its
        own sums wait for more. Other threads, as one that saves, leave it to the one that settles."""
        thread, is_settling = self._settling
        is_open = is_settling or self.phase in (Phase.IDLE, Phase.COLLECTING, Phase.FAILED)
        if is_open and threading.get_ident() == thread:
            self.reducer.send_needed(need)

    def settle_once(self, occasion: str) -> int:
        """Settles, unless nothing happened since the last time; says which parameters have a gradient."""
        if self.needs_sync:
            self.settle(occasion)
        return self.used

    def end(self, to_zeros: bool = False, on_all: bool = False) -> None:
        """Throws the gradients away, or makes them zeros, which count as gradients of the next window.

        A collective `on_all` ranks, and else unless a step has used the window, or an error that all ranks know ended it, and
        nothing came since. A rank cannot know what the others have: this one may have failed alone, and so they learn of it.
        """
        self.check_cleared()
        cleared = sum(1 << index for index in set_bits(self.used) if self.params.tensors[index].grad is None)
        kept, error = self.used & ~cleared, None
        edits = self._scan_grads() if to_zeros else GradEdits(0, 0, 0)
        if on_all or self.needs_sync or edits.local or self.phase not in (Phase.STEPPED, Phase.ABORTED):
            agreement = self._agree("zero_grad", edits)
            with torch.no_grad():
                self.reducer.send_missing_rounds(agreement.rounds, keep=not agreement.discard)
            self._follow(agreement, self.local.collected)
            kept = self.used & ~agreement.removed | agreement.used
            error = agreement.error
        self.forget()
        self.move_to(Phase.IDLE)  # a torn one too, as all ranks have heard of it
        self.sync.set_phase("before a backward")
        if isinstance(error, RanksDiffer):  # that a rank failed is no news to ranks that clear
            raise error
        if to_zeros:
            self.used = kept
            self.grads.install_where(kept)

    def _follow(self, agreement: Agreement, used_here: int) -> None:
        """Learns the order of buckets from what was agreed. A failure teaches nothing."""
        self.reducer.update_order(agreement.order, agreement.used if agreement.error is None else 0, used_here)
        if agreement.starts_over:
            self.policy.counting.begin()

    def forget(self) -> None:
        """Forgets every gradient of this window on this rank."""
        self.grads.clear()
        self._begin()

    def _forget_cleared(self) -> None:
        """Drops the gradients: the user cleared every `.grad` by a way that is not reported, such as `model.zero_grad()`.

        What this rank sent for the old window pairs with what the others sent, so those rounds must still be made equal. That
        waits for the settling; new gradients wait until then too.
        """
        is_synchronized = not (self.local.collected or self.local.is_none or self.local.pending)
        self._begin(self.clears if is_synchronized else self.clears + 1)

    def _begin(self, clears: int = 0) -> None:
        """Begins a new window. Every `.grad` is None."""
        self.local.reset()
        self.grads.begin()
        self.in_backward, self._is_short, self.params.reached = False, False, None
        self.clears = clears
        self.reducer.inflight.begin_window(is_used=self.phase in (Phase.IDLE, Phase.STEPPED))
        if self.phase is not Phase.TORN:
            self.move_to(Phase.COLLECTING if clears else Phase.IDLE)
        self.reducer.drop()
        self.grad_ops.clear()
        self.used = 0
        self.scaling.begin()
        if torch._C._current_graph_task_id() == -1:  # or else the first backward of the new window runs already
            self.scaling.expect_plain()
        self.policy.end_window()

    def _scan_grads(self) -> GradEdits:
        """Compares every `.grad` with what was put there."""
        self._is_short = False
        self.check_cleared()
        for index in range(len(self.params.tensors)):
            self._scan_grad(index)
        grads = self.grads
        local = sum(1 << index for index in {*self.local.pending, *grads.user_grads})
        return GradEdits(local, grads.removed, grads.replaced)
