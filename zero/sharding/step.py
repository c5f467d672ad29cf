"""One step of a sharded optimizer.

What it does, as plain torch would say it of one bucket, of which this rank has the elements `share`:

    norm = total_norm(sums)                            # 1, 2: of the sums of all parameters, over all ranks
    if not isfinite(norm): return                      # 2, 3: with on_nonfinite="skip"
    master.grad = sums[share] * min(1, clip / norm)    # 4: in fp32
    user_optimizer.step()                              # 4: on masters in place of parameters
    weights[share] = master.to(torch.bfloat16)         # 4
    all_gather(weights)                                # 5: every rank gives its share

The steps, each with its owner; update.py says why the user's own optimizer steps, and what else there was:

    1. settle     sums of gradients become those of all ranks                        `Window.settle`
    2. decide     apply or skip, and the factor that clips: the same on all ranks    `Updater.decide`
    3. scale      the loss scale moves                                               `LossScaler.update`
    4. update     batch by batch: states come, shares are stepped, states go home    `Updater`
    5. publish    masters of a batch become weights while the next one is stepped    `publish`

A step that is skipped ends after 3, unless only the device knows that yet: then the optimizer skips on it, by `found_inf`, and
the host hears of it later. An error in 4 or 5 leaves the window torn: weights may be stepped in part.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from zero.errors import DiskFailed, RankFailed
from zero.plan.layout import Block, set_bits
from zero.runtime.params.table import Params
from zero.sharding.publish import publish
from zero.sharding.state import ShardingState
from zero.sharding.update import StepDecision
from zero.window.records import Phase

logger = logging.getLogger("zero")


def step(state: ShardingState) -> StepDecision | None:
    """Settles the window and updates the weights with what is in it. Returns what was decided, or None if no rank had a
    gradient. A collective."""
    window, sync = state.window, state.window.sync
    _log_late_skips(state)
    decision = decide(state)  # 1 and 2
    sync.count_step()
    is_applied = decision is None or decision.apply  # a step without any gradient counts as a finite one
    state.loss_scaler.update(is_applied)  # 3
    if decision is not None and is_applied:
        update(state, window.stepped, decision)  # 4 and 5
        if decision.found_inf is not None:  # the device may skip this step yet
            window.reducer.inflight.forget_errors(decision.found_inf)
            state.updater.skipped.add(decision.found_inf)
        if decision.differing is not None:  # whether a rank has other factors is heard later
            sync.expect(decision.differing)
    else:
        window.move_to(Phase.STEPPED)
        if decision is not None:
            window.reducer.inflight.forget_errors()
            state.updater.skipped.add()
        _log_skip(state, decision)
    sync.set_phase("before a backward")
    return decision


def decide(state: ShardingState) -> StepDecision | None:
    """Settles the window, and decides whether its sums are applied and how they are clipped. None if no rank had a gradient.
    A collective."""
    window, sync = state.window, state.window.sync
    if window.ahead is not None and window.phase is Phase.AHEAD:
        window.ahead.check_settings()
    state.placer.weights.check_written()  # none may still be without values, as on the meta device
    window.settle("step")  # 1: comes first of all collectives, as a settling hears of a rank that failed before
    state.check_on_disk()  # a rank may have lost its disk
    state.group.end_warmup()  # from the first step on, a rank waits for others no longer than the configuration says
    if state.buffers is not None:
        state.buffers.take_rank0s()
    sync.set_phase("in the update")
    sync.tracker.copy_back()  # of what was assigned to `.data`
    if window.used and state.config.on_unused == "raise":
        _check_used(state.params, window.used)
    if not window.used:
        return None
    factors = window.since_reset.changes.unread
    return state.updater.decide(window.used, factors, scale_waits=state.loss_scaler.scale is not None)


def update(state: ShardingState, used: int, decision: StepDecision) -> None:
    """Steps the masters of what was used and publishes its weights. The two go on in turn: while one batch is stepped, the
    weights of those before it are on their way."""
    layout = state.layout_ref.layout
    buckets = [bucket for bucket, params in enumerate(layout.params_in) if params & used]
    batches = state.updater.batches([block for bucket in buckets for block in layout.blocks(bucket)])
    with torn_by_failure(state):
        # If states are on a disk, ranks tell each other at once, since a rank that cannot read goes on to try again.
        failure = _step_failed if state.masters.shard.homes.disks else None
        try:
            prepare, written = partial(_prepare, state, batches, used), _step_batches(state, batches, used, decision)
            publish(state, batches, prepare, written, f"step {state.window.sync.step}", failure, params=used)  # 4, 5
        finally:
            state.window.forget_norms()  # the norms are those of before clipping
        if state.window.ahead is not None:
            state.window.ahead.end()
        state.window.move_to(Phase.STEPPED)
        state.updater.note_stepped()


@contextlib.contextmanager
def torn_by_failure(state: ShardingState) -> Iterator[None]:
    """Leaves the window torn if what runs inside fails in the middle of an update."""
    try:
        yield
    except BaseException as error:
        if state.window.phase is Phase.STEPPING:
            state.window.move_to(Phase.TORN)
            if state.window.ahead is not None:
                state.window.ahead.tear()
            state.window.annotate_error(error)
        raise


def _step_failed(error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    kind = DiskFailed if all(text.startswith(DiskFailed.__name__) for text in failed.values()) else RankFailed
    what = f"it failed on {where.rstrip('.')}. Weights may be stepped in part"
    return error or kind(f"Cannot complete the step: {what}. Load a checkpoint on all ranks.")


def _prepare(state: ShardingState, batches: Sequence[Sequence[Block]], used: int) -> None:
    """Does what comes before weights are written: last checks, and state moves to where the fused step has it."""
    state.window.move_to(Phase.STEPPING)
    if state.window.ahead is not None:
        state.window.ahead.check_weights()
    state.publisher.follow_edits()
    with state.memory_guard.explain_oom("A step", state.layout_ref):
        state.updater.begin(batches, used)


def _step_batches(
    state: ShardingState, batches: Sequence[Sequence[Block]], used: int, decision: StepDecision
) -> Iterator[Sequence[Block]]:
    """Steps one batch after the other, while what the next ones need is on its way. `publish` runs this generator: it sends the
    batch of each `yield`, and then has the next one stepped."""
    updater, publisher, is_moved = state.updater, state.publisher, not state.layout_ref.layout.stays_on_device
    bucket_after = dict(itertools.pairwise(dict.fromkeys(block.bucket for batch in batches for block in batch)))
    for batch, following in itertools.zip_longest(batches, batches[1:], fillvalue=()):
        publisher.prefetch((*batch, *following))  # weights begin to cross while the batch before them is stepped
        for bucket in dict.fromkeys(block.bucket for block in batch) if is_moved else ():
            state.masters.streams.prefetch(bucket)
            if bucket in bucket_after:
                state.masters.streams.prefetch(bucket_after[bucket])
                state.window.grad_ops.shard.stream.prefetch(bucket_after[bucket])
        with state.memory_guard.explain_oom("A step", state.layout_ref):
            updater.step(batch, used, decision)
        yield batch


def _check_used(params: Params, used: int) -> None:
    """Refuses a step for which some trainable parameter has no gradient on any rank."""
    members, named = set(set_bits(used)), enumerate(zip(params.names, params.leaves, strict=True))
    idle = [name for index, (name, tensor) in named if tensor.requires_grad and index not in members]
    if idle:
        raise ValueError(
            f"Cannot step: no rank had a gradient for {', '.join(idle[:5])} ({len(idle)} such parameters), and the "
            "configuration refuses parameters that are not used. Nothing was applied. Use them in the loss, or freeze them."
        )


def _log_skip(state: ShardingState, decision: StepDecision | None) -> None:
    if decision is not None and state.group.rank == 0:
        scale = state.loss_scaler.scale
        note = "" if scale is None or scale.window is None else f" The loss scale is {scale.value:g} from now on."
        number, norm, where = state.window.sync.step, decision.grad_norm, decision.nonfinite
        logger.info("Skipped step %d: the norm of the gradients is %s: %s.%s", number, norm, where, note)


def _log_late_skips(state: ShardingState) -> None:
    """Tells of steps that a device skipped while the host went on, once that is known here."""
    skipped, step = state.updater.skipped.news(), state.window.sync.step
    if skipped and state.group.rank == 0:
        why = "gradients are not finite, or ranks changed them differently"
        logger.info("Skipped %d of the steps up to %d: %s.", skipped, step, why)
