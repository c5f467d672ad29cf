"""Tensors in files of the safetensors format: what such a file consists of, and where each of its tensors lies.

The library writes all tensors at once, from host memory, and neither syncs nor checksums; it reads by mapping a file that it
looks up by name. Here tensors are written one at a time, wherever they are, and checksummed as they are written. They are read
from a file that is open, which remains the same file if another one gets its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accelerators.tensor_bytes import host_bytes
from zero.checkpoint.disk import OpenFile
from zero.checkpoint.manifest import Unreadable, is_within, plain_json
from zero.plan.layout import Span

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# These two are read and not written: a checkpoint's own manifest says which dtype such bytes have.
_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_LONGEST_HEADER, _DEEPEST_HEADER = 100_000_000, 127  # bytes and levels, as in the safetensors library
_MOST_ON_HOST = 64 * 2**20  # the bytes of a tensor on a device that are copied at once

Metadata = Mapping[str, str]


def has_name(dtype: torch.dtype) -> bool:
    """Returns True if other programs can read a tensor of this dtype."""
    return dtype in _NAMES


def file_of_tensors(
    tensors: Mapping[str, torch.Tensor], values: Callable[[str], torch.Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """Returns the contents of a file of these tensors, part by part. `values` returns the values of one tensor at a time, if
    the tensors themselves are not on the host."""
    # Sorted so that each tensor begins at a multiple of its item size.
    ordered = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    return file_of_stream(sizes, map(values or ordered.__getitem__, ordered))


def file_of_stream(
    sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: Metadata | None = None,
) -> Iterator[bytes | memoryview]:
    """Returns the contents of a file as `file_of_tensors` does, of tensors that are made one at a time. Their sizes are known
    before; those of the widest dtype come first."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in sizes.items():
        numel = torch.Size(shape).numel()
        # If the format has no name for a dtype, its values lie as bytes; the manifest says which dtype they have.
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


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: shape, dtype, and where its bytes are. Any stretch of it can be read by itself."""

    file: OpenFile
    start: int  # the offset in the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, span: Span) -> torch.Tensor:
        """Returns a stretch of its elements, in order."""
        size = self.dtype.itemsize
        return self.file.read(self.start + span.start * size, span.numel * size).view(self.dtype)

    def read_into(self, span: Span, target: torch.Tensor) -> None:
        """Copies a stretch to a tensor of so many elements: if it can be, to where it belongs."""
        if target.is_cpu and target.dtype == self.dtype and target.is_contiguous():
            self.file.read_into(self.start + span.start * self.dtype.itemsize, host_bytes(target.detach()))
            return
        for part in span.cut(_MOST_ON_HOST // self.dtype.itemsize):
            target[part.start - span.start : part.stop - span.start].copy_(self.read(part))


def read_header(file: OpenFile) -> tuple[dict[str, FileTensor], Metadata]:
    """Returns the tensors of a safetensors file, and its metadata. It checks every field as the safetensors library does: the
    tensors lie one behind the other, without a gap, in as many bytes as their shapes say, to the end of the file. Raises a
    ValueError with what is wrong, and an OSError if the file cannot be read."""
    size = file.size()
    length = int.from_bytes(bytes(host_bytes(file.read(0, 8))), "little") if size >= 8 else size
    if length > size - 8:
        raise Unreadable("its header is longer than the file")
    if length > _LONGEST_HEADER:
        raise Unreadable(f"its header has {length} bytes, and may have {_LONGEST_HEADER}")
    header = plain_json(bytes(host_bytes(file.read(8, length))))
    if not isinstance(header, dict) or not is_within(header, _DEEPEST_HEADER):
        raise Unreadable("its header is not a table, or has too many levels")
    json.dumps(header, ensure_ascii=False).encode()  # raises for half a surrogate pair, which is no text
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Unreadable("its metadata are not texts")
    fields = {name: _fields(name, entry) for name, entry in header.items()}
    end, tensors = 0, dict[str, FileTensor]()
    for name, (dtype, shape, start, stop) in sorted(fields.items(), key=lambda pair: pair[1][2:]):
        if start != end or stop - start != _num_bytes(shape, dtype):
            raise Unreadable(f"{name} does not lie where the tensor before it ends, with as many bytes as its shape says")
        tensors[name] = FileTensor(file, 8 + length + start, shape, dtype)
        end = stop
    if 8 + length + end != size:
        raise WrongSize(f"it has {size} bytes and should have {8 + length + end}")
    return {name: tensors[name] for name in fields}, metadata


class WrongSize(Unreadable):
    """A file is longer or shorter than its header says."""


def _fields(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise Unreadable(f"what it says of {name} is not a table")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise Unreadable(f"what it says of {name} lacks {key!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Unreadable(f"{name} has dtype {dtype!s:.40}, which cannot be held")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise Unreadable(f"{name} has a shape or offsets that are not lists of whole numbers")
    return _DTYPES[dtype], tuple(shape), *offsets


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Returns the bytes of a tensor; numbers that no file has room for are not multiplied any further."""
    numel, most = 1, 1
    for size in shape:
        numel, most = numel * size, most * max(1, size)
        if most >= 2**63:
            raise Unreadable("a shape has more elements than memory can have")
    return numel * dtype.itemsize
