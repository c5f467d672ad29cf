"""The model that is planned for: a number of parameters, a configuration file, or a function that makes it."""

from __future__ import annotations

import importlib
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.memory.formats import DTYPES, dtype_name
from zero.plan.families import parameters_of
from zero.plan.layout import ITEM_BYTES, ParamSpec
from zero.tools.cli import code_of

_MOST_BUCKETS = 2**18  # which the plan lists
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Subject:
    """The model to plan for: a description, its parameters, and a function that builds it if there is one."""

    words: str
    params: tuple[ParamSpec, ...]  # in the dtype that they are trained in
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    build: Callable[..., Any] | None = None  # the user's function

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.params)

    @property
    def dtypes(self) -> str:
        return ", ".join(sorted({spec.dtype for spec in self.params}))


def read_subject(text: str, dtype: str | None, bucket_bytes: int, batch: int | None) -> Subject:
    """Reads a number, a path or a function, in `dtype`, or in the model's own or the usual one."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if number is not None:
        dtype = dtype or "bfloat16"
        size, most = float(number[1]) * _UNITS[number[2].upper()], max(1, bucket_bytes // ITEM_BYTES[dtype])
        if size > most * _MOST_BUCKETS:
            what = f"that is more than {_MOST_BUCKETS:,} buckets of {most:,}"
            raise ValueError(f"Cannot plan a model of {text} parameters: {what}. Give fewer, or a larger --bucket-bytes.")
        numel = round(size)
        return Subject(f"{numel:,} parameters", _parts_of(numel, dtype, most))
    if text.endswith(".json"):
        return _from_config(Path(text), dtype)
    return _from_function(text, dtype, batch)


def _parts_of(numel: int, dtype: str, most: int) -> tuple[ParamSpec, ...]:
    """As many parameters of the size of a bucket."""
    if numel < 1:
        raise ValueError(f"Cannot plan a model of {numel} parameters: it has at least one. Give more.")
    sizes = [most] * (numel // most) + [numel % most] * bool(numel % most)
    return tuple(ParamSpec(str(index), (size,), dtype) for index, size in enumerate(sizes))


def _from_config(path: Path, dtype: str | None) -> Subject:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Cannot read {path}: it is not JSON ({error}). Give a model's config.json.") from None
    if not isinstance(config, dict):
        raise ValueError(f"Cannot read {path}: it has a {type(config).__name__} in it. Give a model's config.json.")
    named = parameters_of(config)
    written = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = dtype or (written if written in ITEM_BYTES else "bfloat16")
    params = tuple(ParamSpec(name, shape, dtype) for name, shape in named)
    numel = sum(math.prod(shape) for _, shape in named)
    return Subject(f"{config['model_type']} of {numel:,} parameters ({path})", params)


def _from_function(text: str, dtype: str | None, batch: int | None) -> Subject:
    with code_of(text):
        build = _function(text)
        made = _on_nothing(build) if batch is None else build(batch)
    if batch is not None and not (isinstance(made, (tuple, list)) and len(made) == 2):
        what = f"it returned a {type(made).__name__} for --batch {batch}"
        raise TypeError(f"Cannot use {text}: {what}. Return the model, and a function that makes a loss of it.")
    model = made if batch is None else made[0]
    if not isinstance(model, nn.Module):
        raise TypeError(f"Cannot use {text}: it returned a {type(model).__name__}. Return an nn.Module.")

    def trained_in(tensor: torch.Tensor) -> str:
        return dtype if dtype is not None and tensor.is_floating_point() else dtype_name(tensor.dtype)

    params = tuple(
        ParamSpec(name, tuple(param.shape), trained_in(param))
        for name, param in model.named_parameters() if param.requires_grad
    )  # fmt: skip
    frozen = (param for param in model.parameters() if not param.requires_grad)
    frozen_bytes = sum(param.numel() * (DTYPES[trained_in(param)].itemsize if param.is_floating_point() else param.itemsize)
                       for param in frozen)  # fmt: skip
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    numel = sum(spec.numel for spec in params)
    words = f"{type(model).__name__} of {numel:,} trained parameters ({text})"
    return Subject(words, params, frozen_bytes, buffer_bytes, build)


def _function(text: str) -> Callable[..., Any]:
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(
            f"Cannot use {text!r}: it is not a number of parameters, a .json file or a function. Write it like 7B, "
            "config.json, module:function or script.py:function."
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"Cannot use {text!r}: there is no file {place!r}. Give the path of a Python script.")
        sys.path.insert(0, str(Path(place).resolve().parent))  # as if the script itself had been started
        target = runpy.run_path(place, run_name="planned_script").get(name)
    else:
        sys.path.insert(0, "")
        try:
            target = getattr(importlib.import_module(place), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # one that it imports
            what = f"there is no module {error.name!r} here"
            raise ValueError(f"Cannot use {text!r}: {what}. Give one, or script.py:function.") from error
    if not callable(target):
        raise ValueError(f"Cannot use {text!r}: there is no such function in {place}. Define it at the top.")
    function: Callable[..., Any] = target
    return function


def _on_nothing(build: Callable[..., Any]) -> Any:
    """The model without memory for its weights, where it can be made so."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):  # it looks at numbers, which there are none of
        return build()
