"""`python -m accelerators`: every candidate, the chosen one marked, and why not for the rest. `--json` for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from accelerators import choice
from accelerators.choice import Selected
from accelerators.interface import Accelerator
from accelerators.memory import format_bytes, memory_cap
from accelerators.registry import FROM_TORCH, Candidate
from accelerators.staged.backend import NAME as STAGED

COMPILERS = ("c++", "g++", "clang++", "cl", "icpx")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m accelerators", description="Which accelerators can be used here.")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    options = parser.parse_args(arguments)
    try:
        memory_cap()
        chosen = choice.chosen()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    report = {
        "chosen": chosen.name,
        "why": chosen.why,
        "device": str(chosen.accelerator.device()),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "missing": missing_here(),
        "candidates": [describe(candidate, chosen) for candidate in choice.candidates()],
    }
    if not options.json:
        print_table(report)
        return 0
    try:
        print(json.dumps(report, indent=2), flush=True)
    except BrokenPipeError:  # the reader has read enough; nor is what is left to be written when this process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def describe(candidate: Candidate, chosen: Selected) -> dict[str, Any]:
    """One candidate as plain data. A device that is there but does not answer is only probed here, so its error is a reason.

    What is taken on request only is not tried in passing: to torch a device that came up is the accelerator of the process.
    """
    is_chosen = candidate.name == chosen.name
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
        try:
            row.update(ask(candidate.accelerator))
        except Exception as error:  # noqa: BLE001 - a plug-in's methods are other people's code, as its import is
            row["reason"] = f"it is there, but does not answer: {type(error).__name__}: {' '.join(str(error).split())}"
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
    console.print(table)
    print_line = partial(console.print, soft_wrap=True)
    for row in report["candidates"]:
        if row["origin"] == FROM_TORCH:
            print_line(f"\n{row['name']}: known to torch; ACCELERATOR={row['name']} takes it")
    print_line(f"\n* {report['chosen']} is used: {escape(report['why'])}. Set ACCELERATOR to choose another.")
    missing = ", ".join(report["missing"]) or "nothing"
    print_line(f"torch {report['torch']} on {report['platform']}, missing here: {missing}")


if __name__ == "__main__":
    sys.exit(main())
