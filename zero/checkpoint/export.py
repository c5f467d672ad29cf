"""Whole weights of a checkpoint for plain torch: without the model's code or ranks, one parameter in memory at a time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import disk, values
from zero.checkpoint.dcp import METADATA, write_dcp
from zero.checkpoint.folder import LATEST, Folder, is_checkpoint
from zero.checkpoint.manifest import VALUE, Manifest, plain_json
from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.reader import CheckpointReader
from zero.checkpoint.weight_files import (
    Aside,
    Sizes,
    WeightFiles,
    aside_in,
    index_of,
    shards_of,
    total_bytes,
    write_file,
    write_files,
    write_torch,
)
from zero.errors import BadCheckpoint, not_written, refusing
from zero.memory.formats import dtype_named
from zero.memory.values import Held, Values, whole

_STEM = "model"
INDEX = index_of(_STEM)
_ALIASES = "zero.aliases"
_MODULES = "zero.modules"  # the key, in a file's metadata, of what modules keep beside tensors, typed


def export(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: str | os.PathLike[str] | None = None,
    format: str = "safetensors",
) -> list[Path]:
    """Writes the weights and buffers of a checkpoint as safetensors, and returns the paths written. Not a collective.

    `read_export` reads it as a state dict for the plain model, and so does safetensors' own `load_model`. Tied weights are
    written once, with their other names in the file's metadata.

    Args:
        directory: The directory that `save` was given.
        out: The file to write, or the folder with `shard_bytes` and `format="dcp"`.
        tag: The name of a checkpoint; the latest by default.
        shard_bytes: Writes several files of about that size, and an index.
        dtype: The dtype of floating-point weights; that they were trained in by default.
        optimizer: A file for a state dict that a plain torch optimizer loads.
        format: "safetensors", or "dcp": a folder that torch.distributed.checkpoint loads, with "model" and "optim" as torch's
            get_state_dict names them, for FSDP2.
    """
    try:
        return _export(directory, out, tag, shard_bytes, dtype, optimizer, format)
    except OSError as error:
        raise not_written(os.fspath(out), error) from error.__cause__


def _export(
    directory: Any, out: Any, tag: str | None, shard_bytes: int | None, dtype: torch.dtype | None, optimizer: Any, format: str
) -> list[Path]:
    if format not in ("safetensors", "dcp"):
        raise ValueError(f"Cannot export with format={format!r}: there are 'safetensors' and 'dcp'. Pass one of them.")
    if format == "dcp" and (shard_bytes is not None or optimizer is not None):
        raise ValueError("Cannot export with format='dcp' and shard_bytes or optimizer: the folder has all. Leave them out.")
    _check_asked(Path(os.fspath(out)), 1 if format == "dcp" else shard_bytes, dtype)
    for target in (out, optimizer):
        if target is not None:
            _check_target(Path(os.fspath(target)), Folder.at(directory))
            if os.path.lexists(target) and not (os.path.isfile(target) or os.path.isdir(target) or os.path.islink(target)):
                raise ValueError(f"Cannot export to {target}: that is not a file, and would be replaced by one. Name a file.")
    with contextlib.closing(CheckpointReader(directory, tag)) as reader:
        _verify(reader)
        exporting = _Exporting(reader.manifest, reader, dtype)
        if format == "dcp":
            return exporting.write_distributed(Path(os.fspath(out)))
        targets = exporting.targets(Path(os.fspath(out)), shard_bytes)
        for target in (out, *targets) if optimizer is not None else ():
            if os.path.realpath(target) == os.path.realpath(optimizer):
                raise ValueError(f"Cannot export weights and optimizer to {target} both: one would be lost. Name two files.")
        exporting.write_weights(Path(os.fspath(out)), shard_bytes)
        return targets if optimizer is None else [*targets, _write_optimizer(exporting, Path(os.fspath(optimizer)))]


def _write_optimizer(exporting: _Exporting, out: Path) -> Path:
    try:
        return exporting.write_optimizer(out)
    except OSError as error:
        raise not_written(out, error) from error.__cause__


def read_weights(directory: str | os.PathLike[str], tag: str | None = None) -> tuple[Path, dict[str, Any], Any]:
    """Returns the path of a checkpoint, its exact weights and buffers as a state dict of the plain model, and what was saved as
    `extra`. Not a collective."""
    with contextlib.closing(CheckpointReader(directory, tag)) as reader:
        _verify(reader)
        manifest = reader.manifest
        state_dict: dict[str, Any] = {name: reader.whole(name, VALUE) for name in manifest.parameters}
        state_dict.update({name: reader.buffer(name) for name in manifest.buffers})
        state_dict.update({alias: state_dict[name] for alias, name in manifest.aliases.items()})
        modules = reader.training()["modules"]
        state_dict.update({f"{name}._extra_state" if name else "_extra_state": state for name, state in modules.items()})
        return reader.path, state_dict, reader.extra()


def _verify(reader: CheckpointReader) -> None:
    """Raises unless all files are those that were saved, and have all that the manifest names."""
    numbers = range(len(reader.manifest.files))
    reader.check_files(numbers)
    reader.check(numbers)


def _check_target(target: Path, directory: Folder) -> None:
    """Raises if a file to be written lies in a checkpoint, or would take the place of one or of the pointer to the latest.

    Paths are those that the system takes: `..` behind a link is the folder that holds what the link names.
    """
    itself = Path(os.path.realpath(target.parent)) / target.name  # a link is replaced itself, and not what it names
    for path in {Path(os.path.realpath(target))} | ({itself} if target.name != ".." else set()):
        checkpoint = next((folder for folder in (path, *path.parents) if is_checkpoint(folder)), None)
        if checkpoint is not None:
            raise ValueError(f"Cannot write to {target}: {checkpoint} is a checkpoint. Name a file or folder outside of it.")
        if path == directory.path.resolve() / LATEST:
            raise ValueError(f"Cannot write to {target}: it names the latest checkpoint. Name another file.")


def _check_asked(out: Path, shard_bytes: int | None, dtype: torch.dtype | None) -> None:
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"Cannot export with shard_bytes={shard_bytes}: a file has at least one byte. Pass 1 or more.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"Cannot export weights in {dtype}: they are not integers. Pass a floating-point dtype.")
    if (shard_bytes is None) is out.is_dir() and out.exists():
        what, instead = ("a folder", "file") if out.is_dir() else ("a file", "folder")
        raise ValueError(f"Cannot export to {out}: that is {what}. Name a {instead}.")


def read_export(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what `export` wrote as a state dict of the plain model: tied weights are one tensor under all their names.
    Not a collective."""
    with contextlib.closing(WeightFiles(out, pickled=False)) as files:
        state_dict: dict[str, Any] = {name: whole(tensor) for name, tensor in files.tensors.items()}

    def refusal(error: Exception) -> Exception:
        what = f"its metadata are not as export writes them ({error!s:.200})"
        return BadCheckpoint(f"Cannot read {out}: {what}. Export it again.")

    with refusing(refusal):
        modules = values.decode(plain_json(files.metadata.get(_MODULES, "{}").encode()))
        state_dict.update({f"{name}._extra_state" if name else "_extra_state": state for name, state in modules.items()})
        aliases = plain_json(files.metadata.get(_ALIASES, "{}").encode())
        state_dict.update({alias: state_dict[name] for alias, name in aliases.items()})
    return state_dict


@dataclass(frozen=True)
class _Exporting:
    """An export: the checkpoint, and where its values go."""

    manifest: Manifest
    reader: CheckpointReader
    dtype: torch.dtype | None

    def targets(self, out: Path, shard_bytes: int | None) -> list[Path]:
        """Returns the paths that `write_weights` writes."""
        return [out] if shard_bytes is None else [out / name for name in (*shards_of(_STEM, self._sizes(), shard_bytes), INDEX)]

    def write_weights(self, out: Path, shard_bytes: int | None) -> None:
        sizes = self._sizes()
        aliases = self.manifest.aliases  # each alias is an entry of its own too, as safetensors' `load_model` needs it
        metadata = {"format": "pt", **aliases, _ALIASES: json.dumps(aliases)}
        modules = self.reader.training()["modules"]
        if modules:
            metadata[_MODULES] = json.dumps(values.encode(modules, "modules"))
        with ProgressBar(f"writing {out.name}", total_bytes(sizes)) as bar:
            if shard_bytes is not None:
                write_files(out, _STEM, sizes, self._values, metadata, bar, shard_bytes)
                return
            with disk.made(out.parent):
                write_file(out, sizes, self._values, metadata, bar)

    def _sizes(self) -> Sizes:
        sizes: Sizes = {}
        for name, stored in self.manifest.parameters.items():
            sizes[name] = self._cast(dtype_named(stored.dtype)), stored.shape
        for name, buffer in self.manifest.buffers.items():
            sizes[name] = dtype_named(buffer.dtype), buffer.shape
        return dict(sorted(sizes.items()))

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def _values(self, name: str) -> Values:
        if name in self.manifest.buffers:
            return Held(self.reader.buffer(name))
        return Held(self.reader.whole(name, VALUE).to(self._cast(dtype_named(self.manifest.parameters[name].dtype))))

    def write_distributed(self, out: Path) -> list[Path]:
        """Writes a distributed checkpoint. Tensors pass through files of their own, as in `write_torch`."""
        groups = self.reader.training()["groups"]
        with disk.filled(out, last=METADATA) as hidden, tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as scratch:
            aside = aside_in(Path(scratch))
            model = {name: aside(whole(self._values(name))) for name in self._sizes()}
            model.update({alias: model[name] for alias, name in self.manifest.aliases.items()})
            state = {name: self._state(name, aside) for name in self.manifest.parameters}
            optim = {"state": {name: entries for name, entries in state.items() if entries}, "param_groups": groups}
            written = write_dcp({"model": model, "optim": optim}, hidden)
        return [out / path.name for path in written]

    def write_optimizer(self, out: Path) -> Path:
        """Writes the optimizer's state, as a plain optimizer saves it."""
        training = self.reader.training()
        numbers: dict[str, int] = {}
        for group in training["groups"]:
            group["params"] = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        saved = {name: number for name, number in numbers.items() if name in self.manifest.parameters}

        def contents(aside: Aside) -> dict[str, Any]:
            state = {number: self._state(name, aside) for name, number in saved.items()}
            return {"state": {number: each for number, each in state.items() if each}, "param_groups": training["groups"]}

        write_torch(out, contents)
        return out

    def _state(self, name: str, aside: Aside) -> dict[str, Any]:
        stored = self.manifest.parameters[name]
        state = self.reader.plain(name)
        for key in stored.state:
            state[key] = aside(self.reader.whole(name, key))
        return state
