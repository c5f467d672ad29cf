"""The parts of a sharded optimizer, what concerns all of them, and the end of their training.

    state = optimizer.sharding        # `build` in build.py made it
    state.window.settle("a look")     # each part is asked by its name
    state.check_whole("save")         # what concerns several of them is a method

Functions take this object if they need several parts: `step` in step.py, `publish` in publish.py, `add_group` in join.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from accelerators import Accelerator
from zero.comm.group import Group
from zero.comm.one_answer import exchange_about, exchange_texts, run_on_all
from zero.config.schema import ZeroConfig
from zero.errors import GroupLost, RanksDiffer
from zero.memory.masters import Masters
from zero.memory.shard import LayoutRef
from zero.profiling import Clock
from zero.runtime.params.placement import ParamPlacer
from zero.runtime.params.table import Params
from zero.setup.memory_guard import MemoryGuard
from zero.setup.module_sync import Buffers
from zero.setup.parts import Parts
from zero.sharding.loss_scaler import LossScaler
from zero.sharding.publisher import WeightPublisher
from zero.sharding.state_offload import StateOffloader
from zero.sharding.update import Updater
from zero.window.grads import reading_failed
from zero.window.hooks import GradHooks
from zero.window.window import Window, leave

logger = logging.getLogger("zero")

_ENDING, _SHORTLY_S = "zero.release", 1.0  # the name of the thread that ends a training, and how long a close waits for it
_OURS = "zero", "staged-"  # the prefixes of threads that this package and accelerators start
_FOR_THREADS = frozenset(("threading", "concurrent.futures.thread", "concurrent.futures._base", "queue"))
_CALL_OTHERS = frozenset(("_bootstrap", "_bootstrap_inner", "run", "_worker"))  # of those: what holds no lock while it calls

if TYPE_CHECKING:
    from zero.checkpoint.writer import PendingSave


class Lifetime:
    """The lifetime of a sharded optimizer, and the end of its group."""

    def __init__(self, group: Group) -> None:
        self.owns_group = False
        self.is_over = False
        self.hooks: list[Any] = []  # the hooks on the model's and the plain optimizers' state_dict and load_state_dict
        # The save in the background; ranks may have yet to tell each other how it went.
        self.last_save: PendingSave | None = None
        self._group = group

    def close_group(self) -> None:
        """Closes the group if it is owned, once ranks need not tell each other any more how a save went."""
        if self.owns_group and self.last_save is not None:
            self.last_save.on_reported(self._group.close)
        elif self.owns_group:
            self._group.close()


@dataclass(frozen=True, eq=False)
class ShardingState:
    """All parts know the same parameters, in one layout: a new one that any of them cannot take in, none of them has.

    They are made together, and are never exchanged for others: what changes is inside of them. `release` ends all of them once;
    after it, the model is plain.
    """

    group: Group  # the ranks that train together
    parts: Parts  # parameters that are one rank's part of larger ones, as experts are
    params: Params  # the table of parameters: number, name, tensor
    masters: Masters  # this rank's shares in fp32, which are stepped, and the optimizer's moments
    window: Window  # the gradients since `zero_grad`
    hooks: GradHooks  # what autograd calls for each parameter
    updater: Updater  # steps masters by the user's optimizer
    publisher: WeightPublisher  # sends new weights to all ranks
    placer: ParamPlacer  # gives parameters a place in flat memory, and in the end their own memory again
    config: ZeroConfig
    offloader: StateOffloader  # moves states away and back when the user says so
    memory_guard: MemoryGuard  # knows how much memory there is, and explains an error if it does not suffice
    loss_scaler: LossScaler
    lifetime: Lifetime
    buffers: Buffers | None  # None if each rank has its own
    input_cast: RemovableHandle | None  # None if inputs are left as they are

    @property
    def accelerator(self) -> Accelerator:
        return self.memory_guard.accelerator

    @property
    def layout_ref(self) -> LayoutRef:
        return self.masters.layout_ref

    def release(self, gives_up: bool = False) -> None:
        """Makes the model plain: no hooks, and memory of its own for every parameter. If values of other ranks cannot be had
        it raises and may be tried again; with `gives_up` such parameters are left without values instead."""
        if self.lifetime.is_over:
            return
        self.offloader.reload(False, ["weights"], gives_up)  # comes first, as it may fail and be tried again
        self.window.close()
        self.offloader.reload(False, ["gradients"], gives_up)  # the window has thrown the sums away by now
        values = []
        try:
            values = self.placer.own_values(elsewhere=self.window.sync.tracker.replaced())
        except GroupLost as error:
            if not gives_up:
                raise GroupLost(
                    "Cannot close: the weights are in shares, and those of other ranks cannot be had: the group is lost. "
                    "Call rebuild() first if every rank is still there, or load the last checkpoint in a new process."
                ) from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            if not gives_up:
                raise MemoryError(
                    "Cannot close: the device has no room for the whole model, whose weights are in shares. Nothing was "
                    "changed. Save or export it, and let go of the optimizer and the model together."
                ) from error
        if not self.masters.wholeness.is_whole:
            logger.warning("The model is plain again, but %s. Load a checkpoint.", self.masters.wholeness.describe())
        self.lifetime.is_over = True
        for hook in self.lifetime.hooks:
            hook.remove()
        self.hooks.detach()
        if self.input_cast is not None:
            self.input_cast.remove()
        leave(self.params.leaves)
        self.placer.detach(values)
        self.updater.forget_state()
        self.updater.restore_kernels()
        if gives_up and self.placer.weights.are_read_by_others:
            # Other ranks may collect theirs much later, and until then train something else that needs this rank.
            ending = threading.Thread(target=self._end, name=_ENDING, daemon=True)
            ending.start()
            ending.join(_SHORTLY_S)
        else:
            self._end()

    def _end(self) -> None:
        self.placer.release()
        self.window.reducer.release()
        self.lifetime.close_group()

    def release_anywhere(self, gives_up: bool = False) -> None:
        """Releases as `release` does, also when garbage is collected while torch traces, where no real tensor may be
        touched."""
        with _disable_current_modes():
            self.release(gives_up)

    def give_up(self) -> None:
        """Releases what nobody closed. The garbage collector may come to it in any thread and at any place. A release waits
        for our threads, and takes locks that they may hold, and it begins and ends threads. So one of our threads leaves it to
        another, and so does a thread that the collector interrupted in Python's own code for threads, whose locks are held."""
        if _interrupts_code_for_threads() or threading.current_thread().name.startswith(_OURS):
            ending = threading.Thread(target=self.release_anywhere, args=(True,), name=_ENDING)
            # Python waits for `ending` when it exits. To begin such a thread takes one of those locks, to begin a daemon none.
            threading.Thread(target=ending.start, name=_ENDING, daemon=True).start()
        else:
            self.release_anywhere(gives_up=True)

    def rebuild(self, group: Any) -> None:
        """Connects all ranks anew after a lost collective and drops what was on its way; the weights stay. Raises on all ranks
        if one had stepped already or failed in the middle of a step; the new connections then serve to load a checkpoint. A
        collective."""
        window, sync = self.window, self.window.sync
        window.refuse_ahead("call rebuild()")
        self.group.reconnect(group)
        window.reducer.restart()
        self.publisher.abandon()
        wholeness = self.masters.wholeness
        if wholeness.is_whole:
            self.masters.streams.flush()  # writes home what was changed in masters since the last step
        self.masters.abandon()
        self.placer.weights.reconnect()
        window.forget()
        local = {
            "steps": sync.step,
            "settled": sync.sync_count,
            "layout": self.layout_ref.layout.digest,
            "torn": not wholeness.is_whole,
        }
        everyone = [json.loads(text) for text in exchange_texts(self.group, json.dumps(local))]
        sync.sync_count = max(progress["settled"] for progress in everyone)
        most = max(progress["steps"] for progress in everyone)
        ahead = next((rank for rank, progress in enumerate(everyone) if progress["steps"] == most and not progress["torn"]), 0)
        for rank, progress in enumerate(everyone):
            same = all(progress[name] == everyone[ahead][name] for name in ("steps", "layout"))
            if progress["torn"] or not same:
                if sync.step != most:
                    wholeness.tear("a step that other ranks have taken")  # this rank has not taken it
                sync.go_on_from(most)  # all ranks must be at the same step when they load
                moment = "in the middle of a step" if progress["torn"] else f"after {progress['steps']} steps"
                raise RanksDiffer(
                    f"Cannot go on after rebuild: rank {rank} was lost {moment}, and rank {ahead} has taken {most}, so their "
                    "weights differ. The ranks are connected again. Load a checkpoint on all of them and go on from that."
                )

    def to_home(self, param: int, whole: torch.Tensor) -> torch.Tensor:
        """Moves a whole value of a parameter to the memory in which its shares live."""
        homes = map(self.masters.shard.home_of, self.layout_ref.layout.buckets_of(param))
        other = next((home for home in homes if not home.holds(whole)), None)
        return whole if other is None else whole.to(other.device)

    def clock(self) -> Clock:
        """Returns the clock of this training, which runs from the first call on."""
        if self.window.clock is None:
            clock = Clock(self.accelerator)
            reducer, inflight = self.window.reducer, self.window.reducer.inflight
            for doer in (self.window, reducer, inflight, inflight.keeper, self.updater, self.publisher):
                doer.clock = clock
        assert self.window.clock is not None
        return self.window.clock

    @property
    def is_whole_here(self) -> bool:
        """True if each rank has all of the optimizer's state in memory, so that no other rank is needed to read it."""
        return not self.layout_ref.layout.is_sharded and not self.masters.shard.homes.disks

    @contextlib.contextmanager
    def asking_all(self, subject: str, must_be_whole: bool = False) -> Iterator[None]:
        """Prepares all ranks for a block in which state is made whole out of their shares; others that miss this rank hear what
        it waits for. With `must_be_whole` what an update left torn is refused. A collective, unless each rank has all."""
        if self.is_whole_here:
            if must_be_whole:
                self.check_whole(f"make {subject}")
            yield
            return
        before = self.group.phase
        self.group.set_phase(f"in {subject}, which all ranks call, though one alone may write it")
        self.even_rounds(subject)
        if must_be_whole:
            self.check_whole_on_all(f"make {subject}")
        self.check_on_disk()
        yield
        self.group.set_phase(before)

    @torch.no_grad()
    def even_rounds(self, subject: str) -> None:
        """Sends the rounds of this window that other ranks have sent and this one has not: other collectives of tensors are to
        come after the same ones on every rank. A collective."""
        reducer = self.window.reducer
        messages = exchange_about(self.group, subject, str(reducer.sent).encode())
        reducer.send_missing_rounds(max(map(int, messages)), counts=True)

    def check_on_disk(self) -> None:
        """Raises on all ranks if one has lost what it had on disk, or if that was changed in a way that does not count.
        A collective if states are on disk."""
        if self.masters.shard.homes.disks:
            run_on_all(self.group, self.masters.streams.check, reading_failed)

    def check_whole(self, what: str) -> None:
        """Raises if an update broke off, and nothing has replaced what it left, or if one has begun in a backward."""
        self.window.refuse_ahead(what)
        if not self.masters.wholeness.is_whole:
            self.masters.streams.check()  # a disk that failed is the better explanation
            self.masters.wholeness.check(what)

    def check_whole_on_all(self, what: str) -> None:
        """Raises on all ranks if `check_whole` would raise on one of them. A collective."""
        run_on_all(self.group, partial(self.check_whole, what), partial(_torn_elsewhere, what))

    def adopt(self) -> None:
        """Takes all edits of the weights over."""
        self.publisher.follow_edits()
        for bucket in range(len(self.layout_ref.layout.buckets)):
            self.adopt_bucket(bucket)

    def adopt_on_all(self) -> None:
        """Takes all edits of the weights over on all ranks: all raise if one cannot read what it has elsewhere. A
        collective."""
        if any(bucket.away for bucket in self.layout_ref.layout.buckets):
            run_on_all(self.group, self.adopt, reading_failed)
        else:
            self.adopt()

    def begin_load(self) -> None:
        """Prepares a load: what lies elsewhere is overwritten like the rest, and rounding errors of earlier gradients are
        forgotten."""
        self.window.sync.tracker.copy_back()
        self.window.reducer.inflight.forget_errors()

    def adopt_bucket(self, bucket: int) -> None:
        """Takes edits of weights of a bucket over, once `follow_edits` was called."""
        for block in self.layout_ref.layout.blocks(bucket):
            self.masters.adopt(block)


def _interrupts_code_for_threads() -> bool:
    """Returns whether the finalizer that calls `give_up` interrupts Python's own code for threads, which may hold its locks."""
    called = finalizer = sys._getframe(2)
    while (frame := called.f_back) is not None:
        is_for_threads = frame.f_globals.get("__name__") in _FOR_THREADS
        if is_for_threads and (called is finalizer or frame.f_code.co_name not in _CALL_OTHERS):
            return True
        called = frame
    return False


def _torn_elsewhere(what: str, error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    rank, text = next(iter(failed.items()))
    return error or ValueError(f"Cannot {what}: rank {rank} has {text!r}. Load a checkpoint on all ranks.")
