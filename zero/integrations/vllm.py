"""Weights of a sharded model for vLLM, which generates with them between steps.

    weights = WeightSource(model)
    engine = WeightTransferTrainerFactory.trainer_init(..., client=client, source=weights)
    engine.send_weights()  # after a step

vLLM itself is not imported: a source is whatever has `metadata` and can be iterated over, again for each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from zero.runtime.params.unread import ParamReader
from zero.setup.parts import check_whole_here
from zero.sharding.optimizer import optimizers_of

__all__ = ["ParamMeta", "WeightSource"]


class ParamMeta(NamedTuple):
    """The facts of a weight, which vLLM gets before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The weights of a model for vLLM: first what there is, and then each name and whole tensor, one after the other.

    At stage 3 each rank that iterates pulls a weight, and frees it as the next one is asked for; ranks that do not send need
    not iterate. Not a collective. `rename` gives the name that vLLM has for a parameter, if it is another one.
    """

    def __init__(self, model: nn.Module, rename: Callable[[str], str] | None = None) -> None:
        check_whole_here(model, "send the weights", "Save with zero.save, and load what zero.export makes of it.")
        if hasattr(model, "peft_config"):
            raise ValueError(
                "Cannot send a model with adapters of PEFT: vLLM has its weights under other names. Send the adapters as "
                "vLLM loads them, from a folder, or merge them first."
            )
        self.model = model
        self._rename = rename or (lambda name: name)

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and whole shape of all weights, and reads none."""
        named = self.model.named_parameters()
        return [ParamMeta(self._rename(name), param.dtype, tuple(param.shape)) for name, param in named]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for optimizer in optimizers_of(self.model):
            optimizer.sharding.check_whole("send the weights")
        with ParamReader() as reader:
            for name, param in self.model.named_parameters():
                yield self._rename(name), _copy_of(param, reader)


@torch.no_grad()
def _copy_of(param: nn.Parameter, reader: ParamReader) -> torch.Tensor:
    """Returns a copy, which stays what it is when the weights are stepped or freed."""
    reader.hold(param)
    copied: torch.Tensor = param.detach().clone()
    return copied
