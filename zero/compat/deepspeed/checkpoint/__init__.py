"""`deepspeed.checkpoint`: the names that scripts import from it. The engine saves and loads checkpoints."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed.absent import ABSENT, absent
from zero.compat.deepspeed.checkpoint import utils as utils


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. docs/from-deepspeed.md has what it is called here.")
