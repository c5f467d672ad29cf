"""The line of the user's code that called the work of this moment."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

from accelerators import staged
from accelerators_sim import torch_private

Place = tuple[str, int]  # a file and a line, or the name of a backward node and 0

_OURS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(staged.__file__)) + os.sep,
)
_WRAPPERS = ("contextlib.py", "functools.py", "typing_extensions.py")  # between torch's functions and who called them
_is_ours: dict[CodeType, bool] = {}


def here() -> Place:
    """Returns the innermost line that is neither torch's nor ours; in an autograd thread, the backward node at work."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = _is_ours.get(code)
        if ours is None:
            name = code.co_filename
            ours = _is_ours[code] = name.startswith((*_OURS, "<frozen")) or name.endswith(_WRAPPERS)
        if not ours:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    node = torch_private.current_node()
    return (f"the backward of {node.name()}" if node is not None else "an unknown place"), 0


def describe(place: Place) -> str:
    name, line = place
    return f"{name}:{line}" if line else name
