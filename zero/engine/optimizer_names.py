"""DeepSpeed's names on the optimizer of `zero.initialize`, for scripts that use them: `optimizer.optimizer`, `loss_scaler`,
..."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zero.sharding.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class Scaler:
    """The loss scale as DeepSpeed shows it; 1.0 if there is none."""

    cur_scale: float
    dynamic: bool

    @property
    def loss_scale(self) -> float:
        """The loss scale, as in `cur_scale`."""
        return self.cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True when the loss scale moves, as in `dynamic`."""
        return self.dynamic


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group; one that is a tensor stays that tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class EngineOptimizer(ShardedOptimizer):
    """A sharded optimizer that also answers to the names of DeepSpeed's optimizers."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was passed or configured, as it steps on this rank. It has the class and the settings of that one;
        settings may be changed. Its parameters, and the keys of its state, are this rank's shares. Not a collective."""
        sharding, inner = self.sharding, self.inner
        held = [sharding.params.numbers_of(group["params"]) for group in inner.param_groups]
        shares = [[master for number in numbers for _, master in sharding.masters.of(number)] for numbers in held]
        view: torch.optim.Optimizer = object.__new__(type(inner))
        vars(view).update(vars(inner))
        view.param_groups = [_SharedGroup(*pair) for pair in zip(inner.param_groups, shares, strict=True)]  # type: ignore[misc]
        view._opt_called = True  # type: ignore[attr-defined]  # a schedule made on it looks whether it steps
        view.step = types.MethodType(_no_step, view)  # type: ignore[method-assign]
        view.load_state_dict = types.MethodType(_no_load, view)  # type: ignore[method-assign]
        return view

    @property
    def loss_scaler(self) -> Scaler:
        """The loss scale of fp16 weights. Not a collective."""
        scale = self.loss_scale
        return Scaler(1.0, False) if scale is None else Scaler(scale.value, scale.window is not None)

    @property
    def loss_scale_config(self) -> Scaler:
        """The `loss_scaler`, under the name that it has in DeepSpeed at stage 0. Not a collective."""
        return self.loss_scaler

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1.0 if there is none. Not a collective."""
        return self.loss_scaler.cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True when the loss scale moves. Not a collective."""
        return self.loss_scaler.dynamic

    @property
    def overflow(self) -> bool:
        """True when the gradients of the last step were not finite. Not a collective."""
        return self.grad_norm is not None and not math.isfinite(self.grad_norm)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group. Not a collective, but every rank sets the same."""
        set_rate(self, lr)

    def get_lr(self) -> Any:
        """Returns the learning rate of the first group. Not a collective."""
        return self.param_groups[0]["lr"]

    def needs_scaler(self) -> bool:
        """Returns whether a loss is scaled before its backward. Not a collective."""
        return self.loss_scale is not None


class _SharedGroup(MutableMapping[str, Any]):
    """A group of the user's optimizer, with this rank's shares in place of its parameters."""

    def __init__(self, group: dict[str, Any], shares: list[torch.nn.Parameter]) -> None:
        self._group = group
        self._shares = shares

    def __getitem__(self, key: str) -> Any:
        return self._shares if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ValueError("Cannot exchange a group's parameters: they are shares. Call add_param_group of the optimizer.")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def _no_step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> NoReturn:
    raise ValueError("Cannot step on the shares of one rank: gradients are settled by all. Call step of the engine.")


def _no_load(_: torch.optim.Optimizer, *args: Any, **options: Any) -> NoReturn:
    raise ValueError(
        "Cannot load the state of one rank's shares: shares are cut by the number of ranks. Save and load with the engine, or "
        "with state_dict() and load_state_dict() of its optimizer, which are whole."
    )
