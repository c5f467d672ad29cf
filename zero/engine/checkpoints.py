"""Checkpoints of an engine, as DeepSpeed saves and loads them, and its weights in files for plain torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.weight_files import Aside, total_bytes, write_file, write_files, write_torch
from zero.comm.group import Group
from zero.comm.one_answer import all_or_none, require_same_args
from zero.errors import not_written
from zero.memory.values import Values
from zero.runtime.params.unread import ParamReader
from zero.setup.parts import check_whole_here
from zero.sharding.load import latest, load_from
from zero.sharding.optimizer import optimizers_of
from zero.sharding.save import save
from zero.sharding.snapshot import TrainingLoop, finish_saving, snapshot_of

logger = logging.getLogger("zero")


def state_dict_of(module: nn.Module, *arguments: Any, exclude_frozen: bool, **options: Any) -> dict[str, Any]:
    """Returns a module's state dict; with `exclude_frozen` without the parameters that are not trained."""
    state_dict: dict[str, Any] = module.state_dict(*arguments, **options)
    prefix = options.get("prefix", "")
    frozen = {prefix + name for name, param in module.named_parameters(remove_duplicate=False) if not param.requires_grad}
    for name in frozen & state_dict.keys() if exclude_frozen else ():
        del state_dict[name]
    return state_dict


def write_weights(
    group: Group, path: Path, module: nn.Module, exclude_frozen: bool, max_shard_bytes: int | None = None
) -> bool:
    """Writes a module's state dict on rank 0, one tensor in memory at a time. A collective."""
    if max_shard_bytes is not None and (path.suffix != ".safetensors" or max_shard_bytes < 1):
        raise ValueError(
            f"Cannot write {path.name} with max_shard_bytes={max_shard_bytes}: several files are safetensors, of a byte or "
            "more. Pass such a number, and a name that ends in .safetensors."
        )

    def write() -> None:
        check_whole_here(module, f"write {path.name}", "Save with zero.save, and zero.export makes files of that.")
        for optimizer in optimizers_of(module):
            optimizer.sharding.check_whole(f"write {path.name}")
        if group.rank:
            return
        whole = state_dict_of(module, exclude_frozen=exclude_frozen, keep_vars=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                _write_safetensors(path, whole, max_shard_bytes)
            else:
                _write_torch(path, whole)
        except OSError as error:
            raise not_written(path, error) from error

    all_or_none(group, f"Saving {path.name}", write)
    return True


def _write_safetensors(path: Path, whole: Mapping[str, torch.Tensor], max_shard_bytes: int | None) -> None:
    sizes = {name: (value.dtype, tuple(value.shape)) for name, value in whole.items()}
    with ProgressBar(f"writing {path.name}", total_bytes(sizes)) as bar, ParamReader() as reader:

        def values_of(name: str) -> Values:
            return reader.values_of(whole[name])

        if max_shard_bytes is None:
            write_file(path, sizes, values_of, {"format": "pt"}, bar)
        else:
            write_files(path.parent, path.stem, sizes, values_of, {"format": "pt"}, bar, max_shard_bytes)


def _write_torch(path: Path, whole: dict[str, Any]) -> None:
    """Writes with torch.save. A tensor that has several names is written once."""

    def contents(aside: Aside) -> dict[str, Any]:
        copies: dict[int, torch.Tensor] = {}  # by id
        for name, value in whole.items():
            if isinstance(value, torch.Tensor):
                if id(value) not in copies:
                    copies[id(value)] = aside(value)
                whole[name] = copies[id(value)]
        return whole

    write_torch(path, contents)


def save_from(
    engine: TrainingLoop, save_dir: str | os.PathLike[str], tag: str | None, extra: Mapping[str, Any] | None, **options: Any
) -> bool:
    """Saves as `zero.save` does, also in the middle of an accumulation, and returns True. A collective."""
    if engine.in_window:
        logger.warning(
            "A checkpoint is saved in the middle of an accumulation: the gradients of this window are not in it. After a load, "
            "send its micro-batches backward again."
        )
    save(save_dir, engine, None if tag is None else str(tag), dict(extra or {}), **{"mid_window": True, **options})
    return True


def load_into(
    engine: TrainingLoop, load_dir: str | os.PathLike[str], tag: str | None, *, states: bool, schedule: bool, weights: bool
) -> tuple[str | None, Any]:
    """Loads a checkpoint, the latest if no tag is given, and returns its path and the client state; `(None, None)` if
    there is none yet. A collective."""
    snapshot = snapshot_of(engine, None)
    finish_saving(engine.optimizer)  # otherwise a first checkpoint that is still being written would not be found
    if tag is None:
        tag = all_or_none(snapshot.sharding.group, "A load", lambda: latest(load_dir))
        require_same_args(snapshot.sharding.group, "A load", latest=tag)
    if tag is None:
        logger.warning("There is no checkpoint in %s yet, so nothing was loaded.", load_dir)
        return None, None
    path, extra = load_from(load_dir, snapshot, str(tag), states, schedule, weights)
    return str(path), extra
