"""Lightning's strategy for a sharded optimizer, of `lightning` or of `pytorch_lightning`.

    strategy = ShardedStrategy(zero={"stage": 2})
    trainer = Trainer(strategy=strategy, devices=8, gradient_clip_val=1.0)

A checkpoint is Lightning's own file with the weights, as `load_from_checkpoint` reads it, and beside it a folder with the
shares that training goes on from: `best.ckpt` and `best.ckpt.zero`. The file names the shares that belong to it, and older ones
go only when it is written, in a thread of Lightning's too, so that a save that is broken off leaves the last one as it was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zero.config.deepspeed.mapping import Implied
from zero.integrations.options import Framework, Given, check_ddp, read_options
from zero.plan.stages import stage_of
from zero.sharding.load import load
from zero.sharding.optimizer import ShardedOptimizer, shard
from zero.sharding.save import save

_SHARES = "zero_shares"  # the key in Lightning's file that names its shares in the folder beside it


def _shares_of(file: str | os.PathLike[str]) -> Path:
    """Returns the folder that belongs to a file of Lightning's, which may be a link to it."""
    path = Path(file).resolve()
    return path.with_name(f"{path.name}.zero")


def _after_writing(checkpoint_io: Any, act: Callable[[Mapping[str, Any]], None]) -> None:
    """Makes `checkpoint_io` call `act` with each checkpoint once its file is written. The innermost one does: those around it
    may only hand a checkpoint to a thread, as AsyncCheckpointIO does."""
    while (inner := getattr(checkpoint_io, "checkpoint_io", None)) is not None:
        checkpoint_io = inner
    write = checkpoint_io.save_checkpoint

    def write_and_act(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        write(checkpoint, *args, **kwargs)
        act(checkpoint)

    checkpoint_io.save_checkpoint = write_and_act


def _ddp_strategy() -> Any:
    """Returns the class of `lightning` or of `pytorch_lightning`, whichever the program has imported, as neither knows the
    other's classes."""
    for package in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda package: package not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            return import_module(f"{package}.strategies").DDPStrategy
    raise ModuleNotFoundError(
        "Cannot import zero.integrations.lightning: neither lightning nor pytorch_lightning is installed. "
        "Install zero-accelerators[lightning].",
        name="lightning",
    )


DDPStrategy: Any = _ddp_strategy()


class ShardedStrategy(DDPStrategy):
    """A strategy that starts ranks as DDPStrategy does, whose other arguments it takes. `zero` has the options of `zero.shard`,
    or is a DeepSpeed configuration: a dict, or the path of a file, which is read when a fit begins."""

    optimizers: list[Any]

    def __init__(self, *args: Any, zero: Given, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(zero, Mapping) and zero.get("dtype") in ("float16", torch.float16):
            raise ValueError(
                "Cannot shard under Lightning with dtype='float16': Lightning calls backward itself, without a loss scale for "
                "such weights. Use precision='16-mixed', or dtype='bfloat16'."
            )
        check_ddp(self._ddp_kwargs, self._ddp_comm_hook or self._ddp_comm_wrapper, self._model_averaging_period)
        self.zero = zero
        self._shares: Path | None = None  # the shares of the checkpoint that is being loaded
        # By tag: the folders to remove once the file that names these shares is written.
        self._older: dict[str, list[Path]] = {}

    @property
    def sharded(self) -> ShardedOptimizer:
        """The sharded optimizer, while the model is fitted."""
        optimizer: ShardedOptimizer = self.optimizers[0]
        return optimizer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of the ranks that have samples of their own, and of this one among them."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                return {"num_replicas": optimizer.group.size, "rank": optimizer.group.rank}
        return dict(super().distributed_sampler_kwargs)

    def configure_ddp(self) -> None:
        """Does nothing: the model is not wrapped, since the sharded optimizer reduces the gradients."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Shards the optimizer that `configure_optimizers` returns. A collective."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"Cannot shard {len(self.optimizers)} optimizers of configure_optimizers: one is sharded for one model. Return "
                "one, with a parameter group for each part of the model that has its own settings, or make several one with "
                "zero.optim.several.Optimizers([muon, adamw])."
            )
        as_ddp = {"buffers": "broadcast" if self._ddp_kwargs.get("broadcast_buffers", True) else "local"}
        _after_writing(self.checkpoint_io, self._remove_older)
        options = {**as_ddp, **read_options(self.zero, self._framework(trainer)).shard}
        self.optimizers = [shard(self.lightning_module, self.optimizers[0], **options)]

    def _framework(self, trainer: Any) -> Framework:
        precision = str(trainer.precision)
        dtype = "bfloat16" if precision.startswith("bf16") else "float16" if precision.startswith("16") else "float32"
        implied = Implied(
            world_size=self.world_size,
            accumulation=trainer.accumulate_grad_batches,
            clip=float(trainer.gradient_clip_val or 0.0),
            dtype=dtype,
        )
        words = {"accumulation": "accumulate_grad_batches", "clip": "gradient_clip_val", "dtype": "precision"}
        return Framework("Lightning", implied, words)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients on this rank at stages 0 and 1. At stage 2 every micro-batch goes into the shards at once, since
        waiting would keep whole gradients."""
        if stage_of(self.sharded.sharding.config.stage).accumulates_locally:
            with self.sharded.no_sync():
                yield
        else:
            yield

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing for Lightning's file: `save_checkpoint` writes shares."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the shares and Lightning's file, or the file alone for weights. In an accumulation its
        gradients are left out, as Lightning leaves them out. A collective."""
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        tag, folder = self.broadcast(f"state-{uuid.uuid4().hex[:12]}"), _shares_of(filepath)
        save(folder, self.sharded, tag, mid_window=True)
        if self.is_global_zero:  # rank 0 writes the file; a later save may make its shares before that
            self._older[tag] = [other for other in folder.iterdir() if other.is_dir() and other.name != tag]
        super().save_checkpoint({**checkpoint, _SHARES: tag}, filepath, storage_options)

    def _remove_older(self, checkpoint: Mapping[str, Any]) -> None:
        for shares in self._older.pop(checkpoint.get(_SHARES, ""), ()):
            shutil.rmtree(shares, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads Lightning's file, of a fit that was sharded or of another."""
        self._shares = _shares_of(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the shares of the checkpoint, or what a plain optimizer saved. A collective."""
        if any(checkpoint["optimizer_states"]):
            super().load_optimizer_state_dict(checkpoint)
        elif self._shares is not None and (self._shares / checkpoint.get(_SHARES, "")).is_dir():
            load(self._shares, self.sharded, checkpoint.get(_SHARES))
        else:
            raise FileNotFoundError(
                f"Cannot resume: the optimizer's state of this checkpoint is not beside it, in {self._shares}. Move that "
                "folder with the file, or load the weights alone with load_from_checkpoint."
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint that is kept no longer, with its shares."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_shares_of(filepath), ignore_errors=True)

    def teardown(self) -> None:
        """Makes the model plain again."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.close()
        super().teardown()
