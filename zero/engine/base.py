"""The half of an engine that needs no optimizer: the model, and the configuration under DeepSpeed's names.

`Engine` in engine.py trains, `ForwardEngine` in forward_only.py runs forward only; both are a `BaseEngine`. A call of
DeepSpeed's is a method, with a row in docs/from-deepspeed.md; one that is not offered is an entry of `_ELSEWHERE`, which says
what to write instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accelerators.launch import read_launch
from zero.comm.group import Group
from zero.comm.levels import copies_of, of_family
from zero.config.schema import Batch, ZeroConfig
from zero.engine.checkpoints import state_dict_of, write_weights
from zero.engine.timers import ThroughputTimer, WallClockTimers
from zero.memory.formats import DTYPES
from zero.setup.parts import check_whole_here, is_of_expert


class BaseEngine:
    """A model, its configuration and the ranks that share it."""

    mpu: Any = None  # the object that `initialize` was passed

    def __init__(
        self, module: nn.Module, config: ZeroConfig, group: Group, device: torch.device, training_dataloader: Any = None
    ) -> None:
        self.module = module
        self.training_dataloader = training_dataloader
        self._config = config
        self._group = group
        self._default_device = device  # the device of a model without parameters
        self._sizes = config.batch

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {type(self.module).__name__}, rank {self._group.rank} of {self._group.size}"

    @property
    def config(self) -> ZeroConfig:
        """The effective configuration. Not a collective."""
        return self._config

    @property
    def group(self) -> Group:
        """The ranks that train together."""
        return self._group

    @property
    def data_parallel_group(self) -> Any:
        """The group of torch.distributed with all ranks, if all are data-parallel; None if it is not up.
        Not a collective."""
        from zero.comm.torch_world import world  # imported late, as torch.distributed is needed only for training

        if self.group_of_data.size < self._group.size:
            raise NotImplementedError(
                "Cannot return data_parallel_group: several ranks share each layer. Use mesh['dp'].get_group()."
            )
        return world()

    @property
    def group_of_data(self) -> Group:
        """The ranks that have samples of their own."""
        return of_family(self._group, 0)

    @property
    def has_moe_layers(self) -> bool:
        """True if the model has parameters of experts, by their `allreduce=False`. Not a collective."""
        return any(map(is_of_expert, self.module.parameters()))

    @property
    def device(self) -> torch.device:
        """The device that the model is on. Not a collective."""
        return next((param.device for param in self.module.parameters()), self._default_device)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Runs the model's forward, under the autocast of the configuration. Not a collective."""
        with autocast_of(self.config, self.device):
            return self.module(*inputs, **named)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Calls the model, as `engine(...)` does."""
        return self(*inputs, **named)

    def close(self) -> None:
        """Ends the training."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Closes the engine, as `close` does."""
        self.close()

    # the configuration -------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch | None:
        """The numbers of samples that make a step now; None if the configuration does not say."""
        return self._sizes

    def train_batch_size(self) -> int:
        """Returns the number of samples of a step, over all ranks."""
        return self._batch("train_batch_size").global_samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples of one backward of one rank."""
        return self._batch("train_micro_batch_size_per_gpu").micro_samples

    def _batch(self, asked: str) -> Batch:
        if self.batch is None:
            raise ValueError(f"Cannot answer {asked}(): the configuration gives no batch sizes. Write {asked} in it.")
        return self.batch

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-steps of a step."""
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
        """Returns a loader of this rank's part of a dataset, in micro-batches unless `batch_size` is given; not shuffled for
        the routes "eval" and "predict". Not a collective."""
        return loader_of(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            self.group_of_data,
            shuffle=route == "train",
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self.config.drop_last,
        )

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """Returns three methods: those that return the samples of a step, the samples of a micro-step, and the micro-steps of a
        step."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Returns whether `step` counts micro-steps."""
        return self.config.count_micro_steps

    def dataloader_drop_last(self) -> bool:
        """Returns whether a loader leaves out the last, smaller batch."""
        return self.config.drop_last

    def optimizer_name(self) -> str | None:
        """Returns the configuration's name for its optimizer, in small letters; None if it describes none."""
        return None if self.config.optimizer is None else self.config.optimizer.kind.lower()

    def scheduler_name(self) -> str | None:
        """Returns the configuration's name for its schedule; None if it describes none."""
        return None if self.config.schedule is None else self.config.schedule.kind

    def steps_per_print(self) -> int | None:
        """Returns the number of steps between two lines of the log."""
        return self.config.report.every_steps

    def wall_clock_breakdown(self) -> bool:
        """Returns whether the times of a step are logged."""
        return self.config.report.wall_clock

    def memory_breakdown(self) -> bool:
        """Returns whether memory is logged."""
        return self.config.report.memory

    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale moves."""
        return self.config.loss_scale is not None and self.config.loss_scale.dynamic

    def initial_dynamic_scale(self) -> float:
        """Returns the loss scale at the start; 1.0 if losses are not scaled."""
        return 1.0 if self.config.loss_scale is None else self.config.loss_scale.initial

    def torch_autocast_enabled(self) -> bool:
        """Returns whether the engine calls the model under autocast."""
        return self.config.autocast is not None

    def gradient_clipping(self) -> float:
        """Returns the norm that gradients are clipped to; 0.0 for no clipping."""
        return self.config.clip or 0.0

    def zero_optimization(self) -> bool:
        """Returns whether anything is sharded."""
        return self.config.stage > 0

    def zero_optimization_stage(self) -> int:
        """Returns the stage."""
        return self.config.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns whether gradients are sharded."""
        return self.config.stage > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Returns whether weights are sharded."""
        return self.config.stage > 2

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns True, as saved weights are whole."""
        return True

    def fp16_enabled(self) -> bool:
        """Returns whether weights are fp16."""
        return self.config.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        """Returns whether weights are bf16."""
        return self.config.dtype == "bfloat16"

    # timers ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def timers(self) -> WallClockTimers:
        """Timers by name, for a script's own use: `engine.timers("data").start()`."""
        return WallClockTimers()

    @functools.cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Counts epochs and the samples of a second, on this rank's clock."""
        return ThroughputTimer(None, None if self.batch is None else self.batch.global_samples)

    # where it is -------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The number of this rank in the group that trains."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group that trains."""
        return self.group.size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that have samples of their own."""
        return self.group_of_data.size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that have the same samples."""
        return self.group.size // self.group_of_data.size

    def get_data_parallel_rank(self) -> int:
        """Returns the number of this rank among those that have samples of their own."""
        return self.group_of_data.rank

    def get_model_parallel_rank(self) -> int:
        """Returns the number of this rank among those that have the same samples."""
        copies = copies_of(self.group)
        return copies[self.group.rank].copy if copies else 0

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host, as the launcher said; 0 without one."""
        return read_launch(os.environ).local_rank or 0

    # the model ---------------------------------------------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """True when the model's forward is compiled."""
        return self.module._compiled_call_impl is not None

    def module_state_dict(self, *arguments: Any, exclude_frozen_parameters: bool = False, **options: Any) -> dict[str, Any]:
        """Returns the model's state dict, with weights in the dtype that they train in. Not a collective."""
        return state_dict_of(self.module, *arguments, exclude_frozen=exclude_frozen_parameters, **options)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Returns `module_state_dict()` on rank 0, and None on the others, as DeepSpeed does. Not a collective."""
        check_whole_here(self.module, "give whole weights", "Save with zero.save, and zero.export makes files of that.")
        return None if self.group.rank else self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _backward_epilogue(self) -> None:
        """Does nothing: a `backward` of a loss of several engines is seen by each."""

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_bytes: int | None = None,
    ) -> bool:
        """Writes the model's state dict for plain torch, in the dtype that it trains in, and returns True. A name that ends in
        .safetensors makes a safetensors file, and with `max_shard_bytes` several of about that size with an index; any other
        name is written by torch.save. Rank 0 writes, with one tensor in memory at a time. A collective."""
        path = Path(save_dir) / save_filename
        return write_weights(self.group, path, self.module, exclude_frozen_parameters, max_shard_bytes)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Saves as `save_16bit_model` does. A collective."""
        return self.save_16bit_model(save_dir, save_filename)

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, **_: Any
    ) -> None:
        """Loads the model's state dict, or the entry "module" of what has one; every rank passes the same. Not a collective."""
        state = checkpoint.get("module", checkpoint)
        if custom_load_fn is None:
            self.module.load_state_dict(state, strict=strict)
        else:
            custom_load_fn(src=state, dst=self.module)

    def __getattr__(self, name: str) -> Any:
        """Looks up on the model a name that the engine does not have. If a method of the model returns the model, as `train`
        does, the engine is returned instead."""
        # While an engine is copied it has no `module` yet, and Python asks for special names.
        if name == "module" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        try:
            attribute = getattr(self.module, name)
        except AttributeError as error:
            instead = _ELSEWHERE.get(name, "ask the optimizer or the model for what is theirs")
            raise AttributeError(
                f"Cannot find {name!r} in {type(self).__name__}: neither it nor its {type(self.module).__name__} has it. "
                f"{instead[0].upper()}{instead[1:]}.",
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


# what an engine is made with ------------------------------------------------------------------------------------------


def autocast_of(config: ZeroConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns the block that a configuration wants the model called in."""
    if config.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[config.autocast])


def loader_of(
    dataset: Any, batch_size: int, group: Group, *, shuffle: bool = True, sampler: Any = None, **options: Any
) -> Any:
    """Returns a DataLoader with torch's `options`, of this rank's part unless a sampler is given."""
    if isinstance(dataset, IterableDataset):
        if group.size > 1:
            raise ValueError(
                f"Cannot load an IterableDataset on {group.size} ranks: each of them would get all of it. Let it give each "
                "rank its part, and pass a DataLoader of it."
            )
    elif sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=group.size, rank=group.rank, shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


# Names that DeepSpeed's engines have besides, each with what to write instead.
_ELSEWHERE = {
    "allreduce_gradients": "call settle()",
    "clip_fp32_gradients": "write gradient_clipping in the configuration, which step applies",
    "load_universal_checkpoint": "load_checkpoint takes a checkpoint of any number of ranks",
    "train_batch": "there is no pipeline: call forward, backward and step",
    "eval_batch": "there is no pipeline: call the engine under torch.no_grad()",
    "get_sequence_parallel_group": "pass mpu= to initialize, or use zero.ulysses and zero.sequence_batch",
    "seq_parallel_group": "pass mpu= to initialize, or use zero.ulysses and zero.sequence_batch",
    "generate": "call it on the model that the engine was made from, which must have it",
    "release_inference_cache": "there is no inference engine, and so no cache of one",
    "set_custom_curriculum_learning_schedule": "choose the data in your own loader",
    "set_data_post_process_func": "process batches in collate_fn=, or in your own loader",
    "flops_profiler": "use torch.profiler, or torch.utils.flop_counter",
    "curriculum_scheduler": "choose the data in your own loader",
    "get_compile_time": "use torch.profiler: torch.compile compiles",
    "get_additional_losses": "there is no pipeline: the model returns all losses",
    "grid": "there is no pipeline, whose grid it is",
    "set_batch_fn": "there is no pipeline: shape a batch before the engine is called with it",
    "set_has_attention_mask": "there is no pipeline: pass the mask to the engine",
    "reset_activation_shape": "leave it out: there is no pipeline, and batches may have any shape",
    "random_ltd_scheduler": "drop tokens in the model's own forward",
    "quantizer": "quantise the model itself, with torchao for instance",
}
