"""Reading parameters out of a checkpoint, by stretches of their lines, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import torch

from zero.checkpoint.tensors import TensorFiles
from zero.memory.flat import Form
from zero.plan.manifest import VALUE, Manifest, buffer_key, key_of
from zero.plan.spans import Span


class Lines:
    """A checkpoint's tensors by name."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files = TensorFiles(folder, [file.name for file in manifest.files])

    def copy(self, name: str, what: str, form: Form, span: Span, target: torch.Tensor) -> None:
        """Copies a stretch of a parameter, or of an entry of its state, as it lies in a slot of this form."""
        stored = self._manifest.parameters[name]
        if stored.order != form.order:
            target.copy_(form.line(self.whole(name, what))[span.start : span.stop])
            return
        dtype = self._dtype_of(name, what)
        for stretch in stored.stretches:
            found = span.overlap(stretch.span)
            if found is not None:
                source = self._files.get(stretch.file, key_of(name, what, stretch.start), dtype)
                here, there = found.shifted(-span.start), found.shifted(-stretch.start)
                target[here.start : here.stop].copy_(source[there.start : there.stop])

    def whole(self, name: str, what: str) -> torch.Tensor:
        """All of a parameter, or of an entry of its state, in its shape."""
        stored = self._manifest.parameters[name]
        line = torch.empty(stored.numel, dtype=self._dtype_of(name, what))
        form = Form(stored.shape, stored.order)
        self.copy(name, what, form, Span(0, stored.numel), line)
        return form.shaped(line)

    def buffer(self, name: str) -> torch.Tensor:
        told = self._manifest.buffers[name]
        return self._files.get(0, buffer_key(name), getattr(torch, told.dtype)).reshape(told.shape)

    def extra(self, key: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """A tensor of the caller's own; a copy, as the file may go."""
        return self._files.get(0, key, dtype).reshape(shape).clone()

    def random_bytes(self, rank: int) -> torch.Tensor:
        return self._files.get(rank, "random", torch.uint8)

    def close(self) -> None:
        self._files.close()

    def _dtype_of(self, name: str, what: str) -> torch.dtype:
        stored = self._manifest.parameters[name]
        found: torch.dtype = getattr(torch, stored.value_dtype if what == VALUE else stored.state[what])
        return found
