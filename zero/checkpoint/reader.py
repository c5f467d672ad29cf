"""The reader of a checkpoint: the tensors of one save by name, in stretches of elements, whichever ranks wrote them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from zero.checkpoint import values
from zero.checkpoint.folder import Folder
from zero.checkpoint.manifest import VALUE, buffer_key, key_of
from zero.checkpoint.progress import ProgressBar, Written
from zero.checkpoint.tensor_files import FileTensor, has_name, read_header
from zero.checkpoint.values import ANOTHER
from zero.errors import BadCheckpoint
from zero.memory.formats import ParamFormat, dtype_named
from zero.plan.layout import Span


class CheckpointReader:
    """Reads the tensors of a checkpoint. All that is read belongs to one save of a tag, as `OpenCheckpoint` says."""

    def __init__(self, directory: Any, tag: str | None = None) -> None:
        self._opened = Folder.at(directory).open(tag)
        self.path, self.manifest = self._opened.path, self._opened.manifest
        self._tensors: dict[int, dict[str, FileTensor]] = {}  # by file
        # The last parameter that was read in another order, by name.
        self._turned: tuple[Any, torch.Tensor] = (None, torch.empty(0))

    def is_current(self) -> bool:
        """Returns True if who asks for the same checkpoint now gets this one."""
        return self._opened.is_current()

    def check_sizes(self) -> None:
        """Raises unless all files that were opened at first are there and have their sizes. Reads nothing."""
        self._opened.check_sizes()

    def check_file(self, number: int, read: Written = lambda _: None) -> None:
        """Raises unless a file is, bit for bit, the one that was saved."""
        self._opened.check_file(number, read)

    def check_files(self, numbers: Collection[int], shown: bool = True) -> None:
        """Does so for several files, and shows how far it is."""
        total = sum(self.manifest.files[number].num_bytes for number in numbers)
        with ProgressBar(f"checking {self.path.name}", total, shown) as bar:
            for number in numbers:
                self.check_file(number, bar.advance)

    def close(self) -> None:
        self._opened.close()
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

    def _tensor(self, number: int, key: str, dtype: torch.dtype) -> FileTensor:
        """Finds a tensor in a file. Those of dtypes that the format has no name for lie as bytes."""
        opened = self._opened.file(number)
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


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except ValueError as error:
        raise BadCheckpoint(f"{error} {ANOTHER}") from error
