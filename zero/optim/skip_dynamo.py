"""Leaves torch's compiler out: optimizers are made without loading it, and functions are not compiled.

[Note: no compiler] Making an optimizer loads torch's compiler, 70 MiB and a second or two in every process, because torch tells
it to leave `add_param_group` alone. If the compiler is not loaded there is nothing to tell, so the method is called as it is;
torch tells the compiler later, should it be loaded. What steps in one pass never needs it; the `step` of most of torch's
optimizers loads it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_TOLD = "__dynamo_disable"  # where torch keeps what the compiler made of a method, and looks before it loads that


@contextlib.contextmanager
def skip_dynamo_import() -> Iterator[None]:
    """Makes a block in which optimizers are made without loading the compiler."""
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(method, _TOLD):
        yield
        return
    with contextlib.suppress(AttributeError):  # the method was replaced by an object without attributes
        setattr(method, _TOLD, method)
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):  # another thread was faster
            if getattr(method, _TOLD, None) is method:
                delattr(method, _TOLD)


def never_compile(function: Callable[..., Any]) -> None:
    """Has the compiler leave a function alone, and what it calls. Its own decorators would load the compiler."""
    with contextlib.suppress(ImportError):  # a torch that has no such names compiles both, which only takes time
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
