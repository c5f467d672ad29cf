"""Makes optimizers without loading torch's compiler.

[Note: no compiler] Making an optimizer loads torch's compiler, 70 MiB and a second or two in every process, because torch tells
it to leave `add_param_group` alone. If the compiler is not loaded there is nothing to tell, so the method is called as it is;
torch tells the compiler later, should it be loaded. What steps in one pass never needs it; the `step` of most of torch's
optimizers loads it.
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
    """Optimizers that are made inside do not load the compiler."""
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(method, _TOLD):
        yield
        return
    with contextlib.suppress(AttributeError):  # where the method was replaced by an object without attributes
        setattr(method, _TOLD, method)
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):  # where another thread was faster
            if getattr(method, _TOLD, None) is method:
                delattr(method, _TOLD)
