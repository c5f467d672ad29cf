"""Tensors in files of the safetensors format, and the reader of a checkpoint, which consists of such files.

The library writes all tensors at once, from host memory, and neither syncs nor checksums; it reads by mapping a file that it
looks up by name. Here tensors are written one at a time, wherever they are, and checksummed as they are written. They are read
from a file that is open, which remains the same file if another one gets its name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerators.tensor_bytes import host_bytes
from zero.checkpoint import values
from zero.checkpoint.disk import OpenFile, Written, write
from zero.checkpoint.folder import MANIFEST, Folder
from zero.checkpoint.manifest import VALUE, Manifest, Unreadable, buffer_key, is_within, key_of, plain_json
from zero.checkpoint.values import ANOTHER
from zero.errors import BadCheckpoint
from zero.memory.formats import ParamFormat, dtype_named
from zero.plan.layout import Span

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# These two are read and not written: a checkpoint's own manifest says which dtype such bytes have.
_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_LONGEST_HEADER, _DEEPEST_HEADER = 100_000_000, 127  # bytes and levels, as in the safetensors library
_MOST_ON_HOST = 64 * 2**20  # the bytes of a tensor on a device that are copied at once
_MOST_AT_ONCE = 256  # the number of files that are opened before any is read
_MOST_BEGUN = 100  # the number of tries, as others may save the tag anew each time

Metadata = Mapping[str, str]


def has_name(dtype: torch.dtype) -> bool:
    """Returns True if other programs can read a tensor of this dtype."""
    return dtype in _NAMES


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    written: Written = lambda _: None,
    metadata: Metadata | None = None,
    values: Callable[[str], torch.Tensor] | None = None,
) -> tuple[int, str]:
    """Writes a file of these tensors. Returns its size and its checksum. `values` returns the values of one tensor at a time,
    if the tensors themselves are not on the host."""
    # Sorted so that each tensor begins at a multiple of its item size.
    ordered = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))
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


class CheckpointReader:
    """All that is read belongs to one save of a tag, whatever other processes remove or save anew meanwhile.

    It finds the tensors of a checkpoint by name, in stretches of elements, whichever ranks wrote them.


    [Note: a reader] Another process may remove the checkpoint or save its tag anew at any time. The manifest and the files are
    looked up in the folder that was opened first, so they belong together, and they are open before the first is read. If the
    folder loses its name before that, the reader begins again with the folder that has the name now.
    """

    def __init__(self, directory: Any, tag: str | None = None) -> None:
        self._directory, self._tag = Folder.at(directory), tag
        # The last parameter that was read in another order, by name.
        self._turned: tuple[Any, torch.Tensor] = (None, torch.empty(0))
        for _ in range(_MOST_BEGUN):
            self._found = self._directory.find(tag)
            self.path = self._directory.by_its_tag(self._found)
            if self._open():
                return
        raise BadCheckpoint(f"Cannot read {self.path}: others saved it anew each time it was read. Load another tag.")

    # files -------------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Opens the files; False if the folder lost its name before that was done."""
        try:
            self._folder = os.open(self._found, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self._close_folder = weakref.finalize(self, os.close, self._folder)
        self._files: dict[int, OpenFile | OSError] = {}
        self._tensors: dict[int, dict[str, FileTensor]] = {}
        try:
            about = OpenFile(self.path / MANIFEST, self._folder)
            text = bytes(host_bytes(about.read(0, about.size())))
            about.close()
        except OSError as error:
            if self._has_lost_its_name():
                self.close()
                return False
            raise BadCheckpoint(f"Cannot read {self.path / MANIFEST}: {error.strerror}. {ANOTHER}") from error
        self.manifest = Manifest.read(text, str(self.path / MANIFEST))
        self._files = dict(enumerate(self._look_up(file.name) for file in self.manifest.files[:_MOST_AT_ONCE]))
        wrong = [opened for opened in self._files.values() if isinstance(opened, OSError)]
        if wrong and self._has_lost_its_name():
            self.close()
            return False
        # Files are opened one at a time then, when they are asked for.
        if any(error.errno in (errno.EMFILE, errno.ENFILE) for error in wrong):
            self._close_files()
        return True

    def _look_up(self, name: str) -> OpenFile | OSError:
        try:
            return OpenFile(self.path / name, self._folder)
        except OSError as error:
            return error  # raised when somebody wants this file

    def _has_lost_its_name(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._found), os.fstat(self._folder))
        except OSError:
            return True

    def is_current(self) -> bool:
        """Returns True if who asks for the same checkpoint now gets this one."""
        return not self._has_lost_its_name() and (self._tag is not None or self._directory.latest() == self.path.name)

    def _file(self, number: int) -> OpenFile:
        if not 0 <= number < len(self.manifest.files):
            raise BadCheckpoint(f"Cannot read {self.path}: it has no file {number}. {ANOTHER}")
        if number not in self._files:
            self._files[number] = self._look_up(self.manifest.files[number].name)
        opened = self._files[number]
        if isinstance(opened, OSError):
            path = self.path / self.manifest.files[number].name
            if self._has_lost_its_name():
                raise BadCheckpoint(f"Cannot read {path}: it was removed or saved anew meanwhile. Load again.") from opened
            raise BadCheckpoint(f"Cannot read {path}: {opened.strerror}. {ANOTHER}") from opened
        return opened

    def check_file(self, number: int, read: Written = lambda _: None) -> None:
        """Raises unless a file is, bit for bit, the one that was saved."""
        opened, entry = self._file(number), self.manifest.files[number]
        try:
            num_bytes = opened.size()
            wrong = None if num_bytes == entry.num_bytes else f"it has {num_bytes} bytes and had {entry.num_bytes}"
            if wrong is None and opened.checksum(read) != entry.checksum:
                wrong = "its content has not the checksum that the manifest gives"
        except OSError as error:
            wrong = error.strerror
        if wrong is not None:
            raise BadCheckpoint(f"Cannot read {opened.path}: {wrong}. {ANOTHER}")

    def _tensor(self, number: int, key: str, dtype: torch.dtype) -> FileTensor:
        """Finds a tensor in a file. Those of dtypes that the format has no name for lie as bytes."""
        opened = self._file(number)
        try:
            if number not in self._tensors:
                self._tensors[number] = read_header(opened)[0]
        except (ValueError, OSError) as error:
            raise BadCheckpoint(f"Cannot read {opened.path}: {error}. {ANOTHER}") from error
        tensor = self._tensors[number].get(key)
        if tensor is None:
            raise BadCheckpoint(f"Cannot read {key} from {opened.path}: the file has no such tensor. {ANOTHER}")
        if tensor.dtype == dtype:
            return tensor
        if has_name(dtype) or tensor.dtype != torch.uint8 or tensor.numel % dtype.itemsize:
            raise BadCheckpoint(f"Cannot read {key} from {opened.path} as {dtype}: it is {tensor.dtype}. {ANOTHER}")
        return FileTensor(tensor.file, tensor.start, (tensor.numel // dtype.itemsize,), dtype)

    def close(self) -> None:
        self._close_files()
        self._close_folder()

    def _close_files(self) -> None:
        for opened in self._files.values():
            if isinstance(opened, OpenFile):
                opened.close()
        self._files.clear()
        self._tensors.clear()

    # values ------------------------------------------------------------------------------------------------------

    def copy(self, name: str, what: str, form: ParamFormat, span: Span, target: torch.Tensor) -> None:
        """Copies a stretch of a parameter, or of an entry of its state, as it lies in a slot of this form."""
        stored = self.manifest.parameters[name]
        if (stored.order, stored.cut) != (form.order, form.cut):
            if self._turned[0] != (name, what, form):  # turned once for all pieces of a parameter
                self._turned = (name, what, form), form.flatten(self.whole(name, what))
            target.copy_(self._turned[1][span.start : span.stop])
            return
        dtype = self._dtype_of(name, what)
        for stretch in stored.stretches:
            overlap = span.overlap(stretch.span)
            if overlap is not None:
                tensor = self._tensor(stretch.file, key_of(name, what, stretch.start), dtype)
                part = overlap.shifted(-span.start)
                tensor.read_into(overlap.shifted(-stretch.start), target[part.start : part.stop])

    def check(self, files: Collection[int]) -> None:
        """Raises unless all that is said to lie in these files does, as what it is said to be. Reads no values."""
        for name, stored in self.manifest.parameters.items():
            for what in (VALUE, *stored.state):
                dtype = self._dtype_of(name, what)
                for stretch in stored.stretches:
                    if stretch.file in files:
                        numel = self._tensor(stretch.file, key_of(name, what, stretch.start), dtype).numel
                        if numel != stretch.span.numel:
                            raise BadCheckpoint(
                                f"Cannot read {what} of {name}: it has {numel} elements from {stretch.start} on. {ANOTHER}"
                            )
        for name, buffer in self.manifest.buffers.items():
            if 0 in files and self._tensor(0, buffer_key(name), _dtype(buffer.dtype)).numel != math.prod(buffer.shape):
                raise BadCheckpoint(
                    f"Cannot read buffer {name}: it does not have the shape {buffer.shape} of the manifest. {ANOTHER}"
                )

    def whole(self, name: str, what: str) -> torch.Tensor:
        """Returns all of a parameter, or of an entry of its state, in its shape."""
        stored = self.manifest.parameters[name]
        line = torch.empty(stored.numel, dtype=self._dtype_of(name, what))
        form = ParamFormat(stored.shape, stored.order, stored.cut)
        self.copy(name, what, form, Span(0, stored.numel), line)
        return form.unflatten(line)

    def buffer(self, name: str) -> torch.Tensor:
        stored = self.manifest.buffers[name]
        return self._flat(0, buffer_key(name), _dtype(stored.dtype)).reshape(stored.shape)

    def plain(self, name: str) -> dict[str, Any]:
        """Returns the entries of a parameter's state that go with no element."""
        entries: Any = values.decode(self.manifest.parameters[name].plain)
        if not isinstance(entries, dict):
            raise BadCheckpoint(f"Cannot read the state of {name}: it is a {type(entries).__name__}. {ANOTHER}")
        return entries

    def training(self) -> dict[str, Any]:
        """Returns what was saved beside tensors of parameters."""
        return self.manifest.training_with(self._fetch)

    def extra(self) -> Any:
        """Returns what the caller saved as `extra`."""
        return values.decode(self.manifest.extra, self._fetch)

    def _fetch(self, key: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        return self._flat(0, key, dtype).reshape(shape)

    def random_bytes(self, rank: int) -> torch.Tensor:
        return self._flat(rank, "random", torch.uint8)

    def _flat(self, number: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._tensor(number, key, dtype)
        return tensor.read(Span(0, tensor.numel))

    def _dtype_of(self, name: str, what: str) -> torch.dtype:
        stored = self.manifest.parameters[name]
        return _dtype(stored.value_dtype if what == VALUE else stored.state[what])


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except ValueError as error:
        raise BadCheckpoint(f"{error} {ANOTHER}") from error
