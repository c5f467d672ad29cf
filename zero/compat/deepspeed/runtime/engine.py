"""`deepspeed.runtime.engine`: the class of what `initialize` returns."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed.absent import ABSENT, absent
from zero.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return absent(name, ABSENT.get(name, "initialize returns the engine; DeepSpeedEngine is its class"))
