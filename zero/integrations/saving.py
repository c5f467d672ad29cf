"""transformers' `save_pretrained` of models whose weights are in shares: one weight at a time is whole, on the rank that
writes.

transformers decides what is saved under which name, converts it to the format of the files, cuts it into files and writes the
configuration. It is given tensors that are gathered only when they are written.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import modeling_utils

import accelerators
from zero.checkpoint.disk import ProgressBar
from zero.checkpoint.weight_files import total_bytes, write_file
from zero.comm.connect import connect
from zero.comm.exchange import all_or_none
from zero.runtime.params.reading import ParamReader
from zero.runtime.params.unread import Unread
from zero.sharding.live import optimizers_of


def save_pretrained(model: Any, folder: Any, **options: Any) -> None:
    """Saves a sharded model as `model.save_pretrained(folder, **options)` does. Rank 0 writes, with one weight in memory at a
    time. Of a model with adapters of PEFT the adapters are saved, whole. A collective."""
    optimizers = optimizers_of(model)
    group = optimizers[0].group if optimizers else connect(accelerators.current())

    def write() -> None:
        for optimizer in optimizers:
            optimizer.sharding.check_whole("save the model")
        if group.rank == 0:
            with saving(model) as state_dict:
                model.save_pretrained(folder, **{"state_dict": state_dict, **options})

    try:
        all_or_none(group, "Saving a model", write)
    finally:
        if not optimizers:
            group.close()


@contextlib.contextmanager
def saving(model: Any) -> Iterator[dict[str, Any]]:
    """Allows code inside the block to save a model with this state dict on this rank. No collective."""
    with torch.no_grad(), _streaming(), ParamReader() as reader:
        yield _state_of(model, reader)


def _state_of(model: nn.Module, reader: ParamReader) -> dict[str, Any]:
    """The model's state dict, with parameters that are gathered when they are read."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name in () if hasattr(model, "peft_config") else _other_names(model, state):  # PEFT chooses itself
        del state[name]
    for name, value in state.items():
        if isinstance(value, nn.Parameter):  # on a device where its memory is not looked for
            state[name] = Unread.of(reader.values_of(value), name, "meta")
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach()
    return state


def _other_names(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Returns the names of tied tensors under which they are not saved. A name stays if the model does not list it as tied to
    another."""
    listed = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    others = set[str]()
    for same in names.values():
        tied = [name for name in same if any(re.search(pattern, name) for pattern in listed)]
        kept = next((name for name in same if name not in tied), max(same) if len(tied) == len(same) else same[0])
        others.update(name for name in same if name != kept)
    return others


@contextlib.contextmanager
def _streaming() -> Iterator[None]:
    """Files are written one tensor after the other, by a Trainer, by models and by PEFT."""
    places = [(safetensors.torch, "save_file"), (modeling_utils, "safe_save_file")]
    if "peft.peft_model" in sys.modules:
        places.append((sys.modules["peft.peft_model"], "safe_save_file"))
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, _write)
        yield
    finally:
        for (module, name), write in zip(places, before, strict=True):
            setattr(module, name, write)


def _write(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = Path(filename)

    with ProgressBar(f"writing {path.name}", total_bytes(sizes)) as bar, ParamReader() as reader:
        write_file(path, sizes, lambda name: reader.values_of(tensors[name]), metadata or {}, bar)
