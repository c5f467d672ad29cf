"""Imports what others saved as a checkpoint of this library: DeepSpeed's ZeRO-1 to 3, torch's state dicts, plain and
distributed."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import values
from zero.checkpoint.dcp import is_dcp, model_and_optimizer, read_dcp, tied_again
from zero.checkpoint.folder import LATEST, Folder, file_of
from zero.checkpoint.manifest import ALL_FROZEN, VALUE, Buffer, File, Manifest, Outline, Part, buffer_key, key_of, merged
from zero.checkpoint.tensor_files import file_of_tensors
from zero.checkpoint.weight_files import load_safely, tensors_in
from zero.errors import BadCheckpoint, is_ours, not_written, refusing
from zero.memory.addresses import address_of
from zero.memory.formats import dtype_name, goes_with_elements
from zero.optim.schedules import DEEPSPEEDS_ITERATION, Schedule

logger = logging.getLogger("zero")

_USUAL_BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
# The names of DeepSpeed's files.
_MODEL, _SHARE = "mp_rank_00_model_states.pt", re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_SHARE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")  # the name of such a file at stage 3
_UNIVERSAL = Path("zero", "optimizer_state.pt")  # the name in checkpoints that DeepSpeed has converted for any number of ranks
Cut = Callable[[Sequence[torch.Tensor], Mapping[str, Any]], dict[str, torch.Tensor]]
# The keys that DeepSpeed writes to its model file; all others are the caller's.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "checkpoint_parallel_dimensions", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "universal_checkpoint_info",
}  # fmt: skip


def import_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    optimizer: str | os.PathLike[str] | None = None,
    buffers: Sequence[str] = (),
) -> Path:
    """Writes what is in `source` as a checkpoint into the directory `out`, and returns its path. Not a collective.

    `source` is a directory of DeepSpeed's, of which `tag` names a checkpoint (None: the latest); a folder that
    torch.distributed.checkpoint wrote, such as FSDP2's; or a file with a model's state dict. For the last two, `buffers` are
    patterns of names that are not parameters, and `optimizer` is the path of the optimizer's state if it lies apart: a
    distributed checkpoint, or a file with the state dict of a plain optimizer, whose numbers are the model's parameters in
    order.
    """
    path, folder = Path(os.fspath(source)), Folder.at(out)
    for read in (path, *(() if optimizer is None else (Path(os.fspath(optimizer)),))):
        inside = folder.path.resolve().is_relative_to(read.resolve())  # a checkpoint and a pointer would lie beside theirs
        if inside or read.resolve() == folder.path.resolve() / LATEST:
            raise ValueError(f"Cannot import into {out}: {read} is read, and would be changed. Name another directory.")

    def refusal(error: Exception) -> Exception:
        if isinstance(error, OSError) or is_ours(str(error)):
            return error
        what = f"it is not as DeepSpeed or torch saves it ({type(error).__name__}: {error!s:.200})"
        return BadCheckpoint(f"Cannot read {path}: {what}. Save it again.")

    with refusing(refusal):
        if is_dcp(path):
            contents = _from_dcp(path, optimizer, buffers)
        else:
            contents = _from_deepspeed(path, tag) if path.is_dir() else _from_torch(path, optimizer, buffers)
    try:
        return _write(contents, folder, f"global_step{contents.more.get('step', 0)}")
    except OSError as error:
        raise not_written(out, error) from error


@dataclass
class ImportedState:
    """The contents of such files, by name."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)  # the exact values
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # the dtypes of the weights
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    extra: Any = None


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
        part.file = File(file_of(0), *folder.put(place, file_of(0), file_of_tensors(tensors)))
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
    logger.warning("State is matched by position: %s", ", ".join(f"{number} is {name}" for number, name in names.items()))
    contents.state = {names[number]: dict(entries) for number, entries in state_dict["state"].items()}
    contents.groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state_dict["param_groups"]]


# DeepSpeed's ----------------------------------------------------------------------------------------------------------
#
#   latest                                         the tag
#   TAG/mp_rank_00_model_states.pt                 stages 1, 2: the module in its own dtype, shapes, counters
#   TAG/zero_pp_rank_R_mp_rank_00_model_states.pt  stage 3: the same, one a rank, without weights
#   TAG/[bf16_]zero_pp_rank_R_..._optim_states.pt  rank R's fp32 masters and moments
#   TAG/zero/NAME/fp32.pt, exp_avg.pt, ...         universal: whole parameters
#
# Stages 1 and 2: the parameters of a group lie end to end on one line, which is cut evenly among the ranks. Stage 3: each
# parameter is cut among the ranks by itself: 10 elements on 4 ranks are 3, 3, 3, 1 and padding.


def _from_deepspeed(directory: Path, tag: str | None) -> ImportedState:
    """Reads a checkpoint of stages 1 to 3, or a universal one."""
    if tag is None and (directory / LATEST).is_file():
        tag = (directory / LATEST).read_text(encoding="utf-8").strip()
    folder = directory if tag is None else directory / tag
    shares, models = _by_rank(folder, _SHARE), _by_rank(folder, _MODEL_SHARE)
    if (folder / _MODEL).is_file() and not models:
        models = {0: folder / _MODEL}
    universal = folder / _UNIVERSAL
    known = {*shares.values(), *models.values()}
    others = [path.name for path in folder.glob("*.pt") if path not in known]
    if not models or not (shares or universal.is_file()) or others:
        what = f"there is {others[0]}, of another kind of training" if others else f"there is no {_MODEL} with optimizer states"
        raise BadCheckpoint(
            f"Cannot read a DeepSpeed ZeRO checkpoint from {folder}: {what}. Convert it with DeepSpeed to a plain state dict, "
            "and import that."
        )
    model = load_safely(models[0] if 0 in models else next(iter(models.values())))
    contents = ImportedState(aliases=dict(model.get("shared_params") or {}))
    if universal.is_file():
        states = [load_safely(universal)]
        _read_universal(folder, contents, model, states[0])
        _read_frozen(contents, [load_safely(path) for path in models.values()])
    else:
        states = [load_safely(path)["optimizer_state_dict"] for path in shares.values()]
        if _check_complete(folder, list(shares), list(models), states) == 3:
            _read_shares(folder, contents, model, states)
            _read_frozen(contents, [load_safely(path) for path in models.values()])
        else:
            _read_lines(folder, contents, model, states)
    buffers = set(model.get("buffer_names") or ())
    for name, tensor in model["module"].items():
        if name in buffers:
            contents.buffers[name] = tensor
        elif name not in contents.aliases:
            contents.dtypes[name] = tensor.dtype
            contents.values.setdefault(name, tensor)
    counters = {name: int(model.get(name, 0)) for name in ("global_steps", "global_samples")}
    scheduler = model.get("lr_scheduler")
    contents.more = {
        "step": counters["global_steps"],
        "skipped_steps": int(model.get("skipped_steps", 0)),
        "loss_scale": _scale_of(states[0]),
        "scheduler": scheduler,
        # DeepSpeed does not name the kind of a schedule, and torch's would take the state of another without a word.
        "schedule": Schedule.__name__ if DEEPSPEEDS_ITERATION in (scheduler or ()) else None,
        "engine": {**counters, "micro_steps": 0},
        # DeepSpeed saves no frozen parameters if it was told so, as transformers tells it of adapters, and does not name them.
        "left_out": [ALL_FROZEN] if model.get("frozen_param_shapes") is None else [],
    }
    contents.extra = {key: value for key, value in model.items() if key not in _OWN}
    return contents


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    return dict(sorted((int(match[1]), path) for path in folder.glob("*.pt") if (match := pattern.fullmatch(path.name))))


def _check_complete(
    folder: Path, ranks: Sequence[int], models: Sequence[int], states: Sequence[Mapping[str, Any]]
) -> int:
    """Returns the stage, after a check that all files are there."""
    stage, count = getattr(states[0]["zero_stage"], "value", states[0]["zero_stage"]), states[0]["partition_count"]
    expected = list(range(max(count) if isinstance(count, (list, tuple)) else count))
    if stage not in (1, 2, 3) or list(ranks) != expected or list(models) != (expected if stage == 3 else [0]):
        raise BadCheckpoint(
            f"Cannot read the DeepSpeed ZeRO checkpoint in {folder}: it is of stage {stage} and has the states of ranks "
            f"{', '.join(map(str, ranks))} of {len(expected)}. Put the files of all ranks there."
        )
    return int(stage)


# DeepSpeed's stages 1 and 2 -------------------------------------------------------------------------------------------


def _read_lines(folder: Path, contents: ImportedState, model: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
    for number, shapes in enumerate(model["param_shapes"]):
        base = states[0]["base_optimizer_state"]
        contents.groups.append({**(base["param_groups"][number] if isinstance(base, dict) else {}), "params": list(shapes)})
        contents.values.update(_cut([state["single_partition_of_fp32_groups"][number] for state in states], shapes))
        _check_values(folder, {name: contents.values[name] for name in shapes}, model["module"])
        _take_state(contents, [_state_of(state, number) for state in states], shapes, _cut)


def _cut(parts: Sequence[torch.Tensor], shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Cuts the parameters, which lie one behind the other, out of what the ranks have. The file's own account of where each
    rank has which parameter is not used: with `round_robin_gradients` it is wrong."""
    line, offset, tensors = torch.cat([part.detach() for part in parts]), 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape)
        tensors[name] = line[offset : offset + size.numel()].reshape(size)
        offset += size.numel()
    return tensors


def _check_values(folder: Path, values: Mapping[str, torch.Tensor], module: Mapping[str, torch.Tensor]) -> None:
    """Raises where a weight is not its master rounded, which shows that masters were read from the wrong place."""
    for name, value in values.items():
        if not torch.equal(value.to(module[name].dtype), module[name]):
            raise BadCheckpoint(
                f"Cannot read {name} from {folder}: its values in the optimizer's states and in the model differ. "
                "Convert the checkpoint with DeepSpeed to a plain state dict, and import that."
            )


def _state_of(state: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    base = state["base_optimizer_state"]
    known: Mapping[str, Any] = base["state"].get(group, {}) if isinstance(base, dict) else base[group]
    return known


def _take_state(contents: ImportedState, states: Sequence[Mapping[str, Any]], shapes: Mapping[str, Any], cut: Cut) -> None:
    for key, entry in states[0].items():
        goes_along = isinstance(entry, torch.Tensor) and entry.dim() > 0
        entries = cut([state[key] for state in states], shapes) if goes_along else dict.fromkeys(shapes, entry)
        for name, value in entries.items():
            contents.state.setdefault(name, {})[key] = value


def _scale_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    scaler = state.get("loss_scaler")
    if not state.get("dynamic_loss_scale") or scaler is None:
        return None
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 2  # the first good step after an overflow does not count
    return {
        "value": float(scaler.cur_scale),
        "good_steps": None if good_steps < 0 else good_steps % scaler.scale_window,
        "patience": scaler.cur_hysteresis,
        "stuck": 0,
    }


# DeepSpeed's stage 3 --------------------------------------------------------------------------------------------------


def _read_shares(folder: Path, contents: ImportedState, model: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Reads stage 3, where each rank has a part of each parameter, one behind the other, in as many lines as the optimizer
    steps at a time."""
    lines, shapes_of = [state["fp32_flat_groups"] for state in states], model["param_shapes"]
    groups = states[0]["optimizer_state_dict"]["param_groups"]
    group_of = _group_of_each(f"the DeepSpeed ZeRO-3 checkpoint in {folder}", groups, len(shapes_of))
    contents.groups = [{**group, "params": []} for group in groups]
    for number, shapes in enumerate(shapes_of):
        contents.groups[group_of[number]]["params"] += list(shapes)
        contents.values.update(_joined([rank[number] for rank in lines], shapes))
        _take_state(contents, [state["optimizer_state_dict"]["state"].get(number, {}) for state in states], shapes, _joined)


def _group_of_each(what: str, groups: Sequence[Mapping[str, Any]], num_lines: int) -> list[int]:
    """Returns the group of the optimizer that each line of parameters is of: a group has the numbers of its lines."""
    numbered = [(line, number) for number, group in enumerate(groups) for line in group["params"]]
    if [line for line, _ in numbered] != list(range(num_lines)):
        raise BadCheckpoint(
            f"Cannot read {what}: it has {num_lines} lines of parameters, and its {len(groups)} groups have the lines "
            f"{', '.join(str(line) for line, _ in numbered) or 'of nobody'}. Convert the checkpoint with DeepSpeed to a plain "
            "state dict, and import that."
        )
    return [number for _, number in numbered]


def _read_frozen(contents: ImportedState, models: Sequence[Mapping[str, Any]]) -> None:
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        fragments = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        parts = [part.reshape(-1) for part in fragments if part is not None]
        contents.values[name] = torch.cat(parts)[: torch.Size(shape).numel()].reshape(shape)


def _joined(parts: Sequence[torch.Tensor], shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Joins the parts of each parameter of all ranks. What follows the last parameter of the last rank is padding."""
    offset, tensors = 0, {}
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        each = -(-numel // len(parts))
        tensors[name] = torch.cat([part.detach()[offset : offset + each] for part in parts])[:numel].reshape(shape)
        offset += each
    if any(part.numel() < offset for part in parts):
        raise BadCheckpoint("Cannot read DeepSpeed's ZeRO-3: a rank has less than its parts of the parameters. Save it again.")
    return tensors


# DeepSpeed's universal ------------------------------------------------------------------------------------------------


def _read_universal(folder: Path, contents: ImportedState, model: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Reads a universal checkpoint, where each parameter is whole, in files of its own."""
    groups, shapes_of = base["param_groups"], model["param_shapes"]
    group_of = _group_of_each(f"the universal checkpoint of DeepSpeed in {folder}", groups, len(shapes_of))
    contents.groups = [{**group, "params": []} for group in groups]
    stepped = (base.get("optimizer_state_dict") or {}).get("state", {})
    for number, shapes in enumerate(shapes_of):
        contents.groups[group_of[number]]["params"] += list(shapes)
        for name, shape in shapes.items():
            files = {path.stem: _tensor_in(path) for path in sorted((folder / "zero" / name).glob("*.pt"))}
            if "fp32" not in files:
                raise BadCheckpoint(
                    f"Cannot read the universal checkpoint in {folder}: {name} is not in it. Convert the checkpoint again."
                )
            numel = torch.Size(shape).numel()
            whole = {
                key: value.reshape(-1)[:numel].reshape(shape) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in files.items()
            }
            contents.values[name] = whole.pop("fp32")
            if whole:
                step = stepped.get(number, {}).get("step")
                contents.state[name] = {**({} if step is None else {"step": step}), **whole}


def _tensor_in(path: Path) -> Any:
    loaded = load_safely(path)
    return loaded["param"] if isinstance(loaded, Mapping) else loaded
