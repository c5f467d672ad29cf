"""Weights in files of other programs: safetensors, one file or several with an index, or what torch.save wrote.

Any stretch of a tensor can be read by itself, so each rank reads only the bytes that it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from zero.checkpoint.disk import OpenFile
from zero.checkpoint.imported import TorchFile, tensors_in
from zero.checkpoint.manifest import Unreadable, plain_json
from zero.checkpoint.tensor_files import FileTensor, WrongSize, read_header
from zero.errors import BadCheckpoint
from zero.memory.values import Held, Values

_IN_FOLDERS = "*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"  # in this order
_INSIDE = "state_dict", "model", "module"  # where training scripts put a state dict in what they save


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
        """Of what the files are said to have, the same for all who have the same ones."""
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
            what = f"it is no safetensors file that is known here ({error!s:.300})"
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

        def in_file(name: str) -> Values:
            tensor = tensors[name]
            return FileTensor(opened, places[name], tuple(tensor.shape), tensor.dtype) if name in places else Held(tensor)

        return {name: in_file(name) for name in tensors}

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
            what = f"it is no index of weights ({error!s:.300})"
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
        raise Unreadable("its 'weight_map' is no table")
    for name, file in listed.items():
        name.encode()  # raises for what is no text
        if not isinstance(file, str) or not file or "\0" in file or "\\" in file:
            raise Unreadable(f"it says that {name:.100} is in {file!r:.100}, which is no file")
        path = PurePosixPath(file.encode().decode())
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Unreadable(f"it says that {name:.100} is in {file:.100}, outside of its folder")
    return listed
