"""Weights in files of other programs: safetensors, one file or several with an index, or what torch.save wrote.

Any stretch of a tensor can be read by itself, so each rank reads only the bytes that it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerators.host_bytes import host_bytes
from zero.errors import BadCheckpoint
from zero.plan.spans import Span

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_IN_FOLDERS = "*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"  # in this order
_INSIDE = "state_dict", "model", "module"  # where training scripts put a state dict in what they save


@dataclass(frozen=True)
class FileTensor:
    """A tensor of such a file: shape, dtype, and how to read a stretch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Span], torch.Tensor]  # a stretch of its elements, in order


class WeightFiles:
    """The tensors of a file, of an index, or of a folder with one of those in it."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.source = Path(source)
        self.tensors: dict[str, FileTensor] = {}
        self._open: list[_OpenFile] = []
        where = dict[str, str]()
        try:
            files, listed = _files_of(self.source)
            for file in files:
                tensors = self._safetensors(file) if file.suffix == ".safetensors" else self._pickled(file)
                twice = sorted(tensors.keys() & self.tensors.keys())
                if twice:
                    raise BadCheckpoint(
                        f"Cannot read {self.source}: {twice[0]} is in {where[twice[0]]} and in {file.name}. Keep the files of "
                        "one model only."
                    )
                self.tensors.update(tensors)
                where.update(dict.fromkeys(tensors, file.name))
            for name, file_name in listed.items():
                if where.get(name) != file_name:
                    raise BadCheckpoint(
                        f"Cannot read {self.source}: its index says that {name} is in {file_name}, and it is in "
                        f"{where.get(name, 'no file')}. Fetch the files again."
                    )
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """Of what the files are said to have, the same for all who have the same ones."""
        said = [(name, tensor.shape, str(tensor.dtype)) for name, tensor in sorted(self.tensors.items())]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Closes the files now. Otherwise a file is closed when no tensor of it is left."""
        while self._open:
            self._open.pop().close()

    def _safetensors(self, file: Path) -> Mapping[str, FileTensor]:
        opened = _OpenFile(file)
        self._open.append(opened)
        size = opened.size()
        try:
            [length] = struct.unpack("<Q", host_bytes(opened.read(0, 8)))
            if length > size:
                raise ValueError("its header is longer than the file")
            header = json.loads(bytes(host_bytes(opened.read(8, length))))
            header.pop("__metadata__", None)
            unknown = next((name for name, about in header.items() if about["dtype"] not in _DTYPES), None)
            if unknown is not None:
                raise ValueError(f"{unknown} has dtype {header[unknown]['dtype']}, which cannot be held")
            tensors = {name: _tensor_at(opened, 8 + length, about) for name, about in header.items()}
            end = max((about["data_offsets"][1] for about in header.values()), default=0)
        except (struct.error, ValueError, KeyError, TypeError) as error:
            what = f"it is no safetensors file that is known here ({_text_of(error)})"
            raise BadCheckpoint(f"Cannot read {file}: {what}. Fetch it again.") from error
        if 8 + length + end != size:
            raise BadCheckpoint(f"Cannot read {file}: it has {size} bytes and should have {8 + length + end}. Fetch it again.")
        return tensors

    def _pickled(self, file: Path) -> Mapping[str, FileTensor]:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of the format before zip files, of which no part can be read by itself
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        inside = [loaded[key] for key in _INSIDE if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
        state_dict: Any = inside[0] if inside else loaded
        if not isinstance(state_dict, Mapping):
            raise BadCheckpoint(f"Cannot read {file}: it has a {type(loaded).__name__}, no state dict. Save a state dict.")
        return {name: _tensor_of(value) for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def _text_of(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _files_of(source: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and what an index says is in which."""
    if source.is_dir():
        matches = next((sorted(source.glob(kind)) for kind in _IN_FOLDERS if any(source.glob(kind))), [])
        if len(matches) > 1 and matches[0].suffix == ".json":
            names = ", ".join(file.name for file in matches)
            raise FileNotFoundError(f"Cannot choose among the indices in {source}: {names}. Pass the path of one of them.")
        if not matches:
            raise FileNotFoundError(f"Cannot find weights in {source}: it has no safetensors and no torch file. Pass a file.")
        return _files_of(matches[0]) if matches[0].suffix == ".json" else (matches, {})
    if not source.is_file():
        raise FileNotFoundError(f"Cannot find weights at {source}: there is no such file or folder. Pass the path of one.")
    if source.suffix == ".json":
        try:
            listed = dict(json.loads(source.read_text())["weight_map"])
        except (ValueError, TypeError, KeyError) as error:
            what = f"it is no index of weights ({_text_of(error)})"
            raise BadCheckpoint(f"Cannot read {source}: {what}. Fetch it again.") from error
        files = [source.parent / name for name in dict.fromkeys(listed.values())]
        lacking = next((file for file in files if not file.is_file()), None)
        if lacking is not None:
            raise FileNotFoundError(f"Cannot find {lacking}, which {source.name} lists. Fetch it.")
        return files, listed
    return [source], {}


class _OpenFile:
    """A file that is open until it is closed, or nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, start: int, num_bytes: int) -> torch.Tensor:
        values = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        left, offset = host_bytes(values), start
        while left:  # one call reads 2 GiB at most
            num_read = os.preadv(self._descriptor, [left], offset)
            if not num_read:
                raise BadCheckpoint(f"Cannot read {self._path}: it became shorter while it was read. Fetch it again.")
            left, offset = left[num_read:], offset + num_read
        return values


def _tensor_at(file: _OpenFile, base: int, about: Mapping[str, Any]) -> FileTensor:
    shape, dtype, (start, stop) = tuple(about["shape"]), _DTYPES[about["dtype"]], about["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor is not as long as its shape says")

    def read(span: Span) -> torch.Tensor:
        return file.read(base + start + span.start * dtype.itemsize, span.numel * dtype.itemsize).view(dtype)

    return FileTensor(shape, dtype, read)


def _tensor_of(tensor: torch.Tensor) -> FileTensor:
    return FileTensor(tuple(tensor.shape), tensor.dtype, lambda span: tensor.reshape(-1)[span.start : span.stop])
