"""An engine without an optimizer: the model as a configuration wants it, for forward only."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import nn

from zero.checkpoint.export import read_weights
from zero.checkpoint.folder import Folder
from zero.comm.group import Group
from zero.comm.one_answer import all_or_none
from zero.config.schema import ZeroConfig
from zero.engine.base import BaseEngine
from zero.engine.optimizer_names import Scaler
from zero.engine.reports import NoReports
from zero.memory.formats import DTYPES
from zero.setup.module_sync import cast_buffers, cast_inputs, sync_module_states
from zero.setup.parts import Parts, check_whole_here
from zero.setup.selection import ManagedParams, fp32_islands
from zero.sharding.unread import UnreadParams

_NOTHING = ManagedParams([], [], [], [], [], [], [], [], [], [])


class ForwardEngine(BaseEngine):
    """All ranks have rank 0's values to begin with, in the dtype of the configuration, and no method trains them.

    It is an engine without an optimizer. Constructing it is a collective.
    """

    optimizer: None = None
    client_optimizer: None = None
    lr_scheduler: None = None
    monitor = NoReports()
    global_steps = global_samples = micro_steps = skipped_steps = 0

    def __init__(
        self, model: nn.Module, config: ZeroConfig, group: Group, device: torch.device, training_dataloader: Any = None
    ) -> None:
        super().__init__(model, config, group, device, training_dataloader)
        self.loss_scaler: Any = Scaler(1.0, dynamic=False)  # a script may replace it by its own
        UnreadParams(model).begin(group, shards_weights=False)
        sync_module_states(model, _NOTHING, group, Parts(model))
        if config.dtype is not None:
            kept = fp32_islands(model, config.keep_fp32)
            for param in model.parameters():
                if param.is_floating_point() and id(param) not in kept:
                    param.data = param.data.to(DTYPES[config.dtype])
        cast_buffers(model, config)
        self._input_cast = cast_inputs(model, config)

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: this engine only runs forward."""
        self._refuse("send a loss backward")

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: this engine only runs forward."""
        self._refuse("step")

    def scale(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: this engine only runs forward."""
        self._refuse("scale a loss")

    def save_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: there is no optimizer to save. `save_16bit_model` writes the weights."""
        self._refuse("save a checkpoint", "save_16bit_model writes the weights. To train, pass")

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True, **_: Any
    ) -> tuple[str | None, Any]:
        """Loads the weights and buffers of a checkpoint, and returns its path and the client state; `(None, None)` if there is
        none yet and no tag was given. A collective."""

        def read() -> tuple[str | None, Any]:
            if tag is None and Folder.at(load_dir).latest() is None:
                return None, None
            check_whole_here(self.module, "load a checkpoint without an optimizer", "Load weights with zero.load_weights.")
            path, weights, extra = read_weights(load_dir, None if tag is None else str(tag))
            self.module.load_state_dict(weights, strict=load_module_strict)
            return str(path), extra

        return all_or_none(self.group, "A load", read)

    def _refuse(self, what: str, instead: str = "Pass") -> NoReturn:
        raise ValueError(f"Cannot {what}: this engine has no optimizer. {instead} optimizer=, or write one in config.")

    def loss_scale(self) -> float:
        """Returns 1.0, as nothing is scaled."""
        return 1.0

    def close(self) -> None:
        """Leaves the group of ranks; the model keeps its weights. Not a collective."""
        if self._input_cast is not None:
            self._input_cast.remove()
        self.group.close()
