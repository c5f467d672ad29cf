"""The one way in which weights are written: whatever fails on a rank, it sends every bucket, as other ranks wait for them.

    def written():               # of a step
        for batch in batches:
            step_masters(batch)
            yield batch          # its weights are sent, and then the next batch is stepped

    publish(state, batches, prepare, written(), "step 9", failure)

`prepare` is called before anything is written. A step, a load, `fill` and `train()` differ in what they pass, and in nothing
else. A load of rank 1 that fails at batch 3 of 5 still sends batches 3 to 5, as they are, since rank 0 waits for
five; then both raise.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from zero.comm.one_answer import Failure, run_on_all
from zero.errors import GroupLost
from zero.memory.masters import ALL, SHARED
from zero.plan.layout import Block
from zero.sharding.state import ShardingState


def publish(
    state: ShardingState,
    batches: Sequence[Sequence[Block]],
    prepare: Callable[[], None],
    written: Iterable[Sequence[Block]],
    cause: str,
    failure: Failure | None,
    *,
    params: int = ALL,
    kinds: Collection[str] = SHARED,
    replaces: Collection[str] = (),
) -> None:
    """Publishes masters as the weights of all ranks, batch by batch. A collective.

    Args:
        batches: The blocks that will be written, batch by batch, the same buckets in the same order on all ranks.
        prepare: Does what comes before anything is written. If it fails on a rank alone, nothing is torn.
        written: Writes the masters of a batch and then yields it.
        cause: What is going on, for errors that name what tore the weights.
        failure: Makes the error that all ranks raise if one of them fails. Without it, the others hear of the failure when
            the window settles.
        params: The parameters, as bits, that are torn if `written` fails.
        kinds: The kinds of their states that are torn then.
        replaces: The kinds that `written` replaces without reading them, which are whole again if it succeeds.
    """
    masters, publisher, slots = state.masters, state.publisher, state.layout_ref.layout.slots
    placed = sum(1 << index for index, slot in enumerate(slots) if slot is not None)
    is_alone = state.group.size == 1

    def write() -> None:
        waiting = deque(batches)
        try:
            prepare()
            if is_alone:
                masters.wholeness.begin(cause, params, kinds)
            for _ in written:
                publisher.send(waiting.popleft())
            masters.streams.flush()
        except BaseException:
            masters.abandon()
            # The others wait for these. Fails without it, and without the line below that begins before the write:
            # test_a_writer_that_breaks_off_leaves_weights_torn_until_a_load in tests/promises/test_torn.py.
            with contextlib.suppress(GroupLost):
                for batch in waiting:
                    publisher.send(batch)
            raise
        finally:
            publisher.wait(params & placed)

    publisher.begin(batches)
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
