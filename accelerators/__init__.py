"""The front door: the accelerator of this process, loaded when it is first used.

    import accelerators
    accelerator = accelerators.current()        # chosen once: use() > ACCELERATOR > the best that works > cpu
    x = torch.ones(3, device=accelerator.device())

Importing this package imports nothing but itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerators.interface import Accelerator as Accelerator
    from accelerators.memory import MemoryReading as MemoryReading
    from accelerators.selection import candidates as candidates
    from accelerators.selection import current as current
    from accelerators.selection import get as get
    from accelerators.selection import of as of
    from accelerators.selection import register as register
    from accelerators.selection import use as use
    from accelerators.selection import using as using

_HOME = {
    "Accelerator": "interface",
    "MemoryReading": "memory",
    "candidates": "selection",
    "current": "selection",
    "get": "selection",
    "of": "selection",
    "register": "selection",
    "use": "selection",
    "using": "selection",
}

__all__ = ["Accelerator", "MemoryReading", "candidates", "current", "get", "of", "register", "use", "using"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'accelerators' has no attribute '{name}'. It has: {', '.join(__all__)}.")
    return getattr(import_module(f"accelerators.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
