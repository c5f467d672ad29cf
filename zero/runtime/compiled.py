"""Passes over host memory that torch's compiler makes of a few lines of Python.

[Note: one code, several compilations]
The compiler keeps what it made with the code object that it was made from, checks all of it at every call, and refuses
after some number. Each variant therefore has a code object of its own, shared by every optimizer of the process. Its
numbers come in a tensor and its lengths are left open, so nothing that changes in a training would give another code.
The compiler checks more than that, such as whether autocast is on where a step is called, and would build within that
step; so it is told to check nothing (torch 2.8 and later can be).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

LONG = 2**18  # elements: what is shorter is built for one thread


@functools.cache
def compiled(lines: Callable[..., None], *variant: object) -> Callable[..., None]:
    """`lines` for one `variant`, which says all that the compiler must know. Everything else may change from call to call."""
    name = "_".join(str(part).removeprefix("torch.") for part in variant)
    # Without the first, a rounding whose result is only compared is left out, and every weight is taken for an edit. Without
    # the second, what a process with fewer threads left in the compiler's cache is taken, and runs with as few.
    options: dict[str, Any] = {"emulate_precision_casts": True, "cpp.threads": torch.get_num_threads()}
    if hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):  # so there is also this option
        options["guard_filter_fn"] = lambda checks: [False for _ in checks]
    code = lines.__code__.replace(co_name=f"{lines.__name__}_{name}")
    return torch.compile(types.FunctionType(code, lines.__globals__), dynamic=True, fullgraph=True, options=options)


def build(lines: Callable[..., None], variant: tuple[object, ...], example: Callable[[], list[Any]]) -> None:
    """Builds, by running: the compiler works at the first call. What it made is compared with what it was made from: some leave
    out a rounding whatever they are told (torch 2.8)."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        with torch.device("cpu"):  # and no longer: the compiler would take it for a part of what it compiles
            given, twins = example(), example()
        compiled(lines, *variant)(*given)
        lines(*twins)
        for found, expected in zip(given, twins, strict=True):
            if isinstance(found, torch.Tensor) and not _agree(found, expected):
                raise RuntimeError(f"what torch {torch.__version__} compiles is not what it was given")


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    exactness = (1e-2, 1e-5) if found.dtype.itemsize == 2 else (1e-5, 1e-6)
    return torch.allclose(found, expected, *exactness)
