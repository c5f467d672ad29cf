"""The text that is trained on, as bytes, and which of them a step sees."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

_NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class Text:
    """The bytes of a text, and samples of them. The samples of a step depend on the seed and the number of the step alone: not
    on the number of ranks, and not on whether the training was interrupted."""

    def __init__(self, content: bytes, context: int, seed: int) -> None:
        if len(content) <= context:
            raise ValueError(
                f"Cannot train on a text of {len(content)} bytes: a sample has {context} and one more. Give more text."
            )
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        self.num_bytes = len(content)
        self._bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._context = context
        self._seed = seed

    def samples(self, step: int, batch: int) -> torch.Tensor:
        """The samples of a step, of all ranks together; each has one byte more than it has places to predict from."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        starts = torch.randint(self.num_bytes - self._context, (batch, 1), generator=generator)
        return self._bytes[starts + torch.arange(self._context + 1)].long()


def read_text(path: str | None, but: str | None = None) -> bytes:
    """Reads a file, all files of a folder in the order of their names, or the source of Python's standard library. The folder
    `but` is left out, since a training writes there."""
    out = None if but is None else Path(but).resolve()
    if path is None:
        files = [file for file in _files_in(Path(os.__file__).parent, out, _NO_SOURCE) if file.suffix == ".py"]
    else:
        files = list(_files_in(Path(path), out)) if Path(path).is_dir() else [Path(path)]
    content = b"\n".join(file.read_bytes() for file in sorted(files))
    if not content:
        where = path or "the standard library"
        raise ValueError(f"Cannot train on {where}: there is no text. Give a file or a folder with --data.")
    return content


def _files_in(folder: Path, out: Path | None, but: Collection[str] = ()) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        kept = (name for name in folders if name not in but and not name.startswith("."))
        folders[:] = [name for name in kept if (Path(place) / name).resolve() != out]
        files = (Path(place) / name for name in names if not name.startswith("."))
        # Leaves out pipes, which would be waited for, and links to nothing.
        yield from (file for file in files if file.is_file())
