"""Reads parameters from the files of a checkpoint, in stretches of elements, whichever ranks wrote them."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch

from zero.checkpoint.manifest import ANOTHER, VALUE, Manifest, buffer_key, key_of
from zero.checkpoint.tensor_files import TensorFiles
from zero.errors import BadCheckpoint
from zero.memory.formats import ParamFormat, dtype_named
from zero.plan.spans import Span


class CheckpointReader:
    """The tensors of a checkpoint by name."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files = TensorFiles(folder, [file.name for file in manifest.files])
        self._turned: tuple[tuple[str, str, ParamFormat] | None, torch.Tensor] = (
            None,
            torch.empty(0),
        )  # what was last asked for so

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
                target_span, file_span = overlap.shifted(-span.start), overlap.shifted(-stretch.start)
                key = key_of(name, what, stretch.start)
                self._files.read(stretch.file, key, dtype, file_span, target[target_span.start : target_span.stop])

    def check(self, files: Collection[int]) -> None:
        """Raises unless all that is said to lie in these files does, as what it is said to be. Reads no values."""
        for name, stored in self.manifest.parameters.items():
            for what in (VALUE, *stored.state):
                dtype = self._dtype_of(name, what)
                for stretch in stored.stretches:
                    if stretch.file in files or stretch.file >= len(self.manifest.files):
                        numel = self._files.get(stretch.file, key_of(name, what, stretch.start), dtype).numel()
                        if numel != stretch.span.numel:
                            raise BadCheckpoint(
                                f"Cannot read {what} of {name}: it has {numel} elements from {stretch.start} on. {ANOTHER}"
                            )
        for name, buffer in self.manifest.buffers.items():
            if 0 in files and self._files.get(0, buffer_key(name), _dtype(buffer.dtype)).numel() != math.prod(buffer.shape):
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
        return self._files.get(0, buffer_key(name), _dtype(stored.dtype)).reshape(stored.shape)

    def extra(self, key: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """A tensor of the caller's own; a copy, as the file may go."""
        return self._files.get(0, key, dtype).reshape(shape).clone()

    def random_bytes(self, rank: int) -> torch.Tensor:
        return self._files.get(rank, "random", torch.uint8)

    def close(self) -> None:
        self._files.close()

    def _dtype_of(self, name: str, what: str) -> torch.dtype:
        stored = self.manifest.parameters[name]
        return _dtype(stored.value_dtype if what == VALUE else stored.state[what])


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except ValueError as error:
        raise BadCheckpoint(f"{error} {ANOTHER}") from error
