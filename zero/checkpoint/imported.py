"""Files that other libraries saved, read by name and without running any code of theirs.

Files are read with `weights_only`. DeepSpeed pickles three classes of its own into its files; stand-ins without behaviour take
their place. Any other class is refused by name.
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.errors import BadCheckpoint, refusing

_INERT = re.compile(
    r"deepspeed\.(runtime\.zero\.config\.ZeroStageEnum|runtime\.fp16\.loss_scaler\.\w+|utils\.tensor_fragment\.fragment_address)"
)

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # that torch names when it refuses one


@dataclass
class ImportedState:
    """What was read from such files, by name."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)  # exact
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the weights
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    extra: Any = None


class _Inert:
    """An object of a class that is not imported: the values that it was made of."""

    def __init__(self, *values: Any) -> None:
        self.value = values[0] if values else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def load_safely(path: Path) -> Any:
    """Returns what torch.save wrote, without running code of it."""
    return TorchFile(path).load()


class TorchFile:
    """What torch.save wrote, read without running code of it."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise BadCheckpoint(f"Cannot read {path}: it is no regular file. Pass the path of one.")
        self._path = path
        with _named(path):
            self._records = _records(path) if zipfile.is_zipfile(path) else None  # or it is of the format before
            is_zip = self._records is not None
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
            refused = [name for name in unsafe if not _INERT.fullmatch(name)]
            if refused:
                raise _refusal(path, ", ".join(sorted(refused)))
            self._stand_ins: list[Any] = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in unsafe]
            # Bytes of the other order are exchanged in place, which memory of a file does not always bear.
            self._can_be_mapped = is_zip and _is_native(path)

    def load(self, mmap: bool = False, device: str = "cpu") -> Any:
        """Returns all that is in it. With `mmap` tensors are views of the file, if they can be."""
        with _named(self._path), torch.serialization.safe_globals(self._stand_ins):
            if self._records is not None:
                mmap = mmap and self._can_be_mapped
                return torch.load(self._path, map_location=device, weights_only=True, mmap=mmap)
            with open(self._path, "rb") as file:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
                if file.read(1):  # torch does not fill what the file's list leaves out
                    raise BadCheckpoint(f"Cannot read {self._path}: it has values that are of no tensor. Fetch it again.")
                return loaded

    def places_of(
        self, tensors: Mapping[str, torch.Tensor], state_dict_of: Callable[[Any], Mapping[str, torch.Tensor]]
    ) -> dict[str, int]:
        """Returns where in the file those of these tensors begin whose values are the bytes there. `state_dict_of` finds them
        in what is loaded. Raises unless each storage is one record: torch takes a length from the file's pickle for true, and
        what lies behind a record is no weight."""
        if not tensors or self._records is None or not self._can_be_mapped:  # else torch has read all of it
            return {}
        places = dict[str, int]()
        located = state_dict_of(self.load(device="meta"))  # which torch gives the offset of each record
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

    return refusing(refusal, hides=True)  # torch advises to run the code that is in the file


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
            archive.open(record).close()  # which compares what is written before it with what the end of the archive says
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
