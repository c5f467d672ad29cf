"""What an engine says about its model and its configuration, under DeepSpeed's names."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from torch import nn

from accelerators.launch import read_launch
from zero.comm.group import Group
from zero.config.schema import Batch, ZeroConfig
from zero.engine.accumulation import Accumulation
from zero.engine.checkpoints import state_dict_of
from zero.engine.loading import loader_of
from zero.sharding.optimizer import ShardedOptimizer


class ModelAnswers:
    """The accessors of every engine, with or without an optimizer. It has methods only; the state they read belongs to the
    engine."""

    module: nn.Module

    @property
    def config(self) -> ZeroConfig:
        """The effective configuration. No collective."""
        raise NotImplementedError

    @property
    def group(self) -> Group:
        """The ranks that train together."""
        raise NotImplementedError

    # what it was told --------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch | None:
        """How many samples make a step; None where the configuration does not say."""
        return self.config.batch

    def train_batch_size(self) -> int:
        """Samples that make a step, over all ranks."""
        return self._batch("train_batch_size").global_samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one backward of one rank."""
        return self._batch("train_micro_batch_size_per_gpu").micro_samples

    def _batch(self, asked: str) -> Batch:
        if self.batch is None:
            raise ValueError(f"Cannot answer {asked}(): the configuration gives no batch sizes. Write {asked} in it.")
        return self.batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps that make a step."""
        return self.config.accumulation or 1

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's part of a dataset, in micro-batches unless `batch_size` says otherwise; not shuffled for the
        routes "eval" and "predict". No collective."""
        return loader_of(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            self.group,
            shuffle=route == "train",
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self.config.drop_last,
        )

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """The methods that say the batch sizes: of a step, of a micro-step, and how many of these make a step."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether `step` counts micro-steps."""
        return self.config.count_micro_steps

    def dataloader_drop_last(self) -> bool:
        """Whether a loader leaves out the last, smaller batch."""
        return self.config.drop_last

    def optimizer_name(self) -> str | None:
        """What the configuration calls its optimizer, in small letters; None where it describes none."""
        return None if self.config.optimizer is None else self.config.optimizer.kind.lower()

    def scheduler_name(self) -> str | None:
        """What the configuration calls its schedule; None where it describes none."""
        return None if self.config.schedule is None else self.config.schedule.kind

    def steps_per_print(self) -> int | None:
        """After how many steps a line is logged."""
        return self.config.report.every_steps

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of a step are logged."""
        return self.config.report.wall_clock

    def memory_breakdown(self) -> bool:
        """Whether memory is logged."""
        return self.config.report.memory

    def dynamic_loss_scale(self) -> bool:
        """Whether a loss scale moves."""
        return self.config.loss_scale is not None and self.config.loss_scale.dynamic

    def initial_dynamic_scale(self) -> float:
        """What the loss scale starts at; 1.0 where losses are not scaled."""
        return 1.0 if self.config.loss_scale is None else self.config.loss_scale.initial

    def torch_autocast_enabled(self) -> bool:
        """Whether the engine calls the model under autocast."""
        return self.config.autocast is not None

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0.0 for no clipping."""
        return self.config.clip or 0.0

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def fp16_enabled(self) -> bool:
        return self.config.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        return self.config.dtype == "bfloat16"

    # where it is -------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """This rank's number in the group that trains."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group that trains."""
        return self.group.size

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, as the launcher said; 0 where none did."""
        return read_launch(os.environ).local_rank or 0

    # the model's own answers -------------------------------------------------------------------------------------

    def module_state_dict(self, *arguments: Any, exclude_frozen_parameters: bool = False, **options: Any) -> dict[str, Any]:
        """The model's state dict, its weights in the dtype that they train in. No collective."""
        return state_dict_of(self.module, *arguments, exclude_frozen=exclude_frozen_parameters, **options)

    def __getattr__(self, name: str) -> Any:
        """Looks up on the model what the engine does not have. Where a method of the model returns the model, the engine is
        returned."""
        if name == "module" or (name.startswith("__") and name.endswith("__")):  # unset while it is copied; Python's own
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        try:
            attribute = getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(
                f"Cannot find {name!r} in {type(self).__name__}: neither it nor its {type(self.module).__name__} has it. "
                "Ask the optimizer or the model for what is theirs.",
                name=name,
                obj=self,
            ) from error
        if not inspect.ismethod(attribute):
            return attribute

        @functools.wraps(attribute)
        def ask(*arguments: Any, **options: Any) -> Any:
            answer = attribute(*arguments, **options)
            return self if answer is self.module else answer

        return ask


class Answers(ModelAnswers):
    """The accessors of an engine with an optimizer."""

    optimizer: ShardedOptimizer
    _accumulation: Accumulation
    _sizes: Batch | None

    @property
    def config(self) -> ZeroConfig:
        """The effective configuration. No collective."""
        return self.optimizer.config

    @property
    def group(self) -> Group:
        """The ranks that train together."""
        return self.optimizer.group

    @property
    def batch(self) -> Batch | None:
        """How many samples make a step now; None where the configuration does not say."""
        return self._sizes

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps that make a step."""
        return self._accumulation.declared

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of samples of a step from the next window on: more or fewer micro-steps of the same size. All
        ranks call it alike, between two windows. No collective."""
        now = self._batch("set_train_batch_size")
        self._resize(Batch.of(global_samples=train_batch_size, micro_samples=now.micro_samples, world_size=now.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the number of samples of a micro-step from the next window on; the number of micro-steps stays.
        No collective."""
        now = self._batch("set_train_micro_batch_size")
        self._resize(Batch.of(micro_samples=micro_batch_size, accumulation=now.accumulation, world_size=now.world_size))

    def _resize(self, batch: Batch) -> None:
        if self._accumulation.num_micro_batches:
            raise ValueError(
                "Cannot change the batch size in the middle of an accumulation: its gradients were divided for another. Call "
                "it after a step, or after discard()."
            )
        self._sizes = batch
        self._accumulation.declared = batch.accumulation
        self.optimizer.sharding.window.scaling.divisor = batch.accumulation

    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1.0 where losses are not scaled."""
        scale = self.optimizer.loss_scale
        return 1.0 if scale is None else scale.value

    def get_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each group: its betas where it has them."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]
