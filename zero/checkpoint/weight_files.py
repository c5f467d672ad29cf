"""Weights in files of other programs: safetensors, one file or several with an index, or what torch.save wrote.

Any stretch of a tensor can be read by itself, so each rank reads only the bytes that it needs. Files of torch.save are read by
name and without running any code of theirs, with `weights_only`. DeepSpeed pickles three classes of its own into its files;
stand-ins without behaviour take their place. Any other class is refused by name. Files are written with a stretch in memory at
a time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from accelerators.tensor_bytes import bytes_of
from zero.checkpoint import disk
from zero.checkpoint.disk import OpenFile
from zero.checkpoint.manifest import Unreadable, plain_json
from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.tensor_files import FileTensor, WrongSize, file_of_stream, has_name, read_header
from zero.errors import BadCheckpoint, refusing
from zero.memory.values import Held, Values
from zero.plan.layout import Span

# The patterns that are tried, in this order.
_IN_FOLDERS = "*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"
_INSIDE = "state_dict", "model", "module"  # the keys under which training scripts put a state dict
_AT_ONCE = 2**24  # the bytes that are read at once
_INERT = re.compile(
    r"deepspeed\.(runtime\.zero\.config\.ZeroStageEnum|runtime\.fp16\.loss_scaler\.\w+|utils\.tensor_fragment\.fragment_address)"
)
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # finds the class that torch names when it refuses one

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class WeightFiles:
    """The tensors of a file, of an index, or of a folder with one of those in it."""

    def __init__(self, source: str | os.PathLike[str], pickled: bool = True) -> None:
        """Opens the files, and looks at all that they say. Without `pickled` all have to be safetensors files."""
        self.source = Path(source)
        self.tensors: dict[str, Values] = {}
        self.metadata: dict[str, str] = {}
        self._open: list[OpenFile] = []
        where = dict[str, str]()
        try:
            files, listed = _files_of(self.source, _IN_FOLDERS if pickled else _IN_FOLDERS[:2])
            for file in files:
                tensors = self._torch(file) if pickled and file.suffix != ".safetensors" else self._safetensors(file)
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
        """A digest of what the files are said to have, the same for all who have the same ones."""
        said = [(name, tensor.shape, str(tensor.dtype)) for name, tensor in sorted(self.tensors.items())]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Closes the files now. Otherwise a file is closed when no tensor of it is left."""
        while self._open:
            self._open.pop().close()

    def _safetensors(self, file: Path) -> Mapping[str, Values]:
        opened = self._opened(file)
        try:
            tensors, metadata = read_header(opened)
        except WrongSize as error:
            raise BadCheckpoint(f"Cannot read {file}: {error}. Fetch it again.") from error
        except OSError as error:
            raise BadCheckpoint(f"Cannot read {file}: {error.strerror or error}. Fetch it again.") from error
        except ValueError as error:
            what = f"it is not a safetensors file that is known here ({error!s:.300})"
            raise BadCheckpoint(f"Cannot read {file}: {what}. Fetch it again.") from error
        self.metadata.update(metadata)
        return tensors

    def _torch(self, file: Path) -> Mapping[str, Values]:
        opened, torch_file = self._opened(file), TorchFile(file)
        loaded = torch_file.load(mmap=True)
        state_dict = _state_dict_in(loaded)
        if not isinstance(state_dict, Mapping):
            raise BadCheckpoint(f"Cannot read {file}: it has a {type(loaded).__name__}, no state dict. Save a state dict.")
        tensors = tensors_in(file, state_dict)
        places = torch_file.places_of(tensors, _state_dict_in)

        def values_of(name: str) -> Values:
            tensor = tensors[name]
            return FileTensor(opened, places[name], tuple(tensor.shape), tensor.dtype) if name in places else Held(tensor)

        return {name: values_of(name) for name in tensors}

    def _opened(self, file: Path) -> OpenFile:
        try:
            self._open.append(OpenFile(file))
        except OSError as error:
            raise BadCheckpoint(f"Cannot read {file}: {error.strerror}. Pass the path of a file.") from error
        return self._open[-1]


def _state_dict_in(loaded: Any) -> Any:
    """Returns the state dict in what a training script saved, or all of that."""
    inside = [loaded[key] for key in _INSIDE if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
    return inside[0] if inside else loaded


def _files_of(source: Path, kinds: tuple[str, ...]) -> tuple[list[Path], Mapping[str, str]]:
    """Returns the files, and what an index says is in which."""
    if source.is_dir():
        matches = next((sorted(source.glob(kind)) for kind in kinds if any(source.glob(kind))), [])
        if (source / "manifest.json").exists() or (not matches and (source / "latest").exists()):
            raise FileNotFoundError(
                f"Cannot find weights in {source}: a checkpoint is there, in shares. Run `python -m zero export` first, "
                "and pass what it writes."
            )
        if not matches:
            raise FileNotFoundError(f"Cannot find weights in {source}: it has no safetensors and no torch file. Pass a file.")
        if matches[0].suffix != ".json":
            return matches, {}
        if len(matches) > 1:
            names = ", ".join(file.name for file in matches)
            raise FileNotFoundError(f"Cannot choose among the indices in {source}: {names}. Pass the path of one of them.")
        source = matches[0]
    if not source.is_file():
        raise FileNotFoundError(f"Cannot find weights at {source}: there is no such file. Pass the path of one, or a folder.")
    if source.suffix == ".json":
        try:
            listed = _index_in(plain_json(source.read_bytes()))
        except ValueError as error:
            what = f"it is not an index of weights ({error!s:.300})"
            raise BadCheckpoint(f"Cannot read {source}: {what}. Fetch it again.") from error
        files = [source.parent / name for name in dict.fromkeys(listed.values())]
        lacking = next((file for file in files if not file.is_file()), None)
        if lacking is not None:
            raise FileNotFoundError(f"Cannot find {lacking}, which {source.name} lists. Fetch it.")
        return files, listed
    return [source], {}


def _index_in(body: Any) -> dict[str, str]:
    """Returns which tensor is in which file, all of them in the folder of the index or below. Raises a ValueError."""
    if not isinstance(body, dict) or "weight_map" not in body:
        raise Unreadable("it lacks 'weight_map'")
    listed = body["weight_map"]
    if not isinstance(listed, dict):
        raise Unreadable("its 'weight_map' is not a table")
    for name, file in listed.items():
        name.encode()  # raises for what is no text
        if not isinstance(file, str) or not file or "\0" in file or "\\" in file:
            raise Unreadable(f"it says that {name:.100} is in {file!r:.100}, which is not a file")
        path = PurePosixPath(file.encode().decode())
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Unreadable(f"it says that {name:.100} is in {file:.100}, outside of its folder")
    return listed


# what torch.save wrote ---------------------------------------------------------------------------------------------------


def load_safely(path: Path) -> Any:
    """Returns what torch.save wrote, without running code of it."""
    return TorchFile(path).load()


class TorchFile:
    """A file that torch.save wrote, read without running code of it."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise BadCheckpoint(f"Cannot read {path}: it is not a regular file. Pass the path of one.")
        self._path = path
        with _named(path):
            self._records = _records(path) if zipfile.is_zipfile(path) else None  # a file without records has the format before
            is_zip = self._records is not None
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
            refused = [name for name in unsafe if not _INERT.fullmatch(name)]
            if refused:
                raise _refusal(path, ", ".join(sorted(refused)))
            self._stand_ins: list[Any] = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in unsafe]
            # Bytes of the other order are exchanged in place, which a mapped file does not always allow.
            self._can_be_mapped = is_zip and _is_native(path)

    def load(self, mmap: bool = False, device: str = "cpu") -> Any:
        """Returns all that is in it. With `mmap` tensors are views of the file, if they can be."""
        with _named(self._path), torch.serialization.safe_globals(self._stand_ins):
            if self._records is not None:
                mmap = mmap and self._can_be_mapped
                return torch.load(self._path, map_location=device, weights_only=True, mmap=mmap)
            with open(self._path, "rb") as file:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
                if file.read(1):  # torch reads only the bytes that the file's list names
                    raise BadCheckpoint(f"Cannot read {self._path}: it has values that are of no tensor. Fetch it again.")
                return loaded

    def places_of(
        self, tensors: Mapping[str, torch.Tensor], state_dict_of: Callable[[Any], Mapping[str, torch.Tensor]]
    ) -> dict[str, int]:
        """Returns where in the file those of these tensors begin whose values are the bytes there. `state_dict_of` finds them
        in what is loaded. Raises unless each storage is one record: torch takes a length from the file's pickle for true, and
        what lies behind a record is no weight."""
        if not tensors or self._records is None or not self._can_be_mapped:  # torch has read all of a file of the format before
            return {}
        places = dict[str, int]()
        # On the meta device, torch gives each storage the offset of its record.
        located = state_dict_of(self.load(device="meta"))
        for name, tensor in tensors.items():
            storage: Any = located[name].untyped_storage()
            offset = getattr(storage, "_checkpoint_offset", None)
            if offset is None or not storage.nbytes():
                continue
            if self._records.get(offset) != storage.nbytes():
                what = f"{name} is not as long as the bytes that it names"
                raise BadCheckpoint(f"Cannot read {self._path}: {what}. Fetch it again.")
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                places[name] = offset + located[name].storage_offset() * tensor.element_size()
        return places


class _Inert:
    """An object of a class that is not imported: the values that it was made of."""

    def __init__(self, *values: Any) -> None:
        self.value = values[0] if values else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _named(path: Path) -> AbstractContextManager[None]:
    """Names the file of whatever torch, pickle and zipfile raise on bytes that nobody wrote."""

    def refusal(error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError):
            return BadCheckpoint(f"Cannot read {path}: there is no such file. Pass the path of one.")
        needed = _GLOBAL.search(str(error))
        if needed is not None:
            return _refusal(path, needed[1])
        if isinstance(error, OSError) and error.strerror:
            return BadCheckpoint(f"Cannot read {path}: {error.strerror}. Fetch it again.")
        what = "it is no file that torch.save wrote, or it is damaged"
        return BadCheckpoint(f"Cannot read {path}: {what}. Fetch it again, or save a state dict.")

    return refusing(refusal, hides=True)  # torch's own message advises to run the code that is in the file


def _refusal(path: Path, needed: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"Cannot read {path} without running code: it needs {needed:.200}. Save tensors, numbers, texts, lists and dicts only."
    )


def _records(path: Path) -> dict[int, int]:
    """Returns where the records of a zip file are: bytes by their offset. Raises unless all lie there as they are, as torch
    maps them whether they do or not."""
    records = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise BadCheckpoint(f"Cannot read {path}: {record.filename:.100} in it is compressed. Save it with torch.save.")
            archive.open(record).close()  # opening compares the record's own header with the list at the end of the archive
            file.seek(record.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            records[record.header_offset + 30 + name_bytes + extra_bytes] = record.file_size
    return records


def _is_native(path: Path) -> bool:
    """Returns True if the bytes of numbers in a zip file have the order of this machine."""
    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    return [sys.byteorder.encode()] == (orders or [b"little"])


def tensors_in(path: Path, loaded: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state dict that was read from a file. Raises unless each has a name and all its values there."""
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    num_bytes = path.stat().st_size
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise BadCheckpoint(f"Cannot read {path}: a tensor in it has the name {name!r:.60}, not a text. Save a state dict.")
        wrong = (
            "is on the meta device" if tensor.is_meta else
            f"is {str(tensor.layout).removeprefix('torch.')}" if tensor.layout != torch.strided else
            "is quantized" if tensor.is_quantized else
            "is nested" if tensor.is_nested else
            "has more elements than the file has bytes" if tensor.numel() * tensor.dtype.itemsize > num_bytes else None
        )  # fmt: skip
        if wrong is not None:
            raise BadCheckpoint(f"Cannot read {name} from {path}: it {wrong}. Save dense tensors that have their values.")
    return tensors


# writing ----------------------------------------------------------------------------------------------------------------


def write_files(
    folder: Path,
    stem: str,
    sizes: Sizes,
    values_of: Callable[[str], Values],
    metadata: Mapping[str, str],
    bar: ProgressBar,
    shard_bytes: int,
) -> list[Path]:
    """Writes safetensors files of about so many bytes, and an index: all of them or none. Returns their paths."""
    shards, index_name = shards_of(stem, sizes, shard_bytes), index_of(stem)
    with disk.filled(folder, last=index_name) as hidden:
        for file_name, shard in shards.items():
            write_file(hidden / file_name, shard, values_of, metadata, bar)
        places = {name: file_name for file_name, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total_bytes(sizes)}, "weight_map": dict(sorted(places.items()))}
        disk.write(hidden / index_name, [json.dumps(index, indent=2).encode()])
    return [folder / name for name in (*shards, index_name)]


def write_file(
    path: Path, sizes: Sizes, values_of: Callable[[str], Values], metadata: Mapping[str, str], bar: ProgressBar
) -> None:
    """Writes a safetensors file, whole or not at all."""
    unknown = next((f"{name} is {dtype}" for name, (dtype, _) in sizes.items() if not has_name(dtype)), None)
    if unknown is not None:
        raise ValueError(f"Cannot write {path.name}: {unknown}, which safetensors lacks. Cast it, or use torch.save.")
    beside = path.with_name(f".{path.name}.saving")
    beside.unlink(missing_ok=True)
    try:
        sizes = ordered(sizes)
        disk.write(beside, file_of_stream(sizes, _stretches(sizes, values_of), metadata), bar.advance)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def ordered(sizes: Sizes) -> Sizes:
    """Returns them with the widest dtype first, so that each tensor begins at a multiple of its dtype's size."""
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1][0].itemsize))


def shards_of(stem: str, sizes: Sizes, shard_bytes: int) -> dict[str, Sizes]:
    """Returns the names of files of about so many bytes, and what is in each of them."""
    shards = list(_cut(ordered(sizes), shard_bytes))
    return {f"{stem}-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def index_of(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def total_bytes(sizes: Sizes) -> int:
    return sum(map(_num_bytes, sizes.values()))


def _cut(sizes: Sizes, shard_bytes: int) -> Iterator[Sizes]:
    shard: Sizes = {}
    so_far = 0
    for name, size in sizes.items():
        if shard and so_far + _num_bytes(size) > shard_bytes:
            yield shard
            shard, so_far = {}, 0
        shard[name] = size
        so_far += _num_bytes(size)
    if shard:
        yield shard


def _num_bytes(size: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return torch.Size(size[1]).numel() * size[0].itemsize


def _stretches(sizes: Sizes, values_of: Callable[[str], Values]) -> Iterator[torch.Tensor]:
    for name, (dtype, shape) in sizes.items():
        values = values_of(name)
        for stretch in Span(0, torch.Size(shape).numel()).cut(_AT_ONCE // dtype.itemsize):
            yield values.read(stretch)


def write_torch(path: Path, contents: Callable[[Aside], Any]) -> None:
    """Writes a file that torch.load reads, whole or not at all, with one tensor in memory at a time. `contents` returns what is
    saved; torch wants all of it at once, so it is given a function that puts a tensor aside, into a file of its own."""
    with disk.made(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        beside, saved = Path(scratch) / "whole", contents(aside_in(Path(scratch)))
        try:
            with open(beside, "wb") as file:
                torch.save(saved, file)
        except RuntimeError as error:  # a write that failed is the system's error, which torch hides behind one of its own
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        del saved  # what was put aside is still mapped
        os.replace(beside, path)


Aside = Callable[[torch.Tensor], torch.Tensor]


def aside_in(folder: Path) -> Aside:
    """Returns a function that returns the same values in a file of their own in this folder. The file may be removed."""
    numbers = itertools.count()

    def put_aside(tensor: torch.Tensor) -> torch.Tensor:
        tensor, file = tensor.detach().contiguous(), folder / str(next(numbers))
        file.write_bytes(bytes_of(tensor))
        mapped = torch.from_file(str(file), size=tensor.numel(), dtype=tensor.dtype) if tensor.numel() else tensor
        return mapped.reshape(tensor.shape)

    return put_aside
