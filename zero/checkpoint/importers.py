"""What others saved, as a checkpoint of ours: DeepSpeed's ZeRO-1 and ZeRO-2, torch's state dicts, plain and distributed.

Files are read with `weights_only`: nobody's code runs. DeepSpeed pickles three classes of its own into its files, which
stand-ins without behaviour take the place of; any other class is refused by name.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import values
from zero.checkpoint.dcp import is_dcp, model_and_optimizer, read_dcp, tied_again
from zero.checkpoint.folder import LATEST, Folder, file_of
from zero.checkpoint.manifest import VALUE, Buffer, File, Manifest, Outline, Part, buffer_key, key_of, merged
from zero.checkpoint.tensor_files import write_tensors
from zero.errors import BadCheckpoint
from zero.memory.formats import dtype_name, goes_with_elements

logger = logging.getLogger("zero")

_INERT = re.compile(
    r"deepspeed\.(runtime\.zero\.config\.ZeroStageEnum|runtime\.fp16\.loss_scaler\.\w+|utils\.tensor_fragment\.fragment_address)"
)
_MODEL, _SHARE = "mp_rank_00_model_states.pt", re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
# What DeepSpeed keeps in its model file; the rest is the caller's.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "checkpoint_parallel_dimensions", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
}  # fmt: skip
_USUAL_BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")


@dataclass
class _Found:
    """What was read, by name."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)  # exact
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the weights
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    extra: Any = None


def import_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    optimizer: str | os.PathLike[str] | None = None,
    buffers: Sequence[str] = (),
) -> Path:
    """Writes what is in `source` as a checkpoint into the directory `out`, and gives its path. No collective.

    `source` is a directory of DeepSpeed's, of which `tag` names one checkpoint (the latest where it is None), one that
    torch.distributed.checkpoint wrote, as FSDP2's are, or a file with a model's state dict. For the last two `buffers` are
    patterns of names that are no parameters, and `optimizer` is where the state of the optimizer lies apart: a distributed
    checkpoint, or a file with the state dict of a plain optimizer, whose parameters have numbers: they are the model's in
    their order.
    """
    path = Path(os.fspath(source))
    if is_dcp(path):
        found = _from_dcp(path, optimizer, buffers)
    else:
        found = _from_deepspeed(path, tag) if path.is_dir() else _from_torch(path, optimizer, buffers)
    return _write(found, Folder.at(out), f"global_step{found.more.get('step', 0)}")


def _write(found: _Found, folder: Folder, tag: str) -> Path:
    place = folder.begin(tag)
    try:
        part, tensors, outlines = Part(), dict[str, torch.Tensor](), dict[str, Outline]()
        for name, value in found.values.items():
            state = found.state.get(name, {})
            entries = {VALUE: value} | {k: entry for k, entry in state.items() if goes_with_elements(k, entry, value.shape)}
            tensors.update({key_of(name, key, 0): entry.reshape(-1) for key, entry in entries.items()})
            part.stretches[name] = [(0, value.numel())]
            part.state[name] = {key: dtype_name(entry.dtype) for key, entry in entries.items() if key != VALUE}
            part.plain[name] = {k: values.encode(v, f"state {k} of {name}") for k, v in state.items() if k not in entries}
            outlines[name] = Outline(tuple(value.shape), None, dtype_name(found.dtypes[name]), dtype_name(value.dtype))
        tensors.update({buffer_key(name): buffer for name, buffer in found.buffers.items()})

        def keep(tensor: torch.Tensor) -> str:
            key = f"extra/{sum(name.startswith('extra/') for name in tensors)}"
            tensors[key] = tensor
            return key

        nothing = {"optimizer": None, "step": 0, "skipped_steps": 0, "loss_scale": None, "engine": None, "schedule": None}
        training = {**nothing, "scheduler": None, "groups": found.groups, "modules": {}, "config": {}, "ranks": 0, **found.more}
        coded = [values.encode(value, what, keep) for value, what in ((training, "training"), (found.extra, "extra"))]
        part.file = File(file_of(0), *write_tensors(place / file_of(0), tensors))
        buffers = {name: Buffer(tuple(buffer.shape), dtype_name(buffer.dtype)) for name, buffer in found.buffers.items()}
        manifest = Manifest((part.file,), merged(outlines, [part]), buffers, found.aliases, *coded)
        return folder.commit(place, tag, manifest)
    finally:
        folder.give_up(place)


# DeepSpeed's ------------------------------------------------------------------------------------------------------------


def _from_deepspeed(directory: Path, tag: str | None) -> _Found:
    if tag is None and (directory / LATEST).is_file():
        tag = (directory / LATEST).read_text(encoding="utf-8").strip()
    folder = directory if tag is None else directory / tag
    shares = sorted((int(match[1]), path) for path in folder.glob("*.pt") if (match := _SHARE.fullmatch(path.name)))
    others = [path.name for path in folder.glob("*.pt") if path.name != _MODEL and not _SHARE.fullmatch(path.name)]
    if not (folder / _MODEL).is_file() or not shares or others:
        what = f"there is {others[0]}, of another kind of training" if others else f"there is no {_MODEL} with optimizer states"
        raise BadCheckpoint(
            f"A checkpoint of DeepSpeed's ZeRO-1 or ZeRO-2 was to be read from {folder}, but {what}. Convert it with "
            "DeepSpeed to a plain state dict, and import that."
        )
    model = _load(folder / _MODEL)
    states = [_load(path)["optimizer_state_dict"] for _, path in shares]
    _check_complete(folder, [rank for rank, _ in shares], states)
    found = _Found(aliases=dict(model.get("shared_params") or {}))
    module: Mapping[str, torch.Tensor] = model["module"]
    for number, shapes in enumerate(model["param_shapes"]):
        base = states[0]["base_optimizer_state"]
        found.groups.append({**(base["param_groups"][number] if isinstance(base, dict) else {}), "params": list(shapes)})
        found.values.update(_cut([state["single_partition_of_fp32_groups"][number] for state in states], shapes))
        _check_values(folder, {name: found.values[name] for name in shapes}, module)
        _take_state(found, [_state_of(state, number) for state in states], shapes)
    buffers = set(model.get("buffer_names") or ())
    for name, tensor in module.items():
        if name in buffers:
            found.buffers[name] = tensor
        elif name not in found.aliases:
            found.dtypes[name] = tensor.dtype
            found.values.setdefault(name, tensor)
    counters = {name: int(model.get(name, 0)) for name in ("global_steps", "global_samples")}
    found.more = {
        "step": counters["global_steps"],
        "skipped_steps": int(model.get("skipped_steps", 0)),
        "loss_scale": _scale_of(states[0]),
        "scheduler": model.get("lr_scheduler"),
        "engine": {**counters, "micro_steps": 0},
    }
    found.extra = {key: value for key, value in model.items() if key not in _OWN}
    return found


def _check_complete(folder: Path, ranks: Sequence[int], states: Sequence[Mapping[str, Any]]) -> None:
    stage, count = getattr(states[0]["zero_stage"], "value", states[0]["zero_stage"]), states[0]["partition_count"]
    expected = max(count) if isinstance(count, (list, tuple)) else count
    if stage not in (1, 2) or list(ranks) != list(range(expected)):
        raise BadCheckpoint(
            f"A checkpoint of DeepSpeed's ZeRO-1 or ZeRO-2 was to be read from {folder}, but it is of stage {stage} and has "
            f"the states of ranks {', '.join(map(str, ranks))} of {expected}. All of them are needed, and stage 3 is not read."
        )


def _cut(parts: Sequence[torch.Tensor], shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters that lie one behind the other on what the ranks have. What is said of where each rank has what of a
    parameter is not used: with `round_robin_gradients` it names others than lie there."""
    line, at, found = torch.cat([part.detach() for part in parts]), 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape)
        found[name] = line[at : at + size.numel()].reshape(size)
        at += size.numel()
    return found


def _check_values(folder: Path, values: Mapping[str, torch.Tensor], module: Mapping[str, torch.Tensor]) -> None:
    """A weight is its master rounded, so masters that lie elsewhere than they are looked for are noticed."""
    for name, value in values.items():
        if not torch.equal(value.to(module[name].dtype), module[name]):
            raise BadCheckpoint(
                f"{name} was to be read from {folder}, but what the optimizer states hold of it is not what the model has. "
                "Convert the checkpoint with DeepSpeed to a plain state dict, and import that."
            )


def _state_of(state: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    base = state["base_optimizer_state"]
    known: Mapping[str, Any] = base["state"].get(group, {}) if isinstance(base, dict) else base[group]
    return known


def _take_state(found: _Found, states: Sequence[Mapping[str, Any]], shapes: Mapping[str, Any]) -> None:
    for key, entry in states[0].items():
        goes_along = isinstance(entry, torch.Tensor) and entry.dim() > 0
        entries = _cut([state[key] for state in states], shapes) if goes_along else dict.fromkeys(shapes, entry)
        for name, its in entries.items():
            found.state.setdefault(name, {})[key] = its


def _scale_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    scaler = state.get("loss_scaler")
    if not state.get("dynamic_loss_scale") or scaler is None:
        return None
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 2  # the first one after an overflow does not count
    return {
        "value": float(scaler.cur_scale),
        "good_steps": None if good_steps < 0 else good_steps % scaler.scale_window,
        "patience": scaler.cur_hysteresis,
        "stuck": 0,
    }


# plain torch's ----------------------------------------------------------------------------------------------------------


def _from_dcp(path: Path, optimizer: Any, patterns: Sequence[str]) -> _Found:
    model, its = model_and_optimizer(read_dcp(path))
    if optimizer is not None:
        its = model_and_optimizer(read_dcp(Path(os.fspath(optimizer))))[1]
    trained = {name for group in (its or {}).get("param_groups", ()) for name in group["params"]}
    found = _of_model(path, tied_again(model, trained), patterns)
    for name, entries in (its or {}).get("state", {}).items():
        if name not in found.values:
            raise BadCheckpoint(f"Cannot take the state of {name} from {path}: it is no parameter there.")
        found.state[name] = dict(entries)
    found.groups = [dict(group) for group in (its or {}).get("param_groups", ())]
    return found


def _from_torch(path: Path, optimizer: Any, patterns: Sequence[str]) -> _Found:
    found = _of_model(path, _load(path), patterns)
    if optimizer is not None:
        _take_numbered(found, _load(Path(os.fspath(optimizer))))
    return found


def _of_model(path: Path, loaded: Any, patterns: Sequence[str]) -> _Found:
    found, first = _Found(), dict[Any, str]()
    if not isinstance(loaded, Mapping):
        raise BadCheckpoint(f"{path} was to be read as a model's state dict, but it is a {type(loaded).__name__}.")
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor):
            raise BadCheckpoint(f"{path} was to be read, but {name} in it is a {type(tensor).__name__}, and not a tensor.")
        place = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        one = first.setdefault(place, name) if tensor.numel() else name
        if one != name:
            found.aliases[name] = one
        elif not tensor.is_floating_point() or any(fnmatch.fnmatchcase(name, p) for p in (*_USUAL_BUFFERS, *patterns)):
            found.buffers[name] = tensor
        else:
            found.values[name], found.dtypes[name] = tensor, tensor.dtype
    return found


def _take_numbered(found: _Found, state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise BadCheckpoint("An optimizer's state dict was to be read, but there is no 'state' with 'param_groups' in it.")
    order = sorted(number for group in state_dict["param_groups"] for number in group["params"])
    names = dict(zip(order, found.values, strict=False))
    wrong = None
    if len(state_dict["param_groups"]) > 1:  # torch numbers parameters group by group
        wrong = f"it has {len(state_dict['param_groups'])} groups, which say nothing of the model's order"
    elif len(order) != len(found.values):
        wrong = f"it has {len(order)} parameters, and the model {len(found.values)} that may be ones"
    for number, entries in state_dict["state"].items():
        shapes = {entry.shape for entry in entries.values() if isinstance(entry, torch.Tensor) and entry.dim() > 0}
        if wrong is None and shapes and found.values[names[number]].shape not in shapes:
            wrong = f"its number {number} has the shape {tuple(shapes.pop())}, and {names[number]} another"
    if wrong is not None:
        raise ValueError(
            f"The state of a plain optimizer was to be taken by its numbers, but {wrong}. Name the buffers with --buffer, or "
            "load the state into a plain optimizer before sharding it."
        )
    logger.warning("Taken by their numbers: %s", ", ".join(f"{number} as {name}" for number, name in names.items()))
    found.state = {names[number]: dict(entries) for number, entries in state_dict["state"].items()}
    found.groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state_dict["param_groups"]]


class _Inert:
    """What an object of a class that is not here was made of."""

    def __init__(self, *values: Any) -> None:
        self.value = values[0] if values else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _load(path: Path) -> Any:
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in unsafe if not _INERT.fullmatch(name)]
        if refused:
            raise BadCheckpoint(
                f"{path} was to be read without running code, but it needs {', '.join(sorted(refused))}. Save tensors, "
                "numbers, texts, lists and dicts only."
            )
        stand_ins: list[Any] = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in unsafe]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{path} was to be read, but that failed: {error}") from error
