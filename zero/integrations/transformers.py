"""transformers' `Trainer` with a sharded optimizer.

    trainer = ShardedTrainer(model, args, train_dataset=data, zero={"stage": 2})
    trainer.train(resume_from_checkpoint=...)

Everything else is the Trainer's own: accumulation, clipping, schedules, precision, evaluation, rotation of checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero.config.deepspeed.mapping import Implied
from zero.engine.optimizers import own_optimizer
from zero.integrations.accelerate import ShardedAccelerator
from zero.integrations.options import Framework, Given, Options, read_options
from zero.optim.schedules import build_schedule
from zero.sharding.load import load
from zero.sharding.save import save

try:
    from transformers import Trainer

    from zero.integrations.pretrained import from_pretrained, loading
    from zero.integrations.saving import save_pretrained, saving
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Cannot import zero.integrations.transformers: {error.name} is not installed. "
        "Install zero-accelerators[transformers].",
        name=error.name,
    ) from error

__all__ = ["ShardedTrainer", "ShardedTrainerMixin", "from_pretrained", "loading", "save_pretrained"]
_FOLDER, _TAG = "zero", "state"  # in each of the Trainer's checkpoints


class ShardedTrainerMixin:
    """Makes a Trainer shard: `class MyTrainer(ShardedTrainerMixin, SFTTrainer)`, for a Trainer of your own or of TRL's."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zero: Given, **kwargs: Any) -> None:
        self._zero = zero  # before the Trainer makes its accelerator
        super().__init__(*args, **kwargs)

    def _options(self, num_training_steps: int | None = None) -> Options:
        """What `zero` says, with the Trainer's arguments for its "auto"."""
        args = self.args
        total = num_training_steps or max(args.max_steps, 1)
        implied = Implied(
            world_size=args.world_size,
            global_samples=args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps,
            micro_samples=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            clip=float(args.max_grad_norm or 0.0),
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            warmup_steps=max(args.get_warmup_steps(total), 1),
            total_steps=total,
        )
        words = {
            "clip": "max_grad_norm",
            "accumulation": "gradient_accumulation_steps",
            "micro_samples": "per_device_train_batch_size",
            "global_samples": "per_device_train_batch_size x ranks x gradient_accumulation_steps",
            "dtype": "the Trainer's precision",
        }
        return read_options(self._zero, Framework("the Trainer", implied, words, builds=True))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer of the DeepSpeed configuration if it has one, else the Trainer's."""
        config = self._options().config
        if self.optimizer is None and config is not None and config.optimizer is not None:
            params = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer = own_optimizer(config, params, self.model)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Makes the schedule of the DeepSpeed configuration if it has one, else the Trainer's."""
        config = self._options(num_training_steps).config
        if self.lr_scheduler is None and config is not None and config.schedule is not None:
            self.lr_scheduler = build_schedule(config.schedule, self.optimizer if optimizer is None else optimizer)
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Trainer's accelerator, and has it shard what it prepares."""
        if self.args.deepspeed:
            raise ValueError(
                "Cannot shard under TrainingArguments(deepspeed=...): that trains with DeepSpeed itself. Leave it out, and "
                "pass its configuration to the trainer as zero=."
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.args.n_gpu > 1:
            raise ValueError(
                f"Cannot shard: one process has {self.args.n_gpu} devices, over which the Trainer copies the model itself. "
                "Start one process for each, with torchrun."
            )
        if self.args.auto_find_batch_size:
            raise ValueError(
                "Cannot use auto_find_batch_size: ranks that fail at different times cannot begin again together. "
                "Set per_device_train_batch_size."
            )
        ShardedAccelerator.of(self.accelerator, self._options().shard)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes the whole model on the first rank, one weight after the other."""
        with saving(self.model) as weights:
            super()._save(output_dir, weights if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        frozen = {"exclude_frozen": bool(getattr(self.model, "peft_config", None))}  # of which adapters are all that is trained
        save(Path(output_dir) / _FOLDER, self.accelerator.sharded, _TAG, scheduler=self.lr_scheduler, **frozen)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Skips the weights of a checkpoint with shares: they are loaded with the shares, once the model is sharded."""
        if not (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint) / _FOLDER
        if best.is_dir() and self.accelerator.sharded is not None:
            load(best, self.accelerator.sharded, _TAG, optimizer_states=False, scheduler_states=False, counters=False)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / _FOLDER).is_dir():
            load(Path(checkpoint) / _FOLDER, self.accelerator.sharded, _TAG, scheduler=self.lr_scheduler)
        else:  # that of a Trainer which did not shard
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """A Trainer that takes `zero` as one more keyword: the options of `zero.shard`, `stage` at least, or a DeepSpeed
    configuration, a dict or the path of a file."""
