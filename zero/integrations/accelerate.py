"""accelerate's `Accelerator`, which shards in `prepare` instead of wrapping the model in DistributedDataParallel.

    accelerator = ShardedAccelerator(zero={"stage": 2})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the loop stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `save_state` and `load_state`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import accelerators
from zero.comm.torch_world import new_mesh, ranks_along
from zero.config.deepspeed.mapping import Implied
from zero.engine.initialize import move
from zero.integrations.options import Framework, Given, check_ddp, read_options
from zero.plan.stages import stage_of
from zero.runtime.params.swap import gathered
from zero.setup.parts import Parts, check_whole_here
from zero.sharding.load import load
from zero.sharding.optimizer import ShardedOptimizer, shard
from zero.sharding.save import save
from zero.window.window import window_of

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import recursively_apply
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Cannot import zero.integrations.accelerate: {error.name} is not installed. Install zero-accelerators[accelerate].",
        name=error.name,
    ) from error

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)
_AXES = ("tp_size", "cp_size", "sp_size", "dp_shard_size")  # the sizes in a ParallelismConfig
_FOLDER, _TAG = "zero", "state"  # the folder and the tag inside the folder that save_state writes


class PreparedOptimizer(AcceleratedOptimizer):
    """The optimizer that `prepare` returns for a sharded one: accelerate's own, and beside it the calls that a sharded one has
    more, such as `whole_grad`."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # unset while the optimizer is copied
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.optimizer, name)


class ShardedAccelerator(Accelerator):
    """An Accelerator for one model and its optimizer. `zero` has the options of `zero.shard`, `stage` at least, or is a
    DeepSpeed configuration: a dict, or the path of a file.

    `prepare` shards the one optimizer for the one model, and has accelerate prepare all as without DDP; `prepare_model` wraps
    nothing, as the sharded optimizer reduces gradients; `prepare_optimizer` gives accelerate's own a class that hands
    `whole_grad` and the like on. `save_state` and `load_state` leave the sharded optimizer and its model to two hooks. `of`
    exchanges the class of an Accelerator that somebody else made, as others hold that object.
    """

    _optimizers: list[Any]  # as accelerate has prepared them

    def __init__(self, *args: Any, zero: Given, **kwargs: Any) -> None:
        if not args and accelerators.current().name == "cpu":  # without `cpu`, accelerate sees one process if ranks are CPUs
            kwargs.setdefault("cpu", True)
        super().__init__(*args, **kwargs)
        self._begin(read_options(zero, self._framework()).shard)

    def _framework(self) -> Framework:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(self.mixed_precision, "float32")
        implied = Implied(world_size=self.num_processes, accumulation=self.gradient_accumulation_steps, dtype=dtype)
        words = {"accumulation": "gradient_accumulation_steps", "dtype": "mixed_precision"}
        return Framework("accelerate", implied, words)

    @classmethod
    def of(cls, accelerator: Accelerator, zero: Mapping[str, Any]) -> ShardedAccelerator:
        """Makes an existing Accelerator shard, in place, and returns it."""
        accelerator.__class__ = cls
        accelerator._begin(zero)
        return accelerator

    def _begin(self, zero: Mapping[str, Any]) -> None:
        splits = self.parallelism_config
        conflicts = [kind.value for kind in _OTHERS if self.distributed_type == kind]
        conflicts += [axis for axis in _AXES if splits is not None and getattr(splits, axis, 1) > 1]
        if conflicts:
            raise ValueError(
                f"Cannot shard under accelerate: this Accelerator is set up for {conflicts[0]}, which distributes the model "
                "itself. Configure it for plain data parallelism, as `accelerate launch` does without a plug-in."
            )
        if zero.get("dtype") in ("float16", torch.float16):
            raise ValueError(
                "Cannot shard under accelerate with dtype='float16': accelerate would not know of skipped steps, and its "
                "schedulers would go on. Use mixed_precision='fp16', or dtype='bfloat16'."
            )
        handler = self.ddp_handler
        if handler is not None:
            hooks = [name for name in ("comm_hook", "comm_wrapper") if str(getattr(handler, name, "no")).lower() != "no"]
            check_ddp(handler.to_kwargs(), ", ".join(hooks))
        self.zero = dict(zero)
        self._saved: ShardedOptimizer | None = None  # the optimizer of the state that is being saved or loaded
        self._gathers_once = False  # True inside gather_for_metrics
        # A mesh of the ranks that have samples of their own, and of those that have the same, if any do.
        self._samples: Any = None
        self.register_save_state_pre_hook(self._save_shares)
        self.register_load_state_pre_hook(self._load_shares)

    @property
    def distributed_type(self) -> Any:
        """The name that accelerate has for the way that ranks train together. LocalSGD asks before it begins, and is
        refused."""
        kind = super().distributed_type
        if kind != DistributedType.NO and sys._getframe(1).f_globals.get("__name__") == "accelerate.local_sgd":
            raise NotImplementedError(
                "Cannot use LocalSGD: no rank can step alone, as it holds only its shares of the optimizer's state. Leave it "
                "out; more accumulation exchanges less often."
            )
        return kind

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """The sharded optimizer, once it is prepared."""
        unwrapped = (optimizer.optimizer for optimizer in self._optimizers)
        return next((optimizer for optimizer in unwrapped if isinstance(optimizer, ShardedOptimizer)), None)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as accelerate does, and shards the optimizer among `args` for the model among them. A collective."""
        plain = [arg for arg in args if isinstance(arg, torch.optim.Optimizer) and not _is_prepared(arg)]
        models = [arg for arg in args if isinstance(arg, nn.Module) and _is_trained(arg)]
        if not plain:
            return super().prepare(*args, device_placement=device_placement)
        if len(plain) != 1 or len(models) != 1 or self.sharded is not None:
            late = ", after an optimizer was prepared before" if self.sharded is not None else ""
            raise ValueError(
                f"Cannot prepare {len(plain)} optimizers and {len(models)} models that are trained{late}: one optimizer is "
                "sharded for one model. Pass these two together, once. Of several make one, with "
                "zero.optim.several.Optimizers([muon, adamw]), or use zero.shard and your own loop."
            )
        (inner,), (model,) = plain, models
        if self.device_placement:
            move(model, self.device)
        across = self._ranks_of_samples(model)
        as_ddp = {"buffers": "broadcast" if getattr(self.ddp_handler, "broadcast_buffers", True) else "local"}
        optimizer = inner if isinstance(inner, ShardedOptimizer) else shard(model, inner, **{**as_ddp, **self.zero, **across})
        if optimizer.sharding.group.size != self.num_processes:
            self._refuse_ranks(optimizer)
        given = [None] * len(args) if device_placement is None else device_placement
        # Placing the optimizer would send all of its state through `state_dict` and back, and it is where its parameters are.
        places = [False if arg is inner else place for arg, place in zip(args, given, strict=True)]
        return super().prepare(*(optimizer if arg is inner else arg for arg in args), device_placement=places)

    def share_samples(self, size: int) -> None:
        """Makes each `size` neighbouring ranks load the same samples, as ranks must over which a model's layers are cut. Call
        it before loaders are prepared. A collective."""
        if size > 1:
            self._samples = new_mesh(self.device, dp_shard=self.num_processes // size, tp=size)

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers as accelerate does, each sample once if several ranks load the same ones."""
        self._gathers_once = self._samples is not None
        try:
            return super().gather_for_metrics(*args, **kwargs)
        finally:
            self._gathers_once = False

    def gather(self, tensor: Any) -> Any:
        """Gathers as accelerate does."""
        gathered = super().gather(tensor)
        return recursively_apply(self._of_first_ranks, gathered) if self._gathers_once else gathered

    def _of_first_ranks(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns what the first of all ranks with the same samples gave."""
        return torch.cat(gathered.chunk(self.num_processes)[:: self._samples["tp"].size()])

    def _prepare_device_mesh(self) -> Any:
        """Returns the mesh by which accelerate gives samples to ranks."""
        return self._samples

    def _ranks_of_samples(self, model: nn.Module) -> dict[str, Any]:
        """Returns the option that says which ranks have samples of their own, if others have the same ones. A collective
        then."""
        if not Parts(model).meshes:
            return {}
        size = getattr(model, "tp_size", None) or 1
        if self._samples is None and size > 1 and not self._dataloaders:
            self.share_samples(size)
        if self._samples is not None:
            return {"group": self._samples["dp_shard"]}
        group = self.zero.get("group")
        if size > 1 or (group is not None and len(ranks_along(group)) < self.num_processes):
            raise ValueError(
                f"Cannot shard a {type(model).__name__} under accelerate: ranks that hold its parts have the same samples, and "
                "its loaders give each rank its own. Call accelerator.share_samples(size) before prepare, with the number of "
                "neighbouring ranks over which its layers are cut."
            )
        return {}

    def _refuse_ranks(self, optimizer: ShardedOptimizer) -> NoReturn:
        num_ranks = optimizer.sharding.group.size
        optimizer.close()  # the model is plain again
        raise ValueError(
            f"Cannot train {num_ranks} ranks under accelerate: it sees {self.num_processes}, so all would train on the same "
            "data. If the ranks are CPUs, pass cpu=True to the Accelerator, or use_cpu=True to TrainingArguments."
        )

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepares the model's precision. Nothing wraps it to reduce gradients, which the sharded optimizer does."""
        if not evaluation_mode and _is_trained(model) and not _is_sharded(model):
            raise ValueError(
                f"Cannot prepare a {type(model).__name__} without its optimizer: nothing would reduce its gradients. "
                "Pass both to one prepare, or freeze a model that is not trained."
            )
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepares a sharded optimizer, which `prepare` passes on."""
        if not isinstance(optimizer, ShardedOptimizer) and not _is_prepared(optimizer):
            raise ValueError(
                f"Cannot prepare a {type(optimizer).__name__} alone: it is sharded for a model. Pass both to one prepare."
            )
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = PreparedOptimizer
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keeps gradients on this rank at stages 0 and 1. At stage 2 every micro-batch goes into the shards at once, since
        waiting would keep whole gradients."""
        optimizer = self.sharded
        if optimizer is None or not stage_of(optimizer.sharding.config.stage).accumulates_locally:
            yield
        else:
            with optimizer.no_sync():
                yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> contextlib.AbstractContextManager[Any]:
        """Returns a block that does nothing, as there is nothing to join if batches are even. Accelerate's own asks for
        modules of DistributedDataParallel."""
        if self.num_processes > 1 and not (self.even_batches and even_batches in (None, True)):
            raise NotImplementedError(
                "Cannot join uneven inputs: the other ranks' steps wait for a rank that has no batch left. Leave even_batches "
                "at True, also in the DataLoaderConfiguration, or call optimizer.no_contribution() and step() on that rank."
            )
        return contextlib.nullcontext(joinables)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns accelerate's state dict. At stage 3 each rank that calls it gets whole weights in memory of their own.
        Not a collective."""
        check_whole_here(model, "give whole weights", "Save with zero.save, and zero.export makes files of that.")
        with gathered(model.parameters()):
            return super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Saves as accelerate does, in an accumulation too, without its gradients; each rank writes its own shares of weights
        and optimizer state. A collective."""
        with self._without_sharded():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Loads what `save_state` wrote, at any number of ranks, stage and dtype. A collective."""
        with self._without_sharded():
            return super().load_state(*args, **kwargs)

    @contextlib.contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Hides the sharded optimizer while accelerate writes or reads each optimizer as one plain file."""
        self._saved, kept = self.sharded, self._optimizers
        self._optimizers = [optimizer for optimizer in kept if optimizer.optimizer is not self._saved]
        try:
            yield
        finally:
            self._optimizers, self._saved = kept, None

    def _save_shares(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        if self._saved is not None:
            save(Path(output_dir) / _FOLDER, self._saved, _TAG, mid_window=True)
            weights[:] = [state for model, state in zip(models, weights, strict=True) if model is not self._saved.model]

    def _load_shares(self, models: list[Any], input_dir: str) -> None:
        if self._saved is not None:
            load(Path(input_dir) / _FOLDER, self._saved, _TAG)
            models[:] = [model for model in models if model is not self._saved.model]


def _is_prepared(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "_is_accelerate_prepared", False)


def _is_trained(model: nn.Module) -> bool:
    return any(param.requires_grad for param in model.parameters())


def _is_sharded(model: nn.Module) -> bool:
    return any(window_of(param) is not None for param in model.parameters())
