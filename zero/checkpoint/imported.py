"""Files that other libraries saved, read by name and without running any code of theirs.

Files are read with `weights_only`. DeepSpeed pickles three classes of its own into its files; stand-ins without behaviour take
their place. Any other class is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.errors import BadCheckpoint

_INERT = re.compile(
    r"deepspeed\.(runtime\.zero\.config\.ZeroStageEnum|runtime\.fp16\.loss_scaler\.\w+|utils\.tensor_fragment\.fragment_address)"
)


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
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in unsafe if not _INERT.fullmatch(name)]
        if refused:
            raise BadCheckpoint(
                f"Cannot read {path} without running code: it needs {', '.join(sorted(refused))}. Save tensors, numbers, "
                "texts, lists and dicts only."
            )
        stand_ins: list[Any] = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in unsafe]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"Cannot read {path}: {error}") from error
