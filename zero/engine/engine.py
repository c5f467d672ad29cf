"""The engine: forward, backward and step of a sharded optimizer, under DeepSpeed's names and with their meanings.

    engine, _, loader, _ = zero.initialize(model=model, config="ds_config.json", training_data=dataset)
    for batch in loader:       # a micro-step each
        loss = engine(batch)   # the model's forward, under the autocast of the configuration
        engine.backward(loss)  # divided by the accumulation; ranks sum gradients while it runs
        engine.step()          # counts; at the end of a window it settles, clips, steps, clears and moves the schedule

With an accumulation of 4, three calls of `step` only count, and the fourth one steps: a *micro-step* is one forward, backward
and `step`, and a *window* is the micro-steps of one step. To *settle* is to agree with the other ranks on its gradients.

An `Engine` counts, and asks its `ShardedOptimizer` for everything else: read "the loop" in it first. Its base, `BaseEngine` in
base.py, has what an engine without an optimizer has too.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero.comm import backwards
from zero.config.schema import Batch
from zero.engine.accumulation import Accumulation
from zero.engine.base import BaseEngine
from zero.engine.checkpoints import load_into, save_from
from zero.engine.optimizer_names import set_rate
from zero.engine.reports import Reports
from zero.graph.backend import compile
from zero.profiling import during
from zero.sharding.optimizer import ShardedOptimizer

logger = logging.getLogger("zero")

_COUNTERS = ("global_steps", "global_samples", "micro_steps")


class Engine(BaseEngine):
    """Every step that did not raise counts once in `global_steps`, whether it was applied or skipped.

    An engine is a model and its sharded optimizer behind `engine(x)`, `engine.backward(loss)` and `engine.step()`. It is not a
    module: `engine.module` is the plain model. Attributes that the engine does not have (`state_dict`, `named_parameters`,
    `train`, `generate`) are looked up on that model. Methods that are collectives say so.
    """

    def __init__(self, optimizer: ShardedOptimizer, lr_scheduler: Any = None, training_dataloader: Any = None) -> None:
        self._sharding = sharding = optimizer.sharding
        super().__init__(optimizer.model, optimizer.config, sharding.group, sharding.accelerator.device(), training_dataloader)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        scaling = sharding.window.scaling
        self._accumulation = Accumulation(
            self.config.accumulation or 1, self.config.count_micro_steps, lambda: scaling.missing_scale
        )
        sharding.window.policy.counting = self._accumulation
        sharding.window.scaling.divisor = self._accumulation.declared
        self._applied = False
        self._reports = Reports(self.config.report, optimizer)

    def __repr__(self) -> str:
        """Says how many steps were counted, and how the optimizer shards. Waits for nothing, and is no collective."""
        of_optimizer = repr(self.optimizer).partition("\n")[0]
        return f"{type(self).__name__} of {type(self.module).__name__}, global step {self.global_steps}: {of_optimizer})"

    # the loop ----------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Runs the model's forward, under the autocast of the configuration. Not a collective."""
        window = self.optimizer.sharding.window
        if backwards.running() == -1:  # a backward that recomputes the forward calls this too
            window.scaling.expect_plain()
        window.sync.set_phase("in the forward")
        if self.module.training:
            self.tput_timer.start()
        with during("forward", window.clock):
            outputs = super().__call__(*inputs, **named)
        window.sync.set_phase("after the forward")
        return outputs

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> torch.Tensor:
        """Runs the backward of a micro-batch's loss, divided by the declared accumulation, and returns the divided loss. No
        rank waits for another one here.

        `loss.backward()` divides too, as in DeepSpeed: its gradients are divided as they come. `scale_wrt_gas=False` turns the
        division off. So does a `weight`, which makes a mean of its own. `options` are those of `torch.autograd.backward`.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"Cannot send a {type(loss).__name__} backward: engine.backward takes a loss, which is a tensor. Compute it "
                "from the model's outputs, and pass it."
            )
        accumulation, window = self._accumulation, self.optimizer.sharding.window
        is_weighted = window.scaling.weight is not None
        if window.since_settling.weights and not is_weighted:
            raise ValueError(
                "Cannot use engine.backward without a weight: other micro-batches of this window have one. Call "
                "engine.weight(n) before each of them, or before none."
            )
        divides = scale_wrt_gas and not is_weighted
        if divides and accumulation.declared != 1:
            loss = loss / accumulation.declared
        with during("backward", window.clock), accumulation.engine_backward(divides), window.scaling.divided():
            self.optimizer.backward(loss, retain_graph=retain_graph, **options)
        self._reports.add(loss)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the loss scale, if there is one, for a backward that you call:
        `engine.scale(loss).backward()`. Without it such a backward is refused, as gradients of fp16 weights could underflow.
        Not a collective."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise ValueError("Cannot scale: this is no tensor that needs a gradient. Pass the loss of this engine's model.")
        return self.optimizer.sharding.loss_scaler.apply(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-step. At the end of a window it also settles, clips, steps, clears the gradients and, unless the step
        was skipped, advances the scheduler with `lr_kwargs`. A collective at the end of a window only."""
        accumulation = self._accumulation
        accumulation.check_step()
        ends = accumulation.at_end or not accumulation.counted
        if ends:
            self._take_step(lr_kwargs)
        else:
            accumulation.count()
            self.optimizer.sharding.window.scaling.weigh(None)  # the weight was for this micro-batch only
            self._applied = False
        self.micro_steps += 1
        self.tput_timer.stop(global_step=ends)

    def flush(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Steps on a window that is not full, dividing by the number of micro-batches that it has. Does nothing if no rank
        has a gradient. A collective."""
        accumulation, window = self._accumulation, self.optimizer.sharding.window
        has_any = window.needs_sync or window.scaling.has_final_sums  # a `.grad` that the caller assigned counts, too
        self.settle()  # comes first, as here this rank hears of another one that failed
        counts = window.grad_ops.exchange_numbers([accumulation.num_micro_batches, accumulation.divided, has_any])
        num_micro_batches = sum(count for count, _, _ in counts)
        if not num_micro_batches and not any(has_any for _, _, has_any in counts):
            return
        if any(divided for _, divided, _ in counts):
            grads = [param.grad for group in self.optimizer.param_groups for param in group["params"] if param.grad is not None]
            if grads:  # none if no loss reached a parameter
                torch._foreach_mul_(grads, accumulation.declared * len(counts) / num_micro_batches)
        self._take_step(lr_kwargs)

    def discard(self) -> None:
        """Throws this window away: the next micro-step is the first of a new one. A collective, unless a step has used the
        window and nothing came since."""
        self.optimizer.discard()
        self._accumulation.begin()
        self._reports.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; the count of micro-steps goes on, as it would in a plain loop. A collective, unless a step has
        used the window and nothing came since."""
        self.optimizer.zero_grad(set_to_none)

    def _take_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        skipped, num_micro_batches = self.optimizer.skipped_steps, self._accumulation.num_micro_batches
        try:
            with during("step", self.optimizer.sharding.window.clock):
                self.optimizer.step()
                self.optimizer.zero_grad()
        finally:
            self._accumulation.begin()  # the window is over, even if the step raised
        self._applied = self.optimizer.skipped_steps == skipped
        self.global_steps += 1
        if self.batch is not None:
            batch, counted = self.batch, self._accumulation.counted
            samples = batch.global_samples if counted else batch.micro_samples * batch.world_size * num_micro_batches
            self.global_samples += samples
        figures = {"skipped": self.skipped_steps, "lr": self.get_lr(), "mom": self.get_mom()}
        try:
            self._reports.tell(self.global_steps, figures)  # the rate of this step
        finally:  # on rank 0 too if it cannot write its records, as the other ranks do not hear of that
            if self._applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))

    # batches -----------------------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-steps of a step."""
        return self._accumulation.declared

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of samples of a step from the next window on: more or fewer micro-steps of the same size. All
        ranks call it alike, between two windows. Not a collective."""
        now = self._batch("set_train_batch_size")
        self._resize(Batch.of(global_samples=train_batch_size, micro_samples=now.micro_samples, world_size=now.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the number of samples of a micro-step from the next window on; the number of micro-steps stays.
        Not a collective."""
        now = self._batch("set_train_micro_batch_size")
        self._resize(Batch.of(micro_samples=micro_batch_size, accumulation=now.accumulation, world_size=now.world_size))

    def _resize(self, batch: Batch) -> None:
        self._accumulation.resize(batch.accumulation)
        self._sizes = batch
        self.optimizer.sharding.window.scaling.divisor = batch.accumulation

    # windows -----------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True when this micro-step is the last of its window. Not a collective."""
        return self._accumulation.at_end

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether this micro-step is the last of its window; it overrides the count until the next step.
        Not a collective."""
        self._accumulation.set_boundary(bool(is_boundary))

    @property
    def in_window(self) -> bool:
        """True when a window has begun that no step has ended. Not a collective."""
        return self._accumulation.num_micro_batches > 0

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keeps gradients of backwards inside on this rank until the window is settled. Not a collective."""
        return self.optimizer.no_sync()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Keeps gradients of the backwards inside on this rank, and reduces them together at the end of the block. Call `step`
        after the block, once for each block. A collective at the end, unless the block raises."""
        with self._accumulation.coalesce(), self.optimizer.no_sync():
            yield
        self.settle()

    def weight(self, amount: float) -> None:
        """Makes the next micro-batch count `amount`, and the gradient the mean over all weights. Not a collective."""
        self.optimizer.weight(amount)

    def no_contribution(self) -> None:
        """Says that this rank has nothing to send backward in this window. Not a collective."""
        self.optimizer.no_contribution()

    def settle(self) -> None:
        """Makes the gradients of this window final. A collective."""
        self.optimizer.settle()

    # looking -----------------------------------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite and were not applied."""
        return self.optimizer.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last window's gradients before the step's own clipping; None before the first step.
        Not a collective."""
        return self.optimizer.grad_norm

    def loss_scale(self) -> float:
        """Returns the factor that the next loss is multiplied by; 1.0 if losses are not scaled."""
        scale = self.optimizer.loss_scale
        return 1.0 if scale is None else scale.value

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group. Not a collective, but every rank sets the same."""
        set_rate(self.optimizer, lr)

    @property
    def client_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was passed, or made from the configuration, and was sharded. Not a collective."""
        return self.optimizer.inner

    @property
    def monitor(self) -> Reports:
        """The writer for TensorBoard, if the configuration has one: `monitor.write_events([(name, value, step)])`."""
        return self._reports

    def get_mom(self) -> list[Any]:
        """Returns the momentum of each group: its betas if it has them."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns `grad_norm`."""
        return self.grad_norm

    def was_step_applied(self) -> bool:
        """Returns whether the last `step` ended a window and was not skipped."""
        return self._applied

    def whole_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns the global gradient of a parameter, whole on every rank. A collective."""
        return self.optimizer.whole_grad(param)

    def whole_state(self, param: nn.Parameter) -> dict[str, Any]:
        """Returns the optimizer's state of a parameter, whole on every rank. A collective; at stage 0 with nothing on disk a
        rank has all of it, and each may ask alone."""
        return self.optimizer.whole_state(param)

    def any_rank(self, flag: bool) -> bool:
        """Returns True if any rank passed True. A collective."""
        return self.optimizer.any_rank(flag)

    def check(self) -> None:
        """Raises unless all ranks have the same weights. A collective."""
        self.optimizer.check()

    def rebuild(self, group: Any = None) -> None:
        """Resumes after a lost collective, if every rank is still there; this window is thrown away. A collective."""
        self.optimizer.rebuild(group)
        self._accumulation.begin()

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves states to the host or to a disk until `reload_states`, as the optimizer's `offload_states` does, with the same
        arguments. Not a collective."""
        self.optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves back what `offload_states` moved. Not a collective."""
        self.optimizer.reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Returns the memory of torch's cache to the device. Not a collective."""
        gc.collect()
        self.optimizer.sharding.accelerator.empty_cache()

    # checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> bool:
        """Saves as `zero.save` does, and takes its other options; `client_state` is rank 0's. In the middle of an accumulation
        the state after the last step is saved, and after a load that window begins anew. A collective."""
        options = {"is_latest": save_latest, "exclude_frozen": exclude_frozen_parameters, **options}
        return save_from(self, save_dir, tag, client_state, **options)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Loads a checkpoint and returns its path and the client state; `(None, None)` if there is none yet and no tag was
        given. What does not match is refused, even with `load_module_strict=False`: export the checkpoint, and load the part
        that fits into the model before it is sharded. A collective."""
        if custom_load_fn is not None:
            raise ValueError(
                "Cannot use custom_load_fn: weights are loaded as shares. Export the checkpoint, and load it into the model "
                "before it is sharded."
            )
        whole = not load_module_only
        states, schedule = whole and load_optimizer_states, whole and load_lr_scheduler_states
        return load_into(self, load_dir, tag, states=states, schedule=schedule, weights=whole)

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Compiles the model in place, as `zero.compile` does. Not a collective."""
        compile(self, backend, **{**(compile_kwargs or {}), **options})

    @property
    def counters(self) -> dict[str, int]:
        """The engine's counters at the beginning of this window; a checkpoint keeps them."""
        counted = {name: getattr(self, name) for name in _COUNTERS}
        return {**counted, "micro_steps": self.micro_steps - self._accumulation.micro_steps}

    def restart(self, counters: Mapping[str, int]) -> None:
        """Goes on counting from these counters, at the beginning of a window."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self._accumulation.begin()

    @property
    def is_closed(self) -> bool:
        """True once `close` has made the model plain again."""
        return self._sharding.lifetime.is_over

    def close(self) -> None:
        """Makes the model plain again: no hooks, and memory of its own for every parameter. A collective at stage 3."""
        self.optimizer.close()
        self._reports.close()
