"""How things go wrong in tests that let them: a rank's program, and what is inside `zero`.

A `Part` is something inside that a test puts its own in place of, to note when it is called, or to fail there. Other faults are
contexts, or functions for the rest of a process. Tests read what is inside by tests/inside.py.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch

from zero import ShardedOptimizer
from zero.checkpoint import disk, values
from zero.checkpoint.progress import ProgressBar
from zero.comm import health, torch_world
from zero.comm.group import Pending
from zero.comm.health import RankMonitor
from zero.comm.results import UnreducedResult
from zero.comm.torch_group import TorchGroup
from zero.memory import masters as masters_module
from zero.memory.flatten import Flattener
from zero.memory.gathered import GatheredWeights
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes import mapped
from zero.memory.homes.file import StateFile
from zero.memory.homes.home import DeviceHome, Transfer
from zero.memory.homes.host import HostHome
from zero.memory.masters import Masters
from zero.memory.staging import Staging
from zero.memory.versions import VersionedShares
from zero.plan import layout as layout_module
from zero.plan.families import Family
from zero.runtime.kernels.adam_step import FusedStep
from zero.runtime.kernels.sums import SumsByTorch
from zero.runtime.params import absent
from zero.runtime.params.placement import ParamPlacer
from zero.runtime.params.tracking import ParamTracker
from zero.runtime.unshard import gathers
from zero.runtime.unshard.gathers import Gathers
from zero.setup import prepare
from zero.sharding import build, optimizer_state, publisher, update
from zero.sharding.publisher import WeightPublisher
from zero.sharding.update import Updater
from zero.window import keeping, narrowing, pace, rounds
from zero.window.grads import GradOps
from zero.window.hooks import GradHooks
from zero.window.rounds import Reducer
from zero.window.window import Window


class Failing:
    """Calls `at` in the middle of its step, before an optimizer's."""

    at = staticmethod(lambda: None)

    def step(self, closure=None):
        self.at()
        return super().step(closure)


class FailingSGD(Failing, torch.optim.SGD):
    pass


class FailingAdamW(Failing, torch.optim.AdamW):
    pass


def end_as_the_interpreter_does(error):
    """What happens to an error that nobody catches, in a process that runs somebody's program."""
    sys.last_value = error
    traceback.print_exception(error)
    atexit._run_exitfuncs()
    os._exit(1)


# Something inside that a test puts its own in place of ------------------------------------------------------------------


class Part(NamedTuple):
    """An attribute of something inside."""

    owner: Any
    name: str

    @property
    def now(self) -> Any:
        """Returns the attribute as it is now, which a replacement may call."""
        return getattr(self.owner, self.name)

    def put(self, value: Any) -> None:
        """Puts something else there, for good."""
        setattr(self.owner, self.name, value)

    def replaced(self, *by: Any, **how: Any) -> Any:
        """A context in which it is something else, given as to `mock.patch.object`."""
        return mock.patch.object(self.owner, self.name, *by, **how)


ADAPTION_OF_STATE = Part(build, "adopt_state")
ADOPTION = Part(masters_module, "adopt")
ANSWERING_A_REQUEST = Part(VersionedShares, "request")
ATTACHING_A_HOOK = Part(GradHooks, "attach")
BROADCAST = Part(TorchGroup, "broadcast")
CHECK_OF_PARAMS = Part(prepare, "check_params")
CHOICE_OF_KERNELS = Part(build, "use_kernels")
COMPARISON_OF_MASTERS = Part(Masters, "are_edited")
COPY_BETWEEN_HOST_AND_DEVICE = Part(HostHome, "_copy")
CUTTING_MASTERS = Part(Masters, "make_params")
DEFERRING_PRODUCTS = Part(GradientShard, "can_defer_product")
DIAGNOSIS = Part(RankMonitor, "diagnose")
DROPPING_GATHERS = Part(Gathers, "_drop_done")
FOLDER_SYNC = Part(disk, "sync_folder")
GATHERING_FOR_AN_OPERATOR = Part(absent, "_plain_of")
GIVING_PIECES = Part(optimizer_state, "_give_pieces")
INNER_STEP = Part(update, "step_without_hooks")
JUDGING_ON_DEVICE = Part(GradOps, "judges_on_device")
LOG_OF_THE_FLATTENER = Part(Flattener, "log")
LOOKING_AHEAD = Part(Updater, "_stay_on_device")
MAKING_ALIASES = Part(ParamTracker, "__init__")
MAKING_THE_REDUCER = Part(Reducer, "__init__")
MAKING_THE_UPDATER = Part(Updater, "__init__")
MAKING_THE_WINDOW = Part(Window, "__init__")
MAPPING_A_FILE = Part(mapped, "_map")
MEMORY_ON_DEVICE = Part(DeviceHome, "allocate")
MEMORY_ON_HOST = Part(HostHome, "allocate")
MOST_TOGETHER = Part(Updater, "_most_together")
NORM_OF_ALL = Part(GradOps, "total_norm")
NORM_OF_A_RANK = Part(GradOps, "_squares")
PROGRESS = Part(ProgressBar, "advance")
READING_A_CHUNK = Part(Flattener, "read")
READING_A_FILE = Part(disk.OpenFile, "read")
READING_FROM_DEVICE = Part(HostHome, "write")
REDUCE_SCATTER = Part(TorchGroup, "reduce_scatter")
SENDING_TO_DEVICE = Part(HostHome, "read")
SENDING_WEIGHTS = Part(WeightPublisher, "send")
STEP = Part(Updater, "step")
STEP_OF_BLOCKS = Part(Updater, "_step_inner")
STEP_OF_BUCKETS = Part(FusedStep, "step")
SECONDS_FOR_THE_STORE = Part(health, "_ANSWER_S")
TAKING_A_MASTER = Part(Masters, "adopt_source")
TAKING_IN = Part(ParamPlacer, "_take")
WRITING_A_CHUNK = Part(Flattener, "write")
WRITING_A_FILE = Part(disk, "write")


def transfer_of_a_disk(act: str) -> Part:
    """Reading or writing of a file of states."""
    return Part(StateFile, act)


def step_of(optimizer: ShardedOptimizer) -> Part:
    """The update of one optimizer."""
    return Part(optimizer.sharding.updater, "step")


def step_ahead_of(optimizer: ShardedOptimizer) -> Part:
    """What the thread of one optimizer calls that steps masters while backward goes on."""
    return Part(optimizer.sharding.updater, "step_ahead")


def decision_of(optimizer: ShardedOptimizer) -> Part:
    """The judging of whether one optimizer applies a step."""
    return Part(optimizer.sharding.updater, "decide")


def begin_of_step(optimizer: ShardedOptimizer) -> Part:
    """Returns what one optimizer calls before it updates anything."""
    return Part(optimizer.sharding.updater, "begin")


def sending_of_weights(optimizer: ShardedOptimizer) -> Part:
    """The sending of one optimizer's new weights."""
    return Part(optimizer.sharding.publisher, "send")


def waiting_for_weights(optimizer: ShardedOptimizer) -> Part:
    """The waiting for one optimizer's new weights."""
    return Part(optimizer.sharding.publisher, "wait")


def collecting_of(optimizer: ShardedOptimizer) -> Part:
    """The copying of one optimizer's gradients into their buckets."""
    return Part(optimizer.sharding.window.reducer, "collect")


def borrowing_of(optimizer: ShardedOptimizer) -> Part:
    """The lending of buffers for one optimizer's buckets."""
    return Part(optimizer.sharding.window.reducer.staging, "borrow")


def gathering_of(optimizer: ShardedOptimizer) -> Part:
    """The gathering of one optimizer's new weights, among the ranks of different shares."""
    return Part(optimizer.sharding.group.inner, "all_gather")


def synchronizing(optimizer: ShardedOptimizer) -> Part:
    """The meeting of ranks before they go on together."""
    return Part(optimizer.sharding.window.sync, "synchronize")


def parts_of_writers(optimizer: ShardedOptimizer) -> dict[str, Part]:
    """Returns what is called before weights are written, after each bucket of them, and when all are written."""
    sharding = optimizer.sharding
    return {
        "beginning": Part(sharding.publisher, "follow_edits"),
        "middle": Part(sharding.masters, "publish"),
        "end": Part(sharding.publisher, "wait"),
    }


# Faults and limits --------------------------------------------------------------------------------------------------------


def update_fails(optimizer: ShardedOptimizer, error: Any = MemoryError) -> Any:
    """A context in which the update of one optimizer fails."""
    return step_of(optimizer).replaced(side_effect=error)


def no_memory_for_sums(optimizer: ShardedOptimizer) -> Any:
    """A context in which this rank has no memory for the sums of one optimizer."""
    return mock.patch.object(optimizer.sharding.window.grad_ops.shard, "allocate", side_effect=MemoryError)


def has_room_for_rounds(optimizer: ShardedOptimizer, num_bytes: float) -> None:
    """Has the device of one optimizer's buckets say, for good, that it has room for so many bytes of them."""
    optimizer.sharding.window.reducer.staging.room = lambda: num_bytes


def cannot_answer(optimizer: ShardedOptimizer, fail: Callable[[], NoReturn]) -> None:
    """Has the thread of this rank that asks other ranks for weights, and answers them, fail at the next request, for good."""
    optimizer.sharding.placer.weights.exchange.pulls._request = lambda *_: fail()


@contextlib.contextmanager
def norms_count_copies() -> Iterator[None]:
    """Has norms count parts as often as ranks hold them, in every optimizer."""
    with mock.patch.object(Family, "counts", lambda family, rank: True):
        yield


@contextlib.contextmanager
def rank_1_adds_up_otherwise() -> Iterator[None]:
    """Has rank 1 of every group find squares of gradients that are a quarter larger, as another processor might."""
    squares = NORM_OF_A_RANK.now

    def other(of_rank: GradOps, beside: torch.Tensor) -> tuple[list[torch.Tensor], list[float]]:
        of_families, numbers = squares(of_rank, beside)
        return [square * (1.0 + 0.25 * of_rank._group.rank) for square in of_families], numbers

    with NORM_OF_A_RANK.replaced(other):
        yield


@contextlib.contextmanager
def no_memory_for_a_chunk(fails: list[int], on_rank: int) -> Iterator[None]:
    """Has the writing of chunks whose number is in `fails` run out of memory, on one rank of every optimizer of this process
    that takes parameters in."""
    take, write, thread = TAKING_IN.now, WRITING_A_CHUNK.now, threading.local()

    def takes(intake: ParamPlacer, *given: Any) -> None:
        thread.rank = intake._masters.rank
        take(intake, *given)

    def writes(flattener: Flattener, chunk: int, *given: Any) -> Any:
        if chunk in fails and thread.rank == on_rank:
            raise MemoryError("nothing left")
        return write(flattener, chunk, *given)

    with TAKING_IN.replaced(takes), WRITING_A_CHUNK.replaced(writes):
        yield


@contextlib.contextmanager
def no_memory_for_state(fails: list[Any], on_rank: int) -> Iterator[None]:
    """Has one rank run out of memory where a parameter's state is given to its pieces, as long as `fails` is not empty."""
    give = GIVING_PIECES.now

    def gives(masters: Masters, *given: Any) -> None:
        if fails and masters.rank == on_rank:
            raise MemoryError("nothing left")
        give(masters, *given)

    with GIVING_PIECES.replaced(gives):
        yield


def publishes_at_most(num_bytes: int) -> Any:
    """A context in which no more bytes of weights are on their way at a time."""
    return mock.patch.object(publisher, "_MOST_IN_FLIGHT", num_bytes)


def publishes_every_bucket_alone() -> Any:
    """A context in which no buckets are sent as one, however small they are."""
    return mock.patch.object(layout_module, "_MOST_AS_ONE", 0)


def only_the_long_path() -> Any:
    """A context in which no gradient takes the short path."""
    return mock.patch.object(Window, "takes_short_path", False)


def host_ahead_at_most(num_bytes: int) -> Any:
    """A context in which a host fills no more bytes of buckets, or two, before its device has come to filling them."""
    return mock.patch.object(pace, "_AHEAD_BYTES", num_bytes)


def hands_over_at_most(numel: int) -> Any:
    """A context in which graphs are made that hand over no more elements of gradients in one call, but for single ones."""
    return mock.patch("zero.graph.backend.MOST_HELD", numel)


def steps_at_most(number: int) -> Any:
    """A context in which no more elements are stepped in one call."""
    return mock.patch.object(update, "_MOST_TOGETHER", number)


def pipes_fail(function: str, error: Any) -> Any:
    """A context in which a function of the pipes between ranks of a host fails."""
    return mock.patch(f"zero.comm.pipes.{function}", side_effect=error)


@contextlib.contextmanager
def keeps_for_a_list(numel: int) -> Iterator[None]:
    """A device keeps so many elements of gradients, before a list of them is copied."""
    with mock.patch.object(rounds, "MOST_HELD", numel):
        yield


@contextlib.contextmanager
def sums_at_once() -> Iterator[None]:
    """A block in which no sum is deferred."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradientShard, "can_defer", lambda *_: False)
        yield


@contextlib.contextmanager
def all_sums_deferred() -> Iterator[None]:
    """Defers all sums, however many and wide their rows are, and with any kernels of the step."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SumsByTorch, "can_defer", lambda *_: True)
        patched.setattr(keeping, "_MOST_OF_A_SUM", float("inf"))
        patched.setattr(GradientShard, "can_defer", lambda shard, bucket: bucket not in shard)
        yield


def sends_in_code(dtype: str, code: Callable[[int], narrowing.Code]) -> Any:
    """A context in which buckets that a user wants to be sent in a dtype are sent in a code of the test's."""
    return mock.patch.dict(narrowing.CODES, {dtype: code})


def stored_values_come_back_as(kind: str, made: Callable[[Any], Any]) -> Any:
    """A context in which stored values of a kind are read as something else."""
    return mock.patch.dict(values._MADE, {kind: made})


class _OverWhen:
    """The result of a collective that is over when somebody else says so."""

    def __init__(self, pending: Pending, is_over: Callable[[], bool]) -> None:
        self._pending, self.done = pending, is_over

    def wait(self) -> torch.Tensor:
        return self._pending.wait()


class _AddedWhen(_OverWhen, UnreducedResult):
    _pending: UnreducedResult

    @property
    def sum_dtype(self) -> torch.dtype:
        return self._pending.sum_dtype

    def addends(self) -> Sequence[torch.Tensor]:
        return self._pending.addends()

    def release(self) -> None:
        self._pending.release()


def over_when(pending: Pending, is_over: Callable[[], bool]) -> Pending:
    """The same result of a collective, with a sum that is left to whoever needs it as before, which is over when `is_over`
    returns True."""
    return (_AddedWhen if isinstance(pending, UnreducedResult) else _OverWhen)(pending, is_over)


@contextlib.contextmanager
def collectives_beside() -> Iterator[None]:
    """Weights in shares are gathered by collectives over gloo too, where messages are as fast."""
    with mock.patch.object(TorchGroup, "beside", lambda self: self.part([range(self.size)]) if self.size > 1 else None):
        yield


@contextlib.contextmanager
def late_ranks_told_after(seconds: float) -> Iterator[None]:
    """A rank that waits for others to gather weights tells them so after this time."""
    with mock.patch.object(gathers, "_GRACE_S", seconds):
        yield


@contextlib.contextmanager
def buffers_are_poison() -> Iterator[list[Any]]:
    """Every staging buffer and gradient share is NaN when it is handed out and again when it is given back, on all ranks.

    Gives the list of what was poisoned, so that a test can see that there was something.
    """
    make, clear, borrow, give_back = GradientShard.allocate, GradientShard.clear, Staging.borrow, Staging.give_back
    lock, seen = threading.Lock(), list[Any]()

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        with lock:
            seen.append((tensor.numel(), tensor.dtype))
        with torch.no_grad():
            return tensor.fill_(float("nan"))

    def poisoned_clear(shard: GradientShard) -> None:
        for share in shard.present():
            fill(share)
        clear(shard)

    def poisoned_give_back(staging: Staging, buffer: torch.Tensor, transfer: Transfer | None = None) -> None:
        fill(buffer)
        give_back(staging, buffer, transfer)

    with (
        mock.patch.object(GradientShard, "allocate", lambda shard, bucket: fill(make(shard, bucket))),
        mock.patch.object(GradientShard, "clear", poisoned_clear),
        mock.patch.object(Staging, "borrow", lambda staging, *args, **options: fill(borrow(staging, *args, **options))),
        mock.patch.object(Staging, "give_back", poisoned_give_back),
    ):
        yield seen


def poison_padding(optimizer: ShardedOptimizer) -> int:
    """Fills what lies between the slots of the flat weights with NaN; returns how many elements that were."""
    layout, chunks = optimizer.sharding.layout_ref.layout, optimizer.sharding.placer.weights.chunks
    filled = 0
    with torch.no_grad():
        for bucket, gaps in zip(layout.buckets, layout.gaps, strict=True):
            for gap in gaps:
                chunks[bucket.chunk][bucket.span.start + gap.start : bucket.span.start + gap.stop] = float("nan")
                filled += gap.numel
    return filled


def poison_freed_weights(optimizer: ShardedOptimizer | None = None) -> None:
    """Makes gathered weights NaN as they are let go: of one optimizer, or of every one of this process from here on."""
    weights = GatheredWeights if optimizer is None else optimizer.sharding.placer.weights.exchange.cache
    weights.poison = True


@contextlib.contextmanager
def freed_weights_are_poison() -> Iterator[None]:
    """Makes gathered weights NaN as they are let go, while it runs."""
    with mock.patch.object(GatheredWeights, "poison", True):
        yield


def forget_free_wires() -> None:
    """Drops process groups that are kept for the next group, as a failure does."""
    torch_world.free_groups._kept.clear()


