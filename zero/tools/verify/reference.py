"""Training in plain PyTorch on the global batch: the expected result of sharded training, computed by none of its code.

Every rank has a plain copy of the model and steps a plain optimizer. Gradients are added over the ranks by hand, in rank order,
from bytes that travel as host messages. Nothing that lays out, reduces, scales, clips or publishes in sharded training is used.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerators.interface import host_bytes
from zero.comm.group import Group
from zero.config.schema import ZeroConfig
from zero.engine.base import autocast_of
from zero.memory.formats import DTYPES, sum_dtype
from zero.setup.module_sync import cast_inputs


class PlainRun:
    """One rank's plain copy. Weights in 16 bits have masters in fp32, which the optimizer steps."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer, config: ZeroConfig, group: Group) -> None:
        self.inner = inner
        self.weights = [param for entry in inner.param_groups for param in entry["params"]]
        self.moved = [0.0] * len(self.weights)  # by how much an element of each moved at most, added up over the steps
        self._model = model
        self._config = config
        self._group = group
        self._sums: dict[int, torch.Tensor] = {}  # of this rank's gradients, by the parameter's number
        before = [weight.detach().clone() for weight in self.weights]
        _cast(model, self.weights, config)
        cast_inputs(model, config)
        self.masters = [_master_of(weight, value) for weight, value in zip(self.weights, before, strict=True)]
        self._let_the_optimizer_step_masters()

    def _let_the_optimizer_step_masters(self) -> None:
        master_of = {id(weight): master for weight, master in zip(self.weights, self.masters, strict=True)}
        for group in self.inner.param_groups:
            group["params"] = [master_of[id(weight)] for weight in group["params"]]
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight and weight in self.inner.state:
                self.inner.state[master] = self.inner.state.pop(weight)

    def backward(self, loss: Callable[[Any], torch.Tensor], scale: float) -> None:
        """One micro-batch; `loss` is called with the model. `scale` is the loss scale of 16 bits."""
        value = loss(callable_of(self._model, self._config)) / (self._config.accumulation or 1)
        torch.autograd.backward(value if scale == 1.0 else value.float() * scale)
        for index, weight in enumerate(self.weights):
            if weight.grad is not None:
                grad = weight.grad.detach().to(sum_dtype(weight.dtype))
                self._sums[index] = self._sums[index] + grad if index in self._sums else grad.clone()
                weight.grad = None

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Steps on the sum over all ranks, unless it is not finite and such steps are to be skipped."""
        before = [master.detach().clone() for master in self.masters]
        for index, master in enumerate(self.masters):
            master.grad = self._global_grad(index, scale)
        self._sums.clear()
        grads = [master.grad for master in self.masters if master.grad is not None]
        if self._config.on_nonfinite == "propagate" or all(bool(grad.isfinite().all()) for grad in grads):
            if self._config.clip is not None:
                nn.utils.clip_grad_norm_(self.masters, self._config.clip)
            self.inner.step()
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            master.grad = None
            if master is not weight:
                weight.copy_(master)
            if master.numel():
                self.moved[index] += float((master - before[index]).abs().max())

    def _global_grad(self, index: int, scale: float) -> torch.Tensor | None:
        """The sum over the ranks, divided as was asked; None where no rank had a gradient."""
        master, local_sum = self.masters[index], self._sums.get(index)
        values = torch.zeros_like(master) if local_sum is None else local_sum
        sent = bytes(host_bytes(values.cpu().contiguous()))
        messages = self._group.all_gather_bytes(bytes([local_sum is not None]) + sent)
        if not any(message[0] for message in messages):
            return None
        total = torch.zeros(master.numel(), dtype=master.dtype)
        for message in messages:
            if message[0]:
                total += torch.frombuffer(bytearray(message[1:]), dtype=master.dtype) if master.numel() else total
        reduce = self._config.reduce
        divisor = len(messages) if reduce == "mean" else 1.0 if reduce == "sum" else reduce
        return (total / (divisor * scale)).reshape(master.shape).to(master.device)


def callable_of(model: nn.Module, config: ZeroConfig) -> Any:
    """Returns the model itself, or what calls it under the autocast of the configuration."""
    if config.autocast is None:
        return model

    def call(*inputs: Any, **named: Any) -> Any:
        with autocast_of(config, next(model.parameters()).device):
            return model(*inputs, **named)

    return call


def _cast(model: nn.Module, weights: list[nn.Parameter], config: ZeroConfig) -> None:
    """Floating parameters that are trained or frozen, unless they or a module above them are to stay."""
    if config.dtype is None:
        return
    kept, trained = set(), {id(weight) for weight in weights}
    for name, param in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(part, pattern) for part in above for pattern in config.keep_fp32):
            kept.add(id(param))
    for param in {id(param): param for param in (*model.parameters(), *weights)}.values():
        if param.is_floating_point() and id(param) not in kept and (id(param) in trained or not param.requires_grad):
            param.data = param.data.to(DTYPES[config.dtype])


def _master_of(weight: nn.Parameter, before: torch.Tensor) -> nn.Parameter:
    """What the optimizer steps: the weight, or a wide copy of what it was before it was cast."""
    wide = sum_dtype(weight.dtype)
    return weight if weight.dtype == wide else nn.Parameter(before.to(wide), requires_grad=weight.requires_grad)
