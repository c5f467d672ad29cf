"""`deepspeed.zero`: the names of stage 3, most of which do nothing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero.compat.deepspeed import comm
from zero.compat.deepspeed.absent import ABSENT, absent
from zero.runtime.params.absent import Absent
from zero.runtime.params.swap import gathered


class Init:
    """Does nothing: a model that is built inside is whole until it is sharded."""

    def __init__(self, module: nn.Module | None = None, *_: Any, **__: Any) -> None:
        """Takes DeepSpeed's arguments; a module is left as it is."""

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""


class GatheredParameters:
    """Makes weights in shares whole inside, without recording gradients; other weights are whole anyway. With `modifier_rank`
    every rank leaves with that rank's weights, which training takes over; this is a collective then, where there are several
    ranks."""

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        single = isinstance(params, torch.Tensor)
        self._params: list[Any] = [params] if single else list(params or ())
        self._modifier_rank = modifier_rank if enabled else None
        self._gathered = contextlib.ExitStack()
        self._enabled = enabled

    def __enter__(self) -> None:
        if self._enabled and any(isinstance(param, Absent) for param in self._params):
            self._gathered.enter_context(gathered(self._params))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._gathered:
            if kind is None and self._modifier_rank is not None and comm.is_initialized() and comm.get_world_size() > 1:
                for param in self._params:
                    comm.broadcast(param.data, self._modifier_rank)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter is whole wherever it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing."""


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    states = importlib.import_module("zero.compat.deepspeed.runtime.zero.partition_parameters")
    if name in ("partition_parameters", "ZeroParamStatus", "ZeroParamType"):  # which imports what is above
        return states if name == "partition_parameters" else getattr(states, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Leave it out.")
