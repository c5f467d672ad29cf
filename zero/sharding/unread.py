"""Shards a model whose parameters are in files: they are on the meta device while it is laid out, then each rank reads its
shares."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import accelerators
from zero.comm.group import Group
from zero.comm.one_answer import exchange_texts, run_on_all
from zero.errors import RanksDiffer
from zero.memory.values import Cast, Values
from zero.runtime.params.absent import Absent
from zero.runtime.params.unread import Unread, become, unread_among
from zero.sharding.fill import failed_on, fill
from zero.sharding.state import ShardingState

_UNCHANGED = "Nothing was changed. Put the files where every rank can read them, and load the model again."


class UnreadParams:
    """The parameters of a model that are in files. All of them are on the meta device, or all are as they were. See
    [Note: unread weights] in zero/runtime/params/unread.py."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        extra = [param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]]
        # A model that is no module is refused later.
        self._params = unread_among(model, extra) if isinstance(model, nn.Module) else []
        self._before: dict[Any, Unread] = {}  # what a parameter that is on the meta device was before

    def begin(self, group: Group, shards_weights: bool) -> None:
        """Reads the weights now if they will not be in shares. A collective."""
        counts = exchange_texts(group, str(len(self._params)))
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise RanksDiffer(
                    f"Cannot shard: {counts[0]} parameters of the model are in files on rank 0, and {count} on rank {rank}. "
                    "Load the model in the same way on all ranks."
                )
        if self._params and shards_weights:
            run_on_all(group, self._to_meta)
        elif self._params:
            run_on_all(group, self._read, partial(failed_on, _UNCHANGED))

    @property
    def awaited(self) -> Collection[Any]:
        """The parameters that `fill` will give values."""
        return self._before.keys()

    def fill(self, sharding: ShardingState) -> None:
        """Reads the weights of this rank's shares. A collective, if there are any."""
        if not self._before:
            return
        values: dict[torch.Tensor, Values] = {}
        for param, before in self._before.items():
            stored = before.viewed()
            values[param] = Cast(stored, param.dtype) if sharding.config.masters == "rounded" else stored
        filled = set(fill(sharding, values, _UNCHANGED))
        whole = [param for param in self._before if param not in filled and not isinstance(param, Absent)]
        run_on_all(sharding.group, partial(self._place, whole), partial(failed_on, _UNCHANGED))
        self._before.clear()

    def restore(self) -> None:
        """Makes the parameters those in files again."""
        for param, before in self._before.items():
            become(param, before)

    def _to_meta(self) -> None:
        device = accelerators.current().device()
        for param in self._params:
            param_device = param.device
            if param_device.type != device.type or param_device.index not in (None, device.index or 0):
                raise ValueError(
                    f"Cannot shard: {param.label} would be read to {param.device}, and the accelerator is {device}. Move the "
                    "model there first, as with model.to(accelerators.current().device()); that reads nothing."
                )
        for param in self._params:
            on_meta = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            self._before[param] = become(param, on_meta)

    def _read(self) -> None:
        for param in self._params:
            self._before[param] = become(param, param.detach().whole())

    def _place(self, params: Sequence[Any]) -> None:
        """Reads parameters that are in no shares."""
        for param in params:
            become(param, self._before[param].whole().to(param.dtype))
