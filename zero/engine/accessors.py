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
from zero.engine.checkpoints import state_dict_of
from zero.sharding.optimizer import ShardedOptimizer


class ModelAnswers:
    """What any engine says. Methods only: what they speak of belongs to the engine."""

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

    def train_batch_size(self) -> int:
        """Samples that make a step, over all ranks."""
        return self._batch("train_batch_size").global_samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one backward of one rank."""
        return self._batch("train_micro_batch_size_per_gpu").micro_samples

    def _batch(self, asked: str) -> Batch:
        if self.config.batch is None:
            raise ValueError(f"{asked}() was asked for, but the configuration gives no batch sizes. Write {asked} in it.")
        return self.config.batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps that make a step."""
        return self.config.accumulation or 1

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
        """What an engine does not have is the model's; where the model answers with itself, the engine does."""
        if name == "module" or (name.startswith("__") and name.endswith("__")):  # unset while it is copied; Python's own
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        try:
            found = getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(
                f"{name} was asked of an {type(self).__name__}, but neither it nor its {type(self.module).__name__} has it. "
                "Ask the optimizer or the model for what is theirs.",
                name=name,
                obj=self,
            ) from error
        if not inspect.ismethod(found):
            return found

        @functools.wraps(found)
        def ask(*arguments: Any, **options: Any) -> Any:
            answer = found(*arguments, **options)
            return self if answer is self.module else answer

        return ask


class Answers(ModelAnswers):
    """What an engine with an optimizer says."""

    optimizer: ShardedOptimizer

    @property
    def config(self) -> ZeroConfig:
        """The effective configuration. No collective."""
        return self.optimizer.config

    @property
    def group(self) -> Group:
        """The ranks that train together."""
        return self.optimizer.group

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
