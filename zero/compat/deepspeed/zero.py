"""The names of `deepspeed.zero` and `deepspeed.runtime.zero`, most of which do nothing here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from enum import Enum
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
        """Does nothing: there is nothing to undo."""


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


class ZeroParamStatus(Enum):
    """The states that `ds_status` names. No parameter has that attribute here: it is whole wherever it is used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """The kinds that `ds_param_type` names; no parameter has it here."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def shutdown_init_context() -> None:
    """Does nothing: `Init` changes nothing that a model would have to be built without."""


def restore_init_context() -> None:
    """Does nothing."""


class OffloadDeviceEnum(str, Enum):
    """The places that DeepSpeed offloads to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that DeepSpeed offloads."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def is_zero_param(parameter: Any) -> bool:
    """Returns False: no parameter has what DeepSpeed writes on its own, and `numel()` is that of the whole wherever it is
    asked."""
    return False


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    hint = "" if name.startswith("__") else ". Leave it out."
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
