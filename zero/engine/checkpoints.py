"""An engine's checkpoints, under DeepSpeed's names and with its returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from zero.comm.exchange import all_or_none, require_same_args
from zero.sharding.load import latest, load_from
from zero.sharding.optimizer import ShardedOptimizer
from zero.sharding.save import save
from zero.sharding.snapshot import finish_saving, snapshot_of

logger = logging.getLogger("zero")


class Checkpoints:
    """Methods only: what they save belongs to the engine."""

    optimizer: ShardedOptimizer

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        **options: Any,
    ) -> bool:
        """As `zero.save`, with its other options; `client_state` is rank 0's. A collective."""
        extra = dict(client_state or {})
        save(save_dir, self, None if tag is None else str(tag), extra, is_latest=save_latest, **options)  # type: ignore[arg-type]
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, Any]:
        """Takes a checkpoint in, and gives its path and the client state; `(None, None)` where there is none yet and no tag was
        given. A collective."""
        about = snapshot_of(self, None)
        if not load_module_strict:
            raise ValueError(
                "load_checkpoint(load_module_strict=False) was asked for, but what is matched by half cannot go on as it was. "
                "Export the checkpoint, and load what fits into the model before it is sharded."
            )
        finish_saving(self.optimizer)  # or the first one, which is still being written, would not be there
        tag = None if tag is None else str(tag)
        if tag is None:
            tag = all_or_none(about.parts.group, "A load", lambda: latest(load_dir))
            require_same_args(about.parts.group, "A load", latest=tag)
        if tag is None:
            logger.warning("There is no checkpoint in %s yet, so nothing was loaded.", load_dir)
            return None, None
        states, schedule = load_optimizer_states and not load_module_only, load_lr_scheduler_states and not load_module_only
        path, extra = load_from(load_dir, about, tag, states, schedule, not load_module_only)
        return str(path), extra
