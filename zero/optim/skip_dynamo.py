"""Makes optimizers without torch's compiler.

[Note: no compiler]
Making an optimizer loads torch's compiler, 70 MiB and a second or two of every process: torch wants to tell it to leave
`add_param_group` alone. Where it is not loaded there is nobody to be told, so the method is called as it is, and torch tells it
another time, should it be loaded. What steps in one pass never needs it; the `step` of most of torch's optimizers loads it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator

import torch

_TOLD = "__dynamo_disable"  # where torch keeps what the compiler made of a method, and looks before it loads that


@contextlib.contextmanager
def skip_dynamo_import() -> Iterator[None]:
    """Within it, optimizers are made without loading it."""
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(method, _TOLD):
        yield
        return
    with contextlib.suppress(AttributeError):  # where somebody has put what takes no marks
        setattr(method, _TOLD, method)
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):  # where another thread was faster
            if getattr(method, _TOLD, None) is method:
                delattr(method, _TOLD)
