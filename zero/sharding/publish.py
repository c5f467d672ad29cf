"""The one way in which weights are written: whatever fails on a rank, it sends every bucket, as other ranks wait for them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from zero.comm.group import Failure, run_on_all
from zero.errors import GroupLost
from zero.memory.masters import ALL, SHARED
from zero.plan.layout import Block
from zero.sharding.state import ShardingState


def publish(
    state: ShardingState,
    batches: Sequence[Sequence[Block]],
    written: Iterable[Sequence[Block]],
    cause: str,
    failure: Failure | None,
    *,
    params: int = ALL,
    kinds: Collection[str] = SHARED,
    replaces: Collection[str] = (),
) -> None:
    """Publishes masters as the weights of all ranks, batch by batch, as `written` writes and yields them, after it has yielded
    nothing once: up to there nothing was written.

    What these `params` have of these `kinds` is torn if that fails, by `cause`, and whole again if what `written` replaces
    without reading succeeds. All ranks raise what `failure` makes of an error on one; without it, the other ranks hear of it
    when the window settles. A collective.
    """
    masters, publisher, slots = state.masters, state.publisher, state.layout_ref.layout.slots
    placed = sum(1 << index for index, slot in enumerate(slots) if slot is not None)

    def write() -> None:
        waiting, steps = deque(batches), iter(written)
        try:
            next(steps)
            if is_alone:
                masters.wholeness.begin(cause, params, kinds)
            for _ in steps:
                publisher.send(waiting.popleft())
            masters.streams.flush()
        except BaseException:
            masters.abandon()
            with contextlib.suppress(GroupLost):
                for batch in waiting:
                    publisher.send(batch)
            raise
        finally:
            publisher.wait(params & placed)

    publisher.begin(batches)
    is_alone = state.group.size == 1
    if not is_alone:  # begun before the write, as the others write whatever becomes of this rank
        masters.wholeness.begin(cause, params, kinds)
    try:
        write() if failure is None else run_on_all(state.group, write, failure)
    except BaseException:
        with contextlib.suppress(GroupLost):
            publisher.end()  # the others end this version too, and read its weights
        raise
    publisher.end()
    masters.wholeness.end(replaces)


def by_bucket(state: ShardingState) -> list[Sequence[Block]]:
    """Returns a batch for each bucket."""
    layout = state.layout_ref.layout
    return list(map(layout.blocks, range(len(layout.buckets))))
