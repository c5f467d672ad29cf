"""What an engine says about its model and its configuration, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero.config import Batch, ZeroConfig
from zero.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from typing_extensions import Self


class Answers:
    """Methods only: what they speak of belongs to the engine."""

    module: nn.Module
    optimizer: ShardedOptimizer
    config: ZeroConfig

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

    # the model's own answers -------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*arguments, **options)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return self.module.buffers(recurse)

    def named_buffers(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*arguments, **options)

    def modules(self) -> Iterator[nn.Module]:
        return self.module.modules()

    def named_modules(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*arguments, **options)
        return found

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.module.state_dict(*arguments, **options)

    def module_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(state_dict, *arguments, **options)
