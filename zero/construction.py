"""Builds what a sharded optimizer consists of: check everything, agree with the other ranks, then change the model."""

from __future__ import annotations

import contextlib
import logging
import socket
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import accelerators
from accelerators import Accelerator
from zero.checks import (
    ELEMENTWISE,
    check_dtypes,
    check_groups,
    check_kernels,
    check_model,
    check_optimizer,
    check_params,
    use_kernels,
)
from zero.chosen import Chosen, choose, fp32_islands, ratio_of, specs_of
from zero.comm.group import Group, exchange_texts, together
from zero.config import Offload, ZeroConfig
from zero.memory.flat import DTYPES, FlatBuffer, Form, Line, Shard, sum_dtype
from zero.memory.flatten import Place, unflatten
from zero.memory.masters import Masters
from zero.memory.offload import Host
from zero.memory.staging import Staging
from zero.plan.layout import FlatLayout
from zero.plan.stages import stage_of
from zero.room import host_beside
from zero.runtime.aliases import Aliases
from zero.runtime.boundary import Boundary
from zero.runtime.gatherer import Gatherer
from zero.runtime.hooks import GradHooks
from zero.runtime.intake import Intake
from zero.runtime.one_pass import Kind, OnePass
from zero.runtime.params import Params
from zero.runtime.reducer import Flight, Reducer
from zero.runtime.settler import Settler
from zero.runtime.shares import GradientShares
from zero.runtime.updater import Rules, Updater
from zero.runtime.window import Window
from zero.sameness import agree_on_what_is_built, settings_of
from zero.state import adopt_state
from zero.travel import Travel

logger = logging.getLogger("zero")


# Of a block on the host. What a step needs of it is 18 MiB, which stay in the last cache between two of torch's passes over it;
# of smaller ones there are so many that the calls are what takes the time.
BLOCK_NUMEL = 2**20

# Parameters that are managed now, so that no two sharded optimizers ever send the same gradient. It keeps none of them alive.
_managed: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass
class Parts:
    """The rooms of one sharded optimizer, wired."""

    accelerator: Accelerator
    group: Group
    line: Line
    params: Params
    masters: Masters
    window: Window
    hooks: GradHooks
    updater: Updater
    gatherer: Gatherer
    intake: Intake
    config: ZeroConfig
    travel: Travel
    owns_group: bool = False
    closed: bool = False

    def release(self) -> None:
        """Makes the model plain: no hooks, storage of its own for every parameter, and nothing of ours kept alive."""
        if self.closed:
            return
        self.closed = True
        self.travel.come_back(False, ["weights"])
        self.hooks.detach()
        self.window.forget()
        for tensor in self.params.tensors:
            _managed.pop(id(tensor), None)
        lost = self.window.settler.aliases.lost()
        unflatten([param for param in self.intake.laid_out() if not lost >> self.params.index[id(param)] & 1])
        self.updater.forget_state()
        self.intake.release()
        self.window.reducer.release()
        if self.owns_group:
            self.group.close()

    def at_home(self, param: int, whole: torch.Tensor) -> torch.Tensor:
        """Something whole of a parameter, in the memory where its shares live."""
        travels = any(self.masters.shard.travels(bucket) for bucket in self.line.layout.buckets_of(param))
        return whole.cpu() if travels else whole

    def adopt(self) -> None:
        """Takes all edits of the weights over."""
        layout = self.line.layout
        for bucket in range(len(layout.buckets)):
            for block in layout.blocks(bucket):
                self.masters.adopt(block)

    def join(self, names: list[str], tensors: list[nn.Parameter], group: int) -> None:
        """Takes in parameters that lie nowhere yet, and will when some rank has a gradient for them."""
        first = len(self.params.tensors)
        ratio = ratio_of(self.updater.group(group), self.config)
        dtypes = [tensor.dtype for tensor in tensors]
        specs = specs_of(names, tensors, [group] * len(names), dtypes, [ratio] * len(names))
        self.line.layout = self.line.layout.joined(specs)
        self.params.add(tensors, names)
        self.window.shares.forms.extend(Form.of(tensor) for tensor in tensors)
        self.window.welcome()
        self.window.settler.aliases.welcome()
        for index in range(first, len(self.params.tensors)):
            self.hooks.attach(index, self.params.tensors[index], self.window.before, self.window.ready)
        _managed.update({id(tensor): tensor for tensor in tensors})


def construct(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, given: Any) -> Parts:
    """A collective. Whatever fails, on whichever rank, the model is as plain as it was before and all ranks raise."""
    from zero.comm.torch_group import connect  # torch.distributed is not imported before somebody trains

    group = connect(_accelerator_of(optimizer), given, config.timeout_s)
    try:
        chosen = together(group, lambda: _check(model, optimizer, config))
        stage = stage_of(config.stage)
        num_shares = group.size if stage.shards_optimizer else 1
        specs, latent = chosen.specs(), range(len(chosen.names))
        device = _device_of(chosen.tensors)
        offloads = any(chosen.offload)
        steps_by_blocks = (offloads or device.type == "cpu") and config.kernels != "compiled"  # one pass has no use for them
        block_numel = BLOCK_NUMEL if steps_by_blocks else None
        layout = FlatLayout.build(specs, num_shares, config.bucket_bytes, config.align_bytes, latent, block_numel)
        agree_on_what_is_built(model, optimizer, chosen, config, group)
        place = Place(accelerators.get(device.type), device, _ranks_that_share_memory(group, device))
        host = None
        if offloads:
            filled = layout.extended([index for index in latent if index not in chosen.latent])
            ranks_here = _ranks_that_share_memory(group, torch.device("cpu"))
            host = together(group, lambda: host_beside(filled, place, config.offload or Offload(), optimizer, ranks_here))
        parts = _assemble(model, optimizer, config, chosen, layout, group, place, host)
    except BaseException:
        if group is not given:
            group.close()
        raise
    parts.owns_group = group is not given and not getattr(group, "owns_world", False)
    return parts


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> Chosen:
    """Everything that can be said before anything is changed."""
    check_optimizer(optimizer, config.elementwise)
    check_model(model)
    check_groups(optimizer, model)
    chosen = choose(model, optimizer, config)
    for name, tensor in zip(chosen.names, chosen.tensors, strict=True):
        if _managed.get(id(tensor)) is tensor:
            raise ValueError(
                f"Sharding was asked for, but parameter {name} is sharded already. Call close() on its optimizer first."
            )
    check_params(chosen.names, chosen.tensors)
    device = _device_of(chosen.tensors)
    check_dtypes(accelerators.get(device.type), set(chosen.dtypes))
    check_kernels(optimizer, config.kernels, device, _kinds_on_host(chosen, device))
    return chosen


def _kinds_on_host(chosen: Chosen, device: torch.device) -> set[Kind]:
    """Of masters that are stepped there."""
    kinds = set[Kind]()
    for dtype, ratio in zip(chosen.dtypes, chosen.offload, strict=True):
        if device.type == "cpu":
            kinds.add((sum_dtype(dtype), None if sum_dtype(dtype) == dtype else dtype, False))
        elif ratio:
            kinds.add((sum_dtype(dtype), dtype, True))
    return kinds


def _accelerator_of(optimizer: torch.optim.Optimizer) -> Accelerator:
    """Of the first parameter that is somewhere."""
    tensors = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    return accelerators.current() if device is None else accelerators.get(device.type)


def _device_of(tensors: list[nn.Parameter]) -> torch.device:
    return tensors[0].device if tensors else accelerators.current().device()


def _ranks_that_share_memory(group: Group, device: torch.device) -> int:
    """How many ranks of the group draw on the same memory as this one."""
    where = f"{socket.gethostname()} {device.type} {0 if device.type == 'cpu' else device.index}"
    places = exchange_texts(group, where)
    return places.count(where)


def _assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ZeroConfig,
    chosen: Chosen,
    layout: FlatLayout,
    group: Group,
    place: Place,
    host: Host | None,
) -> Parts:
    line, forms = Line(layout), [Form.of(tensor) for tensor in chosen.tensors]
    params, weights = Params(chosen.tensors, chosen.names), FlatBuffer(line)
    masters = Masters(line, group.rank if layout.num_shares > 1 else 0, weights, Shard(line, place.device, host))
    intake = Intake(params, forms, weights, masters, group, place)
    latent, dtypes = chosen.latent, [tensor.dtype for tensor in chosen.tensors]
    hooks = GradHooks()

    built: list[weakref.ref[Parts]] = []  # weakly: the window is a part and holds `lay`

    def lay(fresh: Sequence[int]) -> Sequence[int]:
        new, parts = intake.lay(fresh), built[0]()
        assert parts is not None
        adopt_state(parts, optimizer)
        return new

    def wire() -> Parts:
        staging = Staging(place.accelerator, lambda numel, dtype: group.staging(numel, dtype, place.device))
        gradients = Shard(line, place.device, host)
        widest = None if config.reduce_dtype is None else DTYPES[config.reduce_dtype]
        reducer = Reducer(line, forms, place.accelerator, staging, Flight(line, group, staging, gradients, widest))
        shares = GradientShares(line, forms, group, gradients)
        boundary = Boundary(config.accumulation, stage_of(config.stage).accumulates_locally)
        aliases = Aliases(model, params, weights, forms, chosen.left_out)
        settler = Settler(group, params, line, config.digest, aliases, partial(settings_of, optimizer))
        window = Window(params, reducer, shares, boundary, settler, lay)
        one_pass = OnePass(optimizer) if config.kernels == "compiled" else None
        rules = Rules(config.clip, config.on_nonfinite, ELEMENTWISE)
        updater = Updater(params, shares, masters, optimizer, rules, one_pass)
        gatherer = Gatherer(line, params, group, weights, masters)
        travel = Travel(model, place.accelerator, params, forms, weights, masters, gradients, optimizer)
        parts = Parts(place.accelerator, group, line, params, masters, window, hooks, updater, gatherer, intake, config, travel)
        adopt_state(parts, optimizer)
        use_kernels(optimizer, config.kernels)
        _cast_frozen(model, chosen, config)
        window.welcome()  # when every parameter has the dtype that it will keep
        for index, tensor in enumerate(chosen.tensors):
            hooks.attach(index, tensor, window.before, window.ready)
        aliases.renew_through(hooks.renew)
        return parts

    with _restoring(optimizer), contextlib.ExitStack() as on_failure:
        on_failure.callback(intake.undo, dtypes)
        on_failure.callback(hooks.detach)
        intake.lay([index for index in range(len(chosen.names)) if index not in latent])
        _share_the_rest(model, chosen, group)
        parts = together(group, wire)
        on_failure.pop_all()
    built.append(weakref.ref(parts))
    _managed.update({id(tensor): tensor for tensor in chosen.tensors})
    return parts


@contextlib.contextmanager
def _restoring(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts the optimizer's state and settings back if what follows fails."""
    state = dict(optimizer.state)
    settings = [dict(group) for group in (*optimizer.param_groups, optimizer.defaults)]
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip((*optimizer.param_groups, optimizer.defaults), settings, strict=True):
            group.clear()
            group.update(before)
        raise


def _share_the_rest(model: nn.Module, chosen: Chosen, group: Group) -> None:
    """Makes what is frozen, and the buffers, those of rank 0."""
    latent = chosen.latent
    laid_out = {id(tensor) for index, tensor in enumerate(chosen.tensors) if index not in latent}
    frozen = [param for param in model.parameters() if id(param) not in laid_out]
    with torch.no_grad():
        for tensor in [*frozen, *model.buffers()]:
            if tensor.numel() and not tensor.is_meta:
                _broadcast_bits(group, tensor.detach())


def _cast_frozen(model: nn.Module, chosen: Chosen, config: ZeroConfig) -> None:
    """Casts what is frozen like the rest of the model; last of all, as nothing remembers what it was before."""
    islands = fp32_islands(model, config.keep_fp32)
    for param in model.parameters():
        if config.dtype is not None and param.is_floating_point() and id(param) not in islands and not param.requires_grad:
            param.data = param.data.to(DTYPES[config.dtype])


def _broadcast_bits(group: Group, tensor: torch.Tensor) -> None:
    """Rank 0's bits in a tensor of any dtype: backends differ in which dtypes they carry, and all carry bytes."""
    dense = tensor.contiguous()
    group.broadcast(dense.reshape(-1).view(torch.uint8)).wait()
    if dense is not tensor:
        tensor.copy_(dense)


def reduction(config: ZeroConfig, size: int) -> float:
    """What the sum over ranks is multiplied with to become the gradient."""
    return 1.0 / size if config.reduce == "mean" else 1.0 if config.reduce == "sum" else 1.0 / config.reduce
