"""Attributes by a name with dots, as LoRA code of DeepSpeed's examples replaces layers."""

from __future__ import annotations

import functools
from typing import Any

from zero.compat.deepspeed.absent import rest_of


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute of that name, such as "decoder.layers.0.fc"."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute of that name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


__getattr__ = rest_of(__name__)
