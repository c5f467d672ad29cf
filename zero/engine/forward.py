"""How a model is called under a configuration: with its inputs cast, and under autocast."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from zero.config.schema import ZeroConfig
from zero.memory.formats import DTYPES


def run_forward(
    module: nn.Module, config: ZeroConfig, device: torch.device, inputs: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Calls `module(*inputs, **named)` with the casts and the autocast of the configuration."""
    if config.cast_inputs and config.dtype is not None:
        inputs, named = _cast(inputs, DTYPES[config.dtype]), _cast(named, DTYPES[config.dtype])
    with _autocast(config, device):
        return module(*inputs, **named)


def _autocast(config: ZeroConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if config.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[config.autocast])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in that dtype, wherever they lie in lists, tuples and dicts; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_cast(item, dtype) for item in value)
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
