"""`deepspeed.zero`: the words of stage 3, which have little to do where weights are whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero.compat.deepspeed import comm
from zero.compat.deepspeed.absent import ABSENT, absent


class Init:
    """Nothing to do: a model that is built inside is whole, as it is at stages 0 to 2."""

    def __init__(self, module: nn.Module | None = None, *_: Any, **__: Any) -> None:
        """Takes DeepSpeed's arguments; a module is left as it is."""

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""


class GatheredParameters:
    """Weights are whole in it as outside of it. With `modifier_rank` every rank leaves with that rank's weights, which training
    takes over; a collective then, where there are several ranks."""

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

    def __enter__(self) -> None:
        """Nothing to gather."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._modifier_rank is not None and comm.is_initialized() and comm.get_world_size() > 1:
            for param in self._params:
                comm.broadcast(param.data, self._modifier_rank)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter is whole wherever it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do."""


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: weights are whole at stages 0 to 2. Leave it out.")
