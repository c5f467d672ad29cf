"""Builds what a sharded optimizer consists of: check everything, agree with the other ranks, then change the model."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import socket
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import accelerators
from accelerators import Accelerator
from zero.checks import check_dtypes, check_model, check_optimizer, check_params
from zero.comm.group import Group, exchange_texts
from zero.config import ZeroConfig
from zero.errors import RanksDiffer
from zero.memory.flat import DTYPES, FlatBuffer, Form, Shard, dtype_name
from zero.memory.flatten import Flattener, Place
from zero.memory.masters import Masters
from zero.memory.staging import Staging
from zero.plan.layout import FlatLayout, ParamSpec
from zero.plan.stages import stage_of
from zero.runtime.boundary import Boundary
from zero.runtime.gatherer import Gatherer
from zero.runtime.hooks import GradHooks
from zero.runtime.params import Params
from zero.runtime.reducer import Flight, Reducer
from zero.runtime.shares import GradientShares
from zero.runtime.updater import Rules, Updater
from zero.runtime.window import Settler, Window

logger = logging.getLogger("zero")

# Parameters that are managed now, so that no two sharded optimizers ever send the same gradient. It keeps none of them alive.
_managed: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass
class Parts:
    """The rooms of one sharded optimizer, wired."""

    accelerator: Accelerator
    group: Group
    layout: FlatLayout
    params: Params
    weights: FlatBuffer
    masters: Masters
    flight: Flight
    window: Window
    hooks: GradHooks
    updater: Updater
    gatherer: Gatherer
    config: ZeroConfig
    factor: float  # what the ranks' sum is multiplied with to become the gradient
    closed: bool = False

    def release(self) -> None:
        """Takes the hooks off and lets the parameters go."""
        self.closed = True
        self.hooks.detach()
        for tensor in self.params.tensors:
            _managed.pop(id(tensor), None)


@dataclass(frozen=True)
class Chosen:
    """The parameters to manage, in the model's order, and the dtype each will have."""

    names: list[str]
    tensors: list[nn.Parameter]
    groups: list[int]
    dtypes: list[torch.dtype]

    def specs(self) -> list[ParamSpec]:
        return [
            ParamSpec(name, tuple(tensor.shape), dtype_name(dtype), group)
            for name, tensor, dtype, group in zip(self.names, self.tensors, self.dtypes, self.groups, strict=True)
        ]


def construct(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, group: Any) -> Parts:
    check_model(model)
    check_optimizer(optimizer, config.elementwise)
    chosen = choose(model, optimizer, config)
    check_params(chosen.names, chosen.tensors)
    taken = next((name for name, tensor in zip(chosen.names, chosen.tensors, strict=True) if _managed.get(id(tensor)) is tensor), None)
    if taken is not None:
        raise ValueError(f"Sharding was asked for, but parameter {taken} is sharded already. Call close() on its optimizer first.")
    accelerator = _accelerator_of(chosen.tensors)
    check_dtypes(accelerator, set(chosen.dtypes))

    from zero.comm.torch_group import connect  # torch.distributed is not imported before somebody trains

    group = connect(accelerator, group, config.timeout_s)
    stage = stage_of(config.stage)
    layout = FlatLayout.build(chosen.specs(), group.size if stage.shards_optimizer else 1, config.bucket_bytes)
    _agree_on_what_is_built(model, chosen, config, group)
    place = Place(accelerator, _device_of(chosen.tensors), _ranks_that_share_memory(group, _device_of(chosen.tensors)))
    return _assemble(model, optimizer, config, chosen, layout, group, place)


def choose(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> Chosen:
    """Every trainable parameter of the optimizer: the model's in its order, then those that only the optimizer knows."""
    group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    named = [(name, param) for name, param in model.named_parameters() if id(param) in group_of and param.requires_grad]
    known = {id(param) for _, param in model.named_parameters()}
    extra = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in known and param.requires_grad]
    named += [(f"optimizer.{index}", param) for index, param in enumerate(extra)]
    left_out = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in group_of]
    if left_out:
        logger.warning("Trainable parameters in no group of the optimizer, left alone: %s", ", ".join(left_out))
    islands = _fp32_islands(model, config.keep_fp32)
    dtypes = [_dtype_for(name, param, config.dtype, id(param) in islands) for name, param in named]
    return Chosen([n for n, _ in named], [p for _, p in named], [group_of[id(p)] for _, p in named], dtypes)


def _fp32_islands(model: nn.Module, patterns: tuple[str, ...]) -> set[int]:
    """Parameters whose name, or whose module's name, matches one of the patterns."""
    found = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        parents = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)]
        if any(fnmatch.fnmatch(part, pattern) for part in parents for pattern in patterns):
            found.add(id(param))
    return found


def _dtype_for(name: str, param: nn.Parameter, dtype: str | None, island: bool) -> torch.dtype:
    return param.dtype if dtype is None or island else DTYPES[dtype]


def _accelerator_of(tensors: list[nn.Parameter]) -> Accelerator:
    return accelerators.get(tensors[0].device.type) if tensors else accelerators.current()


def _device_of(tensors: list[nn.Parameter]) -> torch.device:
    return tensors[0].device if tensors else accelerators.current().device()


def _agree_on_what_is_built(model: nn.Module, chosen: Chosen, config: ZeroConfig, group: Group) -> None:
    """Raises on every rank, with the first difference, when ranks build different things."""
    lines = [f"configuration {config.digest} {json.dumps(config.as_dict(), sort_keys=True)}"]
    lines += [f"parameter {spec.name} {spec.shape} {spec.dtype} in group {spec.group}" for spec in chosen.specs()]
    lines += [f"frozen parameter {name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters() if not p.requires_grad]
    lines += [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    lines += [f"start {config.start}"]
    if config.start == "verify":
        lines += [f"weights of {name}: {_bits(tensor)}" for name, tensor in zip(chosen.names, chosen.tensors, strict=True)]
    text = "\n".join(lines)
    digests = group.exchange(hashlib.sha256(text.encode()).digest())
    if all(digest == digests[0] for digest in digests):
        return
    texts = [each.split("\n") for each in exchange_texts(group, text)]
    for rank, theirs in enumerate(texts):
        for mine, other in zip([*texts[0], ""], [*theirs, ""], strict=False):
            if mine != other:
                raise RanksDiffer(
                    f"Rank {rank} of {group.size} built '{_short(other)}' where rank 0 built '{_short(mine)}'. "
                    "Build the same model, optimizer and configuration on all ranks."
                )


def _bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:197] + "..."


def _ranks_that_share_memory(group: Group, device: torch.device) -> int:
    """How many ranks of the group draw on the same memory as this one."""
    where = f"{socket.gethostname()} {device.type} {0 if device.type == 'cpu' else device.index}"
    places = exchange_texts(group, where)
    return places.count(where)


def _assemble(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, chosen: Chosen, layout: FlatLayout, group: Group, place: Place
) -> Parts:
    forms = [Form.of(tensor) for tensor in chosen.tensors]
    weights, shard_rank = FlatBuffer(layout), group.rank if layout.num_shares > 1 else 0
    masters = Masters(layout, shard_rank, weights, Shard(layout, place.device))
    params = Params(chosen.tensors, chosen.names)
    with torch.no_grad():
        _move_in(model, layout, Flattener(weights, chosen.tensors, forms, place), masters, group, shard_rank)

    staging = Staging(place.accelerator, lambda numel, dtype: group.staging(numel, dtype, place.device))
    gradients = Shard(layout, place.device)
    flight = Flight(layout, group, staging, gradients)
    reducer = Reducer(layout, forms, place.accelerator, staging, flight)
    digest = hashlib.sha256(f"{layout.digest} {config.digest}".encode()).digest()[:8]
    window: Window
    shares = GradientShares(layout, forms, group, gradients, lambda occasion: window.settle_once(occasion))
    boundary = Boundary(config.accumulation, stage_of(config.stage).accumulates_locally)
    window = Window(params, reducer, shares, boundary, Settler(group, params, layout, digest))
    hooks = GradHooks(params.tensors, window.before, window.ready)
    updater = Updater(params, shares, masters, optimizer, Rules(config.clip, config.on_nonfinite))
    gatherer = Gatherer(layout, params, group, weights, masters)
    for tensor in chosen.tensors:
        _managed[id(tensor)] = tensor
    factor = _factor(config, group.size)
    return Parts(place.accelerator, group, layout, params, weights, masters, flight, window, hooks, updater, gatherer, config, factor)


def _move_in(
    model: nn.Module, layout: FlatLayout, flattener: Flattener, masters: Masters, group: Group, shard_rank: int
) -> None:
    """Weights of rank 0 into flat memory on all ranks, and this rank's masters from what they were before rounding."""
    for chunk in range(len(layout.chunks)):
        source = flattener.read(chunk)
        group.broadcast(source).wait()
        flattener.write(chunk, source)
        for index, bucket in enumerate(layout.buckets):
            if bucket.chunk == chunk:
                share = bucket.share(shard_rank)
                masters.take(index, source[share.start : share.stop])
    masters.cut()
    flattener.log()
    managed = {id(tensor) for tensor in flattener.tensors}
    for tensor in [*(param for param in model.parameters() if id(param) not in managed), *model.buffers()]:
        if tensor.numel() and not tensor.is_meta:
            _broadcast_bits(group, tensor.detach())


def _broadcast_bits(group: Group, tensor: torch.Tensor) -> None:
    """Rank 0's bits in a tensor of any dtype: backends differ in which dtypes they carry, and all carry bytes."""
    dense = tensor.contiguous()
    group.broadcast(dense.reshape(-1).view(torch.uint8)).wait()
    if dense is not tensor:
        tensor.copy_(dense)


def _factor(config: ZeroConfig, size: int) -> float:
    return 1.0 / size if config.reduce == "mean" else 1.0 if config.reduce == "sum" else 1.0 / config.reduce

