"""Reads a checkpoint: its parameters in stretches of elements, whichever ranks wrote them, and whatever becomes of its name."""

from __future__ import annotations

import errno
import math
import os
import weakref
from collections.abc import Collection
from typing import Any

import torch

from accelerators.interface import host_bytes
from zero.checkpoint import values
from zero.checkpoint.disk import OpenFile, Written
from zero.checkpoint.folder import MANIFEST, Folder
from zero.checkpoint.manifest import ANOTHER, VALUE, Manifest, buffer_key, key_of
from zero.checkpoint.tensor_files import FileTensor, has_name, read_header
from zero.errors import BadCheckpoint
from zero.memory.formats import ParamFormat, dtype_named
from zero.plan.spans import Span

_MOST_AT_ONCE = 256  # files that are opened before any is read
_MOST_BEGUN = 100  # times, when others save the tag anew all the time


class CheckpointReader:
    """A checkpoint whose files are open, and its tensors by name.

    [Note: a reader] Another process may remove the checkpoint or save its tag anew at any time. The manifest and the files are
    looked up in the folder that was opened first, so they belong together, and they are open before the first is read. If the
    folder loses its name before that, the reader begins again with the folder that has the name now.
    """

    def __init__(self, directory: Any, tag: str | None = None) -> None:
        self._directory, self._tag = Folder.at(directory), tag
        self._turned: tuple[Any, torch.Tensor] = (None, torch.empty(0))  # what was last asked for in another order
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
        if any(error.errno in (errno.EMFILE, errno.ENFILE) for error in wrong):  # one at a time, as they are asked for
            self._close_files()
        return True

    def _look_up(self, name: str) -> OpenFile | OSError:
        try:
            return OpenFile(self.path / name, self._folder)
        except OSError as error:
            return error  # for who wants this file

    def _has_lost_its_name(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._found), os.fstat(self._folder))
        except OSError:
            return True

    def is_current(self) -> bool:
        """True if who asks for the same checkpoint now gets this one."""
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
            raise BadCheckpoint(f"Cannot read {key} from {opened.path}: it is not in it. {ANOTHER}")
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
        if stored.order != form.order:
            if self._turned[0] != (name, what, form):  # once for all of its pieces
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
        """All of a parameter, or of an entry of its state, in its shape."""
        stored = self.manifest.parameters[name]
        line = torch.empty(stored.numel, dtype=self._dtype_of(name, what))
        form = ParamFormat(stored.shape, stored.order)
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
        """Returns the caller's own."""
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
