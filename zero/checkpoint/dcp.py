"""torch's distributed checkpoints, as FSDP2 saves and loads them: written with torch, read without running any code of theirs.

Torch pickles the description of such a checkpoint into `.metadata`. The few classes that say where which part of a tensor lies
are known here; any other is refused by name.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerators.tensor_bytes import bytes_of
from zero.errors import BadCheckpoint, refusing

METADATA = ".metadata"
_KNOWN = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_ROOTS = "model", "model_state_dict", "state_dict"
_OPTIMIZERS = "optim", "optimizer", "optimizers", "optim_state_dict", "optimizer_state_dict"


def is_dcp(folder: Path) -> bool:
    """Returns True if a folder is such a checkpoint."""
    return (folder / METADATA).is_file()


def write_dcp(state_dict: Mapping[str, Any], out: Path) -> list[Path]:
    """Writes a nested state dict, on this rank alone. A failed write is the system's error, which torch hides in others."""
    import torch.distributed.checkpoint.state_dict_saver as saver
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            saver.save(dict(state_dict), checkpoint_id=out, no_dist=True)
        except CheckpointException as failed:
            error, _ = next(iter(failed.failures.values()))
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    return sorted(path for path in out.iterdir() if path.is_file())


def read_dcp(folder: Path) -> dict[Any, Any]:
    """Returns the nested state dict that was saved; lists become dicts by number."""

    def refusal(error: Exception) -> Exception:
        return BadCheckpoint(f"Cannot read {folder} as a distributed checkpoint of torch: {error!s:.200}. Save it again.")

    with refusing(refusal):
        metadata = MetadataReader(io.BytesIO((folder / METADATA).read_bytes())).load()
        leaves = _leaves(folder, metadata)
    nested: dict[Any, Any] = {}
    paths = metadata.planner_data or {}
    for key in dict.fromkeys([*paths, *leaves]):  # in the order of the model
        *parents, last = paths.get(key) or (key,)
        inside = nested
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = leaves[key]
    return nested


def tied_again(model: Mapping[str, Any], trained: Collection[str]) -> dict[str, Any]:
    """Returns a model's state dict with matrices of the same bits as one tensor: such a checkpoint has a tied matrix under each
    of its names. The name that is `trained`, or else the first, comes first."""
    first: dict[Any, torch.Tensor] = {}
    result = {}
    for name in sorted(model, key=lambda name: name not in trained):
        value = model[name]
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.numel() and (value != value.reshape(-1)[0]).any():
            bits = value.dtype, value.shape, hashlib.sha256(bytes_of(value)).digest()
            same = first.setdefault(bits, value)
            value = value if name in trained else same
        result[name] = value
    return result


def model_and_optimizer(nested: Mapping[Any, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Splits a nested state dict into a model's and an optimizer's: by the names that programs use for them, else by what is in
    them, if that leaves no choice. Without either, its tensors are the model's."""
    while len(nested) == 1 and isinstance(only := next(iter(nested.values())), dict) and not nested.keys() & {*_ROOTS}:
        nested = only  # torch's own examples put both into one `app`
    dicts = {name: value for name, value in nested.items() if isinstance(value, dict) and value}
    flat = {name: value for name, value in nested.items() if isinstance(value, torch.Tensor)}
    models = [each for each in dicts.values() if all(isinstance(value, torch.Tensor) for value in each.values())]
    optimizers = [each for each in dicts.values() if "param_groups" in each]
    model = next((dicts[name] for name in _ROOTS if name in dicts), None)
    if model is None:  # all tensors are the model's, but for counters
        model = models[0] if len(models) == 1 and not any(value.dim() for value in flat.values()) else flat
    optimizer = next((dicts[name] for name in _OPTIMIZERS if name in dicts), None)
    if optimizer is None and len(optimizers) == 1:
        optimizer = optimizers[0]
    if optimizer is not None:
        groups = optimizer.get("param_groups", {})
        optimizer = {**optimizer, "param_groups": list(groups.values() if isinstance(groups, dict) else groups)}
    return model, optimizer


class MetadataReader(pickle.Unpickler):
    """Reads `.metadata`, and refuses classes other than the few that say where parts lie."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13 has paths in this module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise BadCheckpoint(
                f"Cannot read a distributed checkpoint without running code: it needs {module}.{name}. Save tensors and plain "
                "values."
            )
        return super().find_class(module, name)


def _leaves(folder: Path, metadata: Any) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    num_read: Counter[str] = Counter()  # elements that were read of each tensor, which may lie in chunks
    most = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    for index, where in metadata.storage_data.items():
        if Path(where.relative_path).name != where.relative_path:
            raise BadCheckpoint(f"Cannot read {index.fqn} from {folder}: its file is outside of the folder. Save it again.")
        if getattr(where, "transform_descriptors", None):
            raise BadCheckpoint(f"Cannot read {index.fqn} from {folder}: it is compressed. Save it without extensions.")
        about = metadata.state_dict_metadata[index.fqn]
        with open(folder / where.relative_path, "rb") as file:
            file.seek(where.offset)
            value = torch.load(io.BytesIO(file.read(where.length)), map_location="cpu", weights_only=True)
        if isinstance(value, torch.Tensor):
            num_read[index.fqn] += value.numel()
        if not isinstance(value, torch.Tensor) or value.shape == about.size:
            leaves[index.fqn] = value
            continue
        if torch.Size(about.size).numel() * value.dtype.itemsize > most:
            raise BadCheckpoint(f"Cannot read {index.fqn} from {folder}: it has more elements than bytes. Save it again.")
        whole = leaves.setdefault(index.fqn, torch.empty(about.size, dtype=value.dtype, device="cpu"))
        for dim, start in enumerate(index.offset):
            whole = whole.narrow(dim, start, value.shape[dim])
        whole.copy_(value)
    lacking = metadata.state_dict_metadata.keys() - leaves.keys()
    lacking.update(name for name, numel in num_read.items() if numel != leaves[name].numel())
    if lacking:
        raise BadCheckpoint(f"Cannot read {folder}: its files lack {sorted(lacking)[0]}, or some of it. Save it again.")
    return leaves
