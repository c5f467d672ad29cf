"""Tensor files in the safetensors format.

They are read with the safetensors library. It does not write them: it takes all tensors at once, in host memory, and neither
syncs nor checksums. Here tensors are written one at a time, wherever they are, and are checksummed as they are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from accelerators.host_bytes import host_bytes
from zero.checkpoint.disk import Written, write
from zero.checkpoint.manifest import ANOTHER
from zero.errors import BadCheckpoint
from zero.plan.spans import Span

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_MOST_ON_HOST = 64 * 2**20  # bytes of a tensor on a device that are copied at a time
Metadata = Mapping[str, str]


def has_name(dtype: torch.dtype) -> bool:
    """Whether other programs can read a tensor of this dtype."""
    return dtype in _NAMES


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    written: Written = lambda _: None,
    metadata: Metadata | None = None,
    values: Callable[[str], torch.Tensor] | None = None,
) -> tuple[int, str]:
    """Writes a file of these tensors. Returns its size and its checksum. `values` returns the values of one tensor at a time,
    where the tensors themselves are not on the host."""
    ordered = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))  # so that each begins at a multiple of it
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    return write_stream(path, sizes, map(values or ordered.__getitem__, ordered), written, metadata)


def write_stream(
    path: Path,
    sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    written: Written = lambda _: None,
    metadata: Metadata | None = None,
) -> tuple[int, str]:
    """Writes tensors as `write_tensors` does, but made one at a time. Their sizes are known before; those of the widest dtype
    come first."""
    return write(path, _bytes(sizes, tensors, metadata), written)


def _bytes(
    sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[torch.Tensor], metadata: Metadata | None
) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in sizes.items():
        numel = torch.Size(shape).numel()
        # a dtype that the format has no name for lies as bytes, and who reads it knows from the manifest what they are
        known = dtype in _NAMES
        size = numel * dtype.itemsize
        listed = list(shape) if known else [size]
        header[name] = {"dtype": _NAMES.get(dtype, "U8"), "shape": listed, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        yield from _host_bytes(tensor)


def _host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    line = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    for part in torch.split(line, max(1, _MOST_ON_HOST // line.dtype.itemsize)) if not line.is_cpu else (line,):
        if part.numel():
            yield host_bytes(part.cpu())


class TensorFiles:
    """The tensor files of one checkpoint, opened when first asked for; tensors are views of the files' own memory."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self._names = list(names)
        self._open: dict[int, Any] = {}
        self._raw: dict[int, _Raw] = {}

    def get(self, file: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor of a file, flat."""
        if not 0 <= file < len(self._names):
            raise BadCheckpoint(
                f"Cannot read {key} in {self._folder}: it would be in file {file} of {len(self._names)}. {ANOTHER}"
            )
        path = self._folder / self._names[file]
        try:
            if file not in self._open:
                opened: Any = safe_open(path, framework="pt", device="cpu")
                self._open[file] = opened.__enter__()
            tensor: torch.Tensor = self._open[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"Cannot read {key} from {path}: {error}. {ANOTHER}") from error
        flat = tensor.reshape(-1)
        if flat.dtype == dtype:
            return flat
        if dtype in _NAMES or flat.dtype != torch.uint8:  # only what the format has no name for lies as bytes
            raise BadCheckpoint(f"Cannot read {key} from {path} as {dtype}: it is {flat.dtype}. {ANOTHER}")
        return flat.view(dtype)

    def read(self, file: int, key: str, dtype: torch.dtype, span: Span, target: torch.Tensor) -> None:
        """Copies a stretch of a tensor. On the host it is read to where it belongs: to map pages of a file takes longer."""
        if not target.is_cpu or target.dtype != dtype or not target.is_contiguous() or not target.numel():
            target.copy_(self.get(file, key, dtype)[span.start : span.stop])
            return
        if file not in self._raw:
            self._raw[file] = _Raw(self._folder / self._names[file])
        self._raw[file].read(key, span.start * dtype.itemsize, host_bytes(target.detach()))

    def close(self) -> None:
        for opened in self._open.values():
            opened.__exit__(None, None, None)
        for raw in self._raw.values():
            raw.file.close()
        self._open.clear()
        self._raw.clear()


class _Raw:
    """A file whose header was read."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115 - until `TensorFiles.close`
        size = int.from_bytes(self.file.read(8), "little")
        self._header = json.loads(self.file.read(size))
        self._data = 8 + size

    def read(self, key: str, offset: int, target: memoryview) -> None:
        self.file.seek(self._data + self._header[key]["data_offsets"][0] + offset)
        while len(target):
            count = self.file.readinto(target)
            if not count:
                raise BadCheckpoint(f"Cannot read {key} from {self.file.name}: the file ends before it. {ANOTHER}")
            target = target[count:]
