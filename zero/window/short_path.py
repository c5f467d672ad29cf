"""The short path of a gradient: flat functions take it in, where nothing about it is unusual.

The plain way is `before_grad`, `grad_ready` and what they call in window.py, to be read first. Both give the same bits: parity
is proved with the short path taken out (`Window.takes_short_path`).

[Note: short path] Nearly every gradient is the first of its parameter in a window that nobody has touched, and has a place in
one bucket. The hooks take these themselves while `is_short` says that the window is untouched, and hand every other one to the
plain way.

[Note: left in place] A rank alone whose sums stay on its device sends to nobody. Its first gradients stay in `.grad` to the end
of the backward, or until something else looks at the window. Then one operator takes all gradients of a bucket. If each was
taken when it comes, our code would have left the processor's cache since the last one, and would take three times as long.
Gradients that stay take no more memory than their sums.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zero.comm import backwards
from zero.plan.scaling import Scaling
from zero.runtime.params.table import Params
from zero.window.alone import Arrived
from zero.window.grads import ShardedGrad
from zero.window.records import InBackward, MastersAhead, SinceReset, SinceSettling
from zero.window.rounds import Place, Reducer
from zero.window.sync_policy import SyncPolicy

Lent = tuple[int, torch.Tensor]  # the number of a parameter, and a gradient in memory of which the caller makes other use
_NOWHERE = -1, 0, None  # the place of a parameter that always takes the long path, as no gradient has the dtype None


class PlainWay(Protocol):
    """The parts, the records and the methods of a `Window` that the short path uses."""

    params: Params
    proxies: list[ShardedGrad]
    reducer: Reducer
    scaling: Scaling
    policy: SyncPolicy
    ahead: MastersAhead | None
    lock: threading.RLock

    since_reset: SinceReset
    since_settling: SinceSettling
    backward: InBackward

    def before_grad(self, index: int) -> None: ...
    def grad_ready(self, index: int, may_stay: bool = False) -> bool: ...
    def step_ahead(self) -> None: ...


def hooks_of(window: PlainWay, index: int) -> tuple[Callable[[object], None], Callable[[object, object], None]]:
    """Returns what autograd calls before and after it writes a parameter's gradient, with all that it needs bound to it."""
    param, bit, strided = window.params.leaves[index], 1 << index, torch.strided
    lock, reducer, proxies = window.lock, window.reducer, window.proxies
    scaling, policy, set_grad, thread = window.scaling, window.policy, window.params.set_grad, threading.get_ident
    holds, task, steps_ahead = reducer.holds, backwards.running, window.ahead is not None
    place: Place | None = None  # the place of a parameter in one bucket; the long path finds it once, and it never changes

    def before(_: object) -> None:
        with lock:
            grad, backward = param.grad, window.backward
            is_free = grad is None and not window.since_reset.proxied & bit and index not in window.since_settling.writing
            if is_free and backward.stay is not None and backward.stay == (me := thread(), task()):
                backward.written = index, me
            elif backward.is_short and grad is proxies[index]:
                set_grad(index, None)
                window.since_settling.writing[index] = thread()
            else:
                window.before_grad(index)

    def take(may_stay: bool) -> bool:
        nonlocal place
        grad: Any = param.grad
        if window.backward.is_short and place is not None and policy.synchronises and scaling.multiplier is None:
            bucket, start, dtype = place
            is_plain = type(grad) is torch.Tensor and grad.dtype is dtype and grad.layout is strided
            # A gradient that is held must belong to nobody else, and a user's hook that saw it may hold and change it. One
            # of the hooks is `follow`.
            is_seen = holds and (param._post_accumulate_grad_hooks or len(param._backward_hooks or ()) > 1)
            is_plain = is_plain and not is_seen
            # A round is opened only for a gradient that it takes; an empty one would be sent otherwise.
            filling = reducer.round_of(bucket) if is_plain and not grad.requires_grad else None
            if filling is not None and not filling.filled & bit:
                set_grad(index, proxies[index])
                if holds:
                    reducer.hold(filling, index, start, grad)
                else:
                    reducer.place_in(filling, index, start).copy_(grad)
                filling.filled |= bit
                window.since_reset.proxied |= bit
                since = window.since_settling
                since.collected |= bit
                since.writing.pop(index, None)
                if filling.awaited & filling.filled == filling.awaited:
                    reducer.advance()
                    if steps_ahead:
                        window.step_ahead()
                return False
        if window.grad_ready(index, may_stay):
            return True
        place = place or reducer.place_of(index)
        return False

    def ready(_: object, __: object) -> None:
        with lock:
            backward = window.backward
            if backward.written is not None and backward.written[0] == index:
                backward.written = None
            # If a user's hook saw the gradient, the hook may hold and change it, and the values that it saw are those that
            # count.
            may_stay = not (window.since_settling.collected & bit or param._post_accumulate_grad_hooks)
            if (backward.stay and may_stay) or take(may_stay):
                backward.left[index] = take, place

    return before, ready


def take_left(window: PlainWay) -> None:
    """Takes the gradients that stayed in `.grad`, a bucket at a time; see [Note: left in place]."""
    backward = window.backward
    left, backward.left = backward.left, {}
    if backward.written is not None:
        (index, thread), backward.written = backward.written, None
        window.since_settling.writing[index] = thread
    if not left:
        return
    is_short = backward.is_short and window.policy.synchronises and window.scaling.multiplier is None
    leaves, since, strided = window.params.leaves, window.since_settling, torch.strided
    of_buckets, alone = defaultdict[int, list[Arrived]](list), list[int]()
    for index, (_, place) in left.items():
        grad: Any = leaves[index].grad
        bucket, start, dtype = place if is_short and place is not None else _NOWHERE
        if type(grad) is torch.Tensor and grad.dtype is dtype and grad.layout is strided and not grad.requires_grad:
            of_buckets[bucket].append((index, start, grad))
        else:
            alone.append(index)
    del grad
    _add_up(window, of_buckets)
    alone += [index for gradients in of_buckets.values() for index, *_ in gradients]
    of_buckets.clear()
    # Each of these is marked as being written, so that taking one puts no `ShardedGrad` into the `.grad` of the next ones.
    since.writing.update(dict.fromkeys(alone, threading.get_ident()))
    for index in alone:
        if leaves[index].grad is None:  # the user took it away
            since.writing.pop(index, None)
        else:
            left[index][0](False)


def take_lent(window: PlainWay, lent: Sequence[Lent]) -> Sequence[Lent]:
    """Takes gradients that do not come by `.grad`, a bucket at a time, and copies them, as their memory is the caller's.
    Returns those about which something is unusual: the long path takes them next."""
    backward, since, reducer = window.backward, window.since_settling, window.reducer
    is_short = backward.is_short and window.policy.synchronises and window.scaling.multiplier is None
    if not is_short or backward.written is not None or backward.left or since.writing:
        return lent
    leaves, proxies, strided, proxied = window.params.leaves, window.proxies, torch.strided, window.since_reset.proxied
    of_buckets, unusual, bits = defaultdict[int, list[Arrived]](list), list[Lent](), 0
    for index, grad in lent:
        present, bit, place = leaves[index].grad, 1 << index, reducer.place_of(index)
        bucket, start, dtype = _NOWHERE if place is None else place
        is_free = present is proxies[index] or (present is None and not proxied & bit)
        is_plain = type(grad) is torch.Tensor and grad.dtype is dtype and grad.layout is strided and not grad.requires_grad
        if is_free and is_plain and not bits & bit and reducer.awaits(bucket, index):
            of_buckets[bucket].append((index, start, grad))
            bits |= bit
        else:
            unusual.append((index, grad))
    if reducer.inflight.sends_to_nobody:
        _add_up(window, of_buckets)
    for bucket, gradients in of_buckets.items():
        reducer.fill(bucket, gradients)
        _note_taken(window, gradients)
        reducer.advance()
        window.step_ahead()
    return unusual


def _add_up(window: PlainWay, of_buckets: dict[int, list[Arrived]]) -> None:
    """Takes the gradients of whole buckets on a rank that sends to nobody, and removes them."""
    for _, added in window.reducer.add_up(of_buckets):  # the list `added` is emptied before the next sums take memory
        _note_taken(window, added)
        added.clear()


def _note_taken(window: PlainWay, gradients: Sequence[Arrived]) -> None:
    since, proxies, set_grad, bits = window.since_settling, window.proxies, window.params.set_grad, 0
    for index, _, _ in gradients:
        set_grad(index, proxies[index])
        since.writing.pop(index, None)
        bits |= 1 << index
    since.collected |= bits
    window.since_reset.proxied |= bits
