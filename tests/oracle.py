"""What training must give: W plain copies of the model in one process, their gradients averaged by hand. No communication.

A training script is a generator function that does one window of one rank:

    def script(model, optimizer, rank, world, step):
        loss = model(draw(model, (4, 8), rank, step)).sum()
        backward(optimizer, loss)
        yield "settle"                       # from here on `.grad` must be the global gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()                 # whatever of it is to be compared

`reference` runs W of them in lockstep from yield to yield and puts the global gradient into every copy wherever they yield.
`train` runs the same generator on one real rank, ignoring the yields, since there the library under test sees to it.
Both give traces, and `compare` names the first parameter and step where two of them differ.

Weights in bf16 or fp16 have fp32 masters. A copy holds the low precision while it computes; from "settle" until the end of the
step its parameters *are* the fp32 masters with the fp32 sums as gradients, and torch's own clipping and optimizer see them.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.traces import LOW, CaseLike, Step, Trace, compare, copied, train, weights_of

__all__ = ["DTYPES", "LOW", "DynamicScale", "StaticScale", "Step", "Trace"]
__all__ += ["compare", "copied", "reference", "train", "weights_of"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass
class DynamicScale:
    """Loss scaling of fp16: the rule that DeepSpeed documents, in its own words."""

    scale: float = 2.0**16
    window: int = 1000  # the steps without overflow after which the scale doubles
    hysteresis: int = 2  # the overflows that pass before it halves
    minimum: float = 1.0

    def __post_init__(self) -> None:
        self._left, self._steps, self._last_overflow = self.hysteresis, 0, -1

    def update(self, finite: bool) -> None:
        if not finite:
            if self._left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self._left -= 1
            self._last_overflow = self._steps
        elif (self._steps - self._last_overflow) % self.window == 0:
            self._left = self.hysteresis
            self.scale *= 2
        self._steps += 1


@dataclass
class StaticScale:
    scale: float

    def update(self, finite: bool) -> None:
        pass


def reference(
    case: CaseLike,
    world: int,
    dtype: str = "fp32",
    *,
    loss_scale: DynamicScale | StaticScale | None = None,
    backwards_order: bool = False,
    divide_late: bool = True,
    device: str = "cpu",
) -> list[Trace]:
    """What each of `world` ranks must have after each window of the case.

    backwards_order and divide_late change the order of the arithmetic, and with it the rounding, but not the meaning: a case
    whose result depends on them would judge the order of somebody's sums and not their correctness.
    """
    replicas = [_Replica(case, rank, dtype, loss_scale, device) for rank in range(world)]
    traces = [Trace(rank, world) for rank in range(world)]
    for number in range(case.steps):
        windows = [case.script(r.model, r.optimizer, r.rank, world, number) for r in replicas]
        grads: dict[str, Tensor | None] = {}
        while True:
            reached = [_advance(window) for window in windows]
            if len({where for where, _ in reached}) != 1:
                raise AssertionError(f"{case.name}: at step {number} the ranks reached different points: {reached}")
            if reached[0][0] == "end":
                break
            grads = _settle(replicas, case.reduce, loss_scale, backwards_order, divide_late)
        for replica, trace, (_, observed) in zip(replicas, traces, reached, strict=True):
            replica.publish()
            step = Step(weights_of(replica.model), copied(observed), copied(grads), copied(replica.masters_by_name()))
            step.loss_scale = None if loss_scale is None else loss_scale.scale
            trace.steps.append(step)
        _check_that_copies_agree(case, number, traces)
    for replica, trace in zip(replicas, traces, strict=True):
        trace.buffers = copied(dict(replica.model.named_buffers()))
        trace.state = replica.state_by_name()
    return traces


def _advance(window: Generator[str, None, Any]) -> tuple[str, Any]:
    try:
        return next(window), None
    except StopIteration as end:
        return "end", end.value


def _check_that_copies_agree(case: CaseLike, number: int, traces: Sequence[Trace]) -> None:
    for trace in traces[1:]:
        for name, weight in trace.steps[-1].weights.items():
            if not torch.equal(weight, traces[0].steps[-1].weights[name]) and not weight.isnan().any():
                raise AssertionError(f"{case.name}: at step {number} rank {trace.rank} edited {name} and rank 0 did not")


class _Replica:
    """One rank's plain model and plain optimizer, and its gradient as far as torch does not keep it in `.grad`."""

    def __init__(
        self, case: CaseLike, rank: int, dtype: str, loss_scale: DynamicScale | StaticScale | None, device: str
    ) -> None:
        self.rank = rank
        # Even for the host, a default device costs a third of building a model: each call of torch asks for it.
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            self.model = case.build()
        self.optimizer = case.optimizer(self.model)
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._low: dict[nn.Parameter, torch.dtype] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._weight: float | None = None  # the weight of the backwards since it was last given, in a window that has weights
        self._total_weight = 0.0
        self._settled = False
        self.finite = True  # whether the gradients that settled last were finite
        self._cast(DTYPES[dtype], case.keep_fp32)
        self._extend(self.optimizer, loss_scale)

    def _cast(self, dtype: torch.dtype, keep: Sequence[str]) -> None:
        for name, parameter in self.model.named_parameters():
            if not parameter.is_floating_point():
                continue
            before = parameter.detach().clone()
            if dtype != torch.float32 and not any(fnmatch.fnmatch(name, pattern) for pattern in keep):
                parameter.data = parameter.data.to(dtype)
            if parameter.dtype in LOW:
                self._masters[parameter] = before.float()
                self._low[parameter] = parameter.dtype
                self._collect_in_fp32(parameter)
        if dtype == torch.float64:
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.double()

    def _collect_in_fp32(self, parameter: nn.Parameter) -> None:
        def take(parameter: nn.Parameter) -> None:
            if parameter.grad is not None:
                self._add(parameter, parameter.grad)
                parameter.grad = None

        # Registered after the hooks of the case, which were registered while it was built. Frozen parameters may be trained
        # later.
        required = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(take)
        parameter.requires_grad_(required)

    def _extend(self, optimizer: Any, loss_scale: DynamicScale | StaticScale | None) -> None:
        """Give the plain optimizer the calls that the sharded one has beside torch's."""
        optimizer.no_sync = contextlib.nullcontext
        optimizer.weight = self._begin_weight
        optimizer.no_contribution = lambda: None
        optimizer.settle = lambda: None
        optimizer.discard = lambda: optimizer.zero_grad()
        optimizer.whole_grad = lambda parameter: parameter.grad
        if loss_scale is not None:
            optimizer.backward = lambda loss, **options: (loss.float() * loss_scale.scale).backward(**options)
            if self.rank == 0:  # all ranks step, and there is one scale
                optimizer.register_step_pre_hook(lambda *_: loss_scale.update(self.finite))
        for owner in (self.model, optimizer):
            owner.zero_grad = self._forgetting(owner.zero_grad)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self.publish())

    def _forgetting(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        def zero_and_forget(*args: Any, **options: Any) -> None:
            zero_grad(*args, **options)
            self.forget()

        return zero_and_forget

    def _begin_weight(self, weight: float) -> None:
        self._fold()
        self._weight = float(weight)
        self._total_weight += float(weight)

    def _before_step(self, *_: Any) -> None:
        if not self._settled and (self._sums or any(p.grad is not None for p in self.model.parameters())):
            raise AssertionError("a script must yield 'settle' between its backwards and its step")

    def _add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
        wide = wide.clone() if self._weight is None else wide * self._weight
        if self._weight == 0:  # a weight of zero adds exact zeros, even in place of the NaN of a mean over no tokens
            wide = torch.zeros_like(wide)
        self._sums[parameter] = self._sums[parameter] + wide if parameter in self._sums else wide

    def _fold(self) -> None:
        """Move what torch has in `.grad` into the wide sums, with the weight that its backwards had."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._add(parameter, parameter.grad)
                parameter.grad = None

    def take_local_gradients(self) -> tuple[dict[str, Tensor], float | None]:
        self._fold()
        local = {name: self._sums[p] for name, p in self.model.named_parameters() if p in self._sums}
        weight = None if self._weight is None else self._total_weight
        self.forget()
        return local, weight

    def forget(self) -> None:
        self._sums.clear()
        self._weight, self._total_weight = None, 0.0

    def begin_step(self, grads: dict[str, Tensor | None]) -> None:
        """From now on, until the step is done, the parameters are the masters and `.grad` is the global gradient."""
        self._settled = True
        for name, parameter in self.model.named_parameters():
            if parameter in self._masters:
                self._adopt_edits(parameter)
                parameter.data = self._masters[parameter]
            grad = grads.get(name)
            if grad is not None and grad.dtype != parameter.dtype:
                grad = grad.to(parameter.dtype)
            parameter.grad = None if grad is None else grad.clone(memory_format=torch.preserve_format)

    def _adopt_edits(self, parameter: nn.Parameter) -> None:
        master = self._masters[parameter]
        edited = parameter.data != master.to(parameter.dtype)
        self._masters[parameter] = torch.where(edited, parameter.data.float(), master)

    def publish(self) -> None:
        self._settled = False
        for parameter, dtype in self._low.items():
            if parameter.dtype == dtype:  # no settled window came before
                continue
            self._masters[parameter] = parameter.data
            parameter.data = parameter.data.to(dtype)
            if parameter.grad is not None:
                grad, parameter.grad = parameter.grad, None
                parameter.grad = grad.to(dtype)

    def masters_by_name(self) -> dict[str, Tensor]:
        return {name: self._masters[p].clone() for name, p in self.model.named_parameters() if p in self._masters}

    def state_by_name(self) -> dict[str, dict[str, Any]]:
        state = self.optimizer.state
        return {name: copied(dict(state[p])) for name, p in self.model.named_parameters() if p in state}


def _settle(
    replicas: Sequence[_Replica],
    reduce: str | float,
    loss_scale: DynamicScale | StaticScale | None,
    backwards_order: bool,
    divide_late: bool,
) -> dict[str, Tensor | None]:
    """The global gradient, put into every copy. None where no rank has any, and what one rank lacks counts as zero."""
    taken = [replica.take_local_gradients() for replica in replicas]
    weights = [weight for _, weight in taken if weight is not None]
    divisor = sum(weights) if weights else {"mean": len(replicas), "sum": 1.0}.get(reduce, reduce)
    factor = 0.0 if divisor == 0 else 1.0 / divisor
    if loss_scale is not None:
        factor /= loss_scale.scale
    grads: dict[str, Tensor | None] = {}
    for name, _ in replicas[0].model.named_parameters():
        local = [grads_of_rank[name] for grads_of_rank, _ in taken if name in grads_of_rank]
        if backwards_order:
            local.reverse()
        if not local:
            grads[name] = None
        elif divide_late:
            grads[name] = _sum(local) * factor
        else:
            grads[name] = _sum([grad * factor for grad in local])
    if loss_scale is not None:
        finite = all(grad is None or bool(grad.isfinite().all()) for grad in grads.values())
        replicas[0].finite = finite
        if not finite:
            # Torch leaves a parameter without gradient alone, and so all ranks skip this step.
            grads = dict.fromkeys(grads)
    for replica in replicas:
        replica.begin_step(grads)
    return grads


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
