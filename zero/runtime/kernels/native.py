"""Passes over host memory in C++, which the system's compiler builds when they are first used.

Building takes about a second. The library stays in the user's cache folder, under a name that says everything it depends on:
the source, the compiler and its options, the processor and the system. If that folder cannot be written or others could
write to it, each process builds its own, and nothing stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from zero.memory.deferred_sum import merged

_SOURCE = Path(__file__).with_name("native.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_EXACT = ("-fno-fast-math", "-fno-unsafe-math-optimizations")  # given even if CXX says otherwise
_OPTIONS = (*_EXACT, "-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC")
# Tried in this order; OpenMP gives threads.
_WHERE_KNOWN = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())
_DTYPES = {dtype: number for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16))}
_LIMIT_S = 120


class _Rows(Structure):
    """Rows as the C++ source declares them."""

    _fields_ = (
        ("rows", POINTER(c_void_p)), ("number", c_int), ("dtype", c_int), ("factors", POINTER(c_double)), ("num_factors", c_int)
    )  # fmt: skip


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "zero_add": (c_int, _Rows, c_void_p, c_int64, c_int, c_int),
    "zero_num_blocks": (c_int64,),
    "zero_square": (c_int, _Rows, c_int64, c_void_p, c_int),
    "zero_step": (c_int, POINTER(c_double), c_int, _Rows, *[c_void_p] * 4, c_int, c_void_p, c_int, c_int64, c_int),
}


def add(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float, adds: bool) -> None:
    """Writes `factor` times the sum of the rows, or adds it to what is there."""
    numel, threads = target.numel(), torch.get_num_threads()
    passes().zero_add(_DTYPES[target.dtype], _rows_of(rows, [factor], numel), _address(target, numel), numel, adds, threads)


def square(rows: Sequence[torch.Tensor], factors: Sequence[float], dtype: torch.dtype) -> float:
    """Returns the square of the norm of the sum of the rows times the factors, computed in this dtype."""
    numel, threads = rows[0].numel(), torch.get_num_threads()
    scratch = torch.empty(passes().zero_num_blocks(numel), dtype=torch.float64, device="cpu")
    result: float = passes().zero_square(_DTYPES[dtype], _rows_of(rows, factors, numel), numel, scratch.data_ptr(), threads)
    return result


def step_adam(
    numbers: Sequence[float],
    decoupled: bool,
    rows: Sequence[torch.Tensor],
    factors: Sequence[float],
    masters: torch.Tensor,
    moments: Sequence[torch.Tensor],
    weights: torch.Tensor | None,
    rounded: torch.Tensor | None,
) -> None:
    """Steps masters and moments by the `Numbers` of the source. Masters that do not round to `weights` take their values
    first."""
    numel, threads = masters.numel(), torch.get_num_threads()
    places = [_address(tensor, numel) for tensor in (masters, *moments)]
    others = (argument for tensor in (weights, rounded) for argument in _place(tensor, numel))
    given = _rows_of(rows, factors, numel)
    passes().zero_step(_DTYPES[masters.dtype], _numbers(numbers), decoupled, given, *places, *others, numel, threads)


def _rows_of(rows: Sequence[torch.Tensor], factors: Sequence[float], numel: int) -> _Rows:
    factors = [factor for factor in merged(factors) if factor != 1.0]
    places = (c_void_p * len(rows))(*(_address(row, numel) for row in rows))
    return _Rows(places, len(rows), _DTYPES[rows[0].dtype], _numbers(factors), len(factors))


def _numbers(numbers: Sequence[float]) -> Array[c_double]:
    return (c_double * len(numbers))(*numbers)


def _place(tensor: torch.Tensor | None, numel: int) -> tuple[int | None, int]:
    return (None, 0) if tensor is None else (_address(tensor, numel), _DTYPES[tensor.dtype])


def _address(tensor: torch.Tensor, numel: int) -> int:
    if tensor.is_cpu and tensor.is_contiguous() and tensor.numel() == numel:
        return tensor.data_ptr()
    raise ValueError(
        f"Cannot run over {numel} elements of host memory: the tensor is {tuple(tensor.shape)} on {tensor.device} with strides "
        f"{tensor.stride()}. Pass as many contiguous elements on the host."
    )


@functools.cache
def passes() -> ctypes.CDLL:
    """Returns the compiled passes, and waits for the compiler. Raises RuntimeError if no compiler can build them."""
    try:
        command = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, _COMPILERS), _COMPILERS[0])]
        kept = _place_of(command)
        if kept is not None and kept.exists() and _others_cannot_write(kept):
            with contextlib.suppress(OSError):  # the file was cut short, or needs a library that is gone
                return _loaded(kept)
        with tempfile.TemporaryDirectory(prefix="zero-", ignore_cleanup_errors=True) as folder:
            library, built = _built(command, Path(folder))
            if kept is not None:
                _keep(built, kept)
            return library
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: CXX cannot be split
        raise RuntimeError(str(error)) from error


def _place_of(command: Sequence[str]) -> Path | None:
    """Returns where the library of this compiler for this machine is kept; None if it could not be kept safely."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
    program = shutil.which(command[0]) or command[0]
    depends_on = (
        _SOURCE.read_text(encoding="utf-8"), command, _OPTIONS, _WHERE_KNOWN, os.path.realpath(program),
        os.stat(program).st_mtime_ns, version.returncode, version.stdout, platform.platform(), platform.libc_ver(),
        _processor(),
    )  # fmt: skip
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zero-accelerators")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]
        return folder / f"{digest}.so" if _others_cannot_write(folder) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None


def _processor() -> str:
    """Returns the text of the system that says which instructions the processor has."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first if line.lower().startswith(("model name", "flags", "features", "cpu ")))


def _others_cannot_write(path: Path) -> bool:
    """Returns True if no other user could have written a file or folder."""
    status = path.stat()
    return hasattr(os, "getuid") and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _keep(built: Path, place: Path) -> None:
    """Copies a library to where the next process finds it whole or not at all."""
    with contextlib.suppress(OSError):  # the next process builds it again
        descriptor, name = tempfile.mkstemp(dir=place.parent)
        os.close(descriptor)
        shutil.copyfile(built, name)
        os.replace(name, place)


def _built(command: Sequence[str], folder: Path) -> tuple[ctypes.CDLL, Path]:
    """Builds with the options that the compiler knows. Raises the error of the attempt with the fewest options."""
    for number, options in enumerate(_WHERE_KNOWN):
        target = folder / f"{number}.so"
        given = [*command, *_OPTIONS, *options, str(_SOURCE), "-o", str(target)]
        done = subprocess.run(given, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
        try:
            return _loaded(target), target
        except OSError as error:  # no library was built, or it needs one that is missing
            reason = f"{command[0]} ended with status {done.returncode}: {done.stderr.strip() or error}"
    raise RuntimeError(reason)


def _loaded(place: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(place))
    library.zero_num_blocks.restype, library.zero_square.restype = c_int64, c_double
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library
