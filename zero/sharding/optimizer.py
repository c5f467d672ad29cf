"""The front door: `shard`, and what it returns, a torch.optim.Optimizer whose gradients and state are in shares.

A *share* is the part of gradients or states that one rank keeps; a *master* is the copy of a weight, in fp32, that is stepped;
*moments* are the rest of an optimizer's state. A *window* is from one `zero_grad` to the next; to *settle* it makes its
gradients those of all ranks. Methods hand on: `step` to step.py, gradients to `Window`, all else to the parts that
`ShardingState` names.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsFloat

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.comm.levels import of_family
from zero.comm.one_answer import exchange_about
from zero.config.schema import ZeroConfig, check_plain_loop, check_supported
from zero.memory.formats import dtype_name, sum_dtype
from zero.memory.leaves import like_leaf
from zero.optim.several import OneOrSeveral, Optimizers, as_one, members_of, skip_dynamo_import
from zero.plan.layout import set_bits
from zero.plan.scaling import LossScale
from zero.runtime.params.swap import gathered, params_of
from zero.runtime.params.table import Params
from zero.runtime.params.tracking import ModuleTables
from zero.setup.checks import check_model, check_weights
from zero.sharding.build import build
from zero.sharding.join import add_group
from zero.sharding.loss_scaler import loaded_scale, with_loss_scale
from zero.sharding.modes import give_modes
from zero.sharding.optimizer_state import load_state, whole_state, whole_state_dict
from zero.sharding.state import ShardingState
from zero.sharding.step import step

# Methods of other libraries' optimizers, each with what to write instead.
_ELSEWHERE = {
    "consolidate_state_dict": "state_dict() is whole on every rank: call it on all of them, and write it on one",
    "check_overflow": "a step whose gradients are not finite is skipped, and overflow says so after it",
    "quantize_nontrainable_params": "no weight is quantised by it: quantise the model itself, with torchao",
    "scaled_global_norm": "engine.get_global_grad_norm() is the norm of the last step",
    "clip_grad_norm": "pass clip= to zero.shard, or call torch.nn.utils.clip_grad_norm_ between backward and step",
}

# The modules of torch.distributed.checkpoint that call `state_dict` to save and to load.
_DCP_MODULES = "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader"

# The tables in which torch keeps the hooks of an optimizer.
_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip

_live: weakref.WeakSet[ShardedOptimizer] = weakref.WeakSet()  # every optimizer that exists, closed ones too


def shard(
    model: nn.Module,
    optimizer: OneOrSeveral | Callable[[Iterable[nn.Parameter]], OneOrSeveral],
    *,
    stage: int,
    dtype: torch.dtype | str | None = None,
    group: Any = None,
    clip: float | None = None,
    accumulation: int | None = None,
    reduce: str | float = "mean",
    offload: Any = None,
    bucket_bytes: int | str = "auto",
    **options: Any,
) -> ShardedOptimizer:
    """Shards the training of `model` by `optimizer`, and returns the optimizer to use from then on. A collective.

    The model stays the object that it is, and the loop stays as it was:

        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-4), stage=2)
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    1. In this call ranks compare what they built, take rank 0's weights, and keep their shares of what `stage` shards.
    2. In backward each bucket of gradients is summed over the ranks once it is full. `.grad` stands for the gradient of the
       global batch, of which a rank may hold a part only.
    3. In `step` ranks agree whether it is applied and how it is clipped. Each steps its shares and sends the new weights.
    4. At stage 3 a weight has memory only while operators use it, and then as long as `gathered_bytes` allows.

    What cannot be trained is refused before the model is changed. If one rank fails, all raise, and the model is plain again.

    Args:
        model: The model, on its device. At stage 3 it may be on the meta device.
        optimizer: One, a list of them, or a function that makes them from the parameters.
        stage: 0 shards nothing, 1 masters and moments, 2 gradients too, 3 weights too. A higher stage takes less memory. With
            one backward a step 1 and 2 send the same bytes, and 3 up to one and a half times as many.
        dtype: Casts floating-point parameters, and keeps fp32 masters of 16-bit ones.
        group: The ranks that have samples of their own: a process group, or a DeviceMesh. If that has two dimensions, the inner
            one shards and the outer one replicates. All ranks by default.
        clip: Limits the norm of all gradients at every step.
        accumulation: Declares how many backwards make a step. At stage 1 gradients then travel once a step.
        reduce: "mean", "sum", or a number to divide by.
        offload: "cpu" keeps masters, moments, gradients and at stage 3 weights on the host. The step is taken there, and sums
            and new weights cross the link.
        bucket_bytes: The bytes that are reduced at once. Two buffers of that size are in use; smaller ones make more
            collectives.
        **options: Other settings of `zero.ZeroConfig`, each of which docs/config.md explains. An unknown name is refused.
    """
    check_model(model)
    options |= {"dtype": dtype, "clip": clip, "accumulation": accumulation, "reduce": reduce, "offload": offload}
    options = {name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in options.items()}
    config = ZeroConfig(stage=stage, bucket_bytes=bucket_bytes, **options)  # type: ignore[arg-type]
    check_supported(config)
    check_plain_loop(config)
    return ShardedOptimizer(model, optimizer(model.parameters()) if callable(optimizer) else optimizer, config, group)


class ShardedOptimizer(torch.optim.Optimizer):
    """Every step is one that the optimizer it was made from would take on the global batch.

    `zero.shard` makes it. `param_groups` are that optimizer's own dicts, so a learning rate schedule may be made from either of
    the two. `state` is keyed by this rank's shares, not by parameters: `whole_state` gives a parameter's state. Methods that
    are collectives say so: all ranks call them, in the same order.
    """

    # A fused inner optimizer offers this to GradScaler, which then leaves unscaling to it; ours does it on the shares.
    _step_supports_amp_scaling = False

    def __init__(self, model: nn.Module, inner: Any, config: ZeroConfig, group: Any = None) -> None:
        inner = as_one(inner)
        config = with_loss_scale(config, inner)
        tables = ModuleTables()
        sharding = build(model, inner, config, group, tables)
        with skip_dynamo_import():
            super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = inner.state
        for hooks in _HOOKS:  # both optimizers share these tables, so a hook of either runs for both
            setattr(self, hooks, getattr(inner, hooks))
        sharding.lifetime.hooks.extend(refuse_state_dict(member) for member in members_of(inner))
        self.inner: torch.optim.Optimizer = inner
        self.model = model
        self.group = of_family(sharding.group, 0)  # the ranks that have data of their own
        self._sharding = sharding
        self._tables = tables
        _live.add(self)
        # [Note: the user's]
        # Nothing that a part keeps may lead back to this object, as a hook or an attribute of the model might: the finalizer
        # keeps the parts, so neither would ever be freed. So parts refer to the model, its modules and the plain optimizer
        # weakly, and this object keeps those. The finalizer has to keep the parts: if a cycle was collected, threads would end
        # and files be closed in any order.
        self._release = weakref.finalize(self, sharding.give_up)
        self._release.atexit = False
        give_modes(self, inner)
        self._grad_norm: SupportsFloat | None = None

    def __repr__(self) -> str:
        """Adds to torch's text how the training is sharded, and where it is. Waits for nothing, and is no collective."""
        sharding, (_, _, groups) = self._sharding, super().__repr__().partition("\n")
        kinds = " and ".join(type(member).__name__ for member in members_of(self.inner))
        where = f"rank {sharding.group.rank} of {sharding.group.size}, step {sharding.window.sync.step}"
        state = "closed" if sharding.lifetime.is_over else f"{where}, window {sharding.window.phase.name}"
        return f"{type(self).__name__} ({kinds} at stage {sharding.config.stage}, {state}\n{groups}"

    @property
    def sharding(self) -> ShardingState:
        """The parts of this optimizer; raises if it was closed. Methods read this one, but for those that may be asked
        afterwards, such as `config` and `skipped_steps`, and `close` itself."""
        if self._sharding.lifetime.is_over:
            raise ValueError(
                "Cannot use a sharded optimizer that was closed: its model is plain again. Use a plain optimizer, or shard "
                "again; read its state before close()."
            )
        return self._sharding

    # the loop ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Settles the window, decides whether the step is applied, and updates the weights. Returns the loss that `closure`
        evaluates, None without one. A collective."""
        sharding = self.sharding
        sharding.offloader.check("step")
        check_original(self, self.inner, sharding.params)
        check_state(self.inner, sharding)
        self.inner._opt_called = True  # type: ignore[attr-defined]  # a schedule made on it looks whether it steps
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decision = step(sharding)
        if decision is not None:
            self._grad_norm = decision.grad_norm
            if not decision.apply and sharding.loss_scaler.is_stuck:
                raise sharding.updater.nonfinite(float(decision.grad_norm))
        every = sharding.config.check_weights_every
        if every is not None and sharding.window.sync.step % every == 0:
            self.check()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and so ends the window. A collective, unless a step has used it and nothing came since."""
        if not set_to_none:
            self.sharding.offloader.check("zero_grad", "weights", "gradients")
        self.sharding.window.end(to_zeros=not set_to_none)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Runs `loss.backward()`, with the loss scale of fp16 weights if there is one."""
        sharding = self.sharding
        sharding.offloader.check("backward", "weights", "gradients")
        try:
            with sharding.loss_scaler.scaled(loss) as scaled:
                torch.autograd.backward(scaled, **options)
        except BaseException as error:
            sharding.window.annotate_error(error)
            raise

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradients that were stepped last, before the step clipped them; None before the first. Reading it
        waits until a device has computed the norm, and not for the step. Not a collective."""
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite. Reading it waits until a device has judged
        the last one, and not for the step. Not a collective."""
        return int(self._sharding.updater.skipped)

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self._sharding.updater.skipped.go_on_from(number)

    @property
    def config(self) -> ZeroConfig:
        """The effective configuration. Not a collective."""
        return self._sharding.config

    @property
    def loss_scale(self) -> LossScale | None:
        """The current loss scale; None unless the weights are fp16. Not a collective."""
        return self._sharding.loss_scaler.scale

    # windows -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients of backwards inside on this rank until the window is settled. Not a collective."""
        with self.sharding.window.policy.no_sync():
            yield

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the next backwards are the last of the accumulation; it holds until the window ends. Not a
        collective."""
        self.sharding.window.policy.override = bool(is_boundary)

    def weight(self, amount: float) -> None:
        """Sets how much the next micro-batch counts. The gradient becomes the mean over the weights of all ranks and
        micro-batches. Not a collective.

        Args:
            amount: A number of tokens, for instance; zero is allowed. It holds for all backwards of that micro-batch.
        """
        if not 0 <= amount < float("inf"):
            raise ValueError(
                f"Cannot use weight({amount}): a weight is a finite number of 0 or more. Pass the number of tokens."
            )
        self.sharding.window.weigh(float(amount))

    def no_contribution(self) -> None:
        """Says that this rank has no backward in this window; it counts as zeros. Not a collective."""
        self.sharding.offloader.check("no_contribution", "weights", "gradients")
        self.sharding.window.contribute_nothing()

    def settle(self) -> None:
        """Makes the gradients of this window final, as the first operation on one does. A collective."""
        self.sharding.offloader.check("settle", "weights", "gradients")
        self.sharding.window.settle("settle")

    def discard(self) -> None:
        """Throws this window's gradients away. A collective, unless a step has used the window and nothing came since."""
        self.zero_grad()

    def flush(self) -> None:
        """Steps on the gradients of an unfinished window and clears them. A collective."""
        self.step()
        self.zero_grad()

    # looking -----------------------------------------------------------------------------------------------------

    def whole_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns the global gradient of a parameter, whole on every rank; None if no rank had one. A collective."""
        window, index = self.sharding.window, self._index(param)
        self.sharding.offloader.check("whole_grad", "weights", "gradients")
        window.settle("whole_grad")  # comes first, as a settling is where this rank hears of another one that failed
        exchange_about(self.sharding.group, f"whole_grad of {self.sharding.params.names[index]}", b"")
        if index not in set_bits(window.used):
            return None
        shard = window.grad_ops.shard
        whole = window.grad_ops.whole(index, shard.piece, sum_dtype(param.dtype)).to(param.dtype)
        return like_leaf(self.sharding.params.leaves[index], whole)

    def whole_state(self, param: nn.Parameter) -> dict[str, Any]:
        """Returns the optimizer's state of a parameter, whole on every rank. A collective; at stage 0 with nothing on disk a
        rank has all of it, and each may ask alone."""
        sharding, index = self.sharding, self._index(param)
        sharding.offloader.check("whole_state", "masters", "moments", "weights")
        with sharding.asking_all(f"whole_state of {sharding.params.names[index]}"):
            return whole_state(sharding, self.inner, index)

    def any_rank(self, flag: bool) -> bool:
        """Returns True if any rank passed True. A collective."""
        return any(numbers[0] for numbers in self.sharding.window.grad_ops.exchange_numbers([float(bool(flag))], "any_rank"))

    def gathered(self, what: Any = None) -> contextlib.AbstractContextManager[None]:
        """Makes parameters ordinary tensors with memory of their own for the length of a block. Not a collective.

        Inside, no gradients are recorded and nothing is stepped. Edits are kept: all ranks make the same.

        Args:
            what: A module, a parameter, or several; None for the whole model.
        """
        self.sharding.offloader.check("gathered", "weights")
        return gathered(params_of(self.model if what is None else what))

    def check(self) -> None:
        """Raises if weights, frozen ones among them, differ between ranks, and names the first parameter that does; also if an
        update broke off and no load has replaced what it left. A collective."""
        self.sharding.offloader.check("check", "weights")
        params = self.sharding.params
        named = dict(zip(params.names, params.tensors, strict=True))
        named |= {name: param for name, param in self.model.named_parameters() if not param.requires_grad}
        check_weights(named, self.sharding.group, self.sharding.parts)
        self.sharding.check_whole_on_all("vouch for the weights")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state by parameter name, whole, the same on every rank and loadable at any number of them. A collective:
        all ranks call it, and one may write it. At stage 0 with nothing on disk a rank has all of it, and each may ask
        alone."""
        sharding = self.sharding
        _refuse_torchs_checkpoints(sys._getframe(1).f_globals.get("__name__"), bool(sharding.parts.meshes))
        sharding.offloader.check("state_dict")
        sharding.window.sync.check_factors()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with sharding.asking_all("a state_dict", must_be_whole=True):
            state_dict = {**whole_state_dict(sharding, self.inner), "skipped_steps": self.skipped_steps}
        if self.loss_scale is not None:
            state_dict["loss_scale"] = self.loss_scale.progress
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, here or in plain torch; every rank passes the same. The loss scale and the count of
        skipped steps, which plain torch does not save, then stay as they are. Not a collective."""
        sharding = self.sharding
        sharding.offloader.check("load_state_dict")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        scale = loaded_scale(self.loss_scale, state_dict, sharding.window.needs_sync)
        load_state(sharding, self.inner, state_dict)
        sharding.loss_scaler.scale, self.skipped_steps = scale, state_dict.get("skipped_steps", self.skipped_steps)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of new parameters, as in torch; they get memory when they are first used. All ranks add the same. A
        group that is refused changes nothing. Not a collective, except that ranks tell each other a plain part's length."""
        sharding = getattr(self, "sharding", None)
        if sharding is None:  # torch's constructor calls this for the groups that it is given
            super().add_param_group(param_group)
            return
        add_group(sharding, self.model, param_group)

    # between phases ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves states to the host or to a disk until `reload_states`. Not a collective.

        Edits of the weights are adopted first; what was assigned to `.data` moves along. Forward needs weights; backward and
        settling need weights and gradients; a step needs all. If memory does not suffice, nothing is moved.

        Args:
            include: Names of masters, moments, gradients, weights and buffers; None for all of these.
            device: "cpu", or "disk:/directory".
            pin_memory: Whether host memory is pinned.
            non_blocking: Whether the call returns before the copies have ended.
        """
        sharding = self.sharding
        what, needed = f"offload_states({'' if include is None else include})", sharding.offloader.num_bytes(include, device)
        sharding.window.refuse_ahead(f"call {what}")
        sharding.memory_guard.check(what, needed)
        if not sharding.offloader.is_away:
            sharding.adopt()
        try:
            names = sharding.offloader.offload(include, device, pin_memory, non_blocking)
        finally:
            sharding.window.sync.tracker.invalidate()
        if "buffers" in names:
            sharding.window.reducer.release_buffers()

    @torch.no_grad()
    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves back what `offload_states` moved. What does not fit the device stays away until another call.
        Not a collective."""
        try:
            self.sharding.offloader.reload(non_blocking)
        finally:
            self.sharding.window.sync.tracker.invalidate()

    def rebuild(self, group: Any = None) -> None:
        """Resumes after a lost collective, if every rank is still there, over new connections. The gradients of the window are
        thrown away. A collective.

        Args:
            group: The process group to use if that of before is gone itself.
        """
        self.sharding.rebuild(group)

    def close(self) -> None:
        """Makes the model plain again: no hooks, and memory of its own for every parameter. The optimizer's state is freed:
        take `state_dict()` before, to go on from it. Deleting the optimizer closes it. A collective at stage 3 only."""
        self._sharding.release_anywhere()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Cannot copy a sharded optimizer: it belongs to its model and to a group of ranks. Keep its state_dict(), which "
            "loads at any number of ranks."
        )

    def __getattr__(self, name: str) -> Any:
        instead = f", but {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self)

    def _index(self, param: nn.Parameter) -> int:
        index = self.sharding.params.index.get(id(param))
        if index is None:
            raise ValueError(
                f"Cannot find the parameter of shape {tuple(param.shape)}: it is not among the "
                f"{len(self.sharding.params.names)} of this optimizer. Pass one of the model's trainable parameters."
            )
        return index


def optimizers_of(model: nn.Module) -> list[ShardedOptimizer]:
    """Returns the sharded optimizers that manage parameters of a model, in the order of the parameters. Not a collective."""
    return list(dict.fromkeys(optimizer for optimizer in map(optimizer_of, model.parameters()) if optimizer is not None))


def optimizer_of(param: nn.Parameter) -> ShardedOptimizer | None:
    """Returns the sharded optimizer that manages a parameter, or None. Not a collective."""
    for optimizer in list(_live):
        if not optimizer._sharding.lifetime.is_over and id(param) in optimizer._sharding.params.index:
            return optimizer
    return None


# the optimizer that was sharded ---------------------------------------------------------------------------------------


def _refuse_torchs_checkpoints(caller: str | None, has_parts: bool) -> None:
    """Refuses a `state_dict` for torch's checkpoints where they would lose something. `has_parts`: ranks have parts of
    parameters."""
    if caller in _DCP_MODULES and has_parts:
        raise ValueError(
            "Cannot save or load the optimizer with torch.distributed.checkpoint: each rank has parts of parameters, and "
            "those of one rank would be written for all. To write call zero.save, and zero.export(..., format='dcp') once; "
            "to read run `python -m zero import`, and zero.load what that writes."
        )
    if caller == "torch.distributed.checkpoint.state_dict":
        raise ValueError(
            "Cannot make torch's get_optimizer_state_dict of a sharded optimizer: it numbers what has names here, and "
            "drops the masters. Call optimizer.state_dict(), or write a checkpoint with zero.save."
        )


def refuse_state_dict(inner: torch.optim.Optimizer) -> RemovableHandle:
    """Refuses `state_dict` of an optimizer that was sharded, whose state is by shares, which torch looks up as parameters."""
    sharded = weakref.ref(inner)

    def refuse(optimizer: torch.optim.Optimizer) -> None:
        if optimizer is sharded():  # the sharded optimizer has the same hooks
            raise ValueError(
                f"Cannot take state_dict() of the {type(optimizer).__name__} that was sharded: its state is in shares. Call it "
                "on the optimizer that zero.shard returned, on all ranks."
            )

    return inner.register_state_dict_pre_hook(refuse)


def check_original(sharded: torch.optim.Optimizer, inner: torch.optim.Optimizer, params: Params) -> None:
    """Raises if the groups or the state of the optimizer that was sharded are no longer those of the sharded one."""
    if isinstance(inner, Optimizers):
        inner.check()
    changed = "other state" if inner.state is not sharded.state else "other groups"
    if inner.state is sharded.state and inner.param_groups is sharded.param_groups:
        held = [param for group in inner.param_groups for param in group["params"] if id(param) not in params.index]
        if not any(param.requires_grad for param in held):
            return
        changed = "parameters in its groups that were not added by add_param_group"
    raise ValueError(
        f"Cannot step: the {type(inner).__name__} that was sharded has got {changed} since. Use the sharded "
        "optimizer for load_state_dict and add_param_group, and change its groups and its state in place."
    )


def check_state(inner: torch.optim.Optimizer, sharding: ShardingState) -> None:
    """Raises if the user has put state of a trained parameter where plain torch has it: the step would not read it."""
    params, slots = sharding.params, sharding.layout_ref.layout.slots
    for tensor, state in inner.state.items():
        index = params.index.get(id(tensor))
        if index is not None and state and slots[index] is not None:  # an empty one comes of reading it
            raise ValueError(
                f"Cannot step: state of {params.names[index]} was set in optimizer.state, which has the shares of this rank "
                "and not the parameters. Remove it there, and load it by name: optimizer.load_state_dict, on all ranks."
            )
