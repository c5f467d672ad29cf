"""transformers' `Trainer` with a sharded optimizer.

    trainer = ShardedTrainer(model, args, train_dataset=data, zero={"stage": 2})
    trainer.train(resume_from_checkpoint=...)

Everything else is the Trainer's own: accumulation, clipping, schedules, precision, evaluation, rotation of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.integrations.accelerate import ShardedAccelerator
from zero.sharding.load import load
from zero.sharding.save import save

try:
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"zero.integrations.transformers was imported, but {error.name} is not installed. "
        "Install zero-accelerators[transformers].",
        name=error.name,
    ) from error

_FOLDER, _TAG = "zero", "state"  # in each of the Trainer's checkpoints


class Sharding:
    """What makes a Trainer shard: `class MyTrainer(Sharding, Seq2SeqTrainer)` for one of your own."""

    accelerator: Any
    args: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zero: Mapping[str, Any], **kwargs: Any) -> None:
        self._zero = dict(zero)  # before the Trainer makes its accelerator
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's accelerator, made to shard what it prepares."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.args.n_gpu > 1:
            raise ValueError(
                f"Sharded training was asked for, but one process was given {self.args.n_gpu} devices, over which the Trainer "
                "copies the model itself. Start one process for each, with torchrun."
            )
        if self.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size was asked for, but ranks that fail at different times cannot begin again together. "
                "Set per_device_train_batch_size."
            )
        ShardedAccelerator.of(self.accelerator, self._zero)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / _FOLDER, self.accelerator.sharded, _TAG, scheduler=self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / _FOLDER).is_dir():
            load(Path(checkpoint) / _FOLDER, self.accelerator.sharded, _TAG, scheduler=self.lr_scheduler)
        else:  # that of a Trainer which did not shard
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class ShardedTrainer(Sharding, Trainer):
    """A Trainer that takes `zero`, the options of `zero.shard`, `stage` at least, as one more keyword."""
