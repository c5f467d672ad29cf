"""Builds the parts of a sharded optimizer: checks everything, agrees with the other ranks, then changes the model.

    1. connect    the ranks, and those that hold the same parts of parameters            `connect`, `Parts.agree`
    2. check      what this rank can check alone, and that all ranks have built the same  `_checked`, `verify_same_setup`
    3. plan       kernels and homes, the layout, whether memory suffices                 `agreed_kernels`, `prepare`
    4. place      parameters move to flat memory or to shares, with rank 0's values      `_basis`, `ParamPlacer.place`
    5. make       the parts, each with those that it uses                                `_connected_parts`
    6. attach     hooks on parameters, and on the model's state_dict                     `_assemble`

If one of them fails on a rank, all ranks raise, and the model is plain again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.comm.group import Group, TimeLimits
from zero.comm.levels import of_family
from zero.comm.one_answer import run_on_all
from zero.config.schema import ZeroConfig
from zero.memory.formats import ParamFormat
from zero.memory.gathered import GatheredWeights
from zero.memory.gradient_shard import GradientShard
from zero.memory.masters import Masters, Wholeness
from zero.memory.shard import LayoutRef, Shard
from zero.memory.staging import Source, Staging
from zero.memory.weights import CopiedInStateDict, FlatBuffer, Weights, is_part
from zero.optim.several import members_of, of_user
from zero.optim.traits import settings_of
from zero.plan.budget import usual_numel
from zero.plan.scaling import Scaling
from zero.plan.stages import stage_of
from zero.runtime.kernels.adam_step import FusedStep, deferrable_sums
from zero.runtime.kernels.select import (
    agreed_kernels,
    check_kernels,
    fused_step_of,
    has_fused_step,
    host_step_dtypes,
    use_kernels,
)
from zero.runtime.kernels.sums import CompiledSums, SumsByTorch
from zero.runtime.params.absent import Absent, tie_in_state_dict
from zero.runtime.params.placement import ParamPlacer
from zero.runtime.params.table import Params
from zero.runtime.params.tracking import ModuleTables, ParamTracker
from zero.runtime.unshard.exchange import ShareExchange
from zero.runtime.unshard.weights import ShardedWeights
from zero.setup.checks import verify_same_setup, warn_without_effect
from zero.setup.module_sync import (
    NO_HOOK,
    Buffers,
    MetaBuffers,
    cast_buffers,
    cast_frozen,
    cast_inputs,
    frozen_to_share,
    restorer_of_dtypes,
    sync_module_states,
)
from zero.setup.parts import Parts
from zero.setup.prepare import ShardingPlan, accelerator_of, check_params_and_settings, device_of, prepare, select_params
from zero.setup.selection import ManagedParams, placement_of, with_pace
from zero.sharding.ahead import StepsAhead, check_ahead, steps_ahead
from zero.sharding.loss_scaler import LossScaler
from zero.sharding.optimizer_state import adopt_state
from zero.sharding.publisher import WeightPublisher
from zero.sharding.share_state import StateOfShares
from zero.sharding.state import Lifetime, ShardingState
from zero.sharding.state_offload import StateOffloader
from zero.sharding.unread import UnreadParams
from zero.sharding.update import StepPolicy, Updater
from zero.window.agreement import WindowSync
from zero.window.grads import GradOps
from zero.window.hooks import GradHooks
from zero.window.inflight import InflightReductions, groups_of
from zero.window.narrowing import InTurn, narrowing_of
from zero.window.rounds import Reducer
from zero.window.short_path import hooks_of
from zero.window.sync_policy import SyncPolicy
from zero.window.window import Window, check_unmanaged, manage

logger = logging.getLogger("zero")


def build(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, given: Any, tables: ModuleTables
) -> ShardingState:
    """Builds the parts of a sharded optimizer, which keeps `tables`. A collective. If it fails on any rank, all ranks raise and
    the model is plain again; only weights that were rounded by then may have lost their exact values, if several ranks have
    parts of them."""
    from zero.comm.connect import connect  # imported late, as torch.distributed is needed only for training

    limits = TimeLimits(config.first_step_timeout_s, config.timeout_s)
    parts = Parts(model, optimizer)
    if given is None:
        parts.check_said()
    group = connect(accelerator_of(optimizer), given, limits, True, config.shared_memory, config.shard_ranks, parts.meshes)  # 1
    unread = UnreadParams(model, optimizer)
    try:
        parts.agree(_params_of(model, optimizer), group)
        unread.begin(group, stage_of(config.stage).shards_weights)
        params = run_on_all(group, lambda: _checked(model, optimizer, config, parts, group.size))  # 2
        # Comes before all collectives that depend on the setup.
        verify_same_setup(model, optimizer, params, config, group, parts)
        warn_without_effect(model, optimizer, params, config, group)
        kernels = agreed_kernels(optimizer, config.kernels, device_of(params), _all_on_host(params), group)  # 3
        config = config.model_copy(update={"kernels": kernels})
        check_ahead(config, optimizer, params, group)
        config = with_pace(config, group, optimizer.param_groups, sum(spec.numel for spec in params.specs()))
        plan = prepare(model, optimizer, config, params, group, has_fused_step(optimizer, config.kernels))
        sharding = _assemble(_basis(model, optimizer, config, plan, group, parts, tables), unread)  # 4, 5 and 6
    except BaseException:
        unread.restore()
        if group is not given:
            group.close()
        raise
    sharding.lifetime.owns_group = group is not given
    return sharding


def _params_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    yield from model.parameters()
    for param_group in optimizer.param_groups:
        yield from param_group["params"]


def _checked(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig, parts: Parts, num_ranks: int
) -> ManagedParams:
    """Checks everything that this rank can check alone. Returns the parameters to manage."""
    if num_ranks > 1:
        parts.check_experts(model)
    params = select_params(model, optimizer, config, parts)
    check_unmanaged(params.names, params.leaves)
    check_params_and_settings(model, optimizer, params, stage_of(config.stage).shards_weights)
    device = device_of(params)
    if config.kernels != "auto":
        check_kernels(optimizer, config.kernels, device, bool(host_step_dtypes(params.specs(), device)))
    return params


def _all_on_host(params: ManagedParams) -> bool:
    """Returns True if all masters are stepped on the host."""
    return device_of(params).type == "cpu" or all(each.offload == 1.0 for each in params.placements)


@dataclass(frozen=True)
class _Basis:
    """The objects that the parts of a sharded optimizer are built on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: ZeroConfig
    plan: ShardingPlan
    group: Group
    parts: Parts
    layout_ref: LayoutRef
    formats: list[ParamFormat]
    params: Params
    weights: Weights
    masters: Masters
    placer: ParamPlacer
    hooks: GradHooks
    input_cast: RemovableHandle | None
    tables: ModuleTables


def _basis(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ZeroConfig,
    plan: ShardingPlan,
    group: Group,
    parts: Parts,
    tables: ModuleTables,
) -> _Basis:
    """Makes the objects that parameters are placed in. Of the model it changes nothing but that inputs are cast."""
    chosen, layout, place, memory_guard = plan.params, plan.layout, plan.place, plan.memory_guard
    layout_ref, formats = LayoutRef(layout), [ParamFormat.of(tensor) for tensor in chosen.tensors]
    params = Params(chosen.tensors, chosen.names, chosen.leaves)
    weights: Weights = FlatBuffer(layout_ref)
    if stage_of(config.stage).shards_weights:
        room = memory_guard.room_for_weights(config.gathered_bytes, layout.extended(range(len(chosen.names))), chosen.tensors)
        cache, host = GatheredWeights(place.device, room), memory_guard.homes.host
        exchanges = [
            ShareExchange(of_family(group, number), cache, host, group, family.holders(group.size))
            for number, family in enumerate(layout.families)
        ]
        weights = ShardedWeights(layout_ref, params, exchanges)
    shard = Shard(layout_ref, memory_guard.homes)
    state = StateOfShares(dict, optimizer.state)
    for member in (optimizer, *members_of(optimizer)):
        member.state = state
    masters = Masters(layout_ref, group.rank, weights, shard, formats, state, rounded=config.masters == "rounded")
    state.begin(params, masters)
    placer = ParamPlacer(params, formats, weights, masters, group, place)
    return _Basis(
        model=model,
        optimizer=optimizer,
        config=config,
        plan=plan,
        group=group,
        parts=parts,
        layout_ref=layout_ref,
        formats=formats,
        params=params,
        weights=weights,
        masters=masters,
        placer=placer,
        hooks=GradHooks(params),
        input_cast=cast_inputs(model, config),
        tables=tables,
    )


def _assemble(basis: _Basis, unread: UnreadParams) -> ShardingState:
    """Places the parameters, and builds the parts that train them. A collective."""
    model, config, plan, group = basis.model, basis.config, basis.plan, basis.group
    chosen, place, weights, placer = plan.params, plan.place, basis.weights, basis.placer
    dtypes = {index: tensor.dtype for index, tensor in enumerate(chosen.tensors)}

    def cast() -> None:
        cast_frozen(model, config)
        cast_buffers(model, config)

    def attach_hooks(window: Window) -> None:
        window.register()  # called once every parameter has the dtype that it will keep
        for index, leaf in enumerate(chosen.leaves):
            basis.hooks.attach(index, leaf, *hooks_of(window, index))

    with _restoring(basis.optimizer), contextlib.ExitStack() as on_failure:
        on_failure.callback(restorer_of_dtypes(model))  # registered first, so that it runs last
        if basis.input_cast is not None:
            on_failure.callback(basis.input_cast.remove)
        on_failure.callback(placer.release)
        on_failure.callback(weights.return_frozen)
        on_failure.callback(placer.remove, dtypes, plan.layout)
        on_failure.callback(basis.hooks.detach)
        with plan.memory_guard.explain_oom("Sharding", basis.layout_ref):
            placer.place([index for index in range(len(chosen.names)) if index not in chosen.frozen])
        sync_module_states(model, chosen, group, basis.parts)
        sharding = run_on_all(group, partial(_connected_parts, basis))
        run_on_all(group, cast)
        names, frozen = frozen_to_share(model, place.device, config.keep_whole_numel, basis.parts)
        part_specs = list(map(basis.parts.spec_of, frozen))
        weights.take_frozen(names, frozen, place, *placement_of({}, config, place.device), unread.awaited, part_specs)
        run_on_all(group, partial(attach_hooks, sharding.window))
        if stage_of(config.stage).shards_weights:
            weights.expect_buffers(MetaBuffers(model, place.device).unwritten)
            unread.fill(sharding)
        manage(chosen.leaves, sharding.window)
        sharding.lifetime.hooks = _hooks_of_state_dict(model, chosen.tensors, basis.masters.wholeness)
        on_failure.pop_all()
    if place.is_host:
        # The old memory of the weights is in pieces too small for the allocator to return by itself.
        place.accelerator.empty_cache()
    return sharding


class _HookOfOurs:
    """A hook that belongs to this training. It does nothing in a copy of the model and in another process, and a file with the
    model can be read without this package."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        self._hook(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_HOOK


def _hooks_of_state_dict(model: nn.Module, tensors: Sequence[nn.Parameter], wholeness: Wholeness) -> list[Any]:
    """Registers the hooks of a model's `state_dict` and `load_state_dict`."""
    # Registered by methods of nn.Module: a ScriptModule calls its hooks, but its own methods take none.
    when_read: Any = partial(nn.Module.register_state_dict_post_hook, model)
    before_load: Any = partial(nn.Module._register_load_state_dict_pre_hook, model)
    after_load: Any = partial(nn.Module.register_load_state_dict_post_hook, model)
    hooks = [before_load(_HookOfOurs(wholeness.note_loading)), after_load(_HookOfOurs(wholeness.note_loaded))]
    hooks.append(when_read(_HookOfOurs(tie_in_state_dict)))
    parts = {id(tensor) for tensor in tensors if not isinstance(tensor, Absent) and is_part(tensor)}
    if parts:
        named = model.named_parameters(remove_duplicate=False)
        hooks.append(when_read(_HookOfOurs(CopiedInStateDict([name for name, param in named if id(param) in parts]))))
    return hooks


def _connected_parts(basis: _Basis) -> ShardingState:
    """Makes all parts, each with the parts that it uses. Not a collective."""
    model, optimizer, config, plan, group = basis.model, basis.optimizer, basis.config, basis.plan, basis.group
    layout_ref, formats, params, masters = basis.layout_ref, basis.formats, basis.params, basis.masters
    weights, hooks, memory_guard = basis.weights, basis.hooks, plan.memory_guard
    staging, fused_step = _staging(basis), fused_step_of(optimizer, config.kernels)
    scaling = Scaling(reduce=reduction(config, of_family(group, 0).size))
    gradients, groups = GradientShard(layout_ref, memory_guard.homes), groups_of(layout_ref, group)
    narrowings = [narrowing_of(config.reduce_dtype, each, in_shares, layout_ref, scaling) for each, in_shares in groups]
    inflight = InflightReductions(
        layout_ref,
        group,
        staging,
        gradients,
        scaling,
        [InTurn(narrowing, weights) if weights.schedules() else narrowing for narrowing in narrowings],
        checks_finite=config.on_nonfinite == "raise",
        sums=_sums(basis, fused_step),
    )
    of_model = partial(_attributes, weakref.ref(model))
    policy = SyncPolicy(config.accumulation, stage_of(config.stage).accumulates_locally, of_model)
    reducer = Reducer(layout_ref, formats, plan.place.accelerator, staging, inflight, policy.num_sends, group.needs)
    grad_ops = GradOps(layout_ref, formats, group, inflight)
    tracker = ParamTracker(model, params, weights, formats, plan.params.unmanaged, hooks.renew, basis.tables)
    buffers = Buffers(model, group, basis.parts) if config.buffers == "broadcast" else None
    settings = partial(_settings, of_user(optimizer), buffers)
    sync = WindowSync(group, params, layout_ref, "\n".join(config.lines()), tracker, settings)
    prepare = gradients.prepare if group.needs is not None else None
    if prepare is not None:
        prepare()
    place_params = partial(_place_params, basis.placer, hooks, params, masters, of_user(optimizer), prepare)
    restore_kernels = use_kernels(optimizer, config.kernels)
    step_policy = StepPolicy(config.clip, config.on_nonfinite)
    updater = Updater(params, grad_ops, masters, optimizer, step_policy, fused_step, restore_kernels)
    ahead = StepsAhead(masters, gradients, updater) if steps_ahead(config) else None
    window = Window(params, reducer, grad_ops, policy, sync, scaling, place_params, ahead)
    publisher = WeightPublisher(layout_ref, params, group, weights, masters)
    offloader = StateOffloader(model, plan.place.accelerator, params, formats, weights, masters, optimizer, window)
    adopt_state(params.leaves, masters, optimizer)
    return ShardingState(
        group=group,
        parts=basis.parts,
        params=params,
        masters=masters,
        window=window,
        hooks=hooks,
        updater=updater,
        publisher=publisher,
        placer=basis.placer,
        config=config,
        offloader=offloader,
        memory_guard=memory_guard,
        loss_scaler=LossScaler(config, scaling),
        lifetime=Lifetime(group),
        buffers=buffers,
        input_cast=basis.input_cast,
    )


def _attributes(model: weakref.ref[nn.Module]) -> Mapping[str, Any]:
    """Returns the attributes of a model; none if that is gone."""
    present = model()
    return {} if present is None else vars(present)


def _settings(inner: Callable[[], torch.optim.Optimizer], buffers: Buffers | None) -> str:
    """Returns a text of the settings that must be the same on all ranks at a step."""
    return "\n".join([settings_of(inner()), *([] if buffers is None else [buffers.text()])])


def _staging(basis: _Basis) -> Staging:
    """Makes the memory that gradients are sent from."""
    group, place, explain_oom = basis.group, basis.plan.place, basis.plan.memory_guard.explain_oom
    layout, layout_ref = basis.plan.layout, basis.layout_ref

    def source(of_ranks: Group) -> Source:
        def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
            with explain_oom("A buffer to send gradients from", layout_ref):
                return of_ranks.staging(numel, dtype, place.device)

        return Source(allocate, of_ranks.is_reusable)

    whole, *of_parts = (source(of_family(group, family).inner) for family in range(len(layout.families)))
    return Staging(place.accelerator, *whole, basis.weights.room, usual_numel(layout), of_parts)


def _sums(basis: _Basis, fused_step: FusedStep | None) -> SumsByTorch:
    """Makes the arithmetic that adds the rows that ranks sent."""
    kinds = host_step_dtypes(basis.plan.layout.params, basis.plan.place.device)
    families = range(len(basis.plan.layout.families))
    sizes = {of_family(basis.group, family).inner.size for family in families if fused_step is not None}
    deferrable = {each for size in sizes for each in deferrable_sums(kinds, size)}
    return CompiledSums(deferrable) if basis.config.kernels == "compiled" else SumsByTorch(deferrable)


def _place_params(
    placer: ParamPlacer,
    hooks: GradHooks,
    params: Params,
    masters: Masters,
    inner: Callable[[], torch.optim.Optimizer],
    prepare: Callable[[], None] | None,
    fresh: Sequence[int],
) -> Sequence[int]:
    """Gives parameters that are trained from now on a place, with the state that the optimizer had for them. A collective."""
    optimizer = inner()
    # A settling may happen in inference mode, and tensors made then could not be trained.
    with _restoring(optimizer), torch.inference_mode(False):
        new = placer.place(fresh, partial(adopt_state, params.leaves, masters, optimizer))
    hooks.renew()
    if prepare is not None:
        prepare()
    return new


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


def reduction(config: ZeroConfig, size: int) -> float:
    """Returns the factor that makes the sum over ranks the gradient."""
    return 1.0 / size if config.reduce == "mean" else 1.0 if config.reduce == "sum" else 1.0 / config.reduce
