"""Going on after a lost collective, where every rank is still there: new connections, an empty window, the same weights."""

from __future__ import annotations

import json
from typing import Any

from zero.comm.exchange import exchange_texts
from zero.errors import RanksDiffer
from zero.runtime.grads.phase import Phase
from zero.sharding.state import ShardingState


def rebuild(sharding: ShardingState, group: Any) -> None:
    """Connects all ranks anew and drops what was on its way. Raises on all of them where some rank had stepped already or is in
    the middle of a step; the new connections then serve to load a checkpoint. A collective."""
    window, sync = sharding.window, sharding.window.sync
    is_torn = window.phase is Phase.TORN
    sharding.group.reconnect(group)
    window.reducer.restart()
    sharding.publisher.abandon()
    if not is_torn:
        sharding.masters.streams.flush()  # what was written to masters since the last step
    sharding.masters.abandon()
    sharding.placer.weights.reconnect()
    window.forget()
    local = {
        "steps": sync.step,
        "settled": sync.sync_count,
        "layout": sharding.layout_ref.layout.digest,
        "torn": is_torn,
    }
    everyone = [json.loads(text) for text in exchange_texts(sharding.group, json.dumps(local))]
    sync.sync_count = max(progress["settled"] for progress in everyone)
    for rank, progress in enumerate(everyone):
        moment = "in the middle of a step" if progress["torn"] else f"after {progress['steps']} steps"
        if progress["torn"] or (progress["steps"], progress["layout"]) != (everyone[0]["steps"], everyone[0]["layout"]):
            raise RanksDiffer(
                f"Cannot go on after rebuild: rank {rank} was lost {moment}, rank 0 after {everyone[0]['steps']}, so their "
                "weights differ. The ranks are connected again. Load a checkpoint on all of them and go on from that."
            )
