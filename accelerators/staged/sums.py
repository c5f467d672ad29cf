"""Which sums gloo can take, and the options that say which one is wanted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d  # the options of collectives are public nowhere else

ReduceOp: Any = dist.ReduceOp  # Any: torch's stubs say it is an enum, which it is not

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPES = frozenset((*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool))
_OPS = (
    *(ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX),
    *(ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR),
)


def op_of(options: Any) -> Any:
    """What the options ask for; None where gloo has no such operation. They hold an object that compares, but not in a set."""
    return next((op for op in _OPS if options.reduceOp == op), None)


def check_sum(name: str, op: Any, dtype: torch.dtype) -> None:
    """Raises before anything is sent: a collective that fails later ends the group."""
    if op is None:
        raise ValueError(f"Cannot run {name}: gloo, which carries it, has no such operation. Use SUM and scale the result.")
    if dtype not in _DTYPES or (dtype == torch.bool and op is ReduceOp.AVG):
        raise TypeError(f"Cannot run {name}: gloo, which carries it, adds no {dtype}. Convert the tensor first.")


def sum_instead(options: Any) -> None:
    """Makes a mean a sum, which is divided after it came: not all versions of gloo divide."""
    if op_of(options) is ReduceOp.AVG:
        options.reduceOp = ReduceOp.SUM


def copied(options: Any) -> Any:
    """The options of a reduce-scatter for one of several."""
    made = c10d.ReduceScatterOptions()
    if options is not None:
        made.reduceOp, made.timeout = options.reduceOp, options.timeout
    return made
