"""transformers' `Trainer` with a sharded optimizer.

    trainer = ShardedTrainer(model, args, train_dataset=data, zero={"stage": 2})
    trainer.train(resume_from_checkpoint=...)

Everything else is the Trainer's own: accumulation, clipping, schedules, precision, evaluation, rotation of checkpoints.

`from_pretrained` and `save_pretrained` are transformers' own, for models whose weights are in shares. Loading, transformers
builds the model, renames and converts the tensors of its files, initialises missing ones and ties weights. Saving, it decides
what is saved under which name, converts it, cuts it into files and writes the configuration. This module gives it tensors that
are read only when the model is sharded (see [Note: unread weights] in zero/runtime/params/unread.py), and that are gathered
only when they are written, one at a time, on the rank that writes.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accelerators
from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.weight_files import WeightFiles, total_bytes, write_file
from zero.comm.connect import connect
from zero.comm.one_answer import all_or_none, exchange_about
from zero.comm.torch_world import new_mesh
from zero.config.deepspeed.mapping import Implied
from zero.engine.make_optimizer import own_optimizer
from zero.engine.parts import CutSizes, cut_by_plan
from zero.errors import BadCheckpoint, RankFailed, RanksDiffer, not_written
from zero.integrations.accelerate import ShardedAccelerator
from zero.integrations.options import Framework, Given, Options, read_options, sequence_ranks_of, sizes_of
from zero.optim.schedules import build_schedule
from zero.plan.stages import stage_of
from zero.runtime.params.swap import gathered
from zero.runtime.params.unread import ParamReader, Unread
from zero.sequence.attention import ulysses
from zero.sequence.batch import sequence_batch
from zero.setup.parts import Parts, check_whole_here
from zero.sharding.load import load
from zero.sharding.optimizer import optimizers_of
from zero.sharding.save import save

try:
    import safetensors.torch
    from transformers import PreTrainedModel, Trainer, TrainingArguments, modeling_utils
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Cannot import zero.integrations.transformers: {error.name} is not installed. "
        "Install zero-accelerators[transformers].",
        name=error.name,
    ) from error

__all__ = ["ShardedTrainer", "ShardedTrainerMixin", "from_pretrained", "loading", "save_pretrained"]
# The attributes by which transformers marks a model that it cut while loading it.
_OF_PLAN = ("_is_distributed_loading_by_transformers", "_tp_size")
_FOLDER, _TAG = "zero", "state"  # the folder and the tag in each of the Trainer's checkpoints


class ShardedTrainerMixin:
    """The optimizer is a sharded one from the first step on, and every checkpoint has its shares.

    It makes a Trainer shard, one of your own or of TRL's: `class MyTrainer(ShardedTrainerMixin, SFTTrainer)`.
    """

    accelerator: Any
    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    model_accepts_loss_kwargs: bool
    compute_metrics: Any
    gather_function: Any
    _row: Any

    def __init__(self, *args: Any, zero: Given, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        _cut(model, sizes_of(zero), [*args, *kwargs.values()])
        # Set before the Trainer makes its accelerator.
        self._zero, self._tensor_ranks = zero, getattr(model, "tp_size", None) or 1
        self._sequence_ranks, self._row = sequence_ranks_of(zero), None  # the mesh of a row, once sequences are cut
        with _as_ordinary(model):
            super().__init__(*args, **kwargs)
        if self._sequence_ranks > 1:
            self._cut_sequences()

    def _options(self, num_training_steps: int | None = None) -> Options:
        """Reads `zero`, with values of the Trainer's arguments for "auto"."""
        args = self.args
        total = num_training_steps or max(args.max_steps, 1)
        num_ranks = args.world_size // (self._tensor_ranks * self._sequence_ranks)  # the ranks that have samples of their own
        implied = Implied(
            world_size=num_ranks,
            global_samples=num_ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps,
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
        """Makes the optimizer that the DeepSpeed configuration describes, if it describes one, else the Trainer's."""
        config = self._options().config
        if self.optimizer is None and config is not None and config.optimizer is not None:
            params = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer = own_optimizer(config, params, self.model)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Makes the schedule that the DeepSpeed configuration describes, if it describes one, else the Trainer's."""
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
        if self.args.world_size % (self._tensor_ranks * self._sequence_ranks):
            raise ValueError(
                f"Cannot cut sequences over {self._sequence_ranks} ranks: {self.args.world_size} train, which cannot be "
                "divided so. Write a divisor."
            )
        ShardedAccelerator.of(self.accelerator, self._options().shard).share_samples(
            self._tensor_ranks * self._sequence_ranks
        )
        # Bound anew: the Trainer bound the method of its accelerator before that became a sharded one.
        self.gather_function = partial(self.accelerator.gather_for_metrics, **getattr(self.gather_function, "keywords", {}))

    def _cut_sequences(self) -> None:
        """Makes neighbouring ranks train on the parts of the same sequences. A collective."""
        args, size = self.args, self._sequence_ranks
        wrong = {
            "layers are cut over ranks too": self._tensor_ranks > 1,
            "average_tokens_across_devices is False": not args.average_tokens_across_devices,
            "label_smoothing_factor is set": args.label_smoothing_factor > 0,
            "compute_metrics would get parts of sequences": self.compute_metrics is not None,
            f"a {type(self.model).__name__} takes no num_items_in_batch": not self.model_accepts_loss_kwargs,
        }
        reason = next((each for each, is_wrong in wrong.items() if is_wrong), None)
        if reason is not None:
            raise ValueError(
                f"Cannot cut sequences over {size} ranks under the Trainer: {reason}. Change that, or use zero.ulysses and "
                "zero.sequence_batch in a loop of your own."
            )
        self._row = new_mesh(args.device, data=args.world_size // size, sequence=size)["sequence"]
        ulysses(self._row, self.model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss as the Trainer does; if sequences are cut, that of this rank's parts."""
        if self._row is not None:
            inputs, _ = sequence_batch(inputs, self._row)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Counts each target once if several ranks load the same samples."""
        number = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        return number if number is None or self._sequence_ranks == 1 else number / self._sequence_ranks

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Evaluates as the Trainer does; returns the loss alone if sequences are cut."""
        if self._row is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        loss, *others = super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]
        if loss is not None:  # the loss of this rank's tokens
            of_rows = self.accelerator.gather(loss.reshape(1)).view(-1, self._sequence_ranks).mean(1)
            loss = of_rows[self.args.process_index // self._sequence_ranks]
        return (loss, *others)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes the whole model on the first rank, one weight after the other. If a plan of transformers cut the model, all
        weights are gathered at once, and transformers joins the parts of all ranks."""
        if _is_cut_by_plan(self.model):
            self.is_distributed_loading_by_transformers = True  # otherwise ranks other than the first would return
            try:
                with gathered(self.model.parameters()):
                    super()._save(output_dir, state_dict)  # type: ignore[misc]
            finally:
                self.is_distributed_loading_by_transformers = False
            return
        with saving(self.model) as weights:
            super()._save(output_dir, weights if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        frozen = {"exclude_frozen": bool(getattr(self.model, "peft_config", None))}  # only adapters are trained
        save(Path(output_dir) / _FOLDER, self.accelerator.sharded, _TAG, scheduler=self.lr_scheduler, **frozen)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads no weights from a checkpoint that has shares: `_load_optimizer_and_scheduler` loads them with the shares, once
        the model is sharded."""
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
        else:  # the checkpoint of a Trainer that did not shard
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


@contextlib.contextmanager
def _as_ordinary(model: Any) -> Iterator[None]:
    """Hides, in its block, that transformers cut a model. A Trainer that saw it would leave the model and its checkpoints to
    FSDP."""
    before = {name: vars(model)[name] for name in _OF_PLAN if name in vars(model)} if isinstance(model, nn.Module) else {}
    for name in before:
        delattr(model, name)  # the class has the values of a model that is not cut
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def _cut(model: Any, sizes: CutSizes, given: Sequence[Any]) -> None:
    """Cuts the model of a Trainer by the model's plan, if a DeepSpeed configuration says so. An optimizer among the Trainer's
    arguments gets the parameters that the model has then. A collective if the model is cut."""
    if not sizes.are_several:
        return
    arguments = next((each for each in given if isinstance(each, TrainingArguments)), None)
    if not isinstance(model, nn.Module) or arguments is None or sizes.tensor == 1:
        raise ValueError(
            f"Cannot cut {sizes} under the Trainer: it is done by tensor_parallel.autotp_size, to a model that is passed with "
            "args=, and experts alone are not saved by transformers. Pass both, write autotp_size, or train with "
            "zero.initialize."
        )
    device = arguments.device  # reading this begins torch.distributed
    _, replaced = cut_by_plan(model, sizes, arguments.world_size, device)
    for each in given:
        replaced.in_optimizer(each)


def _is_cut_by_plan(model: Any) -> bool:
    """Returns True if transformers cut the model, and so joins its parts when it saves the model."""
    return bool(Parts(model).meshes) and getattr(model.config, "distributed_config", None) is not None


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """A Trainer that takes `zero` as one more keyword: the options of `zero.shard`, `stage` at least, or a DeepSpeed
    configuration, a dict or the path of a file."""


def from_pretrained(model_class: Any, name: Any, *args: Any, stage: int, **options: Any) -> Any:
    """Returns `model_class.from_pretrained(name, *args, **options)` for a model that will be sharded at this stage, by
    `zero.shard`, a `ShardedTrainer` or another integration. Each rank then reads its shares of the weights. A collective at
    stage 3."""
    with loading(stage=stage):
        return model_class.from_pretrained(name, *args, **options)


class loading:
    """Makes transformers' own `from_pretrained` leave weights in their files, for models that will be sharded at stage 3. At
    other stages it reads the weights, as these are whole on all ranks.

    The end of the block is a collective at stage 3: all ranks raise if one failed to load, or if ranks have different
    files.
    """

    def __init__(self, *, stage: int) -> None:
        self._is_wanted = stage_of(stage).shards_weights
        self._before: Any = None
        self._loaded: list[str] = []  # digests of the loaded files, to compare with other ranks

    def __enter__(self) -> None:
        if self._is_wanted:
            # Read from the class dict, which has the static or class method itself; `_load` calls the function in it.
            self._before = PreTrainedModel.__dict__["_load_pretrained_model"]
            PreTrainedModel._load_pretrained_model = staticmethod(self._load)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self._is_wanted:
            return
        PreTrainedModel._load_pretrained_model = self._before
        if error is None or isinstance(error, Exception):
            self._agree(error)

    def _agree(self, error: Exception | None) -> None:
        group = connect(accelerators.current())
        try:
            said = f"{type(error).__name__}: {error}" if error is not None else None
            messages = [json.loads(text) for text in exchange_about(group, "a load", json.dumps([said, self._loaded]).encode())]
        finally:
            group.close()
        if error is not None:
            return
        for rank, (failure, loaded) in enumerate(messages):
            if failure is not None:
                raise RankFailed(f"Cannot load the model: rank {rank} of {group.size} could not. {failure}")
            if loaded != messages[0][1]:
                raise RanksDiffer(
                    f"Cannot load the model: rank {rank} of {group.size} has other files than rank 0. Give all ranks the same."
                )

    def _load(self, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **options: Any) -> Any:
        """Takes the place of the method that transformers calls to load files into a model on the meta device, and calls it
        with tensors that are not read yet."""
        _check(model, load_config)
        if state_dict is None and checkpoint_files:
            state_dict = self._unread(list(map(Path, checkpoint_files)), load_config.sharded_metadata)
        result = self._before.__func__(model, state_dict, checkpoint_files, load_config, *args, **options)
        if state_dict and not any(isinstance(param, Unread) for param in model.parameters()):
            raise BadCheckpoint(
                f"Cannot load {type(model).__name__}: nothing in {Path(checkpoint_files[0]).parent} is a parameter of it, "
                "which is of another architecture. Load the class that was saved."
            )
        _read_buffers(model)
        return result

    def _unread(self, files: Sequence[Path], index: Mapping[str, Any] | None) -> dict[str, Unread]:
        unread: dict[str, Unread] = {}
        where: dict[str, str] = {}
        for file in files:
            opened = WeightFiles(file)
            for name, values in opened.tensors.items():
                if name in unread:
                    raise BadCheckpoint(f"Cannot load {name}: it is in {file.name} and in a file before it. Keep one of them.")
                unread[name], where[name] = Unread.of(values, name), file.name
            self._loaded.append(opened.digest)
        for name, file_name in (index or {}).get("weight_map", {}).items():
            if where.get(name) != Path(file_name).name:
                raise BadCheckpoint(
                    f"Cannot load {name}: the index says that it is in {file_name}, and it is in {where.get(name, 'no file')}. "
                    "Fetch the files again."
                )
        return unread


def _check(model: Any, load_config: Any) -> None:
    if load_config.hf_quantizer is not None:
        raise ValueError(
            f"Cannot load a quantized {type(model).__name__} for shares: it is quantized as it is read. Load it without "
            "`loading`, and it is whole on all ranks; weights that are trained beside it are sharded."
        )
    devices = {str(device) for device in (load_config.device_map or {}).values()}
    if devices - {"cpu"}:
        raise ValueError(
            f"Cannot load {type(model).__name__} for shares with device_map={load_config.device_map}: its weights are nowhere "
            "until it is sharded. Leave device_map out, and move the model with model.to(device), which reads nothing."
        )


def _read_buffers(model: Any) -> None:
    """Reads the buffers, which are whole on every rank."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if type(buffer) is Unread:
                module._buffers[name] = whole = buffer.whole()
                whole._is_hf_initialized = True  # type: ignore[attr-defined]  # otherwise transformers initialises it


def save_pretrained(model: Any, folder: Any, **options: Any) -> None:
    """Saves a sharded model as `model.save_pretrained(folder, **options)` does. Rank 0 writes, with one weight in memory at a
    time. If the model has adapters of PEFT, these alone are saved, whole. A collective."""
    optimizers = optimizers_of(model)
    group = optimizers[0].group if optimizers else connect(accelerators.current())

    def write() -> None:
        for optimizer in optimizers:
            optimizer.sharding.check_whole("save the model")
        if _is_cut_by_plan(model):
            with gathered(model.parameters()):
                model.save_pretrained(folder, **{"is_main_process": group.rank == 0, **options})
        elif group.rank == 0:
            with saving(model) as state_dict:
                model.save_pretrained(folder, **{"state_dict": state_dict, **options})

    try:
        all_or_none(group, "Saving a model", write)
    finally:
        if not optimizers:
            group.close()


@contextlib.contextmanager
def saving(model: Any) -> Iterator[dict[str, Any]]:
    """Yields a state dict with which code inside the block may save the model on this rank. Not a collective."""
    check_whole_here(model, "save the model", "Save with zero.save, and zero.export makes files of that.")
    with torch.no_grad(), _streaming(), ParamReader() as reader:
        yield _state_of(model, reader)


def _state_of(model: nn.Module, reader: ParamReader) -> dict[str, Any]:
    """Returns the model's state dict, with parameters that are gathered when they are read."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name in () if hasattr(model, "peft_config") else _other_names(model, state):  # PEFT itself chooses the names
        del state[name]
    for name, value in state.items():
        if isinstance(value, nn.Parameter):  # on the meta device, where no code asks for the memory of a tensor
            state[name] = Unread.of(reader.values_of(value), name, "meta")
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach()
    return state


def _other_names(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Returns the names of a state dict that are left out, as the same tensor is saved under another name. A name that the
    model does not list among its tied weights is kept, if there is one."""
    listed = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    others = set[str]()
    for same in names.values():
        tied = [name for name in same if any(re.search(pattern, name) for pattern in listed)]
        kept = next((name for name in same if name not in tied), max(same) if len(tied) == len(same) else same[0])
        others.update(name for name in same if name != kept)
    return others


@contextlib.contextmanager
def _streaming() -> Iterator[None]:
    """Makes a Trainer, models and PEFT write files one tensor after the other."""
    places = [(safetensors.torch, "save_file"), (modeling_utils, "safe_save_file")]
    if "peft.peft_model" in sys.modules:
        places.append((sys.modules["peft.peft_model"], "safe_save_file"))
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, _write)
        yield
    finally:
        for (module, name), write in zip(places, before, strict=True):
            setattr(module, name, write)


def _write(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = Path(filename)

    try:
        with ProgressBar(f"writing {path.name}", total_bytes(sizes)) as bar, ParamReader() as reader:
            write_file(path, sizes, lambda name: reader.values_of(tensors[name]), metadata or {}, bar)
    except OSError as error:
        raise not_written(path, error) from error
