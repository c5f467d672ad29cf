"""Finds the sharded optimizer of a parameter, for code that has the parameter alone."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_live: weakref.WeakSet[Any] = weakref.WeakSet()  # all sharded optimizers, closed ones too


def remember(optimizer: Any) -> None:
    """Registers a sharded optimizer, without keeping it alive."""
    _live.add(optimizer)


def optimizers_of(model: nn.Module) -> list[Any]:
    """Returns the sharded optimizers that manage parameters of a model, in the order of the parameters. Not a collective."""
    return list(dict.fromkeys(optimizer for optimizer in map(optimizer_of, model.parameters()) if optimizer is not None))


def optimizer_of(param: nn.Parameter) -> Any:
    """Returns the sharded optimizer that manages a parameter, or None. Not a collective."""
    for optimizer in list(_live):
        if not optimizer._sharding.lifetime.is_over and id(param) in optimizer._sharding.params.index:
            return optimizer
    return None
