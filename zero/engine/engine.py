"""The engine: forward, backward and step of a sharded optimizer, under DeepSpeed's names and with their meanings."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero.config.schema import Batch
from zero.engine.accumulation import Accumulation
from zero.engine.base import BaseEngine
from zero.engine.checkpoints import load_into, save_from
from zero.engine.optimizer_names import set_rate
from zero.engine.progress import Progress
from zero.graph.backend import compile
from zero.profiling import during
from zero.sharding.optimizer import ShardedOptimizer

_COUNTERS = ("global_steps", "global_samples", "micro_steps")


class Engine(BaseEngine):
    """A model and its sharded optimizer behind `engine(x)`, `engine.backward(loss)` and `engine.step()`.

    It is not a module: `engine.module` is the plain model. Attributes that the engine does not have (`state_dict`,
    `named_parameters`, `train`, `generate`) are looked up on that model. Methods that are collectives say so.
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
        self._progress = Progress(self.config.report, optimizer)

    # the loop ----------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward, under the autocast of the configuration. No collective."""
        window = self.optimizer.sharding.window
        if torch._C._current_graph_task_id() == -1:  # or else it is recomputed in a backward
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
                f"Cannot send a {type(loss).__name__} backward: engine.backward takes a loss. Pass the tensor that the model's "
                "outputs were computed to."
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
        self._progress.add(loss)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the loss scale, if there is one, for a backward that you call:
        `engine.scale(loss).backward()`. Without it such a backward is refused, as gradients of fp16 weights could underflow.
        No collective."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise ValueError("Cannot scale: this is no tensor that a backward could start from. Pass a loss of this model.")
        return self.optimizer.sharding.loss_scaler.apply(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-step. At the end of a window it also settles, clips, steps, clears the gradients and, unless the step
        was skipped, advances the scheduler with `lr_kwargs`. A collective at the end of a window, else none."""
        accumulation = self._accumulation
        accumulation.check_step()
        ends = accumulation.at_end or not accumulation.counted
        if ends:
            self._take_step(lr_kwargs)
        else:
            accumulation.count()
            self.optimizer.sharding.window.scaling.weigh(None)  # it was this micro-batch's
            self._applied = False
        self.micro_steps += 1
        self.tput_timer.stop(global_step=ends)

    def flush(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Steps on a window that is not full, dividing by the number of micro-batches that it has. Does nothing where no rank
        has a gradient. A collective."""
        accumulation, window = self._accumulation, self.optimizer.sharding.window
        has_any = window.needs_sync or window.scaling.has_final_sums  # by a `.grad` of the caller's own, for instance
        self.settle()  # first, as it hears of a rank that failed before
        counts = window.grad_ops.exchange_numbers([accumulation.num_micro_batches, accumulation.divided, has_any])
        num_micro_batches = sum(count for count, _, _ in counts)
        if not num_micro_batches and not any(has_any for _, _, has_any in counts):
            return
        if any(divided for _, divided, _ in counts):
            grads = [param.grad for group in self.optimizer.param_groups for param in group["params"] if param.grad is not None]
            if grads:  # a loss may reach no parameter at all
                torch._foreach_mul_(grads, accumulation.declared * len(counts) / num_micro_batches)
        self._take_step(lr_kwargs)

    def discard(self) -> None:
        """Throws this window away: the next micro-step is the first of a new one. A collective, unless a step has used the
        window and nothing came since."""
        self.optimizer.discard()
        self._accumulation.begin()
        self._progress.forget()

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
            self._accumulation.begin()  # whatever became of the step, its window is over
        self._applied = self.optimizer.skipped_steps == skipped
        self.global_steps += 1
        if self.batch is not None:
            batch, counted = self.batch, self._accumulation.counted
            samples = batch.global_samples if counted else batch.micro_samples * batch.world_size * num_micro_batches
            self.global_samples += samples
        figures = {"skipped": self.skipped_steps, "lr": self.get_lr(), "mom": self.get_mom()}
        self._progress.tell(self.global_steps, figures)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    # batches -----------------------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps that make a step."""
        return self._accumulation.declared

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of samples of a step from the next window on: more or fewer micro-steps of the same size. All
        ranks call it alike, between two windows. No collective."""
        now = self._batch("set_train_batch_size")
        self._resize(Batch.of(global_samples=train_batch_size, micro_samples=now.micro_samples, world_size=now.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the number of samples of a micro-step from the next window on; the number of micro-steps stays.
        No collective."""
        now = self._batch("set_train_micro_batch_size")
        self._resize(Batch.of(micro_samples=micro_batch_size, accumulation=now.accumulation, world_size=now.world_size))

    def _resize(self, batch: Batch) -> None:
        self._accumulation.resize(batch.accumulation)
        self._sizes = batch
        self.optimizer.sharding.window.scaling.divisor = batch.accumulation

    # windows -----------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when this micro-step is the last of its window. No collective."""
        return self._accumulation.at_end

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether this micro-step is the last of its window; it overrides the count until the next step. No collective."""
        self._accumulation.set_boundary(bool(is_boundary))

    @property
    def in_window(self) -> bool:
        """Whether a window has begun that no step has ended. No collective."""
        return self._accumulation.num_micro_batches > 0

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients of backwards inside wait on this rank until the window is settled. No collective."""
        return self.optimizer.no_sync()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Gradients of the backwards inside wait on this rank, and are reduced together at the end of the block. Call `step`
        after the block, once for each block. A collective at the end, unless the block raises."""
        with self._accumulation.coalesce(), self.optimizer.no_sync():
            yield
        self.settle()

    def weight(self, amount: float) -> None:
        """The next micro-batch counts `amount`, and the gradient becomes the mean over all weights. No collective."""
        self.optimizer.weight(amount)

    def no_contribution(self) -> None:
        """This rank has nothing to send backward in this window. No collective."""
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
        """The norm of the last window's gradients before the step's own clipping; None before the first step. No collective."""
        return self.optimizer.grad_norm

    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1.0 where losses are not scaled."""
        scale = self.optimizer.loss_scale
        return 1.0 if scale is None else scale.value

    def get_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group. No collective, but every rank sets the same."""
        set_rate(self.optimizer, lr)

    @property
    def client_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was passed, or made from the configuration, and was sharded. No collective."""
        return self.optimizer.inner

    @property
    def monitor(self) -> Progress:
        """What writes for TensorBoard where the configuration says so: `monitor.write_events([(name, value, step)])`."""
        return self._progress

    def get_mom(self) -> list[Any]:
        """The momentum of each group: its betas where it has them."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """As `grad_norm`."""
        return self.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step` ended a window and was not skipped."""
        return self._applied

    def whole_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """The global gradient of a parameter, whole on every rank. A collective."""
        return self.optimizer.whole_grad(param)

    def whole_state(self, param: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter, whole on every rank. A collective; at stage 0 with nothing on disk each may
        ask alone."""
        return self.optimizer.whole_state(param)

    def any_rank(self, flag: bool) -> bool:
        """True where any rank passed True. A collective."""
        return self.optimizer.any_rank(flag)

    def check(self) -> None:
        """Raises unless all ranks have the same weights. A collective."""
        self.optimizer.check()

    def rebuild(self, group: Any = None) -> None:
        """Goes on after a lost collective where every rank is still there; this window is thrown away. A collective."""
        self.optimizer.rebuild(group)
        self._accumulation.begin()

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves what training keeps on the device to the host until `reload_states`. No collective."""
        self.optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves back what `offload_states` moved. No collective."""
        self.optimizer.reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Gives memory that torch keeps for later back to the device. No collective."""
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
        """Loads a checkpoint and returns its path and the client state; `(None, None)` where there is none yet and no tag was
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
        """Compiles the model in place, as `zero.compile` does. No collective."""
        compile(self, backend, **{**(compile_kwargs or {}), **options})

    @property
    def counters(self) -> dict[str, int]:
        """What the engine has counted up to the beginning of this window; a checkpoint keeps it."""
        counted = {name: getattr(self, name) for name in _COUNTERS}
        return {**counted, "micro_steps": self.micro_steps - self._accumulation.micro_steps}

    def restart(self, counters: Mapping[str, int]) -> None:
        """Counts on from there, at the beginning of a window."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self._accumulation.begin()

    @property
    def is_closed(self) -> bool:
        """Whether the model is plain again."""
        return self._sharding.lifetime.is_over

    def close(self) -> None:
        """Makes the model plain again: no hooks, and memory of its own for every parameter. A collective at stage 3."""
        self.optimizer.close()
        self._progress.close()
