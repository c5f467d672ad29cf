"""Goes on after a lost collective if every rank is still there: new connections, an empty window, the same weights."""

from __future__ import annotations

import json
from typing import Any

from zero.comm.group import exchange_texts
from zero.errors import RanksDiffer
from zero.sharding.state import ShardingState


def rebuild(sharding: ShardingState, group: Any) -> None:
    """Connects all ranks anew and drops what was on its way. Raises on all of them if some rank had stepped already or failed
    in the middle of a step; the new connections then serve to load a checkpoint. A collective."""
    window, sync = sharding.window, sharding.window.sync
    sharding.group.reconnect(group)
    window.reducer.restart()
    sharding.publisher.abandon()
    wholeness = sharding.masters.wholeness
    if wholeness.is_whole:
        sharding.masters.streams.flush()  # what was written to masters since the last step
    sharding.masters.abandon()
    sharding.placer.weights.reconnect()
    window.forget()
    local = {
        "steps": sync.step,
        "settled": sync.sync_count,
        "layout": sharding.layout_ref.layout.digest,
        "torn": not wholeness.is_whole,
    }
    everyone = [json.loads(text) for text in exchange_texts(sharding.group, json.dumps(local))]
    sync.sync_count = max(progress["settled"] for progress in everyone)
    most = max(progress["steps"] for progress in everyone)
    ahead = next((rank for rank, progress in enumerate(everyone) if progress["steps"] == most and not progress["torn"]), 0)
    for rank, progress in enumerate(everyone):
        same = all(progress[name] == everyone[ahead][name] for name in ("steps", "layout"))
        if progress["torn"] or not same:
            if sync.step != most:
                wholeness.tear("a step that other ranks have taken")  # and this one has not
            sync.go_on_from(most)  # so that all ranks are at the same step when they load
            moment = "in the middle of a step" if progress["torn"] else f"after {progress['steps']} steps"
            raise RanksDiffer(
                f"Cannot go on after rebuild: rank {rank} was lost {moment}, and rank {ahead} has taken {most}, so their "
                "weights differ. The ranks are connected again. Load a checkpoint on all of them and go on from that."
            )
