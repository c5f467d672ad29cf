"""`python -m zero inspect DIR`: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.plan.manifest import Manifest


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "inspect", help="show what a checkpoint holds and check its files", description="Needs no ranks and no model."
    )
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--parameters", action="store_true", help="list every parameter and buffer")
    parser.add_argument("--no-check", action="store_true", help="do not read the files to check their hashes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: whole. 1: damaged, or there is none; the reason is on stderr."""
    # Imported here: torch is not for those who ask for another subcommand.
    from pathlib import Path

    from zero.checkpoint.folder import Folder, check_file, read_manifest
    from zero.errors import ZeroError

    try:
        found = Folder(Path(args.directory)).find(args.tag)
        manifest = read_manifest(found)
    except (ValueError, OSError, ZeroError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    wrong = []
    for number in range(0 if args.no_check else len(manifest.files)):
        try:
            check_file(found, manifest, number)
        except ZeroError as error:
            wrong.append(str(error))
    told = {"path": str(found), **_figures(manifest), "damaged": wrong}
    if args.json:
        sys.stdout.write(json.dumps({**told, "parameters": _shapes(manifest)}, indent=2) + "\n")
    else:
        lines = [f"{name.replace('_', ' '):20} {value}" for name, value in told.items() if name != "damaged"]
        lines += [f"  {name:40} {text}" for name, text in _shapes(manifest).items()] if args.parameters else []
        lines.append("not checked" if args.no_check else f"{len(manifest.files)} files, {len(wrong)} of them damaged")
        sys.stdout.write("\n".join(lines) + "\n")
    for problem in wrong:
        sys.stderr.write(f"{problem}\n")
    return 1 if wrong else 0


def _figures(manifest: Manifest) -> Mapping[str, Any]:
    from zero.checkpoint.typed import decode

    training = decode(manifest.training, lambda key, dtype, shape: f"a {dtype} of shape {shape}")  # type: ignore[arg-type,return-value]
    return {
        "ranks_that_saved": len(manifest.files),
        "bytes": sum(file.num_bytes for file in manifest.files),
        "parameters": len(manifest.parameters),
        "elements": sum(stored.numel for stored in manifest.parameters.values()),
        "dtypes": ", ".join(sorted({stored.dtype for stored in manifest.parameters.values()})) or "none",
        "buffers": len(manifest.buffers),
        "tied": len(manifest.aliases),
        "optimizer": training["optimizer"] or "unknown",
        "state": ", ".join(sorted({key for stored in manifest.parameters.values() for key in stored.state})) or "none",
        "groups": len(training["groups"]),
        "step": training["step"],
        "skipped_steps": training["skipped_steps"],
        "schedule": "no" if training["scheduler"] is None else "yes",
        "extra": "no" if manifest.extra is None else "yes",
    }


def _shapes(manifest: Manifest) -> dict[str, str]:
    found = {name: f"{stored.dtype} {list(stored.shape)}" for name, stored in manifest.parameters.items()}
    found |= {name: f"{buffer.dtype} {list(buffer.shape)}, a buffer" for name, buffer in manifest.buffers.items()}
    return found | {alias: f"is {name}" for alias, name in manifest.aliases.items()}
