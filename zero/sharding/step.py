"""One step of a sharded optimizer, in order: settle, decide, update, publish."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

from zero.comm.exchange import run_on_all
from zero.errors import DiskFailed, GroupLost, ZeroError
from zero.plan.layout import Block
from zero.runtime.grads.phase import Phase
from zero.runtime.params.table import Params
from zero.runtime.step.updater import StepDecision
from zero.sharding.state import ShardingState

logger = logging.getLogger("zero")


def step(state: ShardingState) -> StepDecision | None:
    """Settles the window and updates the weights with what is in it. Returns what was decided, or None where no rank had a
    gradient. A collective."""
    window, sync = state.window, state.window.sync
    decision = decide(state)
    sync.count_step()
    is_applied = decision is None or decision.apply  # a step without any gradient counts as a finite one
    state.loss_scaler.update(is_applied)
    if decision is not None and is_applied:
        update(state, window.used, decision.coefficient)
    else:
        window.move_to(Phase.STEPPED)
        if decision is not None:
            window.reducer.inflight.forget_errors()
        _log_skip(state, decision)
    sync.set_phase("before a backward")
    return decision


def _log_skip(state: ShardingState, decision: StepDecision | None) -> None:
    if decision is not None and state.group.rank == 0:
        scale = state.loss_scaler.scale
        note = "" if scale is None or scale.window is None else f" The loss scale is {scale.value:g} from now on."
        number, norm, where = state.window.sync.step, decision.grad_norm, decision.nonfinite
        logger.info("Skipped step %d: the norm of the gradients is %s: %s.%s", number, norm, where, note)


def decide(state: ShardingState) -> StepDecision | None:
    """Settles the window and decides what is done with what is in it. A collective."""
    window, sync = state.window, state.window.sync
    state.placer.weights.check_written()
    state.check_on_disk()
    window.settle("step")
    state.group.end_warmup()
    if state.buffers is not None:
        state.buffers.take_rank0s()
    sync.set_phase("in the update")
    sync.tracker.copy_back()
    if window.used and state.config.on_unused == "raise":
        _check_used(state.params, window.used)
    return state.updater.decide(window.used) if window.used else None


def update(state: ShardingState, used: int, coefficient: float) -> None:
    """Steps the masters of what was used and publishes its weights."""
    layout = state.layout_ref.layout
    buckets = [bucket for bucket, params in enumerate(layout.params_in) if params & used]
    batches = state.updater.batches([block for bucket in buckets for block in layout.blocks(bucket)])
    with torn_by_failure(state):
        begin_update(state)
        with _told_on_all(state):
            _step_batches(state, batches, used, coefficient)
        end_update(state)


def begin_update(state: ShardingState) -> None:
    state.publisher.begin()
    state.window.move_to(Phase.STEPPING)
    state.masters.is_whole = False


def end_update(state: ShardingState) -> None:
    state.publisher.end()
    state.masters.is_whole = True
    state.window.move_to(Phase.STEPPED)


@contextlib.contextmanager
def torn_by_failure(state: ShardingState) -> Iterator[None]:
    """Leaves the window torn where what runs inside fails in the middle of an update."""
    try:
        yield
    except BaseException as error:
        if state.window.phase is Phase.STEPPING:
            state.window.move_to(Phase.TORN)
            state.window.annotate_error(error)
            if state.publisher.is_writing:
                with contextlib.suppress(GroupLost):
                    state.publisher.end()  # as the others did: they read the weights of this version
        raise


@contextlib.contextmanager
def _told_on_all(state: ShardingState) -> Iterator[None]:
    """Raises on all ranks what one of them could not read or write, where states are on disk. A collective then."""
    failed: ZeroError | None = None
    try:
        yield
    except DiskFailed as error:
        failed = error
    if not state.masters.shard.homes.disks:
        return

    def tell() -> None:
        if failed is not None:
            raise failed

    run_on_all(state.group, tell, _step_failed)


def _step_failed(error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return error or DiskFailed(f"Cannot complete the step: it failed on {where}")


def _step_batches(state: ShardingState, batches: Sequence[Sequence[Block]], used: int, coefficient: float) -> None:
    updater, publisher, waiting = state.updater, state.publisher, collections.deque(batches)
    ahead = dict(itertools.pairwise(dict.fromkeys(block.bucket for batch in batches for block in batch)))
    try:
        with state.memory_guard.explain_oom("A step", state.layout_ref):
            updater.begin(batches, used)
        for batch, following in itertools.zip_longest(batches, batches[1:], fillvalue=()):
            publisher.prefetch((*batch, *following))  # weights on their way while this batch is stepped
            for bucket in dict.fromkeys(block.bucket for block in batch):
                state.masters.streams.prefetch(bucket)
                if bucket in ahead:
                    state.masters.streams.prefetch(ahead[bucket])
                    state.window.grad_ops.shard.stream.prefetch(ahead[bucket])
            with state.memory_guard.explain_oom("A step", state.layout_ref):
                updater.step(batch, used, coefficient)
            publisher.send(waiting.popleft())
        state.masters.streams.flush()
    except BaseException:
        state.masters.abandon()
        with contextlib.suppress(GroupLost):
            for batch in waiting:  # as the others do
                publisher.send(batch)
        raise
    finally:
        state.window.grad_ops.forget_norms()  # they are those of before clipping
        publisher.wait(used)


def _check_used(params: Params, used: int) -> None:
    """Refuses a step for which some trainable parameter has no gradient on any rank."""
    named = enumerate(zip(params.names, params.tensors, strict=True))
    idle = [name for index, (name, tensor) in named if tensor.requires_grad and not used >> index & 1]
    if idle:
        raise ValueError(
            f"Cannot step: no rank had a gradient for {', '.join(idle[:5])} ({len(idle)} such parameters), and the "
            "configuration refuses parameters that are not used. Nothing was applied. Use them in the loss, or freeze them."
        )
