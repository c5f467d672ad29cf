"""The command `python -m accelerators`: a table of all candidates, which one is used, and why the others are not."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch

from accelerators import selection
from accelerators.interface import Accelerator
from accelerators.memory import MemoryReading, format_bytes, memory_cap
from accelerators.output import Parser, answer, complain, write
from accelerators.selection import FROM_TORCH, Candidate, Selected, plain, words_of
from accelerators.staged import NAME as STAGED

Result = TypeVar("Result")

MOST_DEVICES = 4096  # a plug-in that reports more is wrong, and the table would be endless
COMPILERS = ("c++", "g++", "clang++", "cl", "icpx")


def main(arguments: Sequence[str] | None = None) -> int:
    return answer(partial(_main, arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m accelerators", description="Lists the accelerators, and says which can be used here.")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    options = parser.parse_args(arguments)
    try:
        memory_cap()
    except ValueError as wrong:
        complain(wrong)
        return 2
    with contextlib.redirect_stdout(sys.stderr):  # the answer on stdout must not contain what plug-ins print
        report, error = _report()
    if report is None:
        complain(error)
        return 2
    if options.json:
        write(json.dumps(report, indent=2) + "\n")
    else:
        print_table(report)
    if report["chosen"] is None:
        complain(f"Cannot choose an accelerator: {report['why']}. Set ACCELERATOR to one that works.")
        return 2
    return 0


def _report() -> tuple[dict[str, Any] | None, BaseException | None]:
    """Returns all that is shown; or None, and why what ACCELERATOR asks for cannot be used."""
    taken, error = _tried(lambda: (selection.chosen(), str(selection.chosen().accelerator.device())))
    if isinstance(error, ValueError):
        return None, error
    chosen = None if taken is None else taken[0]
    return {
        "chosen": None if chosen is None else chosen.name,
        "why": f"a plug-in failed, {words_of(error)}" if chosen is None else chosen.why,
        "device": None if taken is None else taken[1],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "missing": missing_here(),
        "candidates": [describe(candidate, chosen) for candidate in selection.candidates()],
    }, None


def _tried(act: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """Returns what `act` returns, or how it failed: a plug-in's methods are other people's code, as its import is."""
    try:
        return act(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001
        return None, error


def describe(candidate: Candidate, chosen: Selected | None) -> dict[str, Any]:
    """Returns one candidate as plain data. Only here is a device asked for its figures, so an error of it becomes a reason.

    A candidate that is taken on request only is not tried: a device that came up is the accelerator of the process to torch.
    """
    is_chosen = chosen is not None and candidate.name == chosen.name
    is_tried = is_chosen or candidate.priority >= 0
    row: dict[str, Any] = {
        "name": candidate.name,
        "chosen": is_chosen,
        "usable": candidate.usable if is_tried else None,
        "reason": candidate.reason if is_tried else f"not tried: it is taken on request only, ACCELERATOR={candidate.name}",
        "priority": candidate.priority,
        "origin": candidate.origin,
    }
    if row["usable"]:
        answers, error = _tried(lambda: ask(candidate.accelerator))
        row.update(answers or {"reason": f"it is there, but does not answer: {words_of(error)}"})
    return row


def ask(accelerator: Accelerator) -> dict[str, Any]:
    """Returns all that is shown of a device. Raises if a plug-in gives an answer of a wrong type."""
    count = accelerator.device_count()
    if type(count) is not int or not 0 <= count <= MOST_DEVICES:
        raise TypeError(f"device_count gave {count!r:.60}, which is not a number of devices")
    dtypes = _typed("supported_dtypes", accelerator.supported_dtypes(), tuple, list)
    preferred = _typed("preferred_dtype", accelerator.preferred_dtype(), torch.dtype)
    return {
        "devices": count,
        "memory": [_figures(accelerator.memory(index)) for index in range(count)],
        "dtypes": [_name_of(_typed("supported_dtypes", dtype, torch.dtype)) for dtype in dtypes],
        "preferred_dtype": _name_of(preferred),
        "communication_backend": _typed("communication_backend", accelerator.communication_backend, str),
        "compile_backend": _typed("compile_backend", accelerator.compile_backend, str),
        "visible_devices_variable": _typed("visible_devices_variable", accelerator.visible_devices_variable, str, type(None)),
        "missing": missing_from(accelerator),
    }


def _typed(member: str, value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"{member} gave {value!r:.60}, which is no {wanted}")
    return value


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _figures(reading: MemoryReading) -> dict[str, Any]:
    figures = asdict(_typed("memory", reading, MemoryReading))
    for name, figure in figures.items():
        _typed(f"memory's {name}", figure, *((str,) if name == "peak_since" else (int, type(None))))
    return figures


def missing_from(accelerator: Accelerator) -> list[str]:
    """Returns what a program must do without on this device."""
    accelerator.reset_peak_memory()
    reading = accelerator.memory()
    lacks = {
        "memory figures": reading.available is None or reading.allocated is None,
        "peak memory": reading.peak is None,
        "resettable peak memory": reading.peak is not None and reading.peak_since != "last reset",
        "streams": not accelerator.is_synchronous and accelerator.new_stream() == accelerator.current_stream(),
        "pinned host memory": not accelerator.is_synchronous and not accelerator.can_pin,
        "collectives of its own": accelerator.communication_backend == STAGED,
        "bf16": not accelerator.supports(torch.bfloat16),
        "fp64": not accelerator.supports(torch.float64),
    }
    return [what for what, is_missing in lacks.items() if is_missing]


def missing_here() -> list[str]:
    """Returns what this platform lacks on every device."""
    lacks = {
        # Torch asks in the same way; asking for the module by its name would import it.
        "torch.distributed": not hasattr(torch._C, "_c10d_init"),
        "a C++ compiler (torch.compile needs one on the CPU)": not any(map(shutil.which, COMPILERS)),
        "the memory limits of containers (Linux)": sys.platform != "linux",
        "CUDA and ROCm communication (nccl)": sys.platform == "win32",
    }
    return [what for what, is_missing in lacks.items() if is_missing]


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 160, highlight=False, emoji=False, markup=False)
    columns = ("", "name", "devices", "available / total", "dtypes", "communication", "missing, or why not")
    table = Table(*columns, box=None, pad_edge=False)
    for row in report["candidates"]:
        mark = "*" if row["chosen"] else ""
        cells, error = _tried(partial(_cells, row)) if "devices" in row else (None, None)
        if cells is None:
            reason = row["reason"] if error is None else f"it is there, but what it answers cannot be shown: {words_of(error)}"
            table.add_row(mark, row["name"], "", "", "", "", reason, style="dim")
        else:
            table.add_row(mark, row["name"], *cells, style="bold green" if row["chosen"] else None)
    with console.capture() as capture:  # rich would end the process if nobody reads, so write() prints it
        console.print(table)
        _print_notes(report, partial(console.print, soft_wrap=True))
    encoding = sys.stdout.encoding or "utf-8"
    write(capture.get().encode(encoding, "backslashreplace").decode(encoding))


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Returns the cells of a device that answers."""
    memory = (f"{format_bytes(reading['available'])} / {format_bytes(reading['total'])}" for reading in row["memory"])
    dtypes = " ".join(row["dtypes"]).replace("bfloat", "bf").replace("float", "fp")
    missing = ", ".join(row["missing"]) or "-"
    return str(row["devices"]), "\n".join(memory), dtypes, plain(row["communication_backend"]), missing


def _print_notes(report: dict[str, Any], print_line: Callable[[str], None]) -> None:
    for row in report["candidates"]:
        if row["origin"] == FROM_TORCH:
            print_line(f"\n{row['name']}: known to torch; ACCELERATOR={row['name']} takes it")
    if report["chosen"] is not None:
        print_line(f"\n* {report['chosen']} is used: {report['why']}. Set ACCELERATOR to choose another.")
    missing = ", ".join(report["missing"]) or "nothing"
    print_line(f"torch {report['torch']} on {report['platform']}, missing here: {missing}")


if __name__ == "__main__":
    sys.exit(main())
