"""Imports what others saved as a checkpoint of this library: DeepSpeed's ZeRO-1 to 3, torch's state dicts, plain and
distributed."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import values
from zero.checkpoint.dcp import is_dcp, model_and_optimizer, read_dcp, tied_again
from zero.checkpoint.folder import LATEST, Folder, file_of
from zero.checkpoint.from_deepspeed import read_deepspeed
from zero.checkpoint.imported import ImportedState, load_safely, tensors_in
from zero.checkpoint.manifest import VALUE, Buffer, File, Manifest, Outline, Part, buffer_key, key_of, merged
from zero.checkpoint.tensor_files import write_tensors
from zero.errors import BadCheckpoint, not_written, refusing
from zero.memory.addresses import address_of
from zero.memory.formats import dtype_name, goes_with_elements

logger = logging.getLogger("zero")

_USUAL_BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")


def import_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    optimizer: str | os.PathLike[str] | None = None,
    buffers: Sequence[str] = (),
) -> Path:
    """Writes what is in `source` as a checkpoint into the directory `out`, and returns its path. No collective.

    `source` is a directory of DeepSpeed's, of which `tag` names a checkpoint (None: the latest); a folder that
    torch.distributed.checkpoint wrote, such as FSDP2's; or a file with a model's state dict. For the last two, `buffers` are
    patterns of names that are not parameters, and `optimizer` is the path of the optimizer's state where it lies apart: a
    distributed checkpoint, or a file with the state dict of a plain optimizer, whose numbers are the model's parameters in
    order.
    """
    path, folder = Path(os.fspath(source)), Folder.at(out)
    for read in (path, *(() if optimizer is None else (Path(os.fspath(optimizer)),))):
        inside = folder.path.resolve().is_relative_to(read.resolve())  # a checkpoint and a pointer would be beside theirs
        if inside or read.resolve() == folder.path.resolve() / LATEST:
            raise ValueError(f"Cannot import into {out}: {read} is read, and would be changed. Name another directory.")

    def refusal(error: Exception) -> Exception:
        if isinstance(error, OSError) or str(error).startswith("Cannot "):
            return error
        what = f"it is not as DeepSpeed or torch saves it ({type(error).__name__}: {error!s:.200})"
        return BadCheckpoint(f"Cannot read {path}: {what}. Save it again.")

    with refusing(refusal):
        if is_dcp(path):
            contents = _from_dcp(path, optimizer, buffers)
        else:
            contents = read_deepspeed(path, tag) if path.is_dir() else _from_torch(path, optimizer, buffers)
    try:
        return _write(contents, folder, f"global_step{contents.more.get('step', 0)}")
    except OSError as error:
        raise not_written(out, error) from error


def _write(contents: ImportedState, folder: Folder, tag: str) -> Path:
    place = folder.begin(tag)
    try:
        part, tensors, outlines = Part(), dict[str, torch.Tensor](), dict[str, Outline]()
        for name, value in contents.values.items():
            state = contents.state.get(name, {})
            entries = {VALUE: value} | {k: entry for k, entry in state.items() if goes_with_elements(k, entry, value.shape)}
            tensors.update({key_of(name, key, 0): entry.reshape(-1) for key, entry in entries.items()})
            part.stretches[name] = [(0, value.numel())]
            part.state[name] = {key: dtype_name(entry.dtype) for key, entry in entries.items() if key != VALUE}
            part.plain[name] = {k: values.encode(v, f"state {k} of {name}") for k, v in state.items() if k not in entries}
            outlines[name] = Outline(tuple(value.shape), None, dtype_name(contents.dtypes[name]), dtype_name(value.dtype))
        tensors.update({buffer_key(name): buffer for name, buffer in contents.buffers.items()})

        def keep(tensor: torch.Tensor) -> str:
            key = f"extra/{sum(name.startswith('extra/') for name in tensors)}"
            tensors[key] = tensor
            return key

        nothing = {"optimizer": None, "step": 0, "skipped_steps": 0, "loss_scale": None, "engine": None, "schedule": None}
        training = {
            **nothing, "scheduler": None, "groups": contents.groups, "modules": {}, "config": {}, "ranks": 0, **contents.more
        }  # fmt: skip
        coded = [values.encode(value, what, keep) for value, what in ((training, "training"), (contents.extra, "extra"))]
        part.file = File(file_of(0), *write_tensors(place / file_of(0), tensors))
        buffers = {name: Buffer(tuple(buffer.shape), dtype_name(buffer.dtype)) for name, buffer in contents.buffers.items()}
        manifest = Manifest((part.file,), merged(outlines, [part]), buffers, contents.aliases, *coded)
        return folder.commit(place, tag, manifest)
    finally:
        folder.give_up(place)


# torch's ----------------------------------------------------------------------------------------------------------------


def _from_dcp(path: Path, optimizer: Any, patterns: Sequence[str]) -> ImportedState:
    model, optim_state = model_and_optimizer(read_dcp(path))
    if optimizer is not None:
        optim_state = model_and_optimizer(read_dcp(Path(os.fspath(optimizer))))[1]
    trained = {name for group in (optim_state or {}).get("param_groups", ()) for name in group["params"]}
    contents = _of_model(path, tied_again(model, trained), patterns)
    for name, entries in (optim_state or {}).get("state", {}).items():
        if name not in contents.values:
            raise BadCheckpoint(
                f"Cannot take the state of {name} from {path}: the model there has no such parameter. Give another file."
            )
        contents.state[name] = dict(entries)
    contents.groups = [dict(group) for group in (optim_state or {}).get("param_groups", ())]
    return contents


def _from_torch(path: Path, optimizer: Any, patterns: Sequence[str]) -> ImportedState:
    contents = _of_model(path, load_safely(path), patterns)
    if optimizer is not None:
        _take_numbered(contents, load_safely(Path(os.fspath(optimizer))))
    return contents


def _of_model(path: Path, loaded: Any, patterns: Sequence[str]) -> ImportedState:
    contents, first = ImportedState(), dict[Any, str]()
    if not isinstance(loaded, Mapping):
        raise BadCheckpoint(
            f"Cannot read {path} as a model's state dict: it is a {type(loaded).__name__}. Give a file with a state dict."
        )
    for name, value in loaded.items():
        if not isinstance(value, torch.Tensor):
            raise BadCheckpoint(
                f"Cannot read {path}: {name} in it is a {type(value).__name__}, not a tensor. Give a file with a state dict."
            )
    for name, tensor in (tensors_in(path, loaded) if path.is_file() else loaded).items():
        place = address_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()
        one = first.setdefault(place, name) if tensor.numel() else name
        if one != name:
            contents.aliases[name] = one
        elif not tensor.is_floating_point() or any(fnmatch.fnmatchcase(name, p) for p in (*_USUAL_BUFFERS, *patterns)):
            contents.buffers[name] = tensor
        else:
            contents.values[name], contents.dtypes[name] = tensor, tensor.dtype
    return contents


def _take_numbered(contents: ImportedState, state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise BadCheckpoint(
            "Cannot read an optimizer's state dict: it has no 'state' and 'param_groups'. Pass what state_dict() returned."
        )
    order = sorted(number for group in state_dict["param_groups"] for number in group["params"])
    names = dict(zip(order, contents.values, strict=False))
    wrong = None
    if len(state_dict["param_groups"]) > 1:  # torch numbers parameters group by group
        wrong = f"it has {len(state_dict['param_groups'])} groups, which say nothing of the model's order"
    elif len(order) != len(contents.values):
        wrong = f"it has {len(order)} parameters, and the model {len(contents.values)} that may be ones"
    for number, entries in state_dict["state"].items():
        shapes = {entry.shape for entry in entries.values() if isinstance(entry, torch.Tensor) and entry.dim() > 0}
        if wrong is None and shapes and contents.values[names[number]].shape not in shapes:
            wrong = f"its number {number} has the shape {tuple(shapes.pop())}, and {names[number]} another"
    if wrong is not None:
        raise ValueError(
            f"Cannot match the state of a plain optimizer by position: {wrong}. Name the buffers with --buffer, or load the "
            "state into a plain optimizer before sharding it."
        )
    logger.warning("Taken by their numbers: %s", ", ".join(f"{number} as {name}" for number, name in names.items()))
    contents.state = {names[number]: dict(entries) for number, entries in state_dict["state"].items()}
    contents.groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state_dict["param_groups"]]
