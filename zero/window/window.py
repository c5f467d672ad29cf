"""Takes in the gradients between one `zero_grad` and the next, and makes them those of all ranks.

A loop, and what each line leaves the window in; `Phase` in records.py has all phases:

    loss.backward()                       # OPEN: gradients are in buckets, which other ranks are adding up; `.grad` has proxies
    clip_grad_norm_(params, max_norm=1)   # SETTLED: it asks a proxy for its norm, so all ranks make the sums final first
    optimizer.step()                      # STEPPED: it settles, unless nothing came since that was done, and uses the sums
    optimizer.zero_grad()                 # EMPTY: the window ends, and the next one begins

The words:

    stop     one of the seven places on the way of a gradient, in docs/internals.md; `@stop` names it in a profiler
    proxy    a `ShardedGrad`, which stands in `.grad` for the gradient of all ranks, of which this rank has a share only
    round    one collective, which sums the gradients of one bucket over all ranks; [Note: rounds] is in rounds.py
    settle   to tell all ranks what this one sent and what its user did to `.grad`, and to send what is missing
    final    what sums are from a settling on; a gradient that comes later is added to them whole
    wide     in the dtype of sums, fp32 for 16-bit gradients; [Note: wide] is in rounds.py
    waiting  what a gradient is that comes into its bucket when the window settles; `_take` and `_add` say why
    left     what a gradient is that a rank alone leaves in `.grad` to the end of the backward; see short_path.py
    used     what a parameter is that some rank had a gradient for
    reset    to forget all gradients: `zero_grad` does
    clear    what a user does who sets every `.grad` to None, as `model.zero_grad()` does
    ahead    masters that are stepped while backward goes on, before the user calls `step`
    torn     weights that are stepped in part

A set of parameters is an int with a bit for each, `1 << index`: ranks exchange such sets, and each hook looks one up.

The path of a gradient through `Window`, by the stops of docs/internals.md; rounds.py has the rest of 2, and 3 and 4:
    1 ready     `before_grad` empties `.grad`, autograd writes the gradient there, and `grad_ready` takes it. The hooks of
                short_path.py do both at once, for nearly every gradient
    2 collect   `_take` and `_add`: put it into its bucket, which `Reducer` sends, or among those that wait
    5 settle    `settle`: ranks tell each other what they sent and what they found in `.grad`, and send what is missing.
                From then on sums are final, and `.grad` is None exactly where no rank had a gradient
      end       `end`, which `zero_grad` calls: forgets it. A step forgets nothing, as in plain torch: what comes then is added

What a window notes of gradients is in three records of records.py: the end of a backward replaces `InBackward`, a settling
`SinceSettling`, and a reset all three, with `SinceReset`. `TRANSITIONS` says which phase may follow which.

The first gradient of a backward puts a `ShardedGrad` into every `.grad`. Nothing reports what a user does to it, so before each
gradient and at every settling `.grad` is compared with what was put there. If all are None, the user cleared them. If one is
None, its gradient is dropped. A tensor that the user assigned takes the place of this rank's gradient, and counts as it stands.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from zero.comm import backwards
from zero.errors import RanksDiffer
from zero.memory.formats import sum_dtype
from zero.memory.leaves import local_grad, local_operand
from zero.memory.norms import KeptNumber
from zero.plan.layout import set_bits
from zero.plan.scaling import Scaling
from zero.profiling import Timed, stop
from zero.runtime.params.table import Params
from zero.window.agreement import Agreement, Counts, GradEdits, WindowSync, digest_of
from zero.window.grads import GradOps, ShardedGrad, written_by_two
from zero.window.records import NEEDS_SYNC, TRANSITIONS, InBackward, MastersAhead, Phase, SinceReset, SinceSettling
from zero.window.rounds import Reducer
from zero.window.short_path import Lent, take_left, take_lent
from zero.window.sync_policy import SyncPolicy

_HELD_BY_US = 2  # references to a `ShardedGrad` that nobody else holds: the list's, and the argument's

PlaceParams = Callable[[Sequence[int]], Sequence[int]]  # gives parameters memory, and returns their new buckets


class Window(Timed):
    """Each note that a window takes of a gradient is in one of three records, and is gone once that record is replaced.

    The records leave out what others own and what outlives a reset: `Reducer` and its shard have the rounds and sums, `Scaling`
    knows whether the sums are final, and hooks tell `Params` which parameter a backward reached. `phase` moves only as
    `TRANSITIONS` allows; TORN stays until all ranks have heard of it.
    """

    takes_short_path = True  # a test sets it to False to prove that the long path gives the same bits

    def __init__(
        self,
        params: Params,
        reducer: Reducer,
        grad_ops: GradOps,
        policy: SyncPolicy,
        sync: WindowSync,
        scaling: Scaling,
        place_params: PlaceParams,
        ahead: MastersAhead | None = None,
    ) -> None:
        self.params = params  # by number, by which hooks, proxies and all sets here know them
        self.reducer = reducer  # stops 2 to 4: buckets, and the rounds that are on their way
        self.grad_ops = grad_ops  # computes with this rank's share of the sums, for proxies
        self.policy = policy  # which backwards send
        self.sync = sync  # asks all ranks at a settling
        self.scaling = scaling  # the factors of gradients and sums
        self.place_params = place_params  # gives memory to what was frozen, or new, before some rank had a gradient
        self.ahead = ahead  # steps masters while backward goes on; None without `step_in_backward`
        reducer.sent_whole = None if ahead is None else []
        self.phase = Phase.EMPTY
        self.proxies: list[ShardedGrad] = []  # by the number of their parameter
        self.since_reset, self.since_settling, self.backward = SinceReset(), SinceSettling(), InBackward()
        self.clears = 0  # how often the user cleared every .grad while rounds were out, which ranks must still make equal
        self.lock = threading.RLock()  # backwards of several threads may meet here
        self._settling = threading.get_ident(), False  # the thread that settled last, and whether it is settling now
        if reducer.needs is not None:  # a device of another rank may wait for what this one has not sent
            reducer.needs.heed(self._send_needed)

    def register(self) -> None:
        """Makes a `ShardedGrad` for each parameter that has none yet, when it has the dtype that it will keep."""
        for index in range(len(self.proxies), len(self.params.tensors)):
            self.proxies.append(self._new_proxy(index))

    def unregister(self, first: int) -> None:
        """Removes the `ShardedGrad` of this parameter and of all after it."""
        del self.proxies[first:]

    def _new_proxy(self, index: int) -> ShardedGrad:
        return ShardedGrad(self.params.leaves[index], index, self.params.names[index], self)

    # phases ------------------------------------------------------------------------------------------------------

    def move_to(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"a window went from {self.phase} to {phase}"
        self.phase = phase

    def note(self) -> None:
        """Notes that something came that other ranks must be told."""
        if self.phase not in NEEDS_SYNC:
            self.move_to(Phase.REOPENED if self.scaling.has_final_sums else Phase.OPEN)

    def _fail(self) -> None:
        """Notes that this rank cannot use its window, which the others hear at the next settling."""
        self.backward.leave_short_path()
        if self.phase is Phase.AHEAD:
            self.tear_ahead()
        elif self.phase is not Phase.TORN:
            self.move_to(Phase.FAILED)

    @property
    def used(self) -> int:
        """The parameters that some rank had a gradient for, as agreed at the last settling."""
        return self.since_reset.used

    @property
    def stepped(self) -> int:
        """The parameters that a step changes, of those that are used."""
        return self.since_reset.stepped

    @property
    def backward_failed(self) -> bool:
        """True when a backward has ended by an exception."""
        return self.backward.has_begun and backwards.running() == -1  # none runs

    @property
    def needs_sync(self) -> bool:
        """True when other ranks must hear of the window before it can be used, or thrown away."""
        return self.phase in NEEDS_SYNC or self.backward_failed

    @property
    def has_unsaved(self) -> bool:
        """True when there are gradients that no step has used. None are left once the user cleared them, until the next."""
        since = self.since_settling
        if self.clears and not (self.backward_failed or since.has_gradient or since.is_none):
            return False
        return self.needs_sync or (self.scaling.has_final_sums and self.phase is not Phase.STEPPED)

    # in backward -------------------------------------------------------------------------------------------------

    def before_grad(self, index: int) -> None:
        """Empties `.grad`, which autograd is about to write, so that it adds to nothing."""
        with self.lock:
            self._make_way(index)
            self.since_settling.writing[index] = threading.get_ident()

    def _make_way(self, index: int) -> None:
        """Empties `.grad` for a gradient of the backward that runs.

        1. refuses another backward once masters are stepped ahead
        2. takes what the last backward left in `.grad`
        3. notes what the user did to `.grad` since
        4. notes the backward, with its first gradient
        """
        is_going_on = self.backward.has_begun and self.since_settling.task == backwards.running()
        if self.phase is Phase.AHEAD and not is_going_on:  # 1
            self._refuse_news(f"run another backward, which reached {self.params.names[index]}")
        take_left(self)  # 2
        has_looked = self.since_settling.has_proxies or self.since_settling.task == backwards.running()
        if not (self.backward.has_begun and has_looked):  # 3
            # Done before the first gradient is noted, as clearing is recognized by `.grad` of all parameters.
            self.check_cleared()
        self._scan_grad(index)
        self._note_backward()  # 4
        thread = threading.get_ident()
        if self.since_settling.writing.get(index, thread) != thread:
            self._fail()
            raise written_by_two(self.params.names[index])
        self.params.set_grad(index, None)

    @stop("ready", lambda window, index, *_, **__: window.params.names[index])
    def grad_ready(self, index: int, may_stay: bool = False) -> bool:
        """Takes a gradient that autograd and the user's hooks are done with (stop 1). Returns whether it stays in `.grad` for
        now: then the caller notes it in `left`."""
        with self.lock:
            grad, stays = self.params.leaves[index].grad, False
            if grad is None or isinstance(grad, ShardedGrad):  # the gradient is undefined, or another thread's backward took it
                self.params.set_grad(index, self.proxies[index] if self.since_reset.proxied >> index & 1 else None)
            else:
                grad = local_grad(self.params.leaves[index], grad)
                stays = self._take(index, grad.detach() if grad.requires_grad else grad, may_stay=may_stay)
            self.since_settling.writing.pop(index, None)
            return stays

    def hand_over(self, lent: Sequence[Lent]) -> None:
        """Takes gradients that do not come by `.grad`. Their memory is the caller's again when this returns."""
        with self.lock:
            # The first gradient of a backward finds out what the user did to `.grad` since the last one, and whether the next
            # ones may take the short path.
            first = 0 if self.backward.is_short and self.since_settling.task == backwards.running() else 1
            for index, grad in lent[:first]:
                self._take_lent(index, grad)
            for index, grad in take_lent(self, lent[first:]):
                self._take_lent(index, grad)

    @stop("ready", lambda window, index, *_, **__: window.params.names[index])
    def _take_lent(self, index: int, grad: torch.Tensor) -> None:
        self._make_way(index)
        self._take(index, local_grad(self.params.leaves[index], grad.detach()), lent=True)

    def _take(self, index: int, grad: torch.Tensor, lent: bool = False, may_stay: bool = False) -> bool:
        """Takes a gradient; or returns True if it may stay in `.grad`, as it does only if `may_stay`."""
        if grad.layout != torch.strided:
            self._fail()
            raise ValueError(
                f"Cannot collect the gradient of {self.params.names[index]}: it is sparse, and only dense ones are summed. "
                "Use sparse=False in the module that it belongs to."
            )
        if self.phase is not Phase.AHEAD:
            self.note()
        elif self.ahead is not None and any(map(self.ahead.has, self.reducer.buckets_of(index))):
            self._refuse_news(f"take another gradient of {self.params.names[index]}")
        self._choose_path()
        since, stays = self.since_settling, self.backward.stay is not None
        if stays and may_stay:
            self.since_reset.proxied |= 1 << index  # marked now, so that a clearing by the user is seen
            return True
        if not (since.has_proxies or stays):
            self.install_proxies()
        self._install(index)
        # The settling drops what was sent of a parameter that the user edited, and all of it if he cleared every `.grad`: what
        # comes from then on waits for that.
        may_collect = not since.edited >> index & 1 and not self.clears and self.reducer.is_placed(index)
        self._add(index, grad, may_collect, lent)
        return False

    def _choose_path(self) -> None:
        """Notes which path the next gradients of this backward may take: the short one if nobody has touched the window, and to
        stay in `.grad` if this rank also sends to nobody."""
        since, backward = self.since_settling, self.backward
        is_new = not (since.edited or self.clears or since.pending or since.accumulated)
        is_watched = self.clock is not None or profiler._is_profiler_enabled
        is_open = self.phase in (Phase.OPEN, Phase.REOPENED)
        backward.is_short = backward.has_begun and is_new and self.takes_short_path and is_open and not is_watched
        stay = backward.is_short and self.phase is Phase.OPEN and self.scaling.is_plain
        stay &= self.reducer.inflight.sends_to_nobody
        backward.stay = (threading.get_ident(), backwards.running()) if stay else None

    def _add(self, index: int, grad: torch.Tensor, may_collect: bool, lent: bool) -> None:
        """Puts a gradient into its bucket if that `may_collect` it; else it waits in `pending`. A `lent` gradient is copied, as
        its memory is the caller's."""
        since, multiplier, bit = self.since_settling, self.scaling.multiplier, 1 << index
        if multiplier == 0.0:
            # A weight of zero adds exact zeros, even in place of the NaN of a mean over no tokens. Fails without it:
            # test_a_rank_whose_tokens_are_all_masked_contributes_zero_and_no_nan in tests/promises/test_reduction.py.
            grad = torch.zeros_like(grad)
        if not self.policy.synchronises:  # 16-bit gradients are added up in a wide round, others wait
            since.accumulated |= bit
            may_collect = may_collect and self.reducer.adds_up_wide(index)
        waiting = since.pending.pop(index, None)
        if waiting is not None:
            grad, multiplier = waiting.add_(grad, alpha=1.0 if multiplier is None else multiplier), None
        if may_collect:
            since.collected |= bit
            self.reducer.collect(index, grad, multiplier, apart=bool(since.accumulated & bit))
            self.reducer.advance()
            self.step_ahead()
        else:
            wide = grad.to(sum_dtype(grad.dtype), copy=lent)
            since.pending[index] = wide if multiplier is None else wide * multiplier

    def _note_backward(self) -> None:
        """Counts backwards for the declared accumulation.

        [Note: no end of backward] The callback runs when the innermost backward ends, and never after an exception: good
        enough to count with, since a wrong count moves a communication to another time and changes no result.
        """
        since = self.since_settling
        is_alone = set(since.writing.values()) <= {threading.get_ident()}
        # The backward before this one broke off at its first gradient: it began, and left nothing in any `.grad`.
        if self.backward.has_begun and not self.since_reset.proxied and is_alone:
            if not self._is_cleared:
                self._fail()
            self.backward = InBackward()
        if not self.backward.has_begun:
            since.task = backwards.running()
            self.backward = InBackward(has_begun=True)
            since.has_proxies = False  # parameters may have become trainable since the last backward
            self.sync.tracker.check_model()
            self.policy.counting.note_backward(divides=self.scaling.weight is None)
            self.sync.set_phase("in a backward", self.location)
            backwards.at_end(self._note_backward_end)

    def _note_backward_end(self) -> None:
        self._note_crossing()
        with self.lock:
            take_left(self)
            if not self.since_settling.has_proxies:
                self.install_proxies()
            self.step_ahead()
            if self.ahead is not None:
                self.ahead.hold_weights()
        self.backward, self.params.reached = InBackward(), None
        self.sync.set_phase("after a backward")

    def _note_crossing(self) -> None:
        """Notes with which ranks the latest backward of this window has exchanged gradients."""
        since = self.since_settling
        if since.task != -1:
            since.row = max(since.row, backwards.crossing_since(since.task))

    def annotate_error(self, error: BaseException) -> None:
        """Adds to an error of a backward or an update where it happened, on Pythons that have notes."""
        location, step = self.location(), self.sync.step
        if location and hasattr(error, "add_note"):
            during = f"step {step}" if self.phase is Phase.TORN else f"a backward of step {step + 1}"
            error.add_note(f"This was in {during}{location}.")

    def location(self) -> str:
        """Says where a backward stopped: at a parameter whose gradient or hook was running, or after that."""
        reached, since = self.params.reached, self.since_settling
        if self.phase is Phase.TORN:
            torn = "this rank's share of the weights may be stepped in part: load a checkpoint to have them whole"
            return f", in the update ({torn})"
        if reached is None:
            return ""
        arrived = (since.collected >> reached & 1 or reached in since.pending) and reached not in since.writing
        arrived = arrived or reached in self.backward.left
        return f", {'after' if arrived else 'at'} parameter {self.params.names[reached]!r}"

    # .grad -------------------------------------------------------------------------------------------------------

    def install_proxies(self) -> None:
        """Puts a `ShardedGrad` into every `.grad`, since code that clips first asks each parameter whether it has a
        gradient."""
        self.since_settling.has_proxies = True
        for index in range(len(self.params.tensors)):
            if self._can_install(index):
                self._scan_grad(index)
                self._install(index)

    def _can_install(self, index: int) -> bool:
        """Returns whether a `ShardedGrad` may be put into `.grad`. It may not while autograd is about to write there, in this
        thread or another, as autograd would add to what it finds. Nor may it if the parameter has another dtype by now, which
        settling reports."""
        param = self.params.leaves[index]
        is_free = not self.since_reset.proxied >> index & 1 and not self._is_written(index) and param.requires_grad
        return is_free and param.dtype == self.proxies[index].own_dtype

    def _is_written(self, index: int) -> bool:
        """Returns whether autograd is writing a `.grad`, or has written it and the gradient was not taken yet."""
        is_latest = self.backward.written is not None and self.backward.written[0] == index
        return is_latest or index in self.backward.left or index in self.since_settling.writing

    def _install(self, index: int) -> None:
        self.params.set_grad(index, self.proxies[index])
        self.since_reset.proxied |= 1 << index

    def _install_where(self, used: int) -> None:
        """Puts a `ShardedGrad` where a parameter is `used`, and None everywhere else."""
        members = set(set_bits(used))
        for index in range(len(self.params.tensors)):
            self.params.set_grad(index, self.proxies[index] if index in members else None)
        self.since_reset.proxied = used

    @property
    def _is_cleared(self) -> bool:
        others = set(self.since_settling.writing.values()) - {threading.get_ident()}
        is_none = all(param.grad is None for param in self.params.leaves)
        # While another thread writes a `.grad` it is None, although the user cleared nothing.
        return is_none and others.isdisjoint(thread.ident for thread in threading.enumerate())

    def check_cleared(self) -> None:
        """Looks whether the user cleared `.grad`, before something of the next window is noted."""
        take_left(self)
        # If this rank is alone and its backward broke off before any gradient was taken, nobody has to hear of it: it counts as
        # not run.
        is_lost = self.sync.size == 1 and self.backward_failed
        if (self.since_reset.proxied or is_lost) and self._is_cleared:
            self._forget_cleared()

    def _scan_grad(self, index: int) -> None:
        """Compares one `.grad` with what was put there, and takes note of what the user did to it."""
        grad, since, bit = self.params.leaves[index].grad, self.since_settling, 1 << index
        is_ours = self.since_reset.proxied & bit
        if grad is self.proxies[index] or (grad is None and not is_ours):
            return
        self._refuse_news(f"change the gradient of {self.params.names[index]}")
        self.backward.leave_short_path()
        if isinstance(grad, ShardedGrad):
            self._fail()
            raise ValueError(
                f"Cannot set the gradient of {self.params.names[index]} to that of {grad.label}"
                f"{' in an earlier window' if grad.param == index else ''}: a sharded gradient belongs to its parameter and "
                "window. Assign optimizer.whole_grad(parameter), on all ranks."
            )
        if grad is None and self._is_cleared:
            self._forget_cleared()
            return
        if grad is None:
            since.removed |= bit
            since.user_grads.pop(index, None)
        else:
            since.replaced |= is_ours
            since.user_grads[index] = local_grad(self.params.leaves[index], grad.detach())
        self.note()
        self._drop(index)

    def _drop(self, index: int) -> None:
        """Drops a gradient that the user removed."""
        self.since_settling.collected &= ~(1 << index)
        self.since_settling.pending.pop(index, None)
        self.reducer.drop_param(index)

    def _scan_grads(self) -> GradEdits:
        """Compares every `.grad` with what was put there."""
        self.check_cleared()
        self.backward.leave_short_path()
        grads = enumerate(zip(self.params.leaves, self.proxies, strict=True))
        for index in (index for index, (leaf, proxy) in grads if leaf.grad is not proxy):
            self._scan_grad(index)
        since = self.since_settling
        local = sum(1 << index for index in {*since.pending, *since.user_grads})
        return GradEdits(local, since.removed, since.replaced)

    # what the user says ------------------------------------------------------------------------------------------

    def weigh(self, amount: float) -> None:
        """Sets how much the micro-batch to come counts. Raises if gradients came that have no weight."""
        self.refuse_ahead(f"use weight({amount})")
        self.check_cleared()
        since = self.since_settling
        if self.scaling.has_final_sums or (since.has_gradient and not since.weights):
            is_late = self.scaling.has_final_sums
            why = "was settled already, so its mean is taken" if is_late else "has a gradient without a weight"
            raise ValueError(
                f"Cannot use weight({amount}): this window {why}. Give every micro-batch of a window its weight, before "
                "clipping, reading gradients or stepping, or none."
            )
        self.note()
        since.weights.append(amount)
        self.scaling.weigh(amount)

    def contribute_nothing(self) -> None:
        """Notes that this rank has no gradient in this window. It counts as zeros."""
        self.refuse_ahead("call no_contribution()")
        self.check_cleared()
        self.note()
        self.since_settling.is_none = True
        if not self.since_settling.has_proxies:
            self.install_proxies()  # this rank clips as the others do, by the global norm

    # what `ShardedGrad`s ask --------------------------------------------------------------------------------------

    def norm(self, param: int, order: float) -> torch.Tensor:
        """Returns the norm of one parameter's global gradient, a 0-dim tensor with the same bits on every rank. It needs all
        ranks, so that of every parameter is computed at once, in one exchange, and remembered until its gradient changes."""
        self.settle_once("an operation on .grad")
        known = self.since_reset.norms.setdefault(order, {})
        if param not in known:
            unknown = [each for each in range(len(self.params.tensors)) if each not in known]
            # Norms come in the dtype of sums, as clipping multiplies by them.
            dtypes = {each: sum_dtype(self.proxies[each].own_dtype) for each in unknown}
            known.update(KeptNumber.of_each(self.grad_ops.norms_there(dtypes, order)))
        # A copy, as the caller may change it. Fails without it: test_a_norm_that_is_changed_is_that_of_who_asked_for_it_alone
        # in tests/promises/test_sharded_grad.py.
        return known[param].copy()

    def apply_inplace(
        self, param: int, operator: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
    ) -> None:
        """Applies an elementwise in-place operator to this rank's part of a gradient."""
        if not self.settle_once("an operation on .grad") >> param & 1:
            return  # the proxy was put there before ranks settled, and no rank had a gradient
        if self.sync.size > 1:  # a single rank compares with nobody
            spec = self.reducer.layout_ref.layout.params[param]
            self.since_reset.changes.note(param, operator, (*arguments, *keywords.values()), spec)
        local = partial(self._local_operand, self.params.leaves[param])
        keywords = {name: local(value) for name, value in keywords.items()}
        self.grad_ops.apply(param, operator, list(map(local, arguments)), keywords)
        for known in self.since_reset.norms.values():
            known.pop(param, None)

    @staticmethod
    def _local_operand(leaf: torch.nn.Parameter, operand: Any) -> Any:
        is_plain = not isinstance(operand, torch.Tensor) or isinstance(operand, ShardedGrad)
        return operand if is_plain else local_operand(leaf, operand)

    def unscale(self, params: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Divides gradients by a GradScaler's scale. If one rank finds an infinite number, `found_inf` says so on all."""
        self.settle_once("unscale_")
        self.grad_ops.unscale(params, found_inf, inverse_scale)
        self.forget_norms()

    def settle_once(self, occasion: str) -> int:
        """Settles, unless nothing happened since the last time; returns which parameters have a gradient."""
        self.grad_ops.shard.check_resident()
        if self.needs_sync:
            self.settle(occasion)
        return self.used

    def forget_norms(self) -> None:
        """Forgets the norms, as all gradients have changed."""
        self.since_reset.norms.clear()

    # settling ----------------------------------------------------------------------------------------------------

    @stop("settle", lambda _, occasion: f"for {occasion}")
    def settle(self, occasion: str) -> None:
        """Makes the sums final; a collective.

        1. compares each `.grad` with what was put there
        2. tells all ranks what this one sent and found; each decides the same by what all of them said
        3. sends the agreed rounds that it has not sent, as other ranks have; only then raises an error that was agreed on
        4. takes out of the sums what users cleared, removed or replaced
        5. gives buckets to parameters that have none, puts what waited into its bucket, and sends what is left
        6. multiplies new sums by the rest of their factor, which waited for all rounds; see `Scaling`
        7. begins new notes, and leaves proxies exactly where some rank had a gradient
        """
        self._finish_ahead(occasion)
        edits = self._scan_grads()  # 1
        agreement = self._agree(occasion, edits)  # 2
        reducer, scaling = self.reducer, self.scaling
        used_here = self.since_settling.collected | edits.local
        with torch.no_grad():
            reducer.send_missing_rounds(agreement.rounds, counts=not agreement.discard)  # 3
            if agreement.error is not None:
                if self.phase is Phase.AHEAD:
                    self.tear_ahead()
                self._follow(agreement, used_here)
                self.forget()
                self.move_to(Phase.ABORTED)
                raise agreement.error
            if agreement.discard:  # 4
                self.since_reset = SinceReset(proxied=self.since_reset.proxied)
                self.grad_ops.shard.clear()
                scaling.begin()
            for index in set_bits(agreement.removed | agreement.replaced):
                self.grad_ops.zero(index)
            fresh = [index for index in set_bits(agreement.used) if not reducer.is_placed(index)]  # 5
            new = self.place_params(fresh) if fresh else ()
            wide = agreement.wide | sum(1 << bucket for bucket in new) & reducer.layout_ref.narrow_buckets
            for index in set_bits(edits.local):
                self._collect_waiting(index, agreement.weight)
            reducer.flush((*agreement.rest, *new), wide)
            if not scaling.has_final_sums:  # 6
                self.grad_ops.shard.multiply(scaling.sync_factor(agreement.weight))
        self._follow(agreement, used_here)  # 7
        self.forget_norms()
        self.since_settling, self.clears = SinceSettling(), 0
        used = self.used & ~agreement.removed | agreement.used
        self.since_reset.used = used
        self.since_reset.stepped = self.since_reset.stepped & ~agreement.removed | agreement.stepped
        if self.phase is not Phase.AHEAD:
            self.move_to(Phase.SETTLED if used else Phase.EMPTY)
        scaling.begin(has_final_sums=bool(used))
        if edits != GradEdits(0, 0, 0) or used != self.since_reset.proxied:  # else every .grad is what it has to be
            self._install_where(used)

    def _collect_waiting(self, index: int, total_weight: float | None) -> None:
        """Puts the waiting gradients of a parameter, and the user's own gradient, into its bucket."""
        pending, user_grad = self.since_settling.pending.pop(index, None), self.since_settling.user_grads.pop(index, None)
        if pending is not None:
            self.reducer.collect(index, pending)
        if user_grad is not None:
            self.reducer.collect(index, user_grad, self.scaling.user_grad_factor(total_weight))

    def _agree(self, occasion: str, edits: GradEdits) -> Agreement:
        """Tells the other ranks what this one has done and found, and hears it from them. A collective."""
        since, reducer, layout = self.since_settling, self.reducer, self.reducer.layout_ref.layout
        if self.backward.has_begun:
            self._note_crossing()
        # Gradients that waited are in the dtype of sums, so all ranks send their buckets in that dtype.
        later = sum({1 << bucket for index in set_bits(edits.local) for bucket in layout.buckets_of(index)})
        counts = Counts(
            occasion=occasion,
            sent=reducer.sent,
            clears=self.clears,
            weight=sum(since.weights),
            weighted=bool(since.weights),
            weights=digest_of(since.weights),
            row=since.row,
            contributed=bool(since.collected or edits.local or since.is_none or since.weights),
            failed=self.phase in (Phase.FAILED, Phase.TORN) or self.backward_failed,
            kept=self.scaling.has_final_sums,
            changes=self.since_reset.changes.digest(occasion),
            micro_steps=self.policy.counting.micro_steps,
            used=since.collected | edits.local,
            put=self.since_reset.proxied,
            removed=edits.removed,
            replaced=edits.replaced,
            open=reducer.open_buckets,
            wide=reducer.wide_buckets | later & reducer.layout_ref.narrow_buckets,
            later=later,
            order=reducer.arrival_order,
        )
        self._settling = threading.get_ident(), True
        try:
            return self.sync.synchronize(counts, reducer.order, self.location(), self.since_reset.changes.values)
        finally:
            self._settling = threading.get_ident(), False

    def _send_needed(self, need: str) -> None:
        """Sends what the device of another rank waits for, while this rank waits for a message: when all settle, or when its
        own sums wait for more. Other threads, as one that saves, leave it to the one that settles."""
        thread, is_settling = self._settling
        is_open = is_settling or self.phase in (Phase.EMPTY, Phase.OPEN, Phase.REOPENED, Phase.FAILED)
        if is_open and threading.get_ident() == thread:
            self.reducer.send_needed(need)

    def _follow(self, agreement: Agreement, used_here: int) -> None:
        """Learns the order of buckets from what was agreed. A failure teaches nothing."""
        self.reducer.update_order(agreement.order, agreement.used if agreement.error is None else 0, used_here)
        if agreement.starts_over:
            self.policy.counting.begin()

    # the end -----------------------------------------------------------------------------------------------------

    def end(self, to_zeros: bool = False, on_all: bool = False) -> None:
        """Throws the gradients away, or makes them zeros, which count as gradients of the next window.

        With `on_all` it is a collective. Without, it is one too, unless a step has used the window or an error that all ranks
        know has ended it, and nothing came since. This rank may have gradients that others lack, or may have failed alone: so
        they hear of it.
        """
        self.refuse_ahead("call zero_grad()")
        self.check_cleared()
        cleared = sum(1 << index for index in set_bits(self.used) if self.params.leaves[index].grad is None)
        kept, stepped, error = self.used & ~cleared, self.stepped & ~cleared, None
        edits = self._scan_grads() if to_zeros else GradEdits(0, 0, 0)
        if on_all or self.needs_sync or edits.local or self.phase not in (Phase.STEPPED, Phase.ABORTED):
            agreement = self._agree("zero_grad", edits)
            with torch.no_grad():
                self.reducer.send_missing_rounds(agreement.rounds, counts=not agreement.discard)
            self._follow(agreement, self.since_settling.collected)
            kept = self.used & ~agreement.removed | agreement.used
            stepped = self.stepped & ~agreement.removed | agreement.stepped
            error = agreement.error
        self.forget()
        self.move_to(Phase.EMPTY)  # TORN ends here too, as all ranks have heard of it
        self.sync.set_phase("before a backward")
        # Ranks that clear need not know that one failed, but they must know that they differ.
        if isinstance(error, RanksDiffer):
            raise error
        if to_zeros:
            self.since_reset.used, self.since_reset.stepped = kept, stepped
            self._install_where(kept)

    def close(self) -> None:
        """Forgets every gradient for good. Masters that are ahead of their weights go with the training."""
        if self.ahead is not None:
            self.ahead.close()
            if self.phase is Phase.AHEAD:
                self.move_to(Phase.TORN)
        self.forget()

    def forget(self) -> None:
        """Forgets every gradient of this window on this rank."""
        self.params.clear_grads()
        self._reset()

    def _forget_cleared(self) -> None:
        """Drops the gradients: the user cleared every `.grad` by a way that is not reported, such as `model.zero_grad()`.

        What this rank sent for the old window pairs with what the others sent, so those rounds must still be made equal. That
        waits for the settling; new gradients wait until then too.
        """
        self._refuse_news("clear every .grad")
        since = self.since_settling
        is_synchronized = not (since.has_gradient or since.is_none)
        self._reset(self.clears if is_synchronized else self.clears + 1)

    def _reset(self, clears: int = 0) -> None:
        """Begins a new window. Every `.grad` is None."""
        self.since_reset, self.since_settling, self.backward, self.clears = SinceReset(), SinceSettling(), InBackward(), clears
        for index in range(len(self.proxies)):
            if sys.getrefcount(self.proxies[index]) > _HELD_BY_US:  # user code still holds a gradient of the old window
                self.proxies[index].ended = True
                self.proxies[index] = self._new_proxy(index)
        self.params.reached = None
        self._forget_offers()
        self.reducer.inflight.begin_window(is_used=self.phase in (Phase.EMPTY, Phase.STEPPED))
        if self.phase is not Phase.TORN:
            self.move_to(Phase.OPEN if clears else Phase.EMPTY)
        self.reducer.drop()
        self.grad_ops.shard.clear()
        self.scaling.begin()
        if backwards.running() == -1:  # otherwise the first backward of the new window is running already
            self.scaling.expect_plain()
        self.policy.end_window()

    # ahead of the step -------------------------------------------------------------------------------------------

    def step_ahead(self) -> None:
        """Has masters stepped whose gradients are complete, if this is the last backward of a window and nobody touched it."""
        ahead, reducer = self.ahead, self.reducer
        if ahead is None or reducer.sent_whole is None:
            return
        whole, reducer.sent_whole = reducer.sent_whole, []
        if self.phase is not Phase.AHEAD and not self._may_step_ahead:
            self._forget_offers()
            return
        ahead.offer(whole)
        while (bucket := ahead.next_ready(reducer.has_landed)) is not None:
            if self.phase is not Phase.AHEAD:
                self.move_to(Phase.AHEAD)
                self.backward.leave_short_path()  # every gradient from now on is looked at
            ahead.start(bucket, self.scaling.sync_factor(None))

    @property
    def _may_step_ahead(self) -> bool:
        """True if nothing but further gradients of the backward that runs will change the sums of this window."""
        since, scaling = self.since_settling, self.scaling
        is_touched = since.edited or since.user_grads or since.pending or since.accumulated or since.weights or since.is_none
        is_plain = not (is_touched or self.clears) and scaling.weight is None and scaling.loss_scale == 1.0
        # A tensor that was assigned to `.data` is copied back when the step begins, and then compared with masters.
        return self.phase is Phase.OPEN and is_plain and self.policy.is_last and not self.sync.tracker.relocated()

    def refuse_ahead(self, what: str) -> None:
        """Raises if masters are ahead of their weights, which only a step ends. If the backward that stepped them has failed,
        the window is torn from here on."""
        if self.phase is Phase.AHEAD and self.backward_failed:
            self.tear_ahead()
        if self.phase is Phase.AHEAD:
            raise ValueError(f"Cannot {what}: step_in_backward has stepped masters of this window already. Call step() first.")

    def tear_ahead(self) -> None:
        """Gives up what was stepped in a backward."""
        assert self.ahead is not None
        self.backward.leave_short_path()
        self.ahead.tear()
        self.move_to(Phase.TORN)

    def _refuse_news(self, what: str) -> None:
        """Refuses a change of gradients that masters were stepped with, or may have been. It cannot be undone."""
        if self.phase is Phase.AHEAD:
            self.tear_ahead()
            raise ValueError(
                f"Cannot {what}: step_in_backward has stepped masters of this window already. Load a checkpoint, and call "
                "step() first from then on."
            )

    def _finish_ahead(self, occasion: str) -> None:
        """Waits for masters that are stepped meanwhile, before a step settles. Any other settling is refused."""
        if occasion != "step":
            self.refuse_ahead(f"run {occasion}")
        if self.ahead is None or self.phase is not Phase.AHEAD:
            self._forget_offers()
        elif self.backward_failed:
            self.tear_ahead()
        else:
            try:
                self.ahead.finish()
            except BaseException:
                self.tear_ahead()
                raise

    def _forget_offers(self) -> None:
        """Leaves all buckets to the step: what they are offered for ends here."""
        if self.ahead is not None:
            self.ahead.forget_offers()
            self.reducer.sent_whole = []


# By id of the parameter: an attribute would be pickled with every model that is saved whole. The id of a parameter that is gone
# may come again, so a window, which keeps its parameters alive, is asked too.
_windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()


def window_of(param: nn.Parameter) -> Window | None:
    """Returns the window that a parameter's gradients belong to; None for a parameter that is not sharded."""
    window = _windows.get(id(param))
    return window if window is not None and id(param) in window.params.index else None


def manage(params: Iterable[nn.Parameter], window: Window) -> None:
    """Registers the parameters of a window, so that no two windows send the same gradient. It keeps neither alive."""
    _windows.update((id(param), window) for param in params)


def leave(params: Iterable[nn.Parameter]) -> None:
    """Unregisters parameters."""
    for param in params:
        _windows.pop(id(param), None)


def check_unmanaged(names: Sequence[str], tensors: Sequence[nn.Parameter]) -> None:
    """Raises if a parameter belongs to another sharded optimizer."""
    for name, tensor in zip(names, tensors, strict=True):
        if window_of(tensor) is not None:
            raise ValueError(
                f"Cannot shard parameter {name}: it is sharded already. Call close() on its optimizer first."
            )
