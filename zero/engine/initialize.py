"""`zero.initialize`: what a DeepSpeed script gets from one call. Everything is checked before anything is changed."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

import accelerators
from accelerators import Accelerator
from zero.comm.group import Group, TimeLimits
from zero.config.deepspeed.mapping import Implied
from zero.config.deepspeed.reader import read_deepspeed
from zero.config.schema import ZeroConfig, check_supported, check_whole_sequences
from zero.engine.base import loader_of
from zero.engine.engine import Engine
from zero.engine.forward_only import ForwardEngine
from zero.engine.make_optimizer import check_known, given_optimizer, moments_of_adam, own_optimizer
from zero.engine.optimizer_names import EngineOptimizer
from zero.engine.parts import CutSizes, cut_by_plan, mark_experts
from zero.memory.formats import dtype_name
from zero.memory.leaves import is_dtensor
from zero.optim.schedules import build_schedule
from zero.optim.several import members_of
from zero.optim.traits import known_whole
from zero.setup.parts import Parts, part
from zero.sharding.metrics import board_writer
from zero.sharding.optimizer import ShardedOptimizer

logger = logging.getLogger("zero")

# By the model's id: the last engine of a model.
_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()

DISTRIBUTED_PORT = 29500  # DeepSpeed's default, so a call with it asks for no port

Source = str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = DISTRIBUTED_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
    *,
    group: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Makes an engine, its optimizer, a loader of this rank's samples and the scheduler; the last two may be None. A
    collective.

    The arguments are those of DeepSpeed 0.19.8, in its order, and `group`. A process group that a launcher asks for is started,
    unless there is one already. Without any optimizer the engine runs forward only, and the returned optimizer is None. A
    second call with the same model closes its first engine.

    Args:
        args: The parsed arguments of the script; `args.deepspeed_config` stands for `config`.
        model: The model to train.
        optimizer: One, a list of them, or a function that makes them from the parameters. It takes precedence over the one in
            the configuration.
        model_parameters: The parameters, or groups, that an optimizer of the configuration trains.
        training_data: A dataset, of which each rank gets its own part, or a DataLoader, which is used as it is.
        lr_scheduler: A scheduler, or a function that makes one; it takes precedence over the one in the configuration.
        distributed_port: The launcher's MASTER_PORT, or the default; another one is refused.
        mpu: An object as Megatron's, which says which ranks have samples of their own; marks on parameters say which are parts.
        dist_init_required: False starts no process group; with several ranks there must be one.
        collate_fn: The function that makes a batch of samples for the loader.
        config: The path of a DeepSpeed file, such a dict, or a `ZeroConfig`.
        mesh_param: Must be None: `zero.ulysses` splits sequences among ranks.
        config_params: An older name for `config`.
        group: The ranks that have samples of their own, as `zero.shard` takes it.
    """
    source = _the_config(args, config, config_params)
    local_rank = os.environ.get("LOCAL_RANK")
    if getattr(args, "local_rank", None) == -1 and local_rank is not None:
        logger.warning("args.local_rank is -1: torchrun passes no --local_rank. Read LOCAL_RANK, which is %s here.", local_rank)
    model = _checked_model(model, training_data, distributed_port, mpu, collate_fn, mesh_param, group)
    accelerator = accelerators.current()
    from zero.comm.connect import connect, start  # imported late, as torch.distributed is needed only for training
    from zero.comm.torch_world import world_size

    waits = source if isinstance(source, ZeroConfig) else ZeroConfig(stage=0)
    limits = TimeLimits(waits.first_step_timeout_s, waits.timeout_s)
    given, may_start = group if mpu is None else _group_of(mpu, model), dist_init_required is not False
    sizes = CutSizes.of(source)
    if sizes.are_several:
        if given is not None:
            raise ValueError(f"Cannot cut {sizes} with group= or mpu=: these keys say which ranks have samples. Leave one out.")
        num_ranks = world_size() if start(accelerator, limits, may_start) else 1
        given, replaced = cut_by_plan(model, sizes, num_ranks, accelerator.device())
        model_parameters = None if model_parameters is None else [replaced.in_place_of(entry) for entry in model_parameters]
        replaced.in_optimizer(optimizer)
    connected = connect(accelerator, given, limits, may_start)
    ranks = _Ranks(given, connected, accelerator, mpu)
    try:
        mark_experts(model)
        return _build(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, source, ranks)
    except BaseException:
        if connected is not given:
            connected.close()
        raise


def _checked_model(
    model: nn.Module | None,
    training_data: Any,
    distributed_port: int,
    mpu: Any,
    collate_fn: Callable[..., Any] | None,
    mesh_param: Any,
    group: Any,
) -> nn.Module:
    """Returns the model. Refuses a call of `initialize` whose arguments are not supported, or contradict each other."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"Cannot initialize(model={model!r}): a model is needed. Pass an nn.Module as model=.")
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        raise ValueError(
            f"Cannot initialize {type(model).__name__}: it is a PipelineModule, and pipeline parallelism is not supported. "
            "Make one nn.Module of its layers, such as an nn.Sequential, which every rank has whole."
        )
    if mpu is not None and group is not None:
        raise ValueError("Cannot initialize(mpu=..., group=...): both say which ranks have samples of their own. Pass one.")
    if mesh_param:
        raise ValueError(
            f"Cannot initialize(mesh_param={mesh_param!r}): an engine makes no mesh. Leave it out, and cut "
            "sequences with zero.ulysses."
        )
    launched = os.environ.get("MASTER_PORT")
    if str(distributed_port) not in (str(DISTRIBUTED_PORT), launched):
        raise ValueError(
            f"Cannot initialize(distributed_port={distributed_port!r}): ranks meet where their launcher says "
            f"(MASTER_PORT is {launched or 'not set'}). Set MASTER_PORT, and leave distributed_port out."
        )
    if collate_fn is not None and (training_data is None or isinstance(training_data, DataLoader)):
        raise ValueError("Cannot initialize(collate_fn=...): there is no dataset to collate. Pass training_data=.")
    return model


class _Ranks(NamedTuple):
    """The ranks that have samples of their own, as they were passed and as they are connected."""

    given: Any
    group: Group
    accelerator: Accelerator
    mpu: Any

    def of_training(self, config: ZeroConfig, parts: Parts) -> Group:
        """Returns all ranks of a training, whose parts those are. A collective."""
        from zero.comm.connect import made_ready  # imported late, as torch.distributed is needed only for training

        if self.given is None:
            parts.check_said()
        return made_ready(self.group, self.given, config.shared_memory, config.shard_ranks, parts.meshes)


def _group_of(mpu: Any, model: nn.Module) -> Any:
    """Returns the ranks that have samples of their own as an `mpu` says it, and marks the parameters that it cuts as parts."""
    if not hasattr(mpu, "get_data_parallel_group"):
        raise ValueError(
            f"Cannot initialize(mpu={mpu!r}): it has no get_data_parallel_group. Give it one, or leave mpu out and pass group=."
        )
    tensor_parallel = getattr(mpu, "get_tensor_model_parallel_group", None) or mpu.get_model_parallel_group
    is_cut = False
    for name, param in model.named_parameters():
        if getattr(param, "sequence_parallel", False):
            raise ValueError(
                f"Cannot initialize(mpu=...): {name} has a part of its gradient on each rank, as its sequences are cut. Leave "
                "sequence parallelism out, or use torch's SequenceParallel."
            )
        if is_dtensor(param):
            is_cut = True
        elif getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False):
            dim = getattr(param, "partition_dim", None)
            if getattr(param, "partition_stride", 1) != 1 or not isinstance(dim, int):
                raise ValueError(
                    f"Cannot initialize(mpu=...): it is not known how {name} is cut, of which a rank has a part. Set "
                    "partition_dim on it, and no partition_stride, or call zero.part and pass group=."
                )
            part(param, tensor_parallel(), dim)
            is_cut = True
    if not is_cut and not Parts(model).meshes and mpu.get_model_parallel_world_size() > 1:
        raise ValueError(
            f"Cannot initialize(mpu=...): its {mpu.get_model_parallel_world_size()} ranks share a model, and no parameter says "
            "that it is a part. Cut layers by torch's parallelize_module, set tensor_model_parallel and partition_dim, "
            "or call zero.part."
        )
    return mpu.get_data_parallel_group()


def _build(
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    collate_fn: Callable[..., Any] | None,
    source: Source,
    ranks: _Ranks,
) -> tuple[Any, Any, Any, Any]:
    accelerator, group = ranks.accelerator, ranks.group
    params = list(model.parameters() if model_parameters is None else model_parameters)
    given = None if optimizer is None else given_optimizer(optimizer, params)
    read = read_config(source, _implied(model, given, training_data, group.size))
    config = effective(read, given, lr_scheduler)
    check_supported(config)
    # If the numbers are equal, the script cuts its batches itself.
    if getattr(ranks.mpu, "sequence_ranks", 1) != config.sequence_ranks:
        check_whole_sequences(config)
    if given is not None and not isinstance(source, ZeroConfig):
        check_known(given, config)
    if config.report.tensorboard is not None:
        board_writer()  # raises if TensorBoard is not installed
    loader = _loader(training_data, config, collate_fn, group)
    if given is None and config.optimizer is None:
        return _forward_only(model, config, lr_scheduler, loader, ranks)
    inner = own_optimizer(config, params, model) if given is None else given
    _check_belonging(model, inner, params, lr_scheduler)
    _close_last(model)
    move(model, accelerator.device())
    group = ranks.of_training(config, Parts(model, inner))
    try:
        sharded = EngineOptimizer(model, inner, config, group)
    except BaseException:
        if group is not ranks.given:
            group.close()
        raise
    sharded.sharding.lifetime.owns_group = group is not ranks.given
    try:
        engine = Engine(sharded, _scheduler(lr_scheduler, config, sharded), loader)
        engine.mpu = ranks.mpu
        _engines[id(model)] = engine
    except BaseException:
        sharded.close()
        raise
    if group.rank == 0:
        logger.info("rank 0: the effective configuration\n%s", sharded.sharding.config.text())
    return engine, sharded, loader, engine.lr_scheduler


def _forward_only(
    model: nn.Module, config: ZeroConfig, lr_scheduler: Any, loader: Any, ranks: _Ranks
) -> tuple[ForwardEngine, None, Any, None]:
    if lr_scheduler is not None:
        raise ValueError("Cannot use lr_scheduler: there is no optimizer. Pass optimizer=, or write one in config.")
    lacking = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if lacking:
        raise ValueError(
            f"Cannot initialize {type(model).__name__} for forward only: {lacking[0]} is on the meta device and has no values "
            f"({len(lacking)} such parameters and buffers). Load the model first."
        )
    _close_last(model)
    device = ranks.accelerator.device()
    move(model, device)
    logger.warning("There is no optimizer, neither in the call nor in the configuration: this engine only runs forward.")
    group = ranks.of_training(config.model_copy(update={"shared_memory": False, "shard_ranks": None}), Parts(model))
    engine = ForwardEngine(model, config, group, device, loader)
    engine.mpu = ranks.mpu
    return engine, None, loader, None


def _close_last(model: nn.Module) -> None:
    """Closes the engine that trained this model before, if there is one."""
    engine = _engines.get(id(model))  # an engine keeps its model alive, so the id is unique
    if engine is not None and not engine.is_closed:
        logger.warning(
            "This %s has an engine already, which is closed now: the state of its optimizer is gone. Keep one engine, or call "
            "engine.destroy() before another initialize.", type(model).__name__,
        )  # fmt: skip
        engine.close()


def move(model: nn.Module, device: torch.device) -> None:
    """Moves the model to the device. Every Parameter stays the same object, since an optimizer may hold it already. What is on
    the meta device stays there: it gets memory when it is sharded, or written."""
    if all(tensor.is_meta or tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return
    probe = nn.Parameter(torch.zeros(1))
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        probe.data = torch.zeros(1, device=device)
    except RuntimeError:  # tensors of that device are of another kind, and torch would make new Parameters of them
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _the_config(args: Any, config: Source | None, config_params: Source | None) -> Source:
    places = {"config": config, "config_params": config_params}
    places["args.deepspeed_config"] = getattr(args, "deepspeed_config", None)
    oldest = getattr(args, "deepscale_config", None)
    if oldest is not None:
        logger.warning("args.deepscale_config is read, but it is called args.deepspeed_config by now. Rename it.")
        places["args.deepscale_config"] = oldest
    given = {place: value for place, value in places.items() if value is not None}
    if not given:
        raise ValueError("Cannot initialize: no configuration was given. Pass config='ds_config.json' or a dict.")
    if len(given) != 1:
        names = " and ".join(given)
        raise ValueError(
            f"Cannot choose a configuration: {names} were passed, and one is needed. Pass config=."
        )
    return next(iter(given.values()))


def read_config(source: Source, implied: Implied) -> ZeroConfig:
    """Returns the configuration for that many ranks, with "auto" answered by what the call implies."""
    config = source if isinstance(source, ZeroConfig) else read_deepspeed(source, implied)
    if config.batch is not None and config.batch.world_size != implied.world_size:
        raise ValueError(
            f"Cannot use a batch for {config.batch.world_size} ranks: there are {implied.world_size}. "
            "Make it with Batch.of(..., world_size=), or start as many ranks."
        )
    return config


def _implied(model: nn.Module, given: torch.optim.Optimizer | None, training_data: Any, world_size: int) -> Implied:
    """Returns what the call, with the optimizer that was passed, says of the keys that are "auto"."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    group = {} if given is None else given.param_groups[0]
    betas = group.get("betas")
    return Implied(
        world_size=world_size,
        micro_samples=training_data.batch_size if isinstance(training_data, DataLoader) else None,
        dtype=dtype_name(dtypes.pop()) if len(dtypes) == 1 else None,
        lr=None if "lr" not in group else float(group["lr"]),
        weight_decay=group.get("weight_decay"),
        betas=None if betas is None else (float(betas[0]), float(betas[1])),
        eps=group.get("eps"),
        adam_moments=None if given is None else moments_of_adam(given),
    )


def effective(config: ZeroConfig, given: torch.optim.Optimizer | None, lr_scheduler: Any) -> ZeroConfig:
    """Returns the configuration that will be used: arguments of the call take precedence over the file."""
    changes: dict[str, Any] = {}
    for name, replaced, by in (("optimizer", config.optimizer, given), ("schedule", config.schedule, lr_scheduler)):
        if replaced is not None and by is not None:
            logger.warning("%s has no effect here: the call passed a %s, which is used.", name, type(by).__name__)
    if given is not None:
        changes = {"optimizer": None}
        if config.elementwise and known_whole(given):
            changes["elementwise"] = None  # the file vouches for unknown optimizers only
    if lr_scheduler is not None:
        changes["schedule"] = None
    return config.model_copy(update=changes)


def _check_belonging(model: nn.Module, inner: torch.optim.Optimizer, params: Iterable[Any], lr_scheduler: Any) -> None:
    """Refuses parameters of neither the model nor the optimizer, and a scheduler that drives another optimizer. Those of the
    model that an optimizer which was passed leaves out are left alone."""
    known = {id(param) for group in inner.param_groups for param in group["params"]} | set(map(id, model.parameters()))
    for entry in params:
        tensors = entry["params"] if isinstance(entry, dict) else [entry]
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            tensor = tensor[1] if isinstance(tensor, tuple) else tensor
            if id(tensor) not in known:
                raise ValueError(
                    f"Cannot use model_parameters: neither the model nor the optimizer has its parameter of shape "
                    f"{tuple(tensor.shape)}. Pass parameters of this model, or leave model_parameters out."
                )
    if lr_scheduler is not None and not hasattr(lr_scheduler, "step") and not callable(lr_scheduler):
        raise TypeError(
            f"Cannot use lr_scheduler={lr_scheduler!r}: it has no step(). Pass a scheduler, or a function that makes one."
        )
    driven = getattr(lr_scheduler, "optimizer", None)
    groups = [optimizer.param_groups for optimizer in (inner, *members_of(inner))]
    if driven is not None and all(getattr(driven, "param_groups", None) is not item for item in groups):
        raise ValueError(
            f"Cannot use the lr_scheduler {type(lr_scheduler).__name__}: it drives another optimizer than the one that trains. "
            "Make it from the optimizer that is passed, or pass a function that makes it."
        )


def _scheduler(lr_scheduler: Any, config: ZeroConfig, optimizer: ShardedOptimizer) -> Any:
    if lr_scheduler is None:
        return None if config.schedule is None else build_schedule(config.schedule, optimizer)
    return lr_scheduler if hasattr(lr_scheduler, "step") else lr_scheduler(optimizer)


def _loader(training_data: Any, config: ZeroConfig, collate_fn: Callable[..., Any] | None, group: Group) -> Any:
    """Returns a loader of micro-batches of this rank's part of the data."""
    if training_data is None or isinstance(training_data, DataLoader):
        return training_data
    if config.batch is None:
        raise ValueError(
            "Cannot initialize(training_data=...): no batch size is known. Write train_micro_batch_size_per_gpu."
        )
    return loader_of(
        training_data, config.batch.micro_samples, group, collate_fn=collate_fn, drop_last=config.drop_last
    )
