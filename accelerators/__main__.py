"""`python -m accelerators`: every candidate, the chosen one marked, and why not for the rest. `--json` for programs."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch

from accelerators import choice
from accelerators.choice import Selected
from accelerators.interface import Accelerator
from accelerators.memory import format_bytes, memory_cap
from accelerators.output import answer, complain, write
from accelerators.registry import FROM_TORCH, Candidate
from accelerators.staged.backend import NAME as STAGED

Result = TypeVar("Result")

COMPILERS = ("c++", "g++", "clang++", "cl", "icpx")


def main(arguments: Sequence[str] | None = None) -> int:
    return answer(partial(_main, arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m accelerators", description="Which accelerators can be used here.")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    options = parser.parse_args(arguments)
    try:
        memory_cap()
    except ValueError as wrong:
        complain(wrong)
        return 2
    taken, error = _tried(lambda: (choice.chosen(), str(choice.chosen().accelerator.device())))
    if isinstance(error, ValueError):
        complain(error)
        return 2
    chosen = None if taken is None else taken[0]
    report = {
        "chosen": None if chosen is None else chosen.name,
        "why": f"a plug-in failed, {_words_of(error)}" if chosen is None else chosen.why,
        "device": None if taken is None else taken[1],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "missing": missing_here(),
        "candidates": [describe(candidate, chosen) for candidate in choice.candidates()],
    }
    if options.json:
        write(json.dumps(report, indent=2) + "\n")
    else:
        print_table(report)
    if chosen is None:
        complain(f"Cannot choose an accelerator: {report['why']}. Set ACCELERATOR to one that works.")
        return 2
    return 0


def _tried(act: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """Returns what `act` returns, or how it failed: a plug-in's methods are other people's code, as its import is."""
    try:
        return act(), None
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return None, error


def _words_of(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def describe(candidate: Candidate, chosen: Selected | None) -> dict[str, Any]:
    """One candidate as plain data. A device that is there but does not answer is only probed here, so its error is a reason.

    What is taken on request only is not tried in passing: to torch a device that came up is the accelerator of the process.
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
        row.update(answers or {"reason": f"it is there, but does not answer: {_words_of(error)}"})
    return row


def ask(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "devices": accelerator.device_count(),
        "memory": [asdict(accelerator.memory(index)) for index in range(accelerator.device_count())],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes()],
        "preferred_dtype": str(accelerator.preferred_dtype()).removeprefix("torch."),
        "communication_backend": accelerator.communication_backend,
        "compile_backend": accelerator.compile_backend,
        "visible_devices_variable": accelerator.visible_devices_variable,
        "missing": missing_from(accelerator),
    }


def missing_from(accelerator: Accelerator) -> list[str]:
    """What a program must do without on this device."""
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
    """What this platform lacks whatever the device is."""
    lacks = {
        "torch.distributed": not hasattr(torch._C, "_c10d_init"),  # as torch itself finds out; naming it would import it
        "a C++ compiler (torch.compile needs one on the CPU)": not any(map(shutil.which, COMPILERS)),
        "the memory limits of containers (Linux)": sys.platform != "linux",
        "CUDA and ROCm communication (nccl)": sys.platform == "win32",
    }
    return [what for what, is_missing in lacks.items() if is_missing]


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 160, highlight=False, emoji=False)
    columns = ("", "name", "devices", "available / total", "dtypes", "communication", "missing, or why not")
    table = Table(*columns, box=None, pad_edge=False)
    for row in report["candidates"]:
        mark = "*" if row["chosen"] else ""
        if "devices" not in row:
            table.add_row(mark, row["name"], "", "", "", "", escape(row["reason"]), style="dim")
            continue
        memory = (f"{format_bytes(reading['available'])} / {format_bytes(reading['total'])}" for reading in row["memory"])
        dtypes = " ".join(row["dtypes"]).replace("bfloat", "bf").replace("float", "fp")
        style = "bold green" if row["chosen"] else None
        missing = ", ".join(row["missing"]) or "-"
        cells = (mark, row["name"], str(row["devices"]), "\n".join(memory), dtypes, row["communication_backend"], missing)
        table.add_row(*cells, style=style)
    with console.capture() as capture:  # and written here, as rich ends the process if nobody reads
        console.print(table)
        _print_notes(report, partial(console.print, soft_wrap=True))
    write(capture.get())


def _print_notes(report: dict[str, Any], print_line: Callable[[str], None]) -> None:
    from rich.markup import escape

    for row in report["candidates"]:
        if row["origin"] == FROM_TORCH:
            print_line(f"\n{row['name']}: known to torch; ACCELERATOR={row['name']} takes it")
    if report["chosen"] is not None:
        print_line(f"\n* {report['chosen']} is used: {escape(report['why'])}. Set ACCELERATOR to choose another.")
    missing = ", ".join(report["missing"]) or "nothing"
    print_line(f"torch {report['torch']} on {report['platform']}, missing here: {missing}")


if __name__ == "__main__":
    sys.exit(main())
